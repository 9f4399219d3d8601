"""How a batch parts from a handler that takes its time (decision 29), where there are lanes to go on in.

Rules kept here:
- What is decided is committed and settled without the slow message; what has not begun goes back to the lanes, unless
  the subscription is serial. The slow one goes on, undisturbed, with what failed.
- It has nothing in the transaction yet, and its mark is taken out. Once it has used the transaction nothing parts: what
  it wrote there is not to be told from the rest.
- It opens a transaction of its own when the others are committed, not before (`UnitOfWork.open`).
- When nothing more may begin, what has not begun goes back to its place in the queue.
"""

from collections.abc import Awaitable, Callable, Sequence

from faregate.core.committing import Committing, scatter
from faregate.core.dedup import by_dedup
from faregate.core.settling import Settling
from faregate.core.states import DECIDED
from faregate.core.unit import UnitOfWork
from faregate.core.work import Spoiled, Work
from faregate.ports.cancellation import finish
from faregate.ports.queue import Delivery

PutBack = Callable[[Sequence[Delivery], Sequence[Delivery]], None]
"""Takes what has not begun, and is seen through another time; and what has ended, before the others of its batch."""
RunHandlers = Callable[[UnitOfWork, list[Work]], Awaitable[bool]]
"""Says whether they sent anything."""


class Parting:
    def __init__(
        self,
        put_back: PutBack,
        committing: Committing,
        settling: Settling,
        *,
        seconds: float,
        serial: bool,
        stopped: Callable[[], bool],
        leave: Callable[[Work], Delivery],
        give_back: Callable[[Delivery], Awaitable[None]],
    ) -> None:
        """A handler is slow once it was at hand twice, so many `seconds` apart. `leave`: a message that has begun will
        be seen through another time. `give_back`: a delivery goes back to its place."""
        self.put_back = put_back
        self._committing = committing
        self._settling = settling
        self._seconds = seconds
        self._serial = serial
        self._stopped = stopped
        self._leave = leave
        self._give_back = give_back

    async def run(self, handlers: RunHandlers, unit: UnitOfWork, works: list[Work]) -> bool:
        """Run the handlers; whether they sent anything. `works` is left with those that stayed."""
        self._watch(unit, works, None)
        try:
            return await handlers(unit, works)
        finally:
            unit.watch.cancel()
            if unit.parting is not None:
                await finish(unit.parting)

    def _watch(self, unit: UnitOfWork, works: list[Work], before: Work | None) -> None:
        """Look again and again whether the same message is at hand as when we looked `before`."""
        loop = unit.home.loop
        if before is not None and before is unit.current and not unit.is_used and not self._stopped():
            unit.parting = loop.create_task(self._part(unit, works, before))
        else:
            unit.watch = loop.call_later(self._seconds, self._watch, unit, works, unit.current)

    async def _part(self, unit: UnitOfWork, works: list[Work], at_hand: Work) -> None:
        if at_hand is not unit.current or unit.is_used:
            return  # it has gone on meanwhile
        decided = [work for work in works if work.state in DECIDED]
        unbegun = [] if self._serial else [work for work in works if work.state == "new" and work is not at_hand]
        leaving = {*decided, *unbegun}
        works[:] = [work for work in works if work not in leaving]
        deliveries = [self._leave(work) for work in unbegun]
        apart = unit.part(works, decided)
        if unit.home.store is None:
            await self._committing.publish(decided)
        else:
            await self._commit_apart(apart, decided, [*works, *unbegun])
        await self._settling.settle_all(decided)
        apart.works = ()  # no cycles
        works += [work for work in decided if work.state == "failed"]
        ended = [work.delivery for work in decided if work.state != "failed"]
        if self._stopped():  # the lanes may be closed by now
            for delivery in deliveries:
                await self._give_back(delivery)
            ended, deliveries = ended + deliveries, []
        self.put_back(deliveries, ended)

    async def _commit_apart(self, apart: UnitOfWork, decided: list[Work], others: list[Work]) -> None:
        """The marks of the others leave the transaction first: they will have one of their own."""
        try:
            if apart.transaction is not None:
                for dedup, group in by_dedup(others):
                    await dedup.unmark(apart.transaction, group)
            await self._committing.commit(apart, decided)
        except BaseException as exc:
            await self._committing.roll_back(apart, exc)
            if not isinstance(exc, Exception | Spoiled):
                raise
            scatter(decided, exc)
            for work in decided:  # if its mark is there after all, it is not for the next transaction to remove
                work.marked = False
        finally:
            for work in others:
                work.marked = False
