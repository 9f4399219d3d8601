"""Keeps a node's store in order: takes in the transport's dead letters, removes what the ledger need not remember.

Rules kept here:
- A dead letter of the transport (expiry, too many deliveries) is in the store before it leaves the transport's queue,
  and with it what the node sends about it.
- Claims whose token is gone, and tokens of attempts that no signal carries, are removed.
- Old ledger rows are removed, never before their outgoing messages are sent; the floor rises in the same commit.
- Old dead letters are removed where the bus says so, exported first (`dead_letter_retention.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any, cast

from faregate.bus.dead_letter_retention import RetainDead, prune
from faregate.bus.dispatcher import Dispatcher
from faregate.bus.supplied import Supplied
from faregate.core.dead_letter import dead_letter
from faregate.core.dedup.claims import CLAIM_AGE
from faregate.core.escalation import Escalation
from faregate.core.node_store import NodeStore
from faregate.core.unit import TRANSACTION_LOST
from faregate.errors import QueueNotFound, StaleLock
from faregate.ids import message_id_of
from faregate.ports.clock import Clock, Timer
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.progress import Occupation
from faregate.ports.queue import Capability, Consumer, Delivery, Held, QueueTransport, dead_letter_queue
from faregate.ports.store import DeadFilter, Transaction

log = logging.getLogger("faregate.bus")

_LONGEST_PERIOD, _SHORTEST_PERIOD = 60.0, 0.5
_LONGEST_PRUNING_PERIOD = 3_600.0
_ROWS_AT_A_TIME = 500
"""Few, since SQLite works on the event loop's thread."""
_STORE_DOWN_SECONDS = 10.0
_DRAINED: frozenset[Capability] = frozenset({"dead letters", "delay"})
"""What a transport needs so that its dead letters can wait for a store that is away."""


