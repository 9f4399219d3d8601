"""`faregate spark audit|rates|drain|replay`: the jobs, for people and for programs.

Rules kept here:
- What can be refused without Spark is refused before a session is started.
- `audit` exits with 0 when it holds, 1 when it does not, and 2 when it could not be checked: a program can tell them
  apart.
- Times are UTC, whatever the zone of this machine.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from faregate.cli.journal.progress import plain_errors, progress
from faregate.cli.output import AsJson, answer, console, fail, print_json, say
from faregate.cli.spark.session import LOCAL, Master, import_spark, session, watched
from faregate.cli.table import Column, numbers, room, show_table
from faregate.errors import ConfigurationError, FaregateError
from faregate.plain import plain
from faregate.ports.schemes import hide_password
from faregate.units import counted, seconds_text

_SHOWN = 20
_ALWAYS = ("published", "handled", "in_flight", "missing", "double", "out_of_order")
_BARS = " ▁▂▃▄▅▆▇█"

Stores = Annotated[
    list[str],
    typer.Option("--store", help="The store, sqlite:PATH or postgresql://…; or NODE=URL, once for each node."),
]

LogPlace = Annotated[str, typer.Argument(help="The journal's folder, or the URL of another log.", metavar="LOG")]


def stores_of(given: list[str]) -> str | dict[str, str] | None:
    """One URL for all nodes, or a mapping. Raises `ConfigurationError`."""
    pairs = {}
    for each in given:
        node, equals, url = each.partition("=")
        if not equals or ":" in node:
            if len(given) > 1:
                shown = hide_password(each)
                raise ConfigurationError(f"--store {shown} does not say whose it is: write NODE={shown}")
            return each
        pairs[node] = url
    return pairs or None


def audit(
    path: LogPlace,
    store: Stores = [],  # noqa: B006 - typer reads it
    effects: Annotated[
        list[str],
        typer.Option(help="NODE:SELECT message_id FROM …, the ids in business data; NODE?: when not all have one."),
    ] = [],  # noqa: B006
    at_rest: Annotated[bool, typer.Option("--at-rest", help="Nothing may be in flight.")] = False,
    unordered: Annotated[list[str], typer.Option(help="A queue or node whose order is not promised.")] = [],  # noqa: B006
    limit: Annotated[int, typer.Option(min=1, help="How many findings are listed.")] = 1000,
    master: Master = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Check that every recipient of every message handled it once, in order, or that it is known where it is.

    Exits with status 0 when it holds, 1 when it does not, and 2 when it could not be audited.
    """
    with _not_audited(as_json):
        stores = stores_of(store)
        with plain_errors():
            import_spark()
            from faregate.spark.jobs.audit import audit as run
            from faregate.spark.jobs.audit import prepare

            prepare(path, stores, effects, unordered)
        with session(master, "audit") as spark, plain_errors(), watched(spark, "audit"):
            found = run(
                spark,
                journal=path,
                store=stores,
                effects=effects,
                at_rest=at_rest,
                unordered=unordered,
                limit=limit,
            )
            listed = [row.asDict() for row in found.findings.collect()]
    report = {"ok": found.ok, "table": found.table, "summary": found.summary, "notes": found.notes}
    answer({**report, "findings": listed}, lambda: _show_audit(found, listed), as_json=as_json)
    if not found.ok:
        raise typer.Exit(1)


@contextmanager
def _not_audited(as_json: bool) -> Iterator[None]:
    """An error in here is no finding: status 2."""
    try:
        yield
    except FaregateError as exc:
        fail(exc, as_json=as_json)
        raise typer.Exit(2) from exc
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as exc:
        traceback.print_exc(file=sys.stderr)
        raise typer.Exit(2) from exc


