"""The fast path: handlers of a node without a store, straight from the log to the two-phase sink.

    journal -> work rows -> shuffled by bucket -> decode, handle, encode -> staged files -> one commit of the driver

Rules kept here:
- What a batch publishes is committed once by (query, batch), under ids that every run of it makes the same. The input
  is read once by Spark's checkpoint. Nothing else is kept, so there is nothing else to be kept right.
- There is nowhere to park or bury: a message that fails after its tries in memory fails the query, which names it. A
  node that shall go on has a store.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def handle_stateless(spec: RunSpec) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over work rows; gives rows of the sink."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        rows = [row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
        rows.sort()  # by position; Spark does not sort a stream
        if rows:
            captured = asyncio.run(_handle(spec, rows))
            schema: Any = to_arrow_schema(OUTPUT, timezone="UTC")
            for start in range(0, len(captured), _ROWS_OUT):
                yield _as_rows(captured[start : start + _ROWS_OUT], schema)

    return run


async def _handle(spec: RunSpec, rows: list[tuple[Any, ...]]) -> list[Envelope]:
    node, clock, captured = node_of(spec), SystemClock(), Captured()
    writer = BodyWriter(find_codec(spec.codec), limit=spec.body_limit)
    sender = Sender(node, captured, writer, clock, key_fields([node]))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="faregate-handler") as pool:
        subscriptions = list(node.subscriptions.values())
        receivers = [
            Direct(each, node, sender, clock=clock, pool=pool, body_limit=spec.body_limit) for each in subscriptions
        ]
        for position, bucket, number, line, packed, at, redeliveries, parked in rows:
            key = line if ordering(subscriptions[number]) == "key" else None
            envelope = unpack(packed)
            delivery = StatelessDelivery(
                position, bucket, line, key, envelope, at, redeliveries, parked, _no_park, _no_end
            )
            wait = (envelope.deliver_at or 0.0) - clock.time()
            if wait > 0:
                await delivery.redeliver(wait)
            await receivers[number].handle_one(delivery)
    return captured.envelopes


async def _no_park(delivery: LogDelivery, delay: float, counted: bool) -> None:
    """Never called: this delivery refuses."""


async def _no_end(delivery: LogDelivery, outcome: str) -> None:
    """Nothing to note: the batch is one."""


def _as_rows(envelopes: list[Envelope], schema: Any) -> Any:
    stored = to_batch(envelopes, [-1] * len(envelopes), range(len(envelopes)), 0)
    columns = [
        stored.column(COLUMNS[name].stored).cast(field.type) for name, field in zip(WRITABLE, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
