"""The fast path: handlers of a node without a store, straight from the log to the two-phase sink.

    journal -> (ordered: work rows, shuffled by bucket) -> decode, handle, encode -> staged files -> one commit

Rules kept here:
- What a batch publishes is committed once by (query, batch), under ids that every run of it makes the same. The input
  is read once by Spark's checkpoint. Nothing else is kept, so there is nothing else to be kept right.
- There is nowhere to park or bury: a message that fails after its tries in memory fails the query, which names it. A
  node that shall go on has a store.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from faregate.broker.journal.columns import to_batch
from faregate.bus.bus import key_fields
from faregate.bus.direct import Direct
from faregate.bus.sender import Sender
from faregate.codec import BodyWriter
from faregate.codec import codec as find_codec
from faregate.errors import FaregateError
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.spark.run_delivery import LogDelivery
from faregate.spark.run_no_transport import NoTransport
from faregate.spark.run_rows import Places
from faregate.spark.run_spec import RunSpec, node_of, ordering
from faregate.spark.schema import COLUMNS
from faregate.spark.sealing import WRITABLE
from faregate.stores.sql.columns import unpack

OUTPUT = StructType([StructField(name, COLUMNS[name].type) for name in WRITABLE])
_ROWS_OUT = 10_000
_THREADS = 16


class HandlerFailed(FaregateError):
    """A handler without a store failed for good, so the run cannot go on."""


class Captured(NoTransport):
    """Keeps what is published, in order."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        self.envelopes.extend(envelopes)


class StatelessDelivery(LogDelivery):
    __slots__ = ()

    async def redeliver(self, delay: float, *, counted: bool = True) -> None:
        self._refuse(f"it asks to be tried again in {delay:g} s")

    async def poison(self, reason: str, error: str) -> None:
        self._refuse(f"it is given up on ({reason}): {error.partition(chr(10))[0]}")

    def _refuse(self, why: str) -> None:
        raise HandlerFailed(
            f"{self.envelope} at offset {self.position} failed, and {why}. A node without a store has nowhere to keep "
            "it: mend the handler and start again, or give the node a store"
        )


class Message(NamedTuple):
    """One message of the log, with its place."""

    position: int
    bucket: int
    handler: int
    line: str | None
    envelope: Envelope
    at: float


def needs_order(spec: RunSpec) -> bool:
    """Whether messages must be brought together by key first."""
    return any(ordering(subscription) is not None for subscription in node_of(spec).subscriptions.values())


def handle_ordered(spec: RunSpec) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over shuffled work rows; gives rows of the sink."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        messages = _sorted_messages(batches)
        if messages:
            yield from _as_batches(asyncio.run(_handle(spec, messages)))

    return run


def _sorted_messages(batches: Iterable[Any]) -> list[Message]:
    """All of a partition by position: Spark does not sort a stream."""
    rows = [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
    rows.sort()
    return [Message(row[0], row[1], row[2], row[3], unpack(row[4]), row[5]) for row in rows]


def handle_as_they_come(spec: RunSpec) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over the source's columns, where no order is asked for: nothing is shuffled."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        places = Places(spec)
        for batch in batches:
            messages = (
                Message(offset, 0, number, None, envelope, time)
                for number, envelope, offset, time in places.ours(batch)
            )
            yield from _as_batches(asyncio.run(_handle(spec, messages)))

    return run


async def _handle(spec: RunSpec, messages: Iterable[Message]) -> list[Envelope]:
    node, clock, captured = node_of(spec), SystemClock(), Captured()
    writer = BodyWriter(find_codec(spec.codec), limit=spec.body_limit)
    sender = Sender(node, captured, writer, clock, key_fields([node]))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="faregate-handler") as pool:
        subscriptions = list(node.subscriptions.values())
        receivers = [
            Direct(each, node, sender, clock=clock, pool=pool, body_limit=spec.body_limit) for each in subscriptions
        ]
        by_key = [ordering(each) == "key" for each in subscriptions]
        for position, bucket, number, line, envelope, at in messages:
            key = line if by_key[number] else None
            redeliveries = envelope.redeliveries
            delivery = StatelessDelivery(
                position, bucket, line, key, envelope, at, redeliveries, False, _no_park, _no_end
            )
            if envelope.deliver_at is not None and envelope.deliver_at > clock.time():
                await delivery.redeliver(envelope.deliver_at - clock.time())
            await receivers[number].handle_one(delivery)
    return captured.envelopes


async def _no_park(delivery: LogDelivery, delay: float, counted: bool) -> None:
    """Never called: this delivery refuses."""


async def _no_end(delivery: LogDelivery, outcome: str) -> None:
    """Nothing to note: the batch is one."""


def _as_batches(envelopes: list[Envelope]) -> Iterator[Any]:
    schema: Any = to_arrow_schema(OUTPUT, timezone="UTC")
    for start in range(0, len(envelopes), _ROWS_OUT):
        some = envelopes[start : start + _ROWS_OUT]
        stored = to_batch(some, [-1] * len(some), range(len(some)), 0)
        columns = [
            stored.column(COLUMNS[name].stored).cast(field.type) for name, field in zip(WRITABLE, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)