def _show_audit(found: Any, listed: list[dict[str, Any]]) -> None:
    from faregate.spark.jobs.audit_result import WRONG

    # A column of zeros is left out, unless it answers the question.
    names = [name for name in found.summary if name in found.table[0] and (name in _ALWAYS or found.summary[name])]
    columns = [Column("RECIPIENT"), *numbers(*(name.replace("_", " ").upper() for name in names))]
    rows = []
    for row in found.table:
        style = "red" if any(row[name] for name in WRONG) else ""
        rows.append([Text(cell, style) for cell in (plain(row["node"]), *(f"{row[name]:,}" for name in names))])
    show_table(columns, rows)
    summary = found.summary
    for note in found.notes:
        say(f"note: {note}")
    for each in listed[:_SHOWN]:
        about = f"; message {each['message_id']}" if each["message_id"] is not None else ""
        told = f"{each['kind']}: {each['text']}{about}"
        at = f", publication {each['publication_id']}, offset {each['offset']}" if each["offset"] is not None else ""
        say(plain(told + at), "red")
    if summary["findings"] > _SHOWN:
        say(f"… {summary['findings'] - _SHOWN:,} more: --json lists up to --limit")
    span = f"offsets {summary['from_offset']:,} to {summary['to_offset'] - 1:,}"
    if found.ok:
        console.print(f"[bold green]it holds[/] for {counted(summary['published'], 'message')}, {span}")
    else:
        console.print(f"[bold red]it does not hold[/]: {counted(summary['findings'], 'finding')}, {span}")


