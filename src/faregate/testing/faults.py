"""Arming fault points (see `faregate.ports.faults` for their names)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from faregate.errors import ConfigurationError
from faregate.ports import faults
from faregate.ports.faults import POINTS, Crash


def crash_at(point: str, times: int = 1) -> AbstractContextManager[Counter[str]]:
    """Crash the worker that reaches `point`, the first `times` times. Gives a count of the points reached."""
    if point not in POINTS:
        raise ConfigurationError(f"there is no fault point {point!r}; there are: {', '.join(POINTS)}")
    return _armed(point, times)


def reached() -> AbstractContextManager[Counter[str]]:
    """Count which points are reached, and disturb nothing."""
    return _armed("", 0)


@contextmanager
def _armed(point: str, times: int) -> Iterator[Counter[str]]:
    counted: Counter[str] = Counter()

    async def hook(name: str) -> None:
        counted[name] += 1
        if name == point and counted[name] <= times:
            raise Crash(name)

    if faults.hook is not None:
        raise ConfigurationError("fault points are armed already; one test at a time")
    faults.hook = hook
    try:
        yield counted
    finally:
        faults.hook = None
