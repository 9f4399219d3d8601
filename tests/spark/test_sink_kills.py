"""A driver that is killed at any step of a commit, for real: what it commits is in the log once, whoever goes on.

A child process commits and ends itself, without any clean-up, before its n-th call that changes the folder.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.journal import staging
from faregate.columns import to_batch
from faregate.ids import root_id
from faregate.message import Envelope
from faregate.transports.journal_log import JournalLog
from tests.spark.rig import empty_journal, run_bus

QUERY = "11111111-2222-3333-4444-555555555555"
CHANGES = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.utime", "os.mkdir", "shutil.rmtree"}
MOST_STEPS = 60


def _is_change(event: str, given: tuple[Any, ...]) -> bool:
    return event in CHANGES or (event == "open" and isinstance(given[2], int) and bool(given[2] & os.O_CREAT))


def killed_before_change(number: int, work: Callable[[], None]) -> bool:
    """Run it in a process of its own, up to that change; whether it got so far."""
    child = os.fork()
    if not child:
        seen = 0

        def count(event: str, given: tuple[Any, ...]) -> None:
            nonlocal seen
            if _is_change(event, given):
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.addaudithook(count)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), "the commit failed"
    return ended == -signal.SIGKILL


def run_batch(path: Path, batch: int) -> Callable[[], None]:
    """Stage a batch in two tasks; returns what commits it."""
    log = JournalLog(path)
    staged = [log.stage(QUERY, batch, f"{task:06}-1", [_noted(f"{batch}.{task}")]) for task in range(2)]
    return lambda: log.commit(QUERY, batch, staged, once=True)


def _noted(text: str) -> Any:
    """Under an id of its own each time: nothing but the batch tells that it was there before."""
    made = Envelope(publication_id=root_id(), type="Noted", source="author", body=b'{"text":"%s"}' % text.encode())
    return to_batch([made], [-1], [0], 0)


def kill_everywhere(path: Path, *, taken_in: bool) -> Iterator[tuple[int, list[str], list[str]]]:
    """Kill a commit at every step, and let the next driver go on; of each what was handled, and what is left over."""
    made = empty_journal(path / "made")
    run_batch(made, 0)()
    assert run_bus(made) == ["0.0", "0.1"]
    for number in range(MOST_STEPS):
        here = path / "j"
        shutil.copytree(made, here)
        killed = killed_before_change(number, run_batch(here, 1))
        handled = run_bus(here) if taken_in else []
        for batch in (1, 2):  # the next driver has another attempt at the batch
            run_batch(here, batch)()
        handled += run_bus(here)
        left = [file.name for folder in ("spool", "quarantine") for file in (here / folder).glob("[!.]*")]
        yield number, handled, left
        shutil.rmtree(here)
        if not killed:
            return
    raise AssertionError("a commit does not end")


BOTH = ["1.0", "1.1", "2.0", "2.1"]


@pytest.mark.parametrize("taken_in", [False, True], ids=["restarted", "taken in, then restarted"])
def test_a_batch_is_in_the_log_once_wherever_its_commit_was_killed(tmp_path: Path, taken_in: bool) -> None:
    steps = 0
    for number, handled, left in kill_everywhere(tmp_path, taken_in=taken_in):
        assert handled == BOTH, f"killed before change {number}: {handled} were handled"
        assert left == [], f"killed before change {number}: {left} is left"
        steps += 1
    assert steps > 8, "it was killed between any two of its steps"


def batch_first(*given: Any) -> None:
    """Puts the batch into the spool before the files that it names."""
    later: list[tuple[Path, Path]] = []
    rename = Path.rename

    def put_off(path: Path, target: Path) -> Any:
        return later.append((path, target)) if target.suffix == ".frames" else rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", put_off)
        real_move(*given)
    for path, target in later:
        rename(path, target)


real_move = staging.move_into_spool


def everything(layout: Any, origin: str, batch: int) -> Iterator[Path]:
    """Takes all files beside batches for garbage."""
    yield from layout.spool.glob("*.frames")


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("faregate.broker.journal.commits.move_into_spool", batch_first),
        ("faregate.broker.journal.staging._nobodys_parts", everything),
    ],
    ids=["batch first", "everything is garbage"],
)
def test_a_commit_that_does_it_otherwise_is_caught(
    name: str, mutant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, mutant)
    with pytest.raises(AssertionError):
        for taken_in in (False, True):
            test_a_batch_is_in_the_log_once_wherever_its_commit_was_killed(tmp_path / str(taken_in), taken_in)
