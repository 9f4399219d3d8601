"""The pages of the documentation, and what stands in their blocks."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("how-to/*.md")),
    *sorted(DOCS.glob("spark/*.md")),
]
_BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    title: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page, in order, without the indent that they have in a list."""
    found = []
    for indent, language, title, text in _BLOCK.findall(page.read_text()):
        if language in languages:
            found.append(Block(language, title, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)))
    return found


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def steps(page: Path) -> list[tuple[str, str]]:
    """The Python blocks without a title, each with the prose since the one before it. A title is a file of its own."""
    found, text, end = [], page.read_text(), 0
    for match in _BLOCK.finditer(text):
        indent, language, title, code = match.groups()
        if language == "python" and not title:
            found.append((text[end : match.start()], re.sub(f"^{indent}", "", code, flags=re.MULTILINE)))
            end = match.end()
    return found
