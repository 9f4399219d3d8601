"""What the suites are made of: named cases, how one is run, and what a backend has to refuse."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

S = TypeVar("S")
Case = Callable[[S], Awaitable[None] | None]


class Cases(dict[str, Case[S]]):
    """Cases by their names, in the order in which they are written."""

    def add(self, function: Case[S]) -> Case[S]:
        self[function.__name__] = function
        return function


async def run_case(case: Case[S], make: Callable[[], AbstractAsyncContextManager[S]]) -> None:
    """Run a case against a fresh subject."""
    async with make() as subject:
        result = case(subject)
        if inspect.isawaitable(result):
            await asyncio.wait_for(result, timeout=30)


@contextmanager
def refused(error: type[Exception], otherwise: str, *, naming: str = "") -> Iterator[None]:
    """Fails with this text unless what is done in here raises the error, which names that."""
    try:
        yield
    except error as exc:
        assert naming in str(exc), f"the error does not name {naming}: {exc}"
    except Exception as exc:
        raise AssertionError(f"{otherwise}: it raised {exc!r}, not {error.__name__}") from exc
    else:
        raise AssertionError(otherwise)
