"""`faregate demo`: the proof. Orders through a shop whose processes are killed again and again, and an audit of it all.

Rules kept here:
- What is expected follows from the seed; what is found is counted in the data (see plan.py and verdict.py).
- The exit status is the verdict: 0 when everything held, 1 when anything did not, 130 after Ctrl-C.
- No process and, without --keep, no file is left, however it ends.
"""

import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from faregate.cli.output import console, errors, print_json
from faregate.errors import ConfigurationError

if TYPE_CHECKING:
    from .result import Result
    from .site import Site

# The demo's other files are loaded when it runs: every other command starts without them, and without the shop.

Plant = Literal["double", "loss", "order", "forget"]
_PLANTS: dict[Plant, str] = {
    "double": "insert into charges select * from charges where rowid = (select min(rowid) from charges)",
    "loss": "delete from parcels where rowid = (select min(rowid) from parcels)",
    "order": "update invoices set rowid = -1 where rowid = (select max(rowid) from invoices where customer = "
    "(select customer from invoices group by customer order by count(*) desc limit 1))",
}
_ORDERS, _ORDERS_ON_RABBITMQ = 10_000, 2_000
_MOST_FINDINGS = 20


def demo(
    orders: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="How many orders to place.",
            show_default=f"{_ORDERS}; with --rabbitmq {_ORDERS_ON_RABBITMQ}",
        ),
    ] = None,
    crashes: Annotated[int, typer.Option(min=0, max=1000, help="How often something is killed.")] = 5,
    seed: Annotated[int, typer.Option(help="Which orders repeat or are bad, and what is killed when.")] = 7,
    rabbitmq: Annotated[
        bool,
        typer.Option("--rabbitmq", help="Two processes of each service, on a RabbitMQ that is killed, too."),
    ] = False,
    no_spark: Annotated[bool, typer.Option("--no-spark", help="Let plain SQL make the audit, without Spark.")] = False,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep the journal and the database here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a report with charts.")] = None,
    plant: Annotated[Plant | None, typer.Option(help="Plant an error, to see that it is found.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Send orders through a shop of four services, kill it again and again, and audit what came of it.

    Many orders are published twice, some late, some are bad, and the bank often does not answer. The worker is a
    process of its own that is killed by SIGKILL while messages flow. In the end every order must be billed, charged and
    shipped exactly once; the exit status says whether that held.

    With --rabbitmq each service runs in two processes, on a RabbitMQ and a PostgreSQL that are started for it. Any of
    the processes is killed, and each third time the broker.
    """
    if report is not None and not report.parent.is_dir():
        raise ConfigurationError(f"--report: there is no folder {report.parent}")
    if rabbitmq and keep is not None:
        raise ConfigurationError("--keep: with --rabbitmq there is nothing to keep; its servers end with the demo")
    if plant == "forget" and not rabbitmq:
        raise ConfigurationError("--plant forget: add --rabbitmq; a journal recognises copies before the shop has to")
    if orders is None:
        orders = _ORDERS_ON_RABBITMQ if rabbitmq else _ORDERS
    logging.disable(logging.CRITICAL)  # what matters is shown; py4j would write tracebacks when Ctrl-C comes
    try:
        with (
            _ending_on_terminate(),
            _folder(keep) as folder,
            _site(folder, rabbitmq, forgets=plant == "forget", quiet=as_json) as site,
        ):
            result = _run(folder, site, orders, crashes, seed, plant, spark=not no_spark, quiet=as_json)
    except KeyboardInterrupt:
        errors.print("stopped; no process is left")
        raise typer.Exit(130) from None
    if report is not None:
        from .report import render

        report.write_text(render(result))
    if as_json:
        print_json(result.as_dict())
    else:
        _show(result, keep, report, plant)
    if not result.held:
        raise typer.Exit(1)


@contextmanager
def _site(folder: Path, rabbitmq: bool, *, forgets: bool, quiet: bool) -> "Iterator[Site]":
    """Where the shop runs; gone afterwards."""
    from .site import JournalSite

    if not rabbitmq:
        yield JournalSite(folder)
        return
    import faregate.stores.postgres
    import faregate.transports.rabbitmq  # noqa: F401 - these say which extra is missing

    from .rabbitmq_site import rabbitmq_site

    with ExitStack() as stack:
        with _status("RabbitMQ and PostgreSQL start …", quiet):
            site = stack.enter_context(rabbitmq_site(folder, forgets=forgets))
        yield site


def _run(
    folder: Path, site: "Site", orders: int, crashes: int, seed: int, plant: Plant | None, *, spark: bool, quiet: bool
) -> "Result":
    from .flow import Flow
    from .plan import Plan
    from .result import Result
    from .timeline import read_timeline
    from .verdict import judge
    from .view import DemoView

    plan = Plan(orders, seed)
    if not quiet:
        console.print(
            f"[bold]{orders:,} orders[/] through four services, {plan.copies:,} exact copies, {plan.dead:,} bad "
            f"ones, and {site.threat.format(crashes)} (seed {seed})"
        )
    with DemoView(console, plan, crashes, quiet=quiet) as view:
        progress = Flow(plan, site, crashes, view.update).run()
    if plant in _PLANTS:
        site.change(_PLANTS[plant])
    with site.database() as connection:
        dead = dict(connection.execute("select reason, count(*) from faregate_dead group by reason"))
    result = Result(plan, progress, read_timeline(site.log, progress.began), judge(plan, site), dead, site.options)
    _audit(result, site, folder, spark=spark, quiet=quiet)
    return result


def _audit(result: "Result", site: "Site", folder: Path, *, spark: bool, quiet: bool) -> None:
    """By Spark where it can be had, by plain SQL where not."""
    from .spark import examine, why_not
    from .verdict import audit

    reason = why_not() if spark else None
    if reason is not None:
        errors.print(f"without Spark: {reason}; plain SQL makes the audit")
    if not spark or reason is not None:
        found = audit(site)
        result.audit_ok, result.audit_summary, result.audit_table = found.ok, found.summary, found.table
        result.findings = found.findings[:_MOST_FINDINGS]
        return
    started = time.monotonic()
    with _status("Spark starts, and reads the log …", quiet):
        examine(result, site, folder, _MOST_FINDINGS)
    result.spark_seconds = time.monotonic() - started


@contextmanager
def _status(text: str, quiet: bool) -> Iterator[None]:
    if quiet or not console.is_terminal:
        yield
    else:
        with console.status(text):
            yield


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where journal and database lie: readable by this user alone, and gone afterwards unless it shall be kept."""
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise ConfigurationError(f"--keep: {keep} is there already; name a new or an empty folder")
        keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="faregate-demo-")).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ending_on_terminate() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind like an exception, so that everything is cleaned up; `nohup` stays in force."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    heeded = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(result: "Result", keep: Path | None, report: Path | None, planted: Plant | None) -> None:
    from rich.text import Text

    from .timeline import PERCENTS
    from .view import rows_table, sparkline, verdict_table

    progress = result.progress
    console.print(Text.assemble(*sparkline(progress, 60), ("  parcels a second", "dim")))
    spark = "" if result.spark_seconds is None else f", and {result.spark_seconds:.0f} s of Spark"
    console.print(
        f"[bold]{result.timeline.messages:,} messages[/] in {progress.seconds:.0f} s{spark}. Killed: {result.killed}. "
        f"The bank did not answer {progress.timeouts:,} times."
    )
    latency = ", ".join(f"p{p} {t:.2f} s" for p, t in zip(PERCENTS, result.timeline.overall, strict=False))
    console.print(f"an order took, from published to shipped, kills included: {latency or 'nothing was shipped'}")
    if progress.pauses:
        pauses = ", ".join(f"{seconds:.1f}" for seconds in progress.pauses)
        console.print(f"seconds from a kill until work was done again: {pauses}")
    console.print(verdict_table(result.checks))
    for title, rows in result.spark_tables.items():
        console.print(rows_table(rows, title))
    if result.audit_table:
        console.print(rows_table(result.audit_table, f"the audit, by {result.judge}"))
    console.print(f"\n{result.audit_summary}", markup=False, soft_wrap=True)
    for finding in result.findings:
        console.print("  " + ", ".join(f"{name} {value}" for name, value in finding.items()), markup=False)
    if keep is not None:
        console.print(f"kept: the journal {keep}/journal and the database {keep}/shop.db", markup=False, soft_wrap=True)
    if report is not None:
        console.print(f"report: {os.fspath(report)}", markup=False, soft_wrap=True)
    if result.held:
        console.print("[bold green]Every order was billed, charged and shipped exactly once.[/]")
    else:
        wanted = (
            f"An error was planted ({planted})." if planted else f"Please report it, with the seed {result.plan.seed}."
        )
        console.print(f"[bold red]It did not hold.[/] {wanted}")
