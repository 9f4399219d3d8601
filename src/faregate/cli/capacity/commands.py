"""`faregate capacity`, the commands."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from faregate.cli.capacity import report
from faregate.cli.capacity.costs import Costs, Figure, check_place, load_costs, with_given, write_costs
from faregate.cli.capacity.load import Engine, Load, Store
from faregate.cli.capacity.plan import make_plan
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, errors
from faregate.errors import ConfigurationError
from faregate.ports.schemes import hide_password
from faregate.units import counted

capacity = typer.Typer(
    invoke_without_command=True,
    help="Say what a rate of messages needs: processes, brokers, databases, disks; and where each part stops.",
)

CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="A file of `capacity measure`; the costs that come with Faregate unless given."),
]
Given = Annotated[
    list[str] | None,
    typer.Option("--set", help="A figure in place of the file's; may be repeated.", metavar="NAME=VALUE"),
]
_PARTS = ("journal", "postgresql", "rabbitmq", "spark")
_LOAD, _WHERE = "The messages", "What runs them"


@capacity.callback()
def plan(
    context: typer.Context,
    rate: Annotated[
        float | None, typer.Option(help="Messages published in a second.", rich_help_panel=_LOAD, show_default=False)
    ] = None,
    body: Annotated[int, typer.Option(help="Bytes of a body.", rich_help_panel=_LOAD)] = 200,
    recipients: Annotated[int, typer.Option(help="Nodes that handle each message.", rich_help_panel=_LOAD)] = 1,
    sent: Annotated[
        float, typer.Option(help="Messages that a handler sends for each one.", rich_help_panel=_LOAD)
    ] = 0.0,
    keyed: Annotated[
        float | None,
        typer.Option(
            help="The share of messages that keep the order of a key; 1 with a store, 0 without.",
            rich_help_panel=_LOAD,
            show_default=False,
        ),
    ] = None,
    keys: Annotated[int, typer.Option(help="Different keys.", rich_help_panel=_LOAD)] = 100_000,
    hot: Annotated[
        float | None,
        typer.Option(help="The share of all messages with the most frequent key.", rich_help_panel=_LOAD),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What runs the handlers.", rich_help_panel=_WHERE)] = "rabbitmq",
    store: Annotated[Store, typer.Option(help="The store of each node.", rich_help_panel=_WHERE)] = "postgresql",
    retain_days: Annotated[float, typer.Option(help="How long the log is kept.", rich_help_panel=_WHERE)] = 7.0,
    ledger_days: Annotated[
        float, typer.Option(help="How long ledgers are kept: retain_ledger=.", rich_help_panel=_WHERE)
    ] = 30.0,
    costs: CostsFile = None,
    given: Given = None,
    as_json: AsJson = False,
) -> None:
    """Say what a rate of messages needs: processes, brokers, databases, disks; and where each part stops.

    Computed from what one message costs, as measured once; `capacity costs` shows these figures, and `capacity measure`
    measures them on your machine. Nothing is run.
    """
    if context.invoked_subcommand is not None:
        return
    if rate is None:
        raise ConfigurationError("say how many messages a second, such as --rate 1000")
    ordered = (0.0 if store == "none" else 1.0) if keyed is None else keyed
    load = Load(rate, body, recipients, sent, ordered, keys, hot, retain_days, ledger_days, engine, store)
    figures = with_given(load_costs(costs), given or [])
    made = make_plan(load, figures)
    answer(report.as_json(made, figures), lambda: report.show(made, figures), as_json=as_json)


@capacity.command("costs")
def show_costs(costs: CostsFile = None, as_json: AsJson = False) -> None:
    """Show the figures that `capacity` computes with: what each is, and whether it was measured or assumed."""
    found = load_costs(costs)
    answer(msgspec.to_builtins(found), lambda: report.show_costs(found), as_json=as_json)


@capacity.command()
def measure(
    file: Annotated[Path, typer.Argument(help="The file of costs to write.", metavar="FILE")],
    store: Annotated[
        str | None, typer.Option(help="A PostgreSQL to measure, in a schema of its own.", metavar="URL")
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="A RabbitMQ to measure, in queues of its own.", metavar="URL")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help=f"What to measure: {', '.join(_PARTS)}; may be repeated. Journal, --store and --broker unless given."
        ),
    ] = None,
    messages: Annotated[int, typer.Option(help="Messages of a round.", min=2_000)] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds that count; on Spark there is one.", min=1)] = 3,
    machine: Annotated[str | None, typer.Option(help="What to call this class of machine, in the file.")] = None,
    costs: CostsFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Yes, put load on these servers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what one message costs here, and write it to a file for `capacity --costs`.

    Journals and SQLite are measured in the system's temporary folder: set TMPDIR to a folder on the disk that you want
    to know. Servers are measured where you name them, with --yes; their processor time only if they run on this
    machine. What is not measured is taken from --costs as it is there; without --costs it is what comes with Faregate,
    and is called assumed.
    """
    servers: dict[str, str | None] = {"postgresql": store, "rabbitmq": broker}
    parts = part or ["journal", *(name for name, url in servers.items() if url is not None)]
    if unknown := [name for name in parts if name not in _PARTS]:
        raise ConfigurationError(f"--part {unknown[0]}: there is {', '.join(_PARTS)}")
    for name, url in servers.items():
        option = "--store" if name == "postgresql" else "--broker"
        if name in parts and url is None:
            raise ConfigurationError(f"--part {name} needs an address: {option} URL")
        if url is not None and not yes:
            raise ConfigurationError(
                f"{hide_password(url)} is a server that others may use. Measuring would send some hundred thousand "
                f"messages through a schema, queues and streams of its own there, and remove these. If that is what "
                f"you want, say so with --yes; otherwise leave out {option}"
            )
    base = load_costs(costs)
    check_place(file)
    made = base
    figures = {name: Figure(each.value, "assumed") if costs is None else each for name, each in base.figures.items()}
    size = f"--messages {messages} --rounds {rounds}"
    done: list[str] = []
    for name, found in _measured(parts, store, broker, messages, rounds):
        done.append(name)
        figures |= {name: Figure(float(f"{value:.3g}"), "measured") for name, value in found.items() if value > 0}
        command = " ".join(["faregate capacity measure", *(f"--part {each}" for each in done), size])
        made = Costs(
            date=time.strftime("%Y-%m-%d"),
            machine=machine or counted(os.cpu_count() or 1, "core"),
            command=command if costs is None else f"{base.command}; {command}",
            figures=figures,
        )
        write_costs(made, file)  # after each part: what it took minutes to measure stays if a later one fails
    answer(msgspec.to_builtins(made), lambda: report.show_costs(made), as_json=as_json)


def _measured(
    parts: list[str], store: str | None, broker: str | None, messages: int, rounds: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each part, and what it costs."""
    from faregate.cli.capacity.measure import Size, measure_journal, measure_postgres, measure_rabbitmq
    from faregate.cli.capacity.measure_spark import measure_spark

    size = Size(messages, rounds)
    if "journal" in parts:
        yield "journal", run_async(measure_journal(size, _say))
    if "postgresql" in parts and store is not None:
        yield "postgresql", run_async(measure_postgres(store, size, _say))
    if "rabbitmq" in parts and broker is not None:
        yield "rabbitmq", run_async(measure_rabbitmq(broker, size, _say))
    if "spark" in parts:
        yield "spark", measure_spark(store, messages, _say)


def _say(text: str) -> None:
    errors.print(text, style="dim", markup=False)
