"""The fast path: handlers of a node without a store, straight from the log to the two-phase sink.

    log -> (ordered: work rows, shuffled by bucket) -> decode, handle, encode -> staged -> one commit

Rules kept here:
- What a batch publishes, and its dead letters, are committed once by (query, batch), under ids that every run of it
  makes the same. The input is read once by Spark's checkpoint. Nothing else is kept, so nothing else can go wrong.
- There is nowhere to park. After the tries in memory a message is a dead letter in the log. One that asks for time
  (`RetryAfter`, `Unavailable`, a later delivery) fails the query, which names it. So do very many dead letters: that
  is an outage, and no matter of messages.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any

import msgspec
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, StructField, StructType

from faregate.bus.bus import shared_keys
from faregate.codec import BodyWriter, find_codec
from faregate.columns import to_batch
from faregate.core import at_hand
from faregate.core.alarms import Alarms
from faregate.core.context import Context
from faregate.core.feed import QueueFeed
from faregate.core.handler import compile_collect
from faregate.core.handling import Handling
from faregate.core.lane_task import LaneTask
from faregate.core.life import Life
from faregate.core.resources import Resources
from faregate.core.sender import Sender
from faregate.core.threads import HandlerThreads
from faregate.core.verdict import Verdict, failure_of, judge
from faregate.core.work import Work
from faregate.errors import Expired, HandlerFailed, Unavailable
from faregate.message import Envelope
from faregate.node.node import Node
from faregate.node.policy import Redeliver
from faregate.node.rules import FailurePolicy
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import Piece
from faregate.ports.queue import Delivery
from faregate.spark.logs import open_staging
from faregate.spark.options import Place
from faregate.spark.runs.delivery import LogDelivery
from faregate.spark.runs.plain import Plain, is_plain
from faregate.spark.runs.rows import NOBODY, Places, located
from faregate.spark.runs.spec import RunSpec, node_of, observers_of
from faregate.spark.schema import STAGED, batches_to_rows, rows_to_batch
from faregate.spark.sink.writer import attempt_of, query_and_batch, task_context
from faregate.spark.source.reading import messages_of

COUNTED = ("handled", "filtered", "dead", "sent")
OUTPUT = StructType([*(StructField(name, IntegerType(), False) for name in COUNTED), *STAGED.fields])
"""How the messages of a task ended, and what the sink takes."""
_ARROW: Any = to_arrow_schema(OUTPUT)
_AT_ONCE = 10_000
MOST_DEAD = 2000
"""In one task: more than so many are an outage."""


class Captured:
    """Keeps what is published, in order."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        self.envelopes.extend(envelopes)


class StagedFeed(QueueFeed):
    """A batch of the log is handled as a whole, or not at all: there are no redeliveries."""

    def judge(self, delivery: Delivery, exc: BaseException, policy: FailurePolicy) -> Verdict:
        if isinstance(exc, HandlerFailed):
            raise exc
        if isinstance(exc, Unavailable):
            raise HandlerFailed(f"{delivery.envelope}: {exc}; the batch will run again") from exc
        return judge(exc, 0, policy._replace(redeliver=Redeliver(), requeue=None))


