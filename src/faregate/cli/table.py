"""Tables of the command line, laid out for the width that there is.

Rules kept here:
- A heading is never cut: it may take several lines, one for each word. Numbers stay on one line.
- Text that is too long for its column goes on below, in the same column.
- What still does not fit goes into a further table below, which repeats what a row begins with: the texts before its
  first number, or its first text where it has no number.
- In a pipe without COLUMNS there is no width: every row is one line, as programs that read lines want it.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from faregate.cli.output import console

GAP = 2
_NARROW = 10
"""Text columns are not made narrower than this, unless they have nothing longer."""


class Column(NamedTuple):
    heading: str
    is_number: bool = False
    """To the right, and whole."""
    is_whole: bool = False
    """Never folded: it is copied from the screen."""


Cell = str | Text
"""A str is text as it stands: no markup is read in it. Whoever makes it makes it plain."""


def numbers(*headings: str) -> list[Column]:
    return [Column(heading, is_number=True) for heading in headings]


def room() -> int | None:
    """How many characters a line has; None in a pipe."""
    return console.width if console.is_terminal or os.environ.get("COLUMNS") else None


def hanging(text: Text, width: int | None, indent: str = "") -> Iterator[Text]:
    """The lines of a text; what does not fit the first goes on below, indented by two more."""
    deeper = indent + "  "
    wrapped = [text] if width is None else text.wrap(console, max(width - len(deeper), 1), overflow="fold")
    for number, line in enumerate(wrapped):
        line.rstrip()
        shown = Text(deeper if number else indent, no_wrap=True, overflow="ignore")
        yield shown.append_text(line)


def show_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    below: Sequence[Text] = (),
    indent: str = "",
    style: str = "bold",
) -> None:
    for line in table(columns, rows, room(), below=below, indent=indent, style=style):
        console.print(line, soft_wrap=True)


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    width: int | None,
    *,
    below: Sequence[Text] = (),
    indent: str = "",
    style: str = "bold",
) -> Iterator[Text]:
    """The lines of a table; `below` has one for each row, which is cut where the line ends."""
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    parts = _parts(columns, cells, None if width is None else width - len(indent))
    for number, part in enumerate(parts):
        if number:
            yield Text("")
        head = [Text(columns[place].heading, style) for place in part]
        yield from _lines(columns, head, part, indent, is_head=True)
        for at, row in enumerate(cells):
            yield from _lines(columns, [row[place] for place in part], part, indent)
            if below and number == len(parts) - 1:
                line = Text(f"{indent}    ") + below[at]
                if width is not None:
                    line.truncate(width, overflow="ellipsis")
                yield line


def fits(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> bool:
    """Whether every row has its place on one line."""
    wanted = [_wanted(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    return width is None or _total(wanted) <= width


def _parts(columns: Sequence[Column], rows: list[list[Text]], width: int | None) -> list[dict[int, int]]:
    """The columns of each part of the table, by their place, and how wide they are."""
    wanted = [_wanted(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    if width is None or _total(wanted) <= width:
        return [dict(enumerate(wanted))]
    least = [_least(column, [row[place] for row in rows]) for place, column in enumerate(columns)]
    first = next((place for place, column in enumerate(columns) if column.is_number), 1)
    begins = list(range(first))
    parts = [begins.copy()]
    for place in range(first, len(columns)):
        if len(parts[-1]) > first and _total(least[each] for each in (*parts[-1], place)) > width:
            parts.append(begins.copy())
        parts[-1].append(place)
    return [_shrunk(part, wanted, least, width) for part in parts]


def _shrunk(part: list[int], wanted: list[int], least: list[int], width: int) -> dict[int, int]:
    """The widest column gives way first."""
    given = {place: wanted[place] for place in part}
    while _total(given.values()) > width:
        may = [place for place in part if given[place] > least[place]]
        if not may:
            break
        given[max(may, key=lambda place: given[place])] -= 1
    return given


def _total(widths: Iterable[int]) -> int:
    return sum(width + GAP for width in widths) - GAP


def _wanted(column: Column, cells: Sequence[Cell]) -> int:
    return max(cell_len(column.heading), *(_cells(cell) for cell in cells), 0)


def _least(column: Column, cells: Sequence[Text]) -> int:
    longest = max((_cells(cell) for cell in cells), default=0)
    words = max(map(cell_len, column.heading.split()), default=0)
    return max(words, longest if column.is_number or column.is_whole else min(longest, _NARROW))


def _cells(cell: Cell) -> int:
    return cell_len(cell if isinstance(cell, str) else cell.plain)


def _lines(
    columns: Sequence[Column], cells: list[Text], part: dict[int, int], indent: str, *, is_head: bool = False
) -> Iterator[Text]:
    """One row: as many lines as its fullest cell has. Headings end on the same line, above the rows."""
    pairs = zip(cells, part.values(), strict=True)
    wrapped = [list(cell.wrap(console, width, overflow="fold")) for cell, width in pairs]
    deepest = max(map(len, wrapped))
    for number in range(deepest):
        line = Text(indent)
        for pieces, (place, width) in zip(wrapped, part.items(), strict=True):
            at = number - (deepest - len(pieces) if is_head else 0)
            text = pieces[at] if 0 <= at < len(pieces) else Text("")
            text.rstrip()
            fill = " " * (width - text.cell_len)
            line = line + (Text(fill) + text if columns[place].is_number else text + Text(fill)) + Text(" " * GAP)
        line.rstrip()
        yield line