class Housekeeper:
    def __init__(
        self,
        node: str,
        shared: NodeStore,
        dispatcher: Dispatcher,
        transport: QueueTransport,
        clock: Clock,
        *,
        retain_ledger: float,
        retain_dead: RetainDead | None,
        escalation: Escalation | None = None,
    ) -> None:
        self._node = node
        self._escalation = escalation
        self._shared = shared
        self._dispatcher = dispatcher
        self._transport = transport
        self._clock = clock
        self._offset = clock.time() - clock.monotonic()
        self._retain = retain_ledger
        self._retain_dead = retain_dead
        self._prune_at = 0.0
        self._period = min(_LONGEST_PERIOD, max(_SHORTEST_PERIOD, retain_ledger / 10))
        self._consumer: Consumer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._stopping = False
        self.activity = 0

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def occupations(self) -> Iterator[Occupation]:
        for task in self._tasks:
            yield Occupation(task, self._node, "", f"the housekeeper of {self._node} {task.get_name()}")

    async def start(self) -> None:
        if self._transport.capabilities >= _DRAINED:
            await self._consume_dead_letters()
        await self._evict_some()
        self._evict_soon()

    async def _consume_dead_letters(self) -> None:
        on_delivery = cast(Callable[[Held], None], self.keep_dead)
        try:
            self._consumer = await self._transport.consume(dead_letter_queue(self._node), on_delivery, prefetch=100)
        except QueueNotFound:
            pass  # a node without subscriptions has no dead letters

    async def stop(self) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if self._consumer is not None:
            self._consumer.pause()
        await self.drained()
        if self._consumer is not None:
            await self._consumer.close()

    async def drained(self) -> None:
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _background(self, work: Coroutine[Any, Any, None], doing: str) -> None:
        task = asyncio.create_task(work, name=doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- dead letters of the transport -----------------------------------------------------------------------

    def keep_dead(self, delivery: Delivery) -> None:
        """Write its dead letter into the store, then settle it."""
        self._background(self._drain(delivery), f"puts {delivery.envelope} among the dead letters")

    async def _drain(self, delivery: Delivery) -> None:
        envelope, message_id = delivery.envelope, message_id_of(delivery.envelope, self._node)
        letter = delivery.letter or dead_letter(self._node, message_id, delivery, "failed", "", self._clock.time())
        try:
            known = await self._shared.store.known(self._node, [message_id])
            if message_id not in known or known[message_id].state != "handled":
                rows = [] if self._escalation is None else await self._escalation.rows(letter)
                await self._shared.commit_sending(lambda each: self._add_dead(each, delivery, letter), rows)
            if self._shared.claims is not None and envelope.attempt_id is not None:
                await self._shared.claims.drop(message_id, envelope.attempt_id)
            await delivery.settle("handled")
        except TRANSACTION_LOST as exc:
            log.warning("the dead letter of %s cannot be written now: %s", letter, exc)
            await self._later(delivery)
        except StaleLock:
            pass  # another consumer of the dead-letter queue has it
        except Exception:
            log.exception("the dead letter of %s cannot be written now", letter)
            await self._later(delivery)
        self.activity += 1

    async def _add_dead(self, transaction: Transaction, delivery: Delivery, letter: DeadLetter) -> bool:
        """Add the dead letter; remove its token, if that is in the same database."""
        if isinstance(delivery, Supplied):
            await delivery.hold(transaction)
        await transaction.add_dead(letter)
        if self._shared.claims is None and letter.envelope.attempt_id is not None:
            await transaction.consume_tokens([letter.envelope.attempt_id])
        return True

    async def _later(self, delivery: Delivery) -> None:
        try:
            await delivery.redeliver(_STORE_DOWN_SECONDS, counted=False)
        except StaleLock:
            pass  # another consumer of the dead-letter queue has it

    # --- retention -------------------------------------------------------------------------------------------

    def _evict_soon(self) -> None:
        self._background(self._evict(), "removes old rows")
        self._timer = self._clock.call_later(self._period, self._evict_soon)

    async def _evict(self) -> None:
        try:
            evicted = _ROWS_AT_A_TIME
            while evicted == _ROWS_AT_A_TIME and not self._stopping:
                evicted = await self._evict_some()
                await asyncio.sleep(0)
            await self._sweep()
            await self._prune()
        except TRANSACTION_LOST as exc:
            log.warning("old ledger rows of %s are not removed this time: %s", self._node, exc)
        except Exception:  # the next time may go better
            log.exception("what is old of %s is not removed this time", self._node)

    def _now(self) -> float:
        """The time that age is measured with. A wall clock that was set forward makes nothing older: the floor never
        sinks, and would refuse everything that is sent after the clock was set right."""
        return min(self._clock.time(), self._offset + self._clock.monotonic())

    async def _evict_some(self) -> int:
        """Remove a few old rows; returns how many."""
        return await self._shared.store.evict(self._node, self._now() - self._retain, _ROWS_AT_A_TIME)

    async def _prune(self) -> None:
        """Export and remove old dead letters, not too often: it reads all of them."""
        wanted, now = self._retain_dead, self._now()
        if wanted is None or now < self._prune_at:
            return
        self._prune_at = now + min(_LONGEST_PRUNING_PERIOD, wanted.seconds / 10)
        file = wanted.export / f"{self._node}-{datetime.fromtimestamp(now, UTC):%Y-%m}.jsonl"
        try:
            for status in wanted.status:
                which = DeadFilter(node=self._node, status=status, before=now - wanted.seconds)
                removed = (await prune(self._shared.store, which, file)).removed
                if removed:
                    log.info("%d %s dead letters of %s are removed; they are in %s", removed, status, self._node, file)
        except OSError as exc:
            log.error("old dead letters of %s stay, since they cannot be exported to %s: %s", self._node, file, exc)

    # --- tokens ----------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove claims without a token, and tokens without a signal."""
        if self._shared.claims is not None:
            await self._shared.claims.sweep(self._now() - CLAIM_AGE)
        await self._dispatcher.discard_strays()
