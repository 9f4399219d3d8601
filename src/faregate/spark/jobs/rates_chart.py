"""Rates as one HTML page: three charts in plain SVG, without a library, a script or anything from the network.

Rules kept here:
- Readable on a light and on a dark screen, and in print: colours are chosen for both, lines differ in dash as well.
- Axes have units and round numbers; times are UTC. A window in which nothing ended is a zero, or a gap for latency.
- Names come from messages: they are escaped.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 240, 72, 16, 16, 36
MOST_SERIES = 8
MOST_POINTS = 400
_DASHES = ("", "6 3", "2 3", "10 3 2 3")

_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2330; --faint: #5d6675; --grid: #e3e7ed;
  --s0: #0b62c4; --s1: #c2410c; --s2: #15803d; --s3: #9333ea; --s4: #0e7490; --s5: #be185d; --s6: #a16207;
  --s7: #475569; }
@media (prefers-color-scheme: dark) { :root { --back: #12161d; --text: #e8ebf0; --faint: #a3adbb; --grid: #2a313c;
  --s0: #62a8ff; --s1: #fb923c; --s2: #4ade80; --s3: #c89bff; --s4: #38d3ee; --s5: #ff7eb6; --s6: #facc15;
  --s7: #a8b4c4; } }
body { margin: 24px auto; max-width: 1000px; padding: 0 16px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 26px 0 4px; }
p { color: var(--faint); margin: 0; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--faint); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 14px 0 0; }
li { display: flex; align-items: center; gap: 8px; } li svg { width: 30px; flex: none; }
table { border-collapse: collapse; margin-top: 26px; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
""".strip()


@dataclass(frozen=True)
class Series:
    name: str
    style: str
    rows: dict[int, dict[str, Any]]
    """By the number of the window, counted from the first."""


def draw(rows: Sequence[dict[str, Any]], seconds: float, title: str) -> str:
    """The page for the rows of `rates`, in windows of so many seconds. Times without a zone are UTC."""
    head = f"<title>Rates of {escape(title)}</title><style>{_STYLE}</style>"
    page = ["<!doctype html>", f'<html lang="en"><meta charset="utf-8">{head}', f"<h1>{escape(title)}</h1>"]
    if not rows:
        return "\n".join([*page, "<p>Nothing has ended yet.</p></html>"])
    first = min(row["from"] for row in rows)
    count = round((max(row["from"] for row in rows) - first).total_seconds() / seconds) + 1
    series, left_out = _series(rows, first, seconds)
    axis = _Times((first if first.tzinfo else first.replace(tzinfo=UTC)).timestamp(), seconds, count)
    page.append(f"<p>{axis.told}; windows of {seconds:g} s; times are UTC</p>{_legend(series)}")
    if left_out:
        page.append(f"<p>The {left_out} smallest series are left out.</p>")
    charts: list[tuple[str, str, str, Callable[[float], str], float | None]] = [
        ("Throughput: messages that ended, per second", "messages / s", "per_second", _plain, 0.0),
        ("Errors: dead letters or delivered again, of all deliveries", "share", "error_rate", _percent, 0.0),
        ("Latency: 95th percentile, from sent to handled", "seconds", "p95", _plain, None),
    ]
    for name, unit, column, told, empty in charts:
        page.append(f"<h2>{name}</h2>{_chart(series, axis, column, unit, told, empty, name)}")
    return "\n".join([*page, _table(series), "</html>\n"])


def _series(rows: Sequence[dict[str, Any]], first: datetime, seconds: float) -> tuple[list[Series], int]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        place = round((row["from"] - first).total_seconds() / seconds)
        found.setdefault(f"{row['node']} · {row['type']}", {})[place] = row
    by_size = sorted(found, key=lambda name: -sum(row["ended"] for row in found[name].values()))
    kept = sorted(by_size[:MOST_SERIES])
    styles = [f'stroke="var(--s{n})" stroke-dasharray="{_DASHES[n % len(_DASHES)]}"' for n in range(MOST_SERIES)]
    return [Series(name, styles[n], found[name]) for n, name in enumerate(kept)], len(found) - len(kept)


