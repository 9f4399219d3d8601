"""Arming fault points (see `faregate.ports.faults` for their names)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from faregate.errors import ConfigurationError
from faregate.ports import faults
from faregate.ports.faults import POINTS, Crash


@contextmanager
def crash_at(point: str, times: int = 1) -> Iterator[Counter[str]]:
    """Crash the worker that reaches `point`, the first `times` times. Gives a count of the points reached."""
    _check(point)
    reached: Counter[str] = Counter()

    async def hook(name: str) -> None:
        reached[name] += 1
        if name == point and reached[name] <= times:
            raise Crash(name)

    with _armed(hook):
        yield reached


@contextmanager
def reached() -> Iterator[Counter[str]]:
    """Count which points are reached, and disturb nothing."""
    counted: Counter[str] = Counter()

    async def hook(name: str) -> None:
        counted[name] += 1

    with _armed(hook):
        yield counted


@contextmanager
def _armed(hook: object) -> Iterator[None]:
    if faults.hook is not None:
        raise ConfigurationError("fault points are armed already; one test at a time")
    faults.hook = hook  # type: ignore[assignment]
    try:
        yield
    finally:
        faults.hook = None


def _check(point: str) -> None:
    if point not in POINTS:
        raise ConfigurationError(f"there is no fault point {point!r}; there are: {', '.join(POINTS)}")
