"""Charts as SVG and a page around them, for the reports of `faregate bench` and of the benchmarks.

No library, no script, nothing from the network.
Colours and sizes are written into each element, so that a chart can be looked at by itself, too. Lines differ in dash
as well as in colour.
"""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 900, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 16, 44
_LEGEND_GAP = 20
_STYLES = (("#0b62c4", ""), ("#475569", "7 3"), ("#c2410c", "2 3"), ("#15803d", "10 3 2 3"))
_TEXT = 'font-family="system-ui, DejaVu Sans, sans-serif" font-size="12" fill="#5d6675"'

_PAGE = """
body { margin: 0; background: #f6f7f9; color: #1c2330; font: 15px/1.55 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 6px; } h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 12px; color: #5d6675; max-width: 75ch; }
section { background: #fff; border: 1px solid #e3e7ed; border-radius: 10px; padding: 20px 22px; margin: 18px 0;
  overflow-x: auto; }
svg { width: 100%; height: auto; display: block; min-width: 620px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 5px 12px; border-bottom: 1px solid #e3e7ed; } th { color: #5d6675; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } tr:last-child td { border-bottom: 0; }
""".strip()


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]


def lines(series: Sequence[Series], *, title: str, x_name: str, y_name: str) -> str:
    """From zero on, on both axes, with the names of the lines beside them."""
    x_ticks = _ticks(max((x for each in series for x, _ in each.points), default=0.0) or 1.0, 8)
    y_ticks = _ticks(max((y for each in series for _, y in each.points), default=0.0) or 1.0, 4)
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * x / x_ticks[-1], bottom - (bottom - _TOP) * y / y_ticks[-1]

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in y_ticks:
        _, y = at(0, tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{"#e3e7ed" if tick else "#5d6675"}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:,.4g}", "end"))
    for tick in x_ticks:
        x, _ = at(tick, 0)
        parts.append(f'<path d="M{x:.1f} {bottom}v4" stroke="#5d6675"/>')
        parts.append(_text(x, bottom + 18, f"{tick:,.4g}", "middle"))
    parts.append(_text((_LEFT + right) / 2, HEIGHT - 8, x_name, "middle"))
    middle = (_TOP + bottom) / 2
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" {_TEXT}>{y_name}</text>')
    for number, (each, (colour, dash)) in enumerate(zip(series, _STYLES, strict=False)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in each.points))
        stroke = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        parts.append(f'<polyline points="{path}" {stroke}/>')
        y = _TOP + 10 + number * _LEGEND_GAP
        parts.append(f'<path d="M{right + 14} {y}h24" {stroke}/>')
        parts.append(_text(right + 44, y + 4, each.name, "start", colour))
    told = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{told}">'
        f"<title>{told}</title>{''.join(parts)}</svg>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return f"<table>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table>"


def page(title: str, told: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """`sections`: title, a sentence or two, and what is drawn."""
    drawn = "".join(
        f"<section><h2>{escape(name)}</h2><p>{escape(text)}</p>{content}</section>" for name, text, content in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_PAGE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"<p>{escape(told)}</p>{drawn}</main></body></html>\n"
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str | None = None) -> str:
    style = _TEXT if colour is None else _TEXT.replace("#5d6675", colour)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def _ticks(most: float, about: int) -> list[float]:
    """Round numbers from 0 to at least the largest value."""
    rough = max(most, 1e-9) / about
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * number for number in range(ceil(most / step * 0.999) + 1)]
