"""Charts as inline SVG, without a library: lines over seconds with marks, and bars.

Colours are CSS variables of the page (`--ink`, `--soft`, `--grid`, `--alarm`, `--s1` …), so a chart follows it from
light to dark. Every second has a tooltip of the browser's own.
"""

from collections.abc import Callable, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 860, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 96, 18, 30
_LABEL_GAP = 15

Scale = Callable[[float], float]
"""From a second or a value to a place in the picture."""


class Series(NamedTuple):
    name: str
    values: Sequence[float | None]
    colour: str
    is_area: bool = False


def lines(series: Sequence[Series], *, title: str, unit: str = "", kills: Sequence[float] = (), digits: int = 0) -> str:
    """One point for each second; None is a gap. `kills` are seconds, drawn as marks across."""
    seconds = max(2, *(len(each.values) for each in series))
    most = max((value for each in series for value in each.values if value is not None), default=1.0)
    ticks = _ticks(most)
    top = ticks[-1]

    def x(second: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * second / (seconds - 1)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [_axes(ticks, seconds, unit, x, y)]
    for moment in kills:
        where = x(min(moment, seconds - 1))
        parts.append(
            f'<g class="kill"><line x1="{where:.1f}" x2="{where:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'
            f'<text x="{where:.1f}" y="{_TOP - 5}" text-anchor="middle">✕</text>'
            f"<title>killed at {moment:.1f} s</title></g>"
        )
    for each in series:
        parts.append(_path(each, x, y))
    parts += _names(series, y)
    parts += _tooltips(series, seconds, x, unit, digits)
    return _svg(title, HEIGHT, parts)


def bars(rows: Sequence[tuple[str, int]], *, title: str, colour: str = "var(--s3)") -> str:
    """Horizontal bars with their numbers."""
    height = 22 + 34 * max(1, len(rows))
    most = max((count for _, count in rows), default=1) or 1
    left, room = 150, WIDTH - 150 - 80
    parts = []
    for number, (name, count) in enumerate(rows):
        y = 10 + 34 * number
        width = max(2.0, room * count / most)
        parts.append(
            f'<text class="name" x="{left - 12}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="22" rx="4" style="fill:{colour}"/>'
            f'<text class="value" x="{left + width + 10:.1f}" y="{y + 16}">{count:,}</text>'
        )
    return _svg(title, height, parts)


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least the largest value, four or five of them."""
    rough = max(most, 1e-9) / 4
    power: float = 10.0 ** floor(log10(rough))
    step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power) if step >= rough)
    ticks = [0.0]
    while ticks[-1] < most:
        ticks.append(ticks[-1] + step)
    return ticks


def _axes(ticks: Sequence[float], seconds: int, unit: str, x: Scale, y: Scale) -> str:
    parts = []
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,.4g}{unit}</text>'
        )
    step = next((step for step in (1, 2, 5, 10, 20, 30, 60, 120, 300) if seconds / step <= 10), 600)
    for second in range(0, seconds, step):
        anchor = f'x="{x(second):.1f}" y="{HEIGHT - 10}" text-anchor="middle"'
        parts.append(f'<text class="tick" {anchor}>{second} s</text>')
    return "".join(parts)


def _path(each: Series, x: Scale, y: Scale) -> str:
    """The line, broken where there is no value; with the area below it when asked for."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for second, value in enumerate(each.values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((x(second), y(value)))
    drawn = ""
    for piece in filter(None, pieces):
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in piece)
        if each.is_area:
            floor_y = HEIGHT - _BOTTOM
            corners = f"{piece[0][0]:.1f},{floor_y} {points} {piece[-1][0]:.1f},{floor_y}"
            drawn += f'<polygon points="{corners}" style="fill:{each.colour};opacity:.14"/>'
        if len(piece) == 1:
            drawn += f'<circle cx="{piece[0][0]:.1f}" cy="{piece[0][1]:.1f}" r="2" style="fill:{each.colour}"/>'
        drawn += f'<polyline points="{points}" style="stroke:{each.colour}"/>'
    return drawn


def _names(series: Sequence[Series], y: Scale) -> list[str]:
    """Each line's name at its end, in its colour, moved apart where they would lie on each other."""
    placed: list[tuple[float, Series]] = []
    for each in series:
        known = [value for value in each.values if value is not None]
        placed.append((y(known[-1]) if known else HEIGHT - _BOTTOM, each))
    placed.sort(key=lambda pair: -pair[0])
    lowest, parts = float(HEIGHT - _BOTTOM + _LABEL_GAP), []
    for wanted, each in placed:
        lowest = min(wanted, lowest - _LABEL_GAP)
        place = f'x="{WIDTH - _RIGHT + 10}" y="{lowest + 4:.1f}"'
        parts.append(f'<text class="series" {place} style="fill:{each.colour}">{escape(each.name)}</text>')
    return parts


def _tooltips(series: Sequence[Series], seconds: int, x: Scale, unit: str, digits: int) -> list[str]:
    wide = (WIDTH - _LEFT - _RIGHT) / (seconds - 1)
    parts = []
    for second in range(seconds):
        told = [
            f"{each.name} {each.values[second]:,.{digits}f}{unit}"
            for each in series
            if second < len(each.values) and each.values[second] is not None
        ]
        left, height = x(second) - wide / 2, HEIGHT - _TOP - _BOTTOM
        parts.append(
            f'<rect class="tip" x="{left:.1f}" y="{_TOP}" width="{wide:.1f}" height="{height}">'
            f"<title>{second} s: {escape(', '.join(told) or 'nothing')}</title></rect>"
        )
    return parts
