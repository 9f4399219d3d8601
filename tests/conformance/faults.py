"""A suite is worth something when each of its cases fails on a backend with one fault: who breaks what."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import pytest

Fault = TypeVar("Fault", bound=type[Any])


class Faults:
    """The faulty backends of one suite. A case without a fault, or a fault without a case, fails `check`."""

    def __init__(self, cases: Iterable[str]) -> None:
        self._cases = set(cases)
        self._of: dict[str, list[type[Any]]] = {}

    def breaks(self, *cases: str) -> Callable[[Fault], Fault]:
        """Decorates a backend with a fault that these cases must catch."""

        def note(fault: Fault) -> Fault:
            for case in cases:
                self._of.setdefault(case, []).append(fault)
            return fault

        return note

    def pairs(self) -> pytest.MarkDecorator:
        """For every case each of its faults, as `case` and `fault`."""
        pairs = [(case, fault) for case, them in self._of.items() for fault in them]
        names = [f"{case}-{fault.__name__}" for case, fault in pairs]
        return pytest.mark.parametrize(("case", "fault"), pairs, ids=names)

    def each(self) -> pytest.MarkDecorator:
        """Every fault once, as `fault`."""
        faults = sorted({fault for them in self._of.values() for fault in them}, key=lambda fault: fault.__name__)
        return pytest.mark.parametrize("fault", faults, ids=[fault.__name__ for fault in faults])

    def check(self) -> None:
        assert self._cases - set(self._of) == set(), "these cases were never seen to fail"
        assert set(self._of) - self._cases == set(), "these cases are gone"


async def passes(case: Coroutine[Any, Any, None]) -> bool:
    """Whether it passes; a case that still waits after so many turns of the loop waits for ever."""
    running = asyncio.ensure_future(case)
    for _ in range(3_000):
        if running.done():
            break
        await asyncio.sleep(0)
    running.cancel()
    [result] = await asyncio.gather(running, return_exceptions=True)
    return result is None