def _legend(series: Sequence[Series]) -> str:
    mark = '<svg viewBox="0 0 30 10"><path class="line" d="M1 5H29" {}/></svg>'
    return "<ul>" + "".join(f"<li>{mark.format(one.style)}{escape(one.name)}</li>" for one in series) + "</ul>"


class _Times:
    """The horizontal axis: windows by number."""

    def __init__(self, first: float, seconds: float, count: int) -> None:
        self.first, self.seconds, self.count = first, seconds, count
        span = self._text(first, "%Y-%m-%d %H:%M:%S"), self._text(first + count * seconds, "%Y-%m-%d %H:%M:%S")
        self.told = " to ".join(span)

    def x(self, place: float) -> float:
        return LEFT + (place + 0.5) / self.count * (WIDTH - LEFT - RIGHT)

    def labels(self) -> list[tuple[float, str]]:
        span = self.count * self.seconds
        form = "%H:%M:%S" if span < 7200 else "%H:%M" if span < 172_800 else "%b %d"
        step = max(1, math.ceil(self.count / 8))
        places = range(0, self.count, step)
        return [(self.x(place), self._text(self.first + place * self.seconds, form)) for place in places]

    @staticmethod
    def _text(moment: float, form: str) -> str:
        return datetime.fromtimestamp(moment, UTC).strftime(form)


def _chart(
    series: Sequence[Series],
    axis: _Times,
    column: str,
    unit: str,
    told: Callable[[float], str],
    empty: float | None,
    name: str,
) -> str:
    highest = max((row[column] or 0.0 for one in series for row in one.rows.values()), default=0.0)
    ticks = _ticks(highest or 1.0)
    floor = HEIGHT - BOTTOM

    def y(value: float) -> float:
        return floor - value / ticks[-1] * (floor - TOP)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">']
    for tick in ticks:
        kind = "grid" if tick else "axis"
        parts.append(f'<path class="{kind}" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{told(tick)}</text>')
    for x, label in axis.labels():
        parts.append(f'<path class="axis" d="M{x:.1f} {floor}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{label}</text>')
    middle = (TOP + floor) / 2
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{unit}</text>')
    for one in series:
        parts.append(_line(one, axis, column, empty, y))
    return "".join([*parts, "</svg>"])


def _line(one: Series, axis: _Times, column: str, empty: float | None, y: Callable[[float], float]) -> str:
    step = max(1, math.ceil(axis.count / MOST_POINTS))
    path, pen_down, last = [], False, ""
    for place in range(0, axis.count, step):
        here = [one.rows[at][column] for at in range(place, min(place + step, axis.count)) if at in one.rows]
        known = [value for value in here if value is not None]
        value = max(known) if known else empty
        if value is None:
            pen_down = False
            continue
        last = f"{axis.x(place + (step - 1) / 2):.1f} {y(value):.1f}"
        path.append(f"{'L' if pen_down else 'M'}{last}")
        # A point between two gaps would not be seen: it is drawn as a short stroke.
        path.append("" if pen_down else "h0.01")
        pen_down = True
    return f'<path class="line" stroke-linecap="round" d="{"".join(path)}" {one.style}/>'


def _ticks(highest: float) -> list[float]:
    """Four or five round numbers from zero to above the highest."""
    raw = highest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * number for number in range(math.ceil(highest / step * 0.999) + 1)]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value * 100:.3g} %"


def _table(series: Sequence[Series]) -> str:
    counted = ("ended", "handled", "skipped", "filtered", "duplicate", "dead", "redelivered")
    head = ("", *counted, "peak / s", "worst p95, s")
    lines = ["<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for one in series:
        rows = list(one.rows.values())
        sums = [sum(row[name] for row in rows) for name in counted]
        worst = max((row["p95"] for row in rows if row["p95"] is not None), default=None)
        cells = [escape(one.name), *(f"{number:,}" for number in sums)]
        cells += [f"{max(row['per_second'] for row in rows):,.1f}", "–" if worst is None else f"{worst:.3g}"]
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])
