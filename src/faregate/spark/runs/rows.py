"""Log rows to work rows: which messages are the node's, for which handler, in which bucket. Runs in executors.

    ranges of the log -> (position, bucket, handler, key, envelope, appended_at, redeliveries, parked)

A bucket is what is shuffled by: all messages of one key are in one bucket, so one task has them, in order. Those of a
subscription whose messages may have several keys are all in one. What needs no order is spread over buckets of its own.
How far the log was read goes along as a row for nobody.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, BooleanType, DoubleType, IntegerType, LongType, StringType, StructType

from faregate.columns import to_envelopes
from faregate.message import Envelope, too_late_at
from faregate.ports.keys import keys_of
from faregate.ports.store import BUCKETS, Parked
from faregate.ports.topology import FROM_THE_BEGINNING
from faregate.spark.options import Options, Place
from faregate.spark.runs.delivery import LogDelivery, Owner
from faregate.spark.runs.spec import RunSpec, node_of
from faregate.spark.schema import rows_to_batch
from faregate.spark.source.reading import ends_in, messages_of
from faregate.stores.sql.columns import pack, unpack

WORK = (
    StructType()
    .add("position", LongType(), False)
    .add("bucket", IntegerType(), False)
    .add("handler", IntegerType(), False)
    .add("key", StringType())
    .add("envelope", BinaryType(), False)
    .add("appended_at", DoubleType(), False)
    .add("redeliveries", IntegerType(), False)
    .add("parked", BooleanType(), False)
)
_ARROW: Any = to_arrow_schema(WORK)

NOBODY = -1
"""The handler of a row that only says how far the log was read."""


class Places:
    """Where the messages of one node go."""

    def __init__(self, spec: RunSpec) -> None:
        node = node_of(spec)
        self._node = node.name
        self.subscriptions = list(node.subscriptions.values())
        self._by_topic: dict[tuple[str, str | None], int] = {}
        self.bindings = [each.binding(spec.body_limit) for each in self.subscriptions]
        self.begins = [spec.begins.get(each.queue, FROM_THE_BEGINNING) for each in self.bindings]
        for number, subscription in enumerate(self.subscriptions):
            self._by_topic[subscription.message_type.wire, subscription.source] = number

    def reading(self, place: Place) -> Options:
        """How the log is read for them."""
        return Options((place,), types=tuple(sorted({each.message_type.wire for each in self.subscriptions})))

    def handler(self, envelope: Envelope) -> int | None:
        """Which subscription handles it, by number."""
        if envelope.kind == "event":
            return self._by_topic.get((envelope.type, envelope.source))
        return self._by_topic.get((envelope.type, None)) if envelope.destination == self._node else None

    def taken(self, number: int, batch: Any) -> Any:
        """The part of a batch of the log that one subscription handles: what went to this node, through this view;
        and what was there before the node was known."""
        subscription, begin = self.subscriptions[number], self.begins[number]
        kind = subscription.message_type.kind
        address = (
            pc.equal(batch.column("source"), subscription.source)
            if kind == "event"
            else pc.equal(batch.column("destination"), self._node)
        )
        listed = batch.column("recipients")
        with_us = np.zeros(len(batch), bool)
        with_us[pc.list_parent_indices(listed).filter(pc.equal(listed.flatten(), self._node))] = True
        offset, replay = batch.column("offset"), pc.fill_null(batch.column("replay"), 0)
        before = pc.and_(pc.less(offset, begin.history), pc.equal(replay, 0))
        conditions = [
            pc.equal(batch.column("type"), subscription.message_type.wire),
            pc.equal(batch.column("kind"), kind),
            address,
            pc.greater_equal(offset, begin.offset),
            pc.or_(pa.array(with_us), before),
        ]
        mask = pc.fill_null(reduce(pc.and_, conditions), fill_value=False)
        return batch if pc.sum(mask).as_py() == len(batch) else batch.filter(mask)

    def row(self, number: int, envelope: Envelope, position: int, at: float, parked: Parked | None) -> tuple[Any, ...]:
        binding = self.bindings[number]
        # All messages of a serial subscription are in one order.
        key = "" if binding.serial else self.key(number, envelope)
        if key is None:
            bucket = BUCKETS + crc32(envelope.publication_id.encode()) % BUCKETS
        else:
            bucket = bucket_of(self.subscriptions[number].name, "" if binding.several else key)
            key = str(key)
        if envelope.attempt_id is not None and self._node not in envelope.recipients:
            envelope = replace(envelope, attempt_id=None)  # the token is for another node: this one was unknown then
        redeliveries = envelope.redeliveries if parked is None else parked.redeliveries
        return position, bucket, number, key, pack(envelope), at, redeliveries, parked is not None

    def delivery(
        self,
        owner: Owner,
        position: int,
        bucket: int,
        number: int,
        key: str | None,
        envelope: Envelope | bytes,
        at: float,
        redeliveries: int,
        parked: bool,
    ) -> LogDelivery:
        """Of a work row, whose envelope may be unpacked already."""
        message = unpack(envelope) if isinstance(envelope, bytes) else envelope
        subscription = self.subscriptions[number]
        own_key = key if subscription.by_key else None
        order_key = key
        locks: tuple[int, ...] = (bucket,)
        if subscription.several and key is not None:
            order_key, own_key = "", self.key(number, message)
            locks = tuple([bucket_of(subscription.name, each) for each in keys_of(own_key)])
        until = too_late_at(message, subscription.expires, at)
        return LogDelivery(owner, number, position, locks, order_key, own_key, message, until, redeliveries, parked)

    def key(self, number: int, envelope: Envelope) -> str | None:
        """What a subscription orders a message by."""
        key_of = self.bindings[number].key_of
        return None if key_of is None else key_of(envelope)

    def parked_rows(self, found: Iterable[Parked]) -> list[tuple[Any, ...]]:
        """Parked messages as work rows; one whose handler is gone stays parked."""
        pairs = [(self.handler(each.envelope), each) for each in found]
        return [
            self.row(number, each.envelope, each.position, each.envelope.sent_at, each)
            for number, each in pairs
            if number is not None
        ]


def bucket_of(handler: str, key: str) -> int:
    return crc32(f"{handler}\0{key}".encode()) % BUCKETS


def located(batch: Any) -> Iterator[tuple[Envelope, int, float]]:
    """The messages of a batch of the log, each with its offset and when it was appended."""
    offsets = batch.column("offset").to_pylist()
    times = batch.column("time").cast(pa.int64()).to_pylist()
    for envelope, offset, time in zip(to_envelopes(batch), offsets, times, strict=True):
        yield envelope, offset, time / 1_000_000


def work_rows(spec: RunSpec, place: Place) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over ranges of the source."""

    def placed(batches: Iterable[Any]) -> Iterator[Any]:
        places = Places(spec)
        options = places.reading(place)
        for ranges in batches:
            for batch in messages_of(options, ranges):
                rows = [
                    places.row(number, envelope, offset, time, None)
                    for number in range(len(places.subscriptions))
                    for envelope, offset, time in located(places.taken(number, batch))
                ]
                if rows:
                    yield rows_to_batch(rows, _ARROW)
            yield rows_to_batch([(end - 1, 0, NOBODY, None, b"", 0.0, 0, False) for end in ends_in(ranges)], _ARROW)

    return placed