def rates(
    path: LogPlace,
    store: Stores = [],  # noqa: B006
    window: Annotated[str, typer.Option(help="The length of a window: 10s, 5m, 1h, 1d.")] = "10s",
    chart: Annotated[Path | None, typer.Option(help="Draw an HTML page of it here.")] = None,
    master: Master = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Show throughput, errors and latency over time, per node and type. Times are UTC."""
    stores = stores_of(store)
    with plain_errors():
        import_spark()
        from faregate.spark.jobs.rates import rates as run
        from faregate.spark.jobs.rates import window_seconds
        from faregate.spark.jobs.rates_chart import draw
        from faregate.spark.jobs.settlements import plan_journal
        from faregate.spark.jobs.stores import open_stores

        window_seconds(window)
        plan_journal(path)
        open_stores(stores)
    with session(master, "rates") as spark, plain_errors():
        with watched(spark, "rates"):
            rows = _in_utc(run(spark, journal=path, store=stores, window=window))
        if chart is not None:
            chart.write_text(draw(rows, window_seconds(window), hide_password(path)), encoding="utf-8")
    if as_json:
        print_json([{**row, "from": _iso(row["from"]), "to": _iso(row["to"])} for row in rows])
        return
    if not rows:
        say(f"nothing has ended in {hide_password(path)} yet")
    else:
        _show_rates(rows, window_seconds(window))
    if chart is not None:
        say(f"drawn to {chart}")


def _in_utc(frame: Any) -> list[dict[str, Any]]:
    """Rows with their times in UTC: Spark's own are in the zone of this machine, and do not say so."""
    from pyspark.sql import functions

    found = []
    for row in frame.withColumns({name: functions.unix_micros(name) for name in ("from", "to")}).collect():
        times = {name: datetime.fromtimestamp(row[name] / 1e6, UTC) for name in ("from", "to")}
        found.append({**row.asDict(), **times})
    return found


def _iso(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _show_rates(rows: list[dict[str, Any]], seconds: float) -> None:
    first, last = rows[0]["from"], rows[-1]["from"]
    lines, rows_of = [], []
    for node, kind in sorted({(row["node"], row["type"]) for row in rows}):
        own = [row for row in rows if (row["node"], row["type"]) == (node, kind)]
        by_time = {round((row["from"] - first).total_seconds() / seconds): row["per_second"] for row in own}
        ended, dead, back = (sum(row[name] for row in own) for name in ("ended", "dead", "redelivered"))
        worst = [
            max((row[name] for row in own if row[name] is not None), default=None) for name in ("p50", "p95", "p99")
        ]
        span = round((last - first).total_seconds() / seconds) + 1
        lines.append(Text(sparkline([by_time.get(place, 0.0) for place in range(span)], (room() or 80) - 4), "cyan"))
        rows_of.append(
            [
                plain(node),
                plain(kind),
                f"{ended:,}",
                f"{max(by_time.values()):,.1f}",
                f"{dead:,}",
                f"{back:,}",
                *("–" if value is None else seconds_text(value) for value in worst),
            ]
        )
    counts = numbers("ENDED", "PEAK/S", "DEAD", "REDELIVERED", "P50", "P95", "P99")
    show_table([Column("NODE"), Column("TYPE"), *counts], rows_of, below=lines)
    span = f"{first:%Y-%m-%d %H:%M:%S} to {rows[-1]['to']:%Y-%m-%d %H:%M:%S} UTC"
    say(f"{span}, as the bars below each row")
    say("P50 to P99: of the worst window")


def sparkline(values: list[float], width: int = 24) -> str:
    """One character for the highest value of each stretch."""
    step = max(1, -(-len(values) // width))
    peaks = [max(values[at : at + step]) for at in range(0, len(values), step)]
    top = max(peaks) or 1.0
    return "".join(_BARS[0 if not peak else max(1, round(peak / top * (len(_BARS) - 1)))] for peak in peaks)


def drain(
    to: Annotated[Path, typer.Argument(help="The folder of the Parquet table.", metavar="TO")],
    store: Stores,
    master: Master = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Add the dead letters of stores to a Parquet table, by node and date. Repeating it adds only what is new."""
    stores = stores_of(store)
    with plain_errors():
        import_spark()
        from faregate.spark.jobs.drain import drain as run
        from faregate.spark.jobs.stores import open_stores

        open_stores(stores)
    with session(master, "drain") as spark, plain_errors(), watched(spark, "drain"):
        counts = run(spark, store=stores, to=to).counts
    told = f"{counted(counts['found'], 'dead letter')}: {counts['new']:,} new, {counts['changed']:,} changed since"
    answer({**counts, "to": str(to)}, f"{told}, {counts['unchanged']:,} there already, in {to}", as_json=as_json)


def replay(
    path: LogPlace,
    start: Annotated[str, typer.Option("--from", help="An offset, or a time: 2026-11-15T09:00:00Z.")] = "earliest",
    end: Annotated[str, typer.Option("--to", help="The same, not included.")] = "latest",
    types: Annotated[list[str], typer.Option("--type", help="Only this type.")] = [],  # noqa: B006
    nodes: Annotated[list[str], typer.Option("--node", help="Only what this node published.")] = [],  # noqa: B006
    recipients: Annotated[
        list[str], typer.Option("--recipient", help="To this node instead of those that got it.")
    ] = [],  # noqa: B006
    identity: Annotated[
        str, typer.Option(help="same: ledgers recognise what was handled; new: it runs again.")
    ] = "same",
    name: Annotated[
        str | None, typer.Option(help="Repeating the same replay under this name repeats nothing; it needs --to.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=100_000, help="Messages that are appended as one.")] = 10_000,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without this it is only counted.")] = False,
    master: Master = LOCAL,
    as_json: AsJson = False,
) -> None:
    """Put a range of messages on the bus again, through the log. Counts first; --yes does it."""
    with plain_errors():
        import_spark()
        from faregate.spark.jobs.replay import replay as run
        from faregate.spark.jobs.settlements import plan_journal

        plan_journal(path)
    with session(master, "replay") as spark, plain_errors(), progress("replay", in_bytes=False) as told:
        found = run(
            spark,
            journal=path,
            start=start,
            end=end,
            types=types,
            nodes=nodes,
            recipients=recipients,
            identity=identity,  # type: ignore[arg-type]
            name=name,
            batch=batch,
            dry_run=not yes,
            progress=told,
        )
        kinds = [row.asDict() for row in found.messages.groupBy("type", "source").count().orderBy("type").collect()]
    if as_json:
        print_json({**found.counts, "name": found.name, "done": yes, "types": kinds})
        return
    listed = [(plain(row["type"]), plain(row["source"]), f"{row['count']:,}") for row in kinds]
    show_table([Column("TYPE"), Column("PUBLISHED BY"), *numbers("MESSAGES")], listed)
    counts = found.counts
    what = f"{counted(counts['messages'], 'message')} from offset {counts['from_offset']:,} on, {identity} identity"
    if yes:
        files = counted(counts["batches"], "batch", "batches")
        say(f"replayed: {what}, in {files}, as {found.name}")
    else:
        say(f"would replay {what}; --yes does it")
