"""What holds for every test: its children can be interrupted, and it ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import Child
from tests.tiers import one_of

ROOT = Path(__file__).parents[1]
WAITER = "import time; print('here', flush=True); time.sleep(600)"


def run_pytest(*arguments: str | Path, ignoring: str = "") -> subprocess.CompletedProcess[str]:
    """Run tests as a shell runs them that ignores these signals; it passes on what it ignores."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *map(str, arguments)]
    script = f"trap '' {ignoring}; exec \"$@\"" if ignoring else 'exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "-", *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_child_ends_by_a_signal(number: signal.Signals) -> None:
    with Child([sys.executable, "-c", WAITER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        child.send_signal(number)
    assert child.returncode == -number


def test_a_child_ends_by_a_signal_also_where_the_tests_ignore_it() -> None:
    ended = run_pytest("tests/test_conftest.py::test_a_child_ends_by_a_signal", ignoring="INT TERM QUIT")
    assert ended.returncode == 0, ended.stdout
    assert "2 passed" in ended.stdout


HANGING = """
import asyncio, subprocess, sys, threading
from tests.child import Child
from tests.tiers import one_of

async def test_an_event_that_never_comes():
    await asyncio.Event().wait()

def test_a_thread_that_never_ends():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()

def test_a_child_that_never_ends():
    with Child([sys.executable, "-c", "import time; time.sleep(600)", "{marker}"]):
        pass

def test_the_next():
    pass
"""


def test_a_test_that_hangs_fails_by_its_name_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING.replace("{marker}", str(tmp_path)))
    ended = run_pytest("-c", "pyproject.toml", "--rootdir", ROOT, "-o", "timeout=1", file)
    for name in ("an_event_that_never_comes", "a_thread_that_never_ends", "a_child_that_never_ends"):
        assert f"::test_{name} - Failed: Timeout" in ended.stdout, ended.stdout
    assert "3 failed, 1 passed" in ended.stdout
    left = [each for each in Path("/proc").glob("[0-9]*/cmdline") if f"\0{tmp_path}\0".encode() in read(each)]
    assert left == [], "the child went on"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended meanwhile
        return b""


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    assert 0 < float(pytestconfig.getini("timeout")) <= 180


def test_slices_of_the_long_tier_are_disjoint_and_together_all_of_it() -> None:
    items = list(range(103))
    slices = [one_of(items, f"{number}/4") for number in range(1, 5)]
    assert sorted(item for part in slices for item in part) == items
    assert {len(part) for part in slices} == {25, 26}


@pytest.mark.parametrize("chosen", ["0/4", "5/4", "2", "a/b", ""])
def test_a_slice_that_there_is_not_is_refused(chosen: str) -> None:
    with pytest.raises(pytest.UsageError, match="K/N"):
        one_of([1, 2], chosen)


def test_a_slice_leaves_the_default_tier_alone(tmp_path: Path) -> None:
    file = tmp_path / "test_tiers.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('number', range(3))\n@pytest.mark.full\ndef test_long(number): pass\n"
        "def test_short(): pass\n"
    )
    ended = run_pytest(
        "-c", "pyproject.toml", "--rootdir", ROOT, "-vv", "-m", "", "--slice", "2/3", "tests/tiers.py", file
    )
    assert "::test_long[1] PASSED" in ended.stdout and "::test_short PASSED" in ended.stdout, ended.stdout
    assert "2 passed, 2 deselected" in ended.stdout
