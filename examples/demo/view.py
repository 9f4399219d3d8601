"""What the demo shows while it runs and when it is done: a live view in a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .flow import Progress, Sample
from .plan import Plan
from .verdict import Check

_BARS = " ▁▂▃▄▅▆▇█"
_REDRAW, _LINE = 0.1, 2.0
"""Seconds between two pictures, and between two plain lines."""


class DemoView:
    """Use as a context manager around the flow, and hand `update` to it."""

    def __init__(self, console: Console, plan: Plan, crashes: int, *, quiet: bool) -> None:
        self._console = console
        self._plan = plan
        self._crashes = crashes
        self._quiet = quiet
        self._live: Live | None = None
        self._shown = self._told = 0.0
        self._kills = 0

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._shown >= _REDRAW:
            self._shown = now
            self._live.update(self.picture(progress), refresh=True)
        elif self._live is None and not self._quiet:
            killed = len(progress.kills) > self._kills
            if killed or now - self._told >= _LINE:
                self._told, self._kills = now, len(progress.kills)
                self._console.print(_line(progress, killed), soft_wrap=True)

    def picture(self, progress: Progress) -> RenderableType:
        last, good = progress.last, len(self._plan.good)
        bars = Table.grid(padding=(0, 2))
        bars.add_column(width=16)
        bars.add_column(justify="right", width=8)
        bars.add_column(width=44)
        for what, count, total, style in (
            ("orders published", last.published, self._plan.orders, "cyan"),
            ("invoices", last.invoices, good, "blue"),
            ("charges", last.charges, good, "magenta"),
            ("parcels", last.parcels, good, "green"),
        ):
            bar = ProgressBar(total=max(1, total), completed=count, width=44, complete_style=style)
            bars.add_row(what, f"{count:,}", bar)
        bars.add_row()
        bars.add_row(
            "parcels a second",
            f"{_rate(progress.samples):,.0f}",
            Text.assemble(*sparkline(progress), no_wrap=True, overflow="crop"),
        )
        bars.add_row("processes", f"{len(progress.pids)}", _state(progress, is_done=last.parcels >= good))
        facts = Table.grid(padding=(0, 3))
        facts.add_row(
            _fact("kills", f"{len(progress.kills)} of {progress.crashes}", "bold red" if progress.kills else "bold"),
            _fact("restarts", str(progress.restarts)),
            _fact("outbox", f"{last.outbox:,}"),
            _fact("dead letters", f"{last.dead:,}", "bold yellow" if last.dead else "bold"),
            _fact("bank silent", f"{progress.timeouts:,}"),
        )
        return Panel(
            Group(bars, Text(), facts),
            title=Text(f"faregate demo · {last.at:.0f} s", style="bold"),
            title_align="left",
            border_style="green" if progress.is_up else "red",
            width=80,
            padding=(1, 2),
        )


def _fact(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _state(progress: Progress, *, is_done: bool) -> Text:
    if progress.is_up and is_done:  # partitions of a killed process are free after ten seconds
        return Text("until nothing is left anywhere, copies too", "green")
    if progress.is_up:
        several = len(progress.pids) > 1
        return Text("all at work" if several else f"process {progress.pids[0]} at work", "green")
    if progress.killed:
        return Text(f"{progress.killed[-1]} was killed with SIGKILL, and starts", "bold red")
    return Text("starting")


def _rate(samples: Sequence[Sample], seconds: float = 2.0) -> float:
    """Parcels a second, of late."""
    if len(samples) < 2:
        return 0.0
    last = samples[-1]
    first = next((sample for sample in samples if sample.at >= last.at - seconds), samples[0])
    return (last.parcels - first.parcels) / max(0.05, last.at - first.at)


def sparkline(progress: Progress, width: int = 44) -> list[tuple[str, str]]:
    """The rate over the whole run so far, with a cross where something was killed."""
    samples = progress.samples
    step = max(0.5, progress.last.at / (width - 1))
    slots = int(progress.last.at / step) + 1
    at_end = [0] * (slots + 1)
    for sample in samples:
        at_end[min(slots, int(sample.at / step) + 1)] = sample.parcels
    for slot in range(1, slots + 1):
        at_end[slot] = max(at_end[slot], at_end[slot - 1])
    rates = [at_end[slot + 1] - at_end[slot] for slot in range(slots)]
    most = max(1, *rates)
    killed = {int(moment / step) for moment in progress.kills}
    return [
        ("✕", "bold red") if slot in killed else (_BARS[-(-rate * (len(_BARS) - 1) // most)], "green")
        for slot, rate in enumerate(rates)
    ]


def _line(progress: Progress, killed: bool) -> str:
    last = progress.last
    told = (
        f"{last.at:5.1f} s  published {last.published:,}  invoices {last.invoices:,}  charges {last.charges:,}  "
        f"parcels {last.parcels:,}  dead letters {last.dead:,}  outbox {last.outbox:,}"
    )
    return f"{told}  {progress.killed[-1]} killed ({len(progress.kills)} of {progress.crashes})" if killed else told


def _table(title: str) -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
    )


def verdict_table(checks: Sequence[Check]) -> Table:
    table = _table("the verdict")
    table.add_column("checked")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    for check in checks:
        mark = Text("held", style="green") if check.held else Text("BROKEN", style="bold red")
        table.add_row(check.what, f"{check.expected:,}", f"{check.found:,}", mark)
    return table


def rows_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Dictionaries with the same keys as a table. A name like `in_flight` is a heading of two lines."""
    table = _table(title)
    for name in rows[0] if rows else ():
        is_text = all(isinstance(row[name], str | None) for row in rows)
        heading = "\n".join(name.rsplit("_", 1)).replace("_", " ")
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    return table


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" if isinstance(value, float) else str(value)
