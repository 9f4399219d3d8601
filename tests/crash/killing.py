"""Starts workers, sees them die, and lets another one finish what they left."""

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tests.crash.line import Records, expected
from tests.crash.places import Place

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.crash.worker"]
LONG = 90.0


def command(place: Place, numbers: Iterable[int], **more: Any) -> list[str]:
    task = {
        "journal": str(place.journal),
        "dedup": place.dedup,
        "stores": place.stores,
        "tokens": place.tokens,
        "numbers": list(numbers),
        **more,
    }
    return [*COMMAND, msgspec.json.encode(task).decode()]


def run(place: Place, numbers: Iterable[int], **more: Any) -> tuple[int, list[str]]:
    """Run a worker to its end, whichever; its return code and the facts that it stated."""
    ended = subprocess.run(
        command(place, numbers, **more), stdout=subprocess.PIPE, text=True, timeout=LONG, check=False, cwd=ROOT
    )
    return ended.returncode, whole_lines(ended.stdout)


def whole_lines(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines(keepends=True) if line.endswith("\n")]


def confirmed(facts: Iterable[str]) -> set[int]:
    return {int(fact.split()[1]) for fact in facts if fact.startswith("confirmed ")}


def reached(facts: Iterable[str]) -> dict[str, int]:
    [counts] = [fact.removeprefix("reached ") for fact in facts if fact.startswith("reached ")]
    return msgspec.json.decode(counts, type=dict[str, int])


def kill_at(place: Place, point: str, nth: int, numbers: range, **more: Any) -> set[int]:
    """Run until the point is reached for the nth time; what was confirmed by then."""
    code, facts = run(place, numbers, kill=point, nth=nth, **more)
    assert code == -signal.SIGKILL, f"{point} was not reached {nth} times; the worker ended with {code}"
    return confirmed(facts)


def finish(place: Place, numbers: Iterable[int], done: set[int], **more: Any) -> list[str]:
    """Start again, publish what was not confirmed, and come to rest."""
    code, facts = run(place, [number for number in numbers if number not in done], **more)
    assert code == 0, f"the worker that was to finish ended with {code}"
    return facts


def check(place: Place, numbers: Iterable[int]) -> None:
    """Every effect once, in the order of its key, every message once in the log, nothing lost, nothing left."""
    there, wanted = place.records(), expected(numbers, place.dedup)
    for name in Records.__dataclass_fields__:
        assert getattr(there, name) == getattr(wanted, name), name
