"""`faregate rabbitmq`: look after what is on the broker. Each command loads the driver when it runs, not before."""

import sys
from typing import Annotated

import typer

from faregate.cli.load import BusName
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, errors
from faregate.cli.rabbitmq import doctor as examination
from faregate.cli.rabbitmq.doctor import Part, examine
from faregate.cli.rabbitmq.site import opened_site
from faregate.errors import ConfigurationError
from faregate.units import counted

rabbitmq = typer.Typer(no_args_is_help=True, help="Look after the queues of a bus on RabbitMQ.")


@rabbitmq.command()
def doctor(
    target: BusName,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove queues that are left over, empty and without consumers.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is on the broker for each subscription, what is wrong with it, and what to run about it.

    Declares and removes no queue without --prune, and works beside a running bus. Exits with 1 when something is to be
    done.
    """
    if prune and not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigurationError("--prune removes without asking only with --yes: there is no terminal to ask on")
        typer.confirm("Remove the queues that are left over, empty and without consumers?", abort=True, err=True)
    url, parts, removed = run_async(_examine(target, prune))
    answer(
        examination.as_json(url, parts, removed),
        lambda: examination.show(url, parts, removed),
        as_json=as_json,
    )
    if any(part.findings for part in parts):
        raise typer.Exit(1)


async def _examine(target: str, prune: bool) -> tuple[str, list[Part], list[str]]:
    async with opened_site(target) as (bus, transport):
        removed: list[str] = []
        if prune:
            from faregate.transports.rabbitmq.survey import as_noted, remove_left_over

            for wanted in bus.bindings:
                binding = await as_noted(wanted, bus.store_of(wanted.node))
                await transport.bind(binding)
                removed += await remove_left_over(transport, binding)
        return bus.url, await examine(bus, transport, target), removed


@rabbitmq.command()
def migrate(target: BusName, as_json: AsJson = False) -> None:
    """Make every queue as it should be: those that are declared otherwise anew, and those that are missing.

    No message is lost, and those of one key stay in order. Stop the instances of the nodes first; publishers may go on.
    When it is interrupted, run it again: it goes on from there.
    """
    url, migrated, moved = run_async(_migrate(target))
    told = f"made {counted(len(migrated), 'queue')} on {url}, and moved {counted(moved, 'message')}"
    if not migrated:
        told = f"every queue on {url} is as it should be"
    answer({"url": url, "migrated": migrated, "moved": moved}, told, as_json=as_json)


async def _migrate(target: str) -> tuple[str, list[str], int]:
    from faregate.transports.rabbitmq.migration import dead_plan, migrate, plans_of
    from faregate.transports.rabbitmq.survey import as_noted

    migrated: list[str] = []
    progress = _Progress()
    async with opened_site(target) as (bus, transport):
        plans = [dead_plan(node) for node in dict.fromkeys(each.node for each in bus.bindings)]
        for wanted in bus.bindings:
            plans += plans_of(await as_noted(wanted, bus.store_of(wanted.node)))
        for plan in plans:
            if await migrate(transport, plan, bus.store_of(plan.node), progress.tell):
                migrated.append(plan.name)
    return bus.url, migrated, progress.moved


@rabbitmq.command()
def repartition(
    target: BusName,
    node: Annotated[str, typer.Argument(help="The node that subscribes.", metavar="NODE")],
    type_: Annotated[str, typer.Argument(help="The type of the message, by its wire name.", metavar="TYPE")],
    to: Annotated[int, typer.Option("--to", help="How many partitions.", min=1, max=256)],
    as_json: AsJson = False,
) -> None:
    """Give an ordered subscription another number of partitions, while its instances run.

    No message is lost, and those of one key stay in order. Nothing of the subscription is handled meanwhile, and
    publishers go on. When it is interrupted, run it again: it goes on from there, and until then nobody consumes.
    """
    url, changed, moved = run_async(_repartition(target, node, type_, to))
    told = f"{node} takes {type_} in {counted(to, 'partition')} now; moved {counted(moved, 'message')}"
    if not changed:
        told = f"{node} takes {type_} in {counted(to, 'partition')} already"
    answer({"url": url, "changed": changed, "partitions": to, "moved": moved}, told, as_json=as_json)


async def _repartition(target: str, node: str, wire: str, to: int) -> tuple[str, bool, int]:
    from faregate.transports.rabbitmq.repartition import repartition

    progress = _Progress()
    changed = False
    async with opened_site(target) as (bus, transport):
        store = bus.store_of(node) if node in bus.nodes else None
        found = [each for each in bus.bindings if (each.node, each.type) == (node, wire) and each.partitions]
        if not found or store is None:
            ordered = ", ".join(f"{each.node} {each.type}" for each in bus.bindings if each.partitions)
            raise ConfigurationError(
                f"{target} has no ordered subscription of {node} to {wire}; it has: {ordered or 'none'}"
            )
        if to > 1 and any(each.partitions == 1 for each in found):
            raise ConfigurationError(
                f"the program has {wire} of {node} in one part: give it the key of its type and partitions= more than "
                "1 first, since the messages of one key would be in several"
            )
        for binding in found:
            changed |= await repartition(transport, binding, store, to, progress.tell)
    return bus.url, changed, progress.moved


class _Progress:
    """Says on standard error what is done, and counts."""

    def __init__(self) -> None:
        self.moved = 0

    def tell(self, what: str, count: int) -> None:
        self.moved += count
        errors.print(f"{what}: {counted(count, 'message')} moved" if count else what, markup=False, soft_wrap=True)
