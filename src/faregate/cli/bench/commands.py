"""`faregate bench`, the command."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from faregate.cli.bench.load import Load, Plan, SteadyClock
from faregate.cli.bench.payload import from_file, from_function, made_up
from faregate.cli.bench.report import check_report, show, write
from faregate.cli.bench.result import is_clean, result_of
from faregate.cli.bench.subject import Choice, Subject, subject_of
from faregate.cli.bench.tidy import remove_queues
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, errors
from faregate.errors import ConfigurationError
from faregate.units import parse_seconds

_PUBLISHING, _LOAD, _SAFETY = "What is sent", "How much", "Where it runs"


def bench(
    target: Annotated[
        str,
        typer.Argument(
            help="A bus, as module:attribute, or a transport, as memory:, journal:PATH or amqp://….", metavar="TARGET"
        ),
    ],
    message: Annotated[
        str,
        typer.Argument(
            help="The message: its wire name; for a URL also its class, as module:Class.", metavar="MESSAGE"
        ),
    ],
    payload: Annotated[
        Path | None,
        typer.Option(
            help="Messages as JSON: one, a list of them, or one a line (.jsonl). They are sent again and again.",
            metavar="FILE",
            rich_help_panel=_PUBLISHING,
        ),
    ] = None,
    generate: Annotated[
        str | None,
        typer.Option(
            help="A function that returns the message, or its fields; it may take the message's number.",
            metavar="MODULE:FUNCTION",
            rich_help_panel=_PUBLISHING,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="The node that publishes; needed if several could.", rich_help_panel=_PUBLISHING),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="The node that a command goes to; needed if several take it.", rich_help_panel=_PUBLISHING),
    ] = None,
    producers: Annotated[
        int, typer.Option(help="How many publish at the same time.", min=1, max=10_000, rich_help_panel=_LOAD)
    ] = 10,
    consumers: Annotated[
        int | None,
        typer.Option(
            help="For a URL: how many messages are handled at the same time; 10 unless given.",
            min=1,
            max=10_000,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Messages a second, over all producers; as fast as it goes unless given.", rich_help_panel=_LOAD
        ),
    ] = None,
    burst: Annotated[
        int, typer.Option(help="Publish so many together, with one confirm.", min=1, max=10_000, rich_help_panel=_LOAD)
    ] = 1,
    duration: Annotated[str, typer.Option(help="How long to send, such as 10s or 5m.", rich_help_panel=_LOAD)] = "10s",
    count: Annotated[
        int | None, typer.Option(help="How many messages to send, instead of a duration.", min=1, rich_help_panel=_LOAD)
    ] = None,
    warm_up: Annotated[str, typer.Option(help="How long to send before it counts.", rich_help_panel=_LOAD)] = "1s",
    most_waiting: Annotated[
        int,
        typer.Option(help="Without --rate: wait while so many are not handled yet.", min=1, rich_help_panel=_LOAD),
    ] = 1000,
    drain: Annotated[
        str, typer.Option(help="How long to wait, in the end, until all are handled.", rich_help_panel=_LOAD)
    ] = "30s",
    on: Annotated[
        str | None,
        typer.Option(
            help="Run the nodes of the bus on this transport, not on a temporary one.",
            metavar="URL",
            rich_help_panel=_SAFETY,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Their store; for a bus that has one, a temporary one unless given.",
            metavar="URL",
            rich_help_panel=_SAFETY,
        ),
    ] = None,
    empty: Annotated[
        bool, typer.Option("--empty", help="Run empty handlers in place of those of the bus.", rich_help_panel=_SAFETY)
    ] = False,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="Yes, put load on a server, a journal or a database that is there already.",
            rich_help_panel=_SAFETY,
        ),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a report with charts, as .html or .md.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a bus, or a transport, carries of your own messages.

    The nodes of a bus run on a temporary journal, or in memory if they do so
    anyway, with a temporary store: no real queue or table is touched. But their
    handlers run, and whatever else these do, such as a call of another service,
    they really do; --empty runs none of them.

    On a URL two private nodes send and handle the message.

    Messages are made up from the schema of their class, unless --payload or
    --generate is given.

    Exits with 1 when something could not be published, became a dead letter, or
    was not handled in the end.
    """
    logging.basicConfig(level="ERROR", format="%(levelname)s %(message)s")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigurationError(f"--rate must be more than 0 messages a second; got {rate:g}")
    if report is not None:
        check_report(report)
    plan = Plan(
        producers, rate, burst, count, _seconds(duration, "--duration"), parse_seconds(warm_up, "--warm-up", bare=True),
        most_waiting, parse_seconds(drain, "--drain", bare=True),
    )  # fmt: skip
    choice = Choice(target, message, on, store, node, to, consumers, empty, yes)
    result = run_async(_run(choice, plan, payload, generate, quiet=as_json))
    if report is not None:
        write(result, report)
    answer(result, lambda: show(result), as_json=as_json)
    if report is not None and not as_json:
        errors.print(f"wrote {report}", markup=False)
    if not is_clean(result):
        raise typer.Exit(1)


def _seconds(text: str, option: str) -> float:
    found = parse_seconds(text, option, bare=True)
    if not found:
        raise ConfigurationError(f"{option} must be more than 0 seconds")
    return found


async def _run(
    choice: Choice, plan: Plan, payload: Path | None, generate: str | None, *, quiet: bool
) -> dict[str, Any]:
    clock = SteadyClock()
    load = Load(plan, clock)
    with subject_of(choice, load.watch, clock) as subject:
        messages = _messages(subject, payload, generate)
        try:
            with _progress(load, quiet=quiet):
                await load.run(subject, messages)
        finally:
            if load.phase != "starting":
                await asyncio.shield(remove_queues(subject.bus, subject.private))
        return result_of(load, subject)


def _messages(subject: Subject, payload: Path | None, generate: str | None) -> Iterator[Any]:
    if payload is not None and generate is not None:
        raise ConfigurationError("give --payload or --generate, not both")
    if payload is not None:
        return from_file(payload, subject.cls)
    if subject.cls is None:
        wire = subject.message_type.wire
        raise ConfigurationError(
            f"of a message called {wire} nothing is known here: name its class, module:Class, or give --payload FILE"
        )
    return made_up(subject.cls) if generate is None else from_function(generate, subject.cls)


def _progress(load: Load, *, quiet: bool) -> Live:
    """A line that moves, on a terminal."""
    shown = not quiet and errors.is_terminal
    return Live(
        get_renderable=lambda: _line(load) if shown else Text(""),
        console=errors, refresh_per_second=4, transient=True, auto_refresh=shown,
    )  # fmt: skip


def _line(load: Load) -> Text:
    failed = sum(load.meter.errors.values())
    told = f"{load.phase}: {load.sent:,} published, {load.ended:,} handled, {max(0, load.unhandled):,} on their way"
    return Text(told + (f", {failed:,} errors" if failed else ""), "dim")
