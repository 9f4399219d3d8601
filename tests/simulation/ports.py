"""The store and the token store as one process sees them: each call is a point, and may fail in the ways of a network.

    fail   the call did not arrive
    lose   the call was done, its answer got lost
    late   neither now; but it arrives some time later
    stale  a read that gives what an earlier one of the same gave, by whomever

Rules kept here:
- A statement within a transaction is no point: nobody sees it before the commit. `begin` is one, and so is `commit`
  where it may fail.
- Whoever watches (`Watch`) is told of every change, with its result, as it happens.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from faregate.errors import CommitUnknown, StoreUnavailable
from faregate.ports.store import Parked, TransactionBlock
from tests.simulation.scheduler import Scheduler

Watch = Callable[[str, tuple[Any, ...], Any], None]
"""Told of (call, arguments, result)."""
Modes = dict[str, tuple[str, ...]]
"""How each call may fail: `tokens.create` -> ("lose", "late")."""


class LateCall:
    """A call whose caller was told that it failed, and which is still on its way."""

    def __init__(self, name: str, call: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        self.call = call


class Port:
    """Forwards every coroutine method of `real`, with a point before it."""

    def __init__(
        self, prefix: str, real: Any, scheduler: Scheduler, modes: Modes, late: list[LateCall], watch: Watch
    ) -> None:
        self._prefix, self._real, self._scheduler = prefix, real, scheduler
        self._modes, self._late, self._watch = modes, late, watch
        self.url, self.database_id = real.url, real.database_id
        self.dear_savepoints = getattr(real, "dear_savepoints", False)  # of a store; it is no call

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        point = f"{self._prefix}.{name}"
        modes = self._modes.get(point, ())

        async def perform(*args: Any, **kwargs: Any) -> Any:
            result = await method(*args, **kwargs)
            self._watch(point, args, result)
            if "stale" in modes:
                self._scheduler.answers.setdefault((point, args), result)
            return result

        async def call(*args: Any, **kwargs: Any) -> Any:
            outcome = await self._scheduler.point(point, modes)
            if outcome == "late":
                self._late.append(LateCall(point, lambda: perform(*args, **kwargs)))
            if outcome in ("fail", "late"):
                raise StoreUnavailable(f"{point} did not get through", retry_after=1.0)
            result = await perform(*args, **kwargs)
            if outcome == "stale":
                result = self._scheduler.answers[point, args]
            self._scheduler.acted()
            if outcome == "lose":
                raise StoreUnavailable(f"the answer to {point} got lost", retry_after=1.0)
            return result

        self.__dict__[name] = call
        return call

    async def now(self) -> float:
        """Only a clock: no point."""
        moment: float = await self._real.now()
        return moment

    def transaction(self) -> "SimTransaction":
        return SimTransaction(self._real.transaction(), self._scheduler, self._modes, self._watch)


class SimTransaction(TransactionBlock):
    def __init__(self, real: Any, scheduler: Scheduler, modes: Modes, watch: Watch) -> None:
        self._real, self._scheduler, self._watch = real, scheduler, watch
        self._locked: set[int] = set()
        self._commit_modes = modes.get("store.commit", ())

    async def begin(self) -> None:
        await self._scheduler.point("store.begin")
        await self._real.begin()

    async def commit(self) -> None:
        if not self._real.is_open:
            await self._real.commit()
            return
        outcome = await self._scheduler.point("store.commit", self._commit_modes) if self._commit_modes else "go"
        if outcome == "fail":
            await self._real.roll_back()
            raise CommitUnknown("the connection broke before the commit")
        await self._real.commit()
        self._scheduler.acted()
        if outcome == "lose":
            raise CommitUnknown("the connection broke after the commit")

    # --- locks: one connection writes at a time here, so nobody would miss them ---

    async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
        self._locked.update(buckets)

    async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
        self._watch("store.positions", (handler, list(keys)), self._locked)
        found: dict[str, int] = await self._real.positions(node, handler, keys)
        return found

    async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
        self._watch("store.advance", (handler, list(positions)), self._locked)
        await self._real.advance(node, handler, positions)

    async def park(self, node: str, found: Sequence[tuple[Parked, int | None]]) -> None:
        self._watch("store.park", ("take@0", [parked.key for parked, _ in found if parked.key]), self._locked)
        await self._real.park(node, found)

    async def roll_back(self) -> None:
        if self._real.is_open:
            self._scheduler.acted()  # what it read before may be old from here on
        await self._real.roll_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
