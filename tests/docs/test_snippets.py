"""The Python snippets of README and docs run as they stand; those of one page share their names, in order."""

import os
import re
import sys
from pathlib import Path

import pytest

from faregate import ids
from tests.docs import first_screen
from tests.presence import address

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def snippets(page: Path) -> list[str]:
    return SNIPPET.findall(page.read_text())


SPARK = (pytest.mark.services, pytest.mark.full)
"""For pages whose snippets take the session that is there: the one that all tests share."""


BROKER = "rabbitmq-stream://guest:guest@localhost:5552/"
MARKS = {"spark.md": SPARK, "rabbitmq-streams.md": pytest.mark.services}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=MARKS.get(page.name, ()), id=page.name) for page in PAGES if snippets(page)],
)
def test_the_snippets_of_a_page_run(page: Path, request: pytest.FixtureRequest) -> None:
    if page.name == "spark.md":
        request.getfixturevalue("spark")
    names: dict[str, object] = {"__name__": "snippet"}
    for number, code in enumerate(snippets(page), 1):
        if BROKER in code:
            code = code.replace(
                f"{BROKER}?stream=", f"{address('FAREGATE_TEST_RABBITMQ_STREAM')}?stream={ids.root_id()}-"
            )
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), names)


def test_the_first_screen_of_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    lines = [line for line in first_screen.program().splitlines() if line.strip()]
    assert len(lines) == 12
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    assert first_screen.follow(tmp_path, [sys.executable, "-m", "faregate"], environment) == ["17"]


@pytest.mark.parametrize("name", ["README.md", "docs/demo.md"])
def test_a_page_that_is_read_first_is_short_and_its_lines_too(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


LINK = re.compile(r"\]\((?!https?://)([^)#]+)")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []
