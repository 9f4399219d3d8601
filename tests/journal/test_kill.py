"""kill -9, again and again, against an oracle: whatever was confirmed is handled, and is in the log exactly once."""

import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from faregate.broker.journal import JournalReader
from faregate.broker.journal.log import SEGMENT_SIZE
from faregate.broker.journal.verify import inspect
from faregate.cli.journal.info import describe
from tests.child import Child

WORKER = Path(__file__).with_name("worker.py")


SMALL = 64 * 1024
"""Bytes of a segment that is full all the time."""


def start(path: Path, what: str, segment: int) -> Child:
    return Child([sys.executable, str(WORKER), str(path), what, str(segment)], stdout=subprocess.PIPE, text=True)


def kill_once(path: Path, number: int, facts: int, segment: int) -> list[str]:
    """Run the worker until it has stated so many facts, kill it, and return everything it stated."""
    process = start(path, str(number), segment)
    assert process.stdout is not None
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            if len(lines) == facts:
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself with {process.returncode}"
    return [line.strip() for line in lines if line.endswith("\n")]


def check(path: Path, rounds: int, seed: int, segment: int = SEGMENT_SIZE) -> None:
    chance = random.Random(seed)
    stated: list[str] = []
    for number in range(rounds):
        stated += kill_once(path, number, chance.choice([1, 5, 40, 200, 600]), segment)
    finishing = start(path, "finish", segment)
    output, _ = finishing.communicate(timeout=120)
    assert finishing.returncode == 0, "the last run did not come to rest, or gave something up"
    stated += output.split("\n")
    confirmed = {line.split()[1] for line in stated if line.startswith("confirmed ")}
    handled = {line.split()[1] for line in stated if line.startswith("handled ")}
    assert confirmed, "nothing was ever confirmed, so this shows nothing"
    assert confirmed <= handled, f"confirmed and never handled: {sorted(confirmed - handled)[:10]}"

    log: Counter[str] = Counter()
    offsets = []
    for offset, envelope in JournalReader(path).envelopes():
        job = msgspec.json.decode(envelope.body)
        log[f"{job['round']}.{job['number']}"] += 1
        offsets.append(offset)
    assert confirmed <= set(log), "confirmed and not in the log"
    assert {name: count for name, count in log.items() if count > 1} == {}, "in the log more than once"
    assert offsets == sorted(set(offsets))


def check_sealed(path: Path) -> None:
    """Segments were sealed between the kills, and everything is sound."""
    told = describe(path)
    assert told["segments"]["sealed"] > 3, "nothing was sealed, so this shows nothing"
    assert inspect(path).problems == []


def test_six_kills_while_segments_are_sealed_lose_nothing(tmp_path: Path) -> None:
    check(tmp_path / "journal", rounds=6, seed=3, segment=SMALL)
    check_sealed(tmp_path / "journal")


@pytest.mark.full
def test_two_hundred_kills_while_segments_are_sealed_lose_nothing(tmp_path: Path) -> None:
    check(tmp_path / "journal", rounds=200, seed=4, segment=SMALL)
    check_sealed(tmp_path / "journal")


def test_eight_kills_lose_nothing_that_was_confirmed(tmp_path: Path) -> None:
    check(tmp_path / "journal", rounds=8, seed=1)


@pytest.mark.full
def test_two_hundred_kills_lose_nothing_that_was_confirmed(tmp_path: Path) -> None:
    check(tmp_path / "journal", rounds=200, seed=2)
