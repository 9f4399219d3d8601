"""Every row of the failure table has tests that are named (docs/testing-internals.md), and these exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def section(page: str, heading: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def test_every_row_of_the_failure_table_names_tests_that_there_are() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \|$", section("recovery.md", "What happened, and what is done"), re.MULTILINE)
    lines = [" ".join(each.split()) for each in section("testing-internals.md", "Failures").split("\n- ")[1:]]
    assert rows[2:] == [re.sub(r": `te.*", "", each) for each in lines]
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    named = {name for each in lines for name in re.findall(r"`(test_\w+)`", each)}
    assert named and not named - written
    assert (ROOT / "tests" / "crash").is_dir()
