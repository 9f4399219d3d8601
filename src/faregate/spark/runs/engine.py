"""The engine in a Python worker process: one event loop, one open store and the resources of the node that live as long
as a bus, kept from task to task.

    work rows of a partition -> deliveries -> lanes (of one key one at a time, in order) -> units of work -> counts

Rules kept here:
- Rows come in the order of their positions and are submitted so; the lanes keep the order of each key.
- What follows a parked message of its key parks behind it (unless the subscription is not strict).
- A row of the log whose message is parked already is left to the parked one.
- Who changes the position of a key, or a parked message, holds the lock of the key's bucket.
- An error that is no outcome of a message (the store is gone) fails the task: nothing is counted, Spark runs it again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from faregate.bus.bus import shared_keys
from faregate.bus.lanes import Lanes
from faregate.bus.several_keys import lanes_of
from faregate.codec import BodyWriter, find_codec
from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import claims_of
from faregate.core.handling import Handling
from faregate.core.life import Life
from faregate.core.node_store import NodeStore
from faregate.core.resources import Resources
from faregate.core.sender import Sender
from faregate.core.threads import HandlerThreads
from faregate.ids import message_id_of
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.keys import keys_of
from faregate.ports.queue import Delivery
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import Parked
from faregate.spark.runs.delivery import LogDelivery
from faregate.spark.runs.feed import LogFeed, NoTransport, OutboxOnly, buckets_of
from faregate.spark.runs.rows import NOBODY, Places
from faregate.spark.runs.spec import RunSpec, node_of, observers_of

log = logging.getLogger("faregate.spark")

CHUNK = 5_000
"""How many messages of a partition are in memory at a time."""


class SubscriptionRun:
    """One subscription at work in this process."""

    def __init__(self, engine: "Engine", places: Places, number: int) -> None:
        self.subscription = subscription = places.subscriptions[number]
        self.strict = places.bindings[number].strict and subscription.ordered
        self.feed = LogFeed(engine.node.name, f"{subscription.name}@{places.begins[number].epoch}")
        self.handling = Handling(
            subscription,
            engine.node,
            engine.sender,
            self.feed,
            store=engine.shared,
            clock=engine.clock,
            alarms=engine.shared.alarms,
            pool=engine.pool,
            body_limit=engine.spec.body_limit,
            observers=observers_of(engine.spec),
            resources=engine.resources,
        )
        self.blocked: dict[str, tuple[int, float]] = {}
        """By key ("" of a serial subscription): the position of a parked message that others wait behind, and when it
        is due."""

    def block(self, key: str, position: int, due: float) -> None:
        known = self.blocked.get(key)
        if known is None or position < known[0]:
            self.blocked[key] = (position, due)

    def behind(self, delivery: LogDelivery) -> float | None:
        """When what it must wait for is due; None when it may run."""
        if not self.strict:
            return None
        for key in delivery.order_keys:
            found = self.blocked.get(key)
            if found is not None and found[0] < delivery.position:
                return found[1]
        return None


class Engine:
    def __init__(self, spec: RunSpec) -> None:
        assert spec.store is not None
        self.spec = spec
        self.node = node_of(spec)
        self.clock: Clock = SystemClock()
        self.pool = HandlerThreads()
        self.store = open_store(spec.store, self.clock, blocking=True)
        self._tokens = None if spec.tokens is None else open_token_store(spec.tokens, self.clock)
        alarms = Alarms()
        claims = claims_of(self.node.name, self.store, self._tokens, alarms, self.clock)
        self.shared = NodeStore(self.store, OutboxOnly(), alarms, self._tokens, claims)
        writer = BodyWriter(find_codec(spec.codec), limit=spec.body_limit)
        self.resources = Resources(self.node, self.pool, alarms)
        self._life = Life([self.resources])
        keys = shared_keys([self.node])
        self.sender = Sender(self.node, NoTransport(), writer, self.clock, keys, alarms, resources=self.resources)
        self._places = Places(spec)
        self.runs = [SubscriptionRun(self, self._places, each) for each in range(len(self._places.subscriptions))]
        self._counts: Counter[str] = Counter()
        self._left = 0
        self._waiting: list[tuple[LogDelivery, Parked]] = []
        """What is parked behind another, with the end of the chunk, in one commit: until then nothing passes it."""
        self._over: asyncio.Future[None] | None = None

    async def open(self) -> None:
        await self.store.open()
        if self._tokens is not None:
            await self._tokens.open()
        await self._life.start()

    async def close(self) -> None:
        await self._life.stop()
        if self._tokens is not None:
            await self._tokens.close()
        await self.store.close()
        self.pool.shutdown(wait=False)

    # --- a partition -----------------------------------------------------------------------------------------

    async def run(self, rows: Iterable[Sequence[Any]]) -> dict[str, int]:
        """Deal with all of them; returns how they ended. `last` is the highest position."""
        self._counts = Counter()
        last = -1
        remaining = iter(rows)
        while chunk := list(islice(remaining, CHUNK)):
            last = max(last, max(row[0] for row in chunk))
            await self._run_chunk([row for row in chunk if row[2] != NOBODY])
        return {**self._counts, "last": last}

    async def _run_chunk(self, rows: list[Sequence[Any]]) -> None:
        if not rows:
            return
        self._waiting = []
        ready = await self._sort_out([self._places.delivery(self, *row) for row in rows])
        self._left = len(ready)
        if not ready:
            return
        self._over = asyncio.get_running_loop().create_future()
        lanes = [self._lanes(run) for run in self.runs]
        for delivery in ready:
            lanes[delivery.handler].submit(delivery)
        try:
            await self._over
        finally:
            for each in lanes:
                await each.close(0)
        if self._waiting:
            await self._commit_parked(self._waiting)

    def _lanes(self, run: SubscriptionRun) -> Lanes:
        async def work(taken: list[Delivery]) -> list[Delivery]:
            try:
                again = await self._work(run, taken)
            except BaseException as exc:
                self._fail(exc)
                raise
            lanes.batch = run.handling.batch
            run.handling.put_off = False
            return again

        lanes = lanes_of(run.subscription, work)
        lanes.batch = run.handling.batch
        return lanes

    async def _work(self, run: SubscriptionRun, taken: list[Delivery]) -> list[Delivery]:
        free: list[Delivery] = []
        for delivery in taken:
            assert isinstance(delivery, LogDelivery)
            if delivery.expired or not self.released(delivery):  # what has expired waits for nothing
                free.append(delivery)
        return await run.handling.handle(free) if free else []

    def released(self, delivery: LogDelivery) -> bool:
        """Park it, if it has to wait for one that is parked; whether it does."""
        run = self.runs[delivery.handler]
        due = run.behind(delivery)
        if due is None:
            return False
        for key in delivery.order_keys:  # of its other keys, too, later ones wait for it
            run.block(key, delivery.position, due)
        self._waiting.append((delivery, self._parked(delivery, due, delivery.redeliveries)))
        self._end("parked")
        return True

    def _end(self, outcome: str) -> None:
        self._counts[outcome] += 1
        self._left -= 1
        if not self._left and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _fail(self, exc: BaseException) -> None:
        if self._over is not None and not self._over.done():
            if isinstance(exc, asyncio.CancelledError):
                self._over.cancel()
            else:
                self._over.set_exception(exc)

    # --- before: what is parked or scheduled --------------------------------------------------------------------

    async def _sort_out(self, deliveries: list[LogDelivery]) -> list[LogDelivery]:
        """Those that run now, in order; the others are parked when this returns."""
        message_ids = {delivery: self._message_id(delivery) for delivery in deliveries}
        here = {message_ids[delivery] for delivery in deliveries if delivery.parked}
        strict = [each for each in deliveries if self.runs[each.handler].strict]
        keys = [each.order_key for each in strict if each.order_key is not None]
        async with self.store.transaction() as transaction:
            known = await transaction.parked_with(self.node.name, list(message_ids.values()), keys)
            await transaction.roll_back()  # it only read
        parked = {each.message_id for each in known}
        for run in self.runs:
            run.blocked.clear()
        for each in known:
            number = self._places.handler(each.envelope)
            if number is not None and each.key is not None and each.message_id not in here:
                several = self.runs[number].subscription.several
                for key in keys_of(self._places.key(number, each.envelope) if several else each.key):
                    self.runs[number].block(key, each.position, each.due)
        ready: list[LogDelivery] = []
        scheduled: list[tuple[LogDelivery, Parked]] = []
        now = self.clock.time()
        for delivery in deliveries:
            if not delivery.parked and message_ids[delivery] in parked:
                self._counts["parked"] += 1
            elif not delivery.parked and (delivery.envelope.deliver_at or 0.0) > now:
                due = delivery.envelope.deliver_at or now
                scheduled.append((delivery, self._parked(delivery, due, 0, waited_for=False)))
                self._counts["scheduled"] += 1
            else:
                ready.append(delivery)
        if scheduled:  # before anything runs: what follows them passes their positions
            await self._commit_parked(scheduled)
        return ready

    # --- after: parked or done ---------------------------------------------------------------------------------

    async def park(self, delivery: LogDelivery, delay: float, counted: bool) -> None:
        redeliveries = delivery.redeliveries + (1 if counted else 0)
        due = self.clock.time() + delay
        await self._commit_parked([(delivery, self._parked(delivery, due, redeliveries))])
        for key in delivery.order_keys:
            self.runs[delivery.handler].block(key, delivery.position, due)
        self._end("redelivered")

    def _parked(self, delivery: LogDelivery, due: float, redeliveries: int, *, waited_for: bool = True) -> Parked:
        key = delivery.order_key if waited_for else None
        return Parked(self._message_id(delivery), due, redeliveries, key, delivery.position, delivery.envelope)

    async def _commit_parked(self, found: list[tuple[LogDelivery, Parked]]) -> None:
        """Park them, but for those that another attempt of this task has dealt with meanwhile."""
        async with self.store.transaction() as transaction:
            await transaction.lock_buckets(self.node.name, buckets_of(each for each, _ in found))
            behind: set[LogDelivery] = set()
            for number, run in enumerate(self.runs):
                own = [delivery for delivery, _ in found if delivery.handler == number]
                behind.update(await run.feed.behind(transaction, own))
            replays = {parked.message_id: bool(delivery.envelope.replay) for delivery, parked in found}
            settled = await self._decided(transaction, replays)
            left = [
                (parked, delivery.redeliveries if delivery.parked else None)
                for delivery, parked in found
                if delivery not in behind and parked.message_id not in settled
            ]
            if left:
                await transaction.park(self.node.name, left)

    async def _decided(self, transaction: Any, replays: dict[str, bool]) -> set[str]:
        """Those that the ledger or the dead letters have; a replay is there to reopen a dead letter."""
        known = await transaction.known(self.node.name, list(replays))
        return {each for each, found in known.items() if found.state != "dead" or not replays[each]}

    async def ended(self, delivery: LogDelivery, outcome: str) -> None:
        if delivery.parked and outcome in ("dead", "duplicate", "filtered"):
            async with self.store.transaction() as transaction:
                await transaction.unpark(self.node.name, {self._message_id(delivery): delivery.position})
        self._end(outcome)

    def dead_letter(self, delivery: LogDelivery, reason: str, error: str) -> None:
        raise AssertionError(f"{delivery.envelope}: a dead letter belongs in the store ({reason}: {error})")

    def _message_id(self, delivery: LogDelivery) -> str:
        return message_id_of(delivery.envelope, self.node.name)
