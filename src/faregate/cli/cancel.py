"""`faregate cancel`: take back a message that is scheduled for later."""

from typing import Annotated

import typer

from faregate.bus.bus import Bus
from faregate.cli.load import load_bus
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer
from faregate.cli.running import Here, OnBroker, Target, ask_answer, locate
from faregate.cli.targets import opened
from faregate.errors import ConfigurationError
from faregate.ports.presence import Instruction


def cancel(
    what: Annotated[str, typer.Argument(help="The publication id; with --key the key.", metavar="ID")],
    target: Target = None,
    by_key: Annotated[
        bool, typer.Option("--key", help="ID is the idempotency_key or id_key that it was scheduled with.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="The node that scheduled it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a message that was scheduled with delay= or at=. Exits with 1 when it was not waiting.

    A bus that runs here is asked over its control socket. On RabbitMQ name the bus,
    as module:attribute: its messages wait in the stores of their senders.
    """
    place = locate(target)
    asked = Instruction("cancel", node, key=what if by_key else None, id=None if by_key else what)
    was_waiting = _here(place, asked) if isinstance(place, Here) else _in_stores(place, target or "", asked)
    told = {"id": asked.id, "key": asked.key, "node": node, "cancelled": was_waiting}
    text = f"{what} is cancelled" if was_waiting else f"{what} was not waiting: it was sent, cancelled, or never there"
    answer(told, text, as_json=as_json)
    if not was_waiting:
        raise typer.Exit(1)


def _here(place: Here, asked: Instruction) -> bool:
    answers = [ask_answer(each.path, asked) for each in place.running()]
    return any(each is not None and each.cancelled for each in answers)


def _in_stores(place: OnBroker, target: str, asked: Instruction) -> bool:
    if target.startswith(("amqp:", "amqps:")):
        raise ConfigurationError(
            f"{place.url} keeps no scheduled messages that could be cancelled: they wait in the stores of their "
            "senders. Name the bus, as module:attribute"
        )
    bus = load_bus(target)
    if asked.node is not None and asked.node not in bus.nodes:
        raise ConfigurationError(f"there is no node {asked.node!r} on this bus; its nodes are: {', '.join(bus.nodes)}")
    if not bus.stores:
        raise ConfigurationError(f"{target} has no store=, and on {bus.url} nothing else can be cancelled")
    return run_async(_cancel(bus, asked))


async def _cancel(bus: Bus, asked: Instruction) -> bool:
    found = 0
    async with opened(bus.stores.values()):
        for node in bus.nodes if asked.node is None else [asked.node]:
            store = bus.store_of(node)
            if store is not None:
                async with store.transaction() as transaction:
                    found += await transaction.cancel_scheduled(node, (asked.id, asked.key))
    return found > 0
