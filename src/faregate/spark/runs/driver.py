"""The driver's side of a handler run: what happens around each batch, on one store and one log.

    due parked rows -> (the batch runs) -> outbox to the log, tokens go -> low-water mark -> what retention may remove

All of it runs on an event loop of its own in a thread of its own (`Driver.run`), so that the store stays open from
batch to batch.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import CLAIM_AGE, claims_of
from faregate.core.observer import Observers
from faregate.core.recipients import RecipientLists, topic_for
from faregate.errors import BelowFloor, ConfigurationError
from faregate.node.node import Node
from faregate.ports.clock import SystemClock
from faregate.ports.queue import Binding
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import Parked
from faregate.ports.topology import Reading
from faregate.spark.logs import open_log, open_subscribed
from faregate.spark.options import Place
from faregate.spark.runs.outbox import OutboxSpooler
from faregate.spark.runs.views import (
    LOW_WATER,
    check_parked,
    low_water_name,
    reader_name,
    token_mark_name,
    with_generations,
)

T = TypeVar("T")
PARKED_AT_ONCE = 20_000
_EVICTION_SECONDS = 60.0
_EVICTED_AT_ONCE = 50_000
_EVICTING_SECONDS = 10.0
"""How long a batch may be held up by it, about."""


class LoopThread:
    """An event loop for code that has none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faregate-spark-driver", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Driver:
    """`open` and `begin` first, `close` at the end. The thread that Spark calls runs the coroutines with `run`."""

    def __init__(
        self,
        node: Node,
        store: str,
        path: Place,
        retain_ledger: float,
        body_limit: int,
        observers: Observers = (),
        tokens: str | None = None,
    ) -> None:
        for url in (store, tokens or ""):
            if url.partition(":")[0] == "memory":
                raise ConfigurationError(
                    "memory: is a database of one process; Spark's workers need sqlite: or postgresql:"
                )
        self._node = node
        self._clock = SystemClock()
        self._store = open_store(store, self._clock)
        self._wanting = [each for each in node.subscriptions.values() if each.dedup == "tokens"]
        self._finds_out = tokens is None
        """Whether nobody said where tokens are: then it has to be known already."""
        self.tokens = tokens or (store if self._wanting else None)
        """Where tokens are; None where the node has nothing to do with any."""
        self._tokens = None if self.tokens is None else open_token_store(self.tokens, self._clock)
        self._recipient_lists = None if self._tokens is None else RecipientLists(self._tokens)
        self._alarms = Alarms()
        self._claims = claims_of(node.name, self._store, self._tokens, self._alarms, self._clock)
        self.path = path
        self._marks: list[str] = []
        self._spooler: OutboxSpooler | None = None
        self._retain_ledger = retain_ledger
        self._body_limit = body_limit
        self._observers = observers
        self._next_eviction = self._next_sweep = 0.0
        self._loop = LoopThread()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    async def open(self) -> None:
        """Connect to the store and make its tables: what can fail for reasons of its own, before anything is taken."""
        await self._store.open()
        if self._tokens is not None:
            await self._tokens.open()
        if self._node.schema is not None:
            await self._store.apply_schema(self._node.schema)
        await self._check_lists()

    async def subscribe(self) -> None:
        """Put the node on the recipient lists, as a bus does. Its views are taken."""
        if self._recipient_lists is not None:
            for each in self._node.subscriptions.values():
                await self._recipient_lists.subscribe(topic_for(each), self._node.name, each.dedup)

    async def begin(self, label: str, begins: dict[str, Reading], start: int | None, read: int) -> dict[str, Reading]:
        """Where each subscription goes on, by the low-water marks of the store. `start` is where one without a mark
        begins instead of at its own beginning, `read` how far the checkpoint has read.

        Raises `BelowFloor`, and `ConfigurationError` for a store that knows less than the checkpoint.
        """
        self._marks = [label, *(low_water_name(queue, begin.epoch) for queue, begin in begins.items())]
        known = await self._read_low_water(self._marks)
        if read > known.get(label, 0):
            raise ConfigurationError(
                f"the checkpoint has read up to offset {read}, and {self._store.url} knows of "
                f"{f'offsets up to {known[label]}' if label in known else 'no such run'}: it is another store, or an "
                "older copy of it. Use the store that belongs to this checkpoint, or a new checkpoint: that goes on "
                "from what the store knows"
            )
        going_on = await self.check(begins, start)
        low = min(begin.offset for begin in going_on.values())
        async with self._store.transaction() as transaction:
            await transaction.advance(self._node.name, LOW_WATER, {label: low})  # the store belongs to the checkpoint
        open_log(self.path).save_reader_offset(reader_name(self._node.name), low)
        self._spooler = OutboxSpooler(
            self._store,
            self._node,
            self.path,
            self._clock,
            self._recipient_lists,
            self._body_limit,
            self._observers,
        )
        await self._spooler.open()
        await self._send(self._spooler)
        await self._spooler.take_in()
        return going_on

    async def check(self, begins: dict[str, Reading], start: int | None) -> dict[str, Reading]:
        """Where each subscription would go on. Raises `BelowFloor`."""
        marks = {queue: low_water_name(queue, begin.epoch) for queue, begin in begins.items()}
        known = await self._read_low_water(list(marks.values()))
        going_on = {
            queue: replace(begin, offset=max(begin.offset, known.get(marks[queue], start or 0)))
            for queue, begin in begins.items()
        }
        low = min(begin.offset for begin in going_on.values())
        floor = await self._store.floor(self._node.name)
        if floor is not None and low < (first := open_log(self.path).offset_at(floor)):
            new = [queue for queue, begin in going_on.items() if begin.offset < first]
            raise BelowFloor(
                f"{', '.join(new)} would begin at offset {low}, and the ledger of {self._node.name!r} remembers "
                f"nothing from before offset {first}: repetitions could not be recognised. Begin there, with start="
                f"{first} (--start {first}), and leave out what is older"
            )
        return going_on

    async def with_generations(self, bindings: list[Binding]) -> list[Binding]:
        return await with_generations(bindings, self._store)

    async def check_parked(self, bindings: list[Binding]) -> None:
        """Raises `ConfigurationError` for what a bus keeps in the store."""
        await check_parked(bindings, self._store)

    async def _check_lists(self) -> None:
        """Raises `ConfigurationError` where tokens are not: one that is looked for in the wrong place is missing, and
        its message would be taken for a duplicate. Notes that they are here before the log says that there are any: a
        run that dies before the node is on its lists can be repeated."""
        if self._tokens is None or not self._wanting:
            return
        topology = open_subscribed(self.path).topology()
        lists = await self._tokens.recipients([topic_for(each) for each in self._wanting])
        queues = {each: each.binding(self._body_limit).queue for each in self._wanting}
        marks = {each: token_mark_name(queue, self._tokens.database_id) for each, queue in queues.items()}
        known = await self._read_low_water(list(marks.values()))
        for each in self._wanting:
            if lists[topic_for(each)].modes.get(self._node.name) == "tokens":
                continue
            if self._finds_out or ("tokens" in topology.ways(queues[each]) and marks[each] not in known):
                raise ConfigurationError(
                    f"{each} deduplicates by tokens, and {self._tokens.url} has no list that says so: its tokens are "
                    "in another database. Say which, with tokens=URL (--tokens URL), as on the bus"
                )
        async with self._store.transaction() as transaction:
            await transaction.advance(self._node.name, LOW_WATER, dict.fromkeys(marks.values(), 0))

    async def _read_low_water(self, marks: list[str]) -> dict[str, int]:
        async with self._store.transaction() as transaction:
            found = await transaction.positions(self._node.name, LOW_WATER, marks)
            await transaction.roll_back()  # it only read
        return found

    async def due(self) -> list[Parked]:
        async with self._store.transaction() as transaction:
            found = await transaction.parked(self._node.name, self._clock.time(), PARKED_AT_ONCE)
            await transaction.roll_back()  # it only read
        return found

    async def finish_batch(self, done: int) -> tuple[int, int]:
        """Everything below `done` is decided: send what was sent, and note it. Returns (sent, parked)."""
        assert self._spooler is not None
        sent = await self._send(self._spooler)
        async with self._store.transaction() as transaction:
            await transaction.advance(self._node.name, LOW_WATER, dict.fromkeys(self._marks, done))
            parked, lowest = await transaction.count_parked(self._node.name)
        open_log(self.path).save_reader_offset(
            reader_name(self._node.name), done if lowest is None else min(done, lowest)
        )
        await self._spooler.take_in()
        await self._evict()
        await self._sweep()
        return sent, parked

    async def _evict(self) -> None:
        """Ledger rows go by age, as on the bus; the floor rises with them. Behind a batch, and never before one: what
        waits to be read must not be below it."""
        now = self._clock.monotonic()
        if now >= self._next_eviction:
            self._next_eviction = now + _EVICTION_SECONDS
            until, before = now + _EVICTING_SECONDS, self._clock.time() - self._retain_ledger
            while await self._store.evict(self._node.name, before, _EVICTED_AT_ONCE) == _EVICTED_AT_ONCE:
                if self._clock.monotonic() >= until:
                    break  # the rest goes next time: a batch waits for this

    async def _sweep(self) -> None:
        """Claims and tokens that a crash left go."""
        assert self._spooler is not None
        now = self._clock.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + _EVICTION_SECONDS
            if self._claims is not None:
                await self._claims.sweep(self._clock.time() - CLAIM_AGE)
            await self._spooler.discard_strays()

    async def send(self) -> int:
        """Send what nobody was told of: a zombie committed it after its batch, or a person replays a dead letter."""
        assert self._spooler is not None
        sent = await self._send(self._spooler)
        if sent:
            await self._spooler.take_in()
        await self._sweep()
        return sent

    async def _send(self, spooler: OutboxSpooler) -> int:
        """Send what is in the outbox; with tokens in another database, forget what is done and sent."""
        return await (spooler.send() if self._claims is None else self._claims.finish_all(spooler.send))

    def close(self) -> None:
        self._loop.run(self._close())
        self._loop.close()

    async def _close(self) -> None:
        if self._spooler is not None:
            await self._spooler.close()
        if self._tokens is not None:
            await self._tokens.close()
        await self._store.close()
