"""The fixtures for pytest, each test in a pytest of its own: as in the docs, with either plugin, and at no cost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
EXAMPLE = BLOCKS[0]
[CONFTEST, ANYIO_CONFTEST] = [block for block in BLOCKS if block.startswith("# conftest.py")]


def run(folder: Path, *arguments: str) -> str:
    """What a pytest says that knows nothing of this project's settings."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-ra", *arguments]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr


def test_the_page_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "test_billing.py").write_text(EXAMPLE)
    assert "2 passed" in run(tmp_path, "-o", "asyncio_mode=auto")


def test_another_store_for_all_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_billing.py").write_text(EXAMPLE)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.delenv("TEST_DATABASE", raising=False)
    said = run(tmp_path, "-o", "asyncio_mode=auto", "-k", "billed")
    assert "1 passed, 1 skipped" in said and "TEST_DATABASE is not set" in said
    monkeypatch.setenv("TEST_DATABASE", "sqlite:here.db")
    assert "2 passed" in run(tmp_path, "-o", "asyncio_mode=auto", "-k", "billed")
    assert (tmp_path / "here.db").exists()


def test_with_the_plugin_of_anyio(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ANYIO_CONFTEST)
    (tmp_path / "test_billing.py").write_text(f"import pytest\npytestmark = pytest.mark.anyio\n{EXAMPLE}")
    assert "2 passed" in run(tmp_path, "-p", "no:asyncio")


def test_nothing_is_loaded_for_tests_that_do_not_ask(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test():\n    assert 'pytest_faregate' in sys.modules and 'faregate' not in sys.modules\n"
    )
    assert "1 passed" in run(tmp_path)


def test_faregate_does_not_import_pytest() -> None:
    code = "import faregate as fg, sys; fg.testing.bench; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
