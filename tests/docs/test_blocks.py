"""A block of Python can be run alone, or the prose before it says what it goes on from."""

import builtins
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, name, steps

SAID = ("goes on from", "go on from")


def tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from tables(child)


def bound(code: str) -> set[str]:
    """The names that a block gives a value at its top level."""
    symbols = symtable.symtable(code, "block", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def needed(code: str) -> set[str]:
    """The names that a block uses and does not bind itself."""
    top = symtable.symtable(code, "block", "exec")
    used = {
        symbol.get_name()
        for table in tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (table is top or symbol.is_global())
    }
    return used - bound(code) - set(dir(builtins))


def silent(page: Path) -> Iterator[str]:
    """The blocks that need an earlier one and do not say so."""
    known: set[str] = set()
    for number, (prose, code) in enumerate(steps(page), 1):
        missing = needed(code) & known
        if missing and not any(phrase in " ".join(prose.split()) for phrase in SAID):
            yield f"block {number} needs {', '.join(sorted(missing))}: {code.splitlines()[0]}"
        known |= bound(code)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_says_what_it_goes_on_from(page: Path) -> None:
    assert list(silent(page)) == []


def test_a_block_that_says_nothing_would_be_found(tmp_path: Path) -> None:
    first, second = "```python\nimport json\ndef one(): ...\n```\n", "```python\ndef two(): return one(json)\n```\n"
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n{first}\nMore.\n\n{second}")
    assert list(silent(page)) == ["block 2 needs json, one: def two(): return one(json)"]
    page.write_text(f"Text.\n\n{first}\nThis goes on\nfrom the block above:\n\n{second}")
    assert list(silent(page)) == []
