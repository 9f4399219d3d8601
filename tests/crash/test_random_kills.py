"""Workers are killed from outside, again and again, wherever they happen to be; one finishes at the end."""

import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.child import Child
from tests.crash.killing import ROOT, check, command, confirmed, finish
from tests.crash.places import Place, place


def kill_once(where: Place, numbers: list[int], facts: int, at_once: int) -> list[str]:
    """Run a worker until it has stated so many facts, kill it, and return what it stated; it may end before."""
    lines: list[str] = []
    with Child(
        command(where, numbers, talk=True, at_once=at_once),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if len(lines) == facts:
                process.send_signal(signal.SIGKILL)
    assert process.returncode in (0, -signal.SIGKILL)
    return [line.strip() for line in lines if line.endswith("\n")]


async def check_rounds(form: str, folder: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    numbers = range(rounds * 12)
    done: set[int] = set()
    async with place(form, folder) as where:
        for _ in range(rounds):
            left = [number for number in numbers if number not in done]
            facts, at_once = chance.choice([1, 3, 10, 25, 50]), chance.choice([4, 12])
            done |= confirmed(kill_once(where, left, facts, at_once))
        assert done != set(numbers), "everything was published before the last kill"
        finish(where, numbers, done)
        check(where, numbers)


async def test_random_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    await check_rounds("tokens-apart-sqlite", tmp_path, rounds=3, seed=11)


@pytest.mark.full
@pytest.mark.services
@pytest.mark.parametrize(
    "form",
    ["ledger-sqlite", "ledger-postgres", "tokens-merged-sqlite", "tokens-apart-sqlite", "tokens-apart-postgres"],
)
async def test_many_random_kills_lose_and_double_nothing(form: str, tmp_path: Path) -> None:
    await check_rounds(form, tmp_path, rounds=20, seed=12)
