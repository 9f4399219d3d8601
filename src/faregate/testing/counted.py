"""A store whose calls are counted while they run: a bench that waits for a real database has to know when it does."""

import inspect
from collections.abc import Awaitable
from typing import Any


class Calls:
    """How many run now."""

    count = 0


class Counted:
    """Whatever it is made around, with its coroutines counted."""

    def __init__(self, inner: Any, calls: Calls) -> None:
        self._inner = inner
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.ismethod(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return self._awaited(result) if inspect.iscoroutine(result) else result

        return call

    async def _awaited(self, work: Awaitable[Any]) -> Any:
        self._calls.count += 1
        try:
            return await work
        finally:
            self._calls.count -= 1


class CountedStore(Counted):
    def transaction(self) -> Any:
        return CountedTransaction(self._inner.transaction(), self._calls)


class CountedTransaction(Counted):
    async def __aenter__(self) -> Any:
        await self.begin()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._awaited(self._inner.__aexit__(*error))
