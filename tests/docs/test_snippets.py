"""The Python snippets of README and docs run as they stand; those of one page share their names, in order.

Blocks with a title are files of their own, which the tests of their page write.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from faregate import ids
from tests.docs import first_screen
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, name
from tests.presence import address


def snippets(page: Path) -> list[str]:
    return [block.text for block in blocks(page, "python") if not block.title]


SPARK = (pytest.mark.services, pytest.mark.full)
"""For pages whose snippets take the session that is there: the one that all tests share."""


BROKER = "rabbitmq-stream://guest:guest@localhost:5552/"


def marks(page: Path) -> Sequence[pytest.MarkDecorator]:
    if page.parent.name == "spark":
        return SPARK
    return [pytest.mark.services] if page.name == "rabbitmq-streams.md" else []


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=marks(page), id=name(page)) for page in PAGES if snippets(page)]
)
def test_the_snippets_of_a_page_run(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # where `faregate` is
    if page.parent.name == "spark":
        request.getfixturevalue("spark")
    names: dict[str, object] = {"__name__": "snippet"}
    for number, code in enumerate(snippets(page), 1):
        if BROKER in code:
            code = code.replace(
                f"{BROKER}?stream=", f"{address('FAREGATE_TEST_RABBITMQ_STREAM')}?stream={ids.root_id()}-"
            )
        exec(compile(code, f"{name(page)}, snippet {number}", "exec"), names)


def test_the_first_screen_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    lines = [line for line in first_screen.program().splitlines() if line.strip()]
    assert len(lines) == 12
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    assert first_screen.follow(tmp_path, [sys.executable, "-m", "faregate"], environment) == ["17"]


@pytest.mark.parametrize("page", ["README.md", "docs/demo.md"])
def test_a_page_that_is_read_first_is_short(page: str) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= 150


WRITTEN = [
    *PAGES,
    *(ROOT / page for page in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_lines_wrap_at_120(page: Path) -> None:
    """Tables cannot, and a link that is longer has a line of its own."""
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|") and " " in line.strip()]
    assert [line for line in lines if len(line) > 120] == []


def test_what_the_guide_to_django_shows_stands_in_the_example() -> None:
    """It cannot be run by itself; the example can, and is."""
    example = "".join(file.read_text() for file in (ROOT / "examples" / "django_shop").glob("*.py")).splitlines()
    shown = [line for block in blocks(ROOT / "docs" / "how-to" / "django.md", "py") for line in block.text.splitlines()]
    assert len(shown) > 20
    assert [line for line in shown if line not in example] == []


LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []
