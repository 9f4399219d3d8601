"""The shortest way through a handler: columns in, columns out.

For a handler that takes the message alone, of a node without middlewares. What is done for each message is decode, call
and encode, and three hashes (two of ids, one of the body); the rest of an envelope is made for thousands at a time. The
outputs are those of the pipeline, field by field.

Rules kept here:
- Only what is usual comes this way: bodies of one known encoding, nothing scheduled or expiring, every one with its id.
- A message that fails is left to the pipeline, which makes the other tries, or a dead letter.
- A result that is not simply an event is collected and sealed as everywhere.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from faregate.codec import BodyReader, Codec
from faregate.core.lane_task import meet_cancellation
from faregate.core.sealing import Keys
from faregate.core.verdict import failure_of
from faregate.errors import MessageTooLarge, Undecodable
from faregate.message import known
from faregate.node.key import Key, type_key
from faregate.node.node import Node
from faregate.node.subscription import Subscription
from faregate.spark.id_columns import are_ids, digests, from_arrow, message_ids, publication_ids, to_arrow
from faregate.spark.sink.publications import as_stored

_NO_HEADERS: dict[str, str] = {}
_MOST_BYTES = 2**31 - 1
"""That a column of bytes may have."""


class Output(NamedTuple):
    """How an event of one class becomes a message."""

    wire: str
    encode: Callable[[Any], bytes]
    key: Key | None
    """Its type's, or what its subscriptions on this node order by."""


class Sent(NamedTuple):
    """The events that a handler gave back, one for each row but those that are left out."""

    bodies: list[bytes]
    left_out: list[int]
    outputs: list[tuple[int, Output]]
    """How they become messages: from the body of that number on, so."""
    keys: dict[int, str | None]
    """By number of the body, of those that have one."""


class Done(NamedTuple):
    """What became of the rows of a batch."""

    batch: Any
    """Their outputs as a record batch of the log; None when there are none."""
    failed: list[tuple[int, BaseException | None]]
    """Rows that the pipeline has to deal with; with what the handler raised, unless it was not called."""
    others: list[tuple[int, Any, Any]]
    """Row, message and result, where the result is not simply an event."""
    filtered: int = 0
    """How many the filter did not take."""


def is_plain(subscription: Subscription, node: Node) -> bool:
    """Whether a subscription can take this way."""
    handler = subscription.handler
    return (
        handler.shape in ("coroutine", "function")
        and not handler.extra
        and not (node.middlewares or node.after_middlewares or node.outgoing_middlewares)
        and not any(interpreter.resources for interpreter in node.interpreters.values())
        and subscription.expires is None
        and (subscription.where is None or not subscription.where.reads_headers)
    )


class Plain:
    """One such subscription."""

    def __init__(self, subscription: Subscription, codec: Codec, limit: int, keys: Keys) -> None:
        self._node, self._handler = subscription.node, subscription.name
        self._function = subscription.handler.function
        self._awaits = subscription.handler.shape == "coroutine"
        self._reader = BodyReader(subscription.message_type.cls, limit=limit)
        self._codec = codec
        self._limit = limit
        self._keys = keys
        self._outputs: dict[type, Output | None] = {}
        self._takes = None if subscription.where is None else subscription.where.takes

    def decoder(self, batch: Any) -> Callable[[bytes], Any] | None:
        """What decodes every body of this batch of the log; None when there is something unusual about it."""
        for name in ("content_encoding", "deliver_at", "expires_at", "payload_ref", "key_id"):
            if batch.column(name).null_count != len(batch):
                return None
        if not (are_ids(batch.column("publication_id")) and are_ids(batch.column("correlation_id"))):
            return None
        if (
            batch.column("payload").null_count
            or pc.max(pc.binary_length(batch.column("payload"))).as_py() > self._limit
        ):
            return None
        if batch.column("traceparent").null_count < len(batch):
            places = batch.column("headers").offsets
            if places[len(batch)].as_py() > places[0].as_py():
                return None  # a tracestate goes on from there
        content_types = pc.unique(batch.column("content_type")).to_pylist()
        if len(content_types) != 1 or not content_types[0]:
            return None
        try:
            return self._reader.decoder(content_types[0])
        except Undecodable:
            return None

    async def handle(self, batch: Any, decode: Callable[[bytes], Any], now: float) -> Done:
        """Run the handler over a batch that `decoder` found usual."""
        # What a row has in common with the one before it is noted where it changes: this loop is what a run does most.
        function, awaits, takes, limit = self._function, self._awaits, self._takes, self._limit
        done, sent = Done(None, [], []), Sent([], [], [], {})
        bodies, keys, add = sent.bodies, sent.keys, sent.bodies.append
        filtered = 0
        cls: type | None = None
        encode: Callable[[Any], bytes]
        key: Key | None = None

        def left_out() -> int:
            """The row that is at hand has no output here."""
            row = len(bodies) + len(sent.left_out)
            sent.left_out.append(row)
            return row

        for body in batch.column("payload").to_pylist():
            try:
                message = decode(body)
                if takes is not None and not takes(message, _NO_HEADERS):
                    filtered += 1
                    left_out()
                    continue
            except Exception:
                done.failed.append((left_out(), None))
                continue
            try:
                result = await function(message) if awaits else function(message)
                if type(result) is not cls:
                    output = None if result is None else self._output(type(result))
                    if output is None:
                        row = left_out()
                        if result is not None:
                            done.others.append((row, message, result))
                        continue
                    cls, encode, key = type(result), output.encode, output.key
                    sent.outputs.append((len(bodies), output))
                encoded = encode(result)
                if len(encoded) > limit:
                    raise MessageTooLarge(f"{type(result).__name__} is {len(encoded)} bytes; the limit is {limit}")
                if key is not None:
                    keys[len(bodies)] = key.hint(result)
            except (Exception, asyncio.CancelledError) as exc:
                done.failed.append((left_out(), exc))
                continue
            except BaseException as exc:
                if (failure := failure_of(exc)) is None:
                    raise
                done.failed.append((left_out(), failure))
                continue
            add(encoded)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # one of them cancelled the task: the pipeline finds out which
            try:
                await meet_cancellation()
            except asyncio.CancelledError as exc:
                if failure_of(exc) is None:
                    raise
            return Done(None, [(row, None) for row in range(len(batch))], [])
        return done._replace(batch=self._sealed(batch, sent, now) if bodies else None, filtered=filtered)

    def _output(self, cls: type) -> Output | None:
        if cls in self._outputs:
            return self._outputs[cls]
        found = known(cls)
        made = None
        if found is not None and found.kind == "event":
            key = type_key(cls) or self._keys.get(("event", self._node, found.wire))
            made = Output(found.wire, self._codec.encoder(cls), key)
        self._outputs[cls] = made
        return made

    def _sealed(self, batch: Any, sent: Sent, now: float) -> Any:
        """Outputs as they would be sealed one by one."""
        count = len(sent.bodies)
        causes = batch if count == len(batch) else batch.take(np.delete(np.arange(len(batch)), sent.left_out))
        correlations = from_arrow(causes.column("correlation_id"))
        causation = message_ids(from_arrow(causes.column("publication_id")), self._node)
        starts, outputs = zip(*sent.outputs, strict=True)
        alike = len(outputs) == 1
        wires: Any = () if alike else np.repeat([output.wire for output in outputs], np.diff([*starts, count]))
        publications = np.empty_like(causation)
        for wire in {output.wire for output in outputs}:
            own = slice(None) if alike else wires == wire
            publications[own] = publication_ids(
                correlations[own], causation[own], node=self._node, handler=self._handler, type=wire, slot=0
            )
        columns = {
            "publication_id": to_arrow(publications),
            "type": pa.repeat(outputs[0].wire, count) if alike else pa.array(wires, pa.string()),
            "source": pa.repeat(self._node, count),
            "body": _joined(sent.bodies),
            "correlation_id": causes.column("correlation_id"),
            "causation_id": to_arrow(causation),
            "depth": pc.add(pc.fill_null(causes.column("depth"), 0), pa.scalar(1, pa.int32())),
            "traceparent": causes.column("traceparent"),
            "sent_at": pa.repeat(pa.scalar(round(now * 1_000_000), pa.timestamp("us", tz="UTC")), count),
            "content_type": pa.repeat(self._codec.content_type, count),
            "body_digest": to_arrow(digests(sent.bodies, 16), pa.binary()),
        }
        if sent.keys:
            columns["key"] = pa.array([sent.keys.get(number) for number in range(count)], pa.string())
        return as_stored(columns, count)


def _joined(bodies: list[bytes]) -> Any:
    """A column of them. Arrow itself would look at each of the objects, and takes three times as long."""
    ends = np.cumsum(np.fromiter(map(len, bodies), np.int64, len(bodies)))
    if ends[-1] > _MOST_BYTES:
        raise MessageTooLarge(f"{len(bodies)} outputs of {ends[-1]} bytes are more than a batch of the log takes")
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(bodies), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(bodies))]
    )