class Task:
    """The handlers of the node in one Spark task."""

    def __init__(self, spec: RunSpec, pool: Executor) -> None:
        node = node_of(spec)
        self._node = node.name
        codec = find_codec(spec.codec)
        self.clock: Clock = SystemClock()
        self._captured = Captured()
        self._dead: list[DeadLetter] = []
        self._failed = 0
        self.counts = dict.fromkeys(COUNTED, 0)
        self.places = Places(spec)
        keys = shared_keys([node])
        writer = BodyWriter(codec, limit=spec.body_limit)
        alarms = Alarms()
        observers = observers_of(spec)
        resources = Resources(node, pool, alarms)
        self.life = Life([resources])
        """Of what lives as long as a bus: here, as long as the task."""
        self._sender = Sender(node, self._captured, writer, self.clock, keys, alarms, resources=resources)
        self._handlings: list[Handling] = []
        self._plain: list[Plain | None] = []
        for each in self.places.subscriptions:
            self._handlings.append(
                Handling(
                    each,
                    node,
                    self._sender,
                    StagedFeed(),
                    store=None,
                    clock=self.clock,
                    alarms=alarms,
                    pool=pool,
                    body_limit=spec.body_limit,
                    observers=observers,
                    resources=resources,
                )
            )
            plain = not observers and not at_hand.wanted and is_plain(each, node)  # that way nobody is told
            self._plain.append(Plain(each, codec, spec.body_limit, keys) if plain else None)
        if any(self._plain):
            self._collect = compile_collect(node.interpreters, {}, pool)

    async def handle(self, deliveries: Iterable[LogDelivery]) -> list[Piece]:
        """Messages one by one, in their order; what they come to."""
        for delivery in deliveries:
            self.counts["handled"] += 1
            await self._handle_one(delivery)
        return self._pieces(None)

    async def _handle_one(self, delivery: LogDelivery, failed: BaseException | None = None) -> None:
        """`failed`: with what its handler has failed once."""
        deliver_at = delivery.envelope.deliver_at
        now = self.clock.time()
        if deliver_at is not None and deliver_at > now:
            await delivery.redeliver(deliver_at - now)
        handling = self._handlings[delivery.handler]
        if failed is not None:
            await handling.handle_again(delivery, failed)
        else:
            await handling.handle([delivery])

    async def handle_batch(self, number: int, batch: Any) -> list[Piece]:
        """A batch of the log that one subscription handles, in no order; what it comes to."""
        plain = self._plain[number]
        decode = None if plain is None else plain.decoder(batch)
        if plain is None or decode is None:
            return await self.handle(self._deliveries(number, batch))
        done = await plain.handle(batch, decode, self.clock.time())
        handling = self._handlings[number]
        for row, message, result in done.others:
            [delivery] = self._deliveries(number, batch.slice(row, 1))
            ctx = Context(Work(delivery, self._node), message)
            try:
                await self._collect(ctx, result)
                sealed = self._sender.seal_outputs(ctx, handling.subscription.name)
            except BaseException as raised:
                if (failure := failure_of(raised)) is None:
                    raise
                done.failed.append((row, failure))
            else:
                await self._captured.publish(sealed)
        for row, exc in done.failed:
            [delivery] = self._deliveries(number, batch.slice(row, 1))
            if exc is not None and not handling.is_retried(exc):
                await handling.fail(delivery, exc)
            else:
                await self._handle_one(delivery, exc)
        self.counts["handled"] += len(batch) - done.filtered
        self.counts["filtered"] += done.filtered
        return self._pieces(done.batch)

    def _deliveries(self, number: int, batch: Any) -> Iterator[LogDelivery]:
        for envelope, offset, at in located(batch):
            yield self.places.delivery(self, offset, 0, number, None, envelope, at, envelope.redeliveries, False)

    # --- how deliveries end: `Owner` ---------------------------------------------------------------------------

    async def ended(self, delivery: LogDelivery, outcome: str) -> None:
        """Nothing but the counts: the batch is one."""
        if outcome == "filtered":
            self.counts["filtered"] += 1
            self.counts["handled"] -= 1

    def released(self, delivery: LogDelivery) -> bool:
        """The task ends early; it is in the log."""
        return False

    async def park(self, delivery: LogDelivery, delay: float, counted: bool) -> None:
        raise HandlerFailed(
            f"{delivery.envelope} at offset {delivery.position} asks to be handled in {delay:g} s. A node without a "
            "store has nowhere to keep it so long: start the run again later, or give the node a store"
        )

    def dead_letter(self, delivery: LogDelivery, reason: str, error: str) -> None:
        """Into the dead letters of the log. Very many whose handlers failed for good are an outage."""
        failed = reason != Expired.reason
        if failed and self._failed >= MOST_DEAD:
            raise HandlerFailed(
                f"{self._failed} messages of one task failed, the last is {delivery.envelope}: that is "
                "more than bad messages. Nothing of this batch is published; it runs again with the next start: "
                f"{error.splitlines()[0]}"
            )
        self._failed += failed
        self._dead.append(
            DeadLetter.of(
                self._node,
                delivery.envelope,
                reason,
                error,
                self.clock.time(),
                queue=self.places.bindings[delivery.handler].queue,
                tries=delivery.tries,
                redeliveries=delivery.redeliveries,
            )
        )

    def _pieces(self, batch: Any) -> list[Piece]:
        """What was captured since the last time, with a batch of outputs: for the staged file."""
        envelopes, dead = self._captured.envelopes, self._dead
        found = [] if batch is None else [batch]
        if envelopes:
            found.append(to_batch(envelopes, [-1] * len(envelopes), range(len(envelopes)), 0))
        self.counts["sent"] += sum(len(each) for each in found)
        self.counts["dead"] += len(dead)
        self.counts["handled"] -= len(dead)
        self._captured.envelopes, self._dead = [], []
        return [*found, dead] if dead else found


def needs_order(node: Node) -> bool:
    """Whether messages must be brought together by key first."""
    return any(subscription.ordered for subscription in node.subscriptions.values())


def handle_ordered(spec: RunSpec, place: Place) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over shuffled work rows; gives a row of `OUTPUT`."""

    def pieces(task: Task, run: Run, batches: Iterable[Any]) -> Iterator[Piece]:
        # By position: Spark does not sort a stream.
        rows = iter(sorted(row for row in batches_to_rows(batches) if row[2] != NOBODY))
        while chunk := list(islice(rows, _AT_ONCE)):
            yield from run(task.handle(task.places.delivery(task, *row) for row in chunk))

    return _staging(spec, place, pieces)


def handle_as_they_come(spec: RunSpec, place: Place) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over ranges of the source, where no order is asked for: nothing is shuffled."""

    def pieces(task: Task, run: Run, batches: Iterable[Any]) -> Iterator[Piece]:
        options = task.places.reading(place)
        for batch in (batch for ranges in batches for batch in messages_of(options, ranges)):
            for number in range(len(task.places.subscriptions)):
                ours = task.places.taken(number, batch)
                if len(ours):
                    yield from run(task.handle_batch(number, ours))

    return _staging(spec, place, pieces)


Run = Callable[[Any], list[Piece]]
"""Runs a coroutine of the task to its end."""


def runner(loop: asyncio.AbstractEventLoop) -> Run:
    return lambda work: loop.run_until_complete(LaneTask(work, loop=loop))


def _staging(
    spec: RunSpec, place: Place, pieces: Callable[[Task, Run, Iterable[Any]], Iterator[Piece]]
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Handle what a Spark task is given, stage what it comes to, and say where that is."""

    def handle(batches: Iterable[Any]) -> Iterator[Any]:
        context = task_context()
        origin, number = query_and_batch(context)
        loop = asyncio.new_event_loop()  # `asyncio.Runner` would print every result
        try:
            with HandlerThreads() as pool:
                task = Task(spec, pool)
                loop.run_until_complete(task.life.start())
                try:
                    made = pieces(task, runner(loop), batches)
                    staged = open_staging(place).stage(origin, number, attempt_of(context), made)
                finally:
                    loop.run_until_complete(task.life.stop())
        finally:
            loop.close()
        values = [*(task.counts[name] for name in COUNTED), msgspec.json.encode(staged)]
        yield rows_to_batch([values], _ARROW)

    return handle
