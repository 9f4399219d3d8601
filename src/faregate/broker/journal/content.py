"""The messages in a frame: rows of MessagePack while a segment is hot, Arrow columns once it is sealed.

Rules kept here:
- Both forms give the same answers; nobody else asks which one it is.
- A row is the envelope as the outbox of a store has it too: a map of the fields that are not their defaults.
- What was written can be read, also as columns. So what comes from others is looked at before it is confirmed: bodies
  (codecs), keys (functions), headers (middlewares), times. A field of a wrong type, or a time that no column holds,
  would be found when it is too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal.frame import COLUMNS, ROWS, Frame, padded
from faregate.codec import is_altered
from faregate.columns import altered_offsets, publication_keys, read_batch, to_batch, to_envelopes
from faregate.errors import Unwritable
from faregate.ids import PublicationKey, publication_key
from faregate.message import Envelope


class _Untimed(msgspec.Struct, gc=False):
    """A message that has no time of its own; of one that has it cannot be read."""

    deliver_at: None = None
    expires_at: None = None


class _Keyed(msgspec.Struct, gc=False):
    """What recognises a message when it comes again."""

    publication_id: str = ""
    attempt_id: str | None = None
    recipients: tuple[str, ...] = ()
    replay: int = 0
    body_digest: bytes | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int | list[int], list[Envelope]]).decode
# To read less of a message takes a sixth, or a third, of the time.
_decode_untimed = msgspec.msgpack.Decoder(tuple[int | list[int], list[_Untimed]]).decode
_decode_keyed = msgspec.msgpack.Decoder(tuple[int | list[int], list[_Keyed]]).decode

_LAST_SECOND = 9.2e12
_MOST = 1 << 31

READ_ERRORS = (msgspec.MsgspecError, pa.ArrowException, UnicodeDecodeError)
"""What a body raises that is not what its frame says."""


def write_rows(envelopes: Sequence[Envelope], topics: Sequence[int], *, by_hand: bool = False) -> bytes:
    """The body of a frame of rows: the topic of all of them, or the topic of each, and the envelopes. `by_hand`: any
    field may be wrong, as no bus has made them. Raises `Unwritable`."""
    alike = topics[0] if topics and topics.count(topics[0]) == len(topics) else topics
    try:
        odd = [
            each
            for each in envelopes
            if each.headers
            or each.body.__class__ is not bytes
            or (each.key is not None and each.key.__class__ is not str)
            or each.deliver_at is not None
            or each.expires_at is not None
            or not 0 <= each.sent_at < _LAST_SECOND
            or each.depth
            or each.redeliveries
            or each.replay
        ]
        if odd:
            for envelope in odd:
                _check_numbers(envelope)
            # What was asked for as a delay is of no use to who reads the log.
            envelopes = [msgspec.structs.replace(envelope, delay=None) for envelope in envelopes]
        body = _encode((alike, envelopes))
        if odd or by_hand:
            _decode(body)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as exc:
        raise Unwritable(f"a message cannot be written to the journal: {exc}") from exc
    return body


def _check_numbers(envelope: Envelope) -> None:
    """A column of times has microseconds of 64 bits, one of counts has 32 bits."""
    for name in ("sent_at", "deliver_at", "expires_at"):
        time = getattr(envelope, name)
        if time is not None and not -_LAST_SECOND < time < _LAST_SECOND:
            raise ValueError(f"{name} is {time!r}, which is no time")
    for name in ("depth", "redeliveries", "replay"):
        count = getattr(envelope, name)
        if not -_MOST <= count < _MOST:
            raise ValueError(f"{name} is {count!r}, which is too large")


class Rows:
    """Of one frame, or of several that follow each other without a gap."""

    decode: Callable[[Any], tuple[int | list[int], list[Any]]] = staticmethod(_decode)

    def __init__(
        self, first: int, topics: list[int], envelopes: list[Envelope], times: list[int], size: int = 0
    ) -> None:
        """`size`: their bytes in the frame."""
        self.first = first
        self.topics = topics
        self.envelopes = envelopes
        self.size = size
        self._times = times

    @classmethod
    def read(cls, frame: Frame, body: Any) -> Rows:
        """Raises `READ_ERRORS`, or `ValueError`."""
        alike, envelopes = cls.decode(body)
        count = len(envelopes)
        topics = [alike] * count if isinstance(alike, int) else alike
        if len(topics) != count or count != frame.rows:
            raise ValueError("it does not have as many topics and messages as it says")
        return cls(frame.base, topics, envelopes, [frame.time] * count, frame.length)

    @property
    def count(self) -> int:
        return len(self.envelopes)

    @property
    def end(self) -> int:
        """The offset behind the last one."""
        return self.first + len(self.envelopes)

    @property
    def last(self) -> int:
        return self.end - 1

    @property
    def offsets(self) -> Sequence[int]:
        return range(self.first, self.end)

    def gather(self, view: memoryview, found: Iterable[tuple[int, int, int, int]], most: int, most_bytes: int) -> int:
        """Take in the frames that follow (see `row_frames`), up to so many messages and bytes; the byte behind them, or
        0 if there is none."""
        topics, envelopes, times, decode = self.topics, self.envelopes, self._times, self.decode
        behind = 0
        for body, end, time, rows in found:
            alike, own = decode(view[body:end])
            count = len(own)
            if count != rows:
                raise ValueError("it does not have as many messages as it says")
            envelopes += own
            topics += [alike] * count if isinstance(alike, int) else alike
            times += [time] * count
            self.size += end - body
            behind = padded(end)
            if len(envelopes) >= most or self.size >= most_bytes:
                break
        if len(topics) != len(envelopes):
            raise ValueError("it does not have a topic for each message")
        return behind

    def takes(self, other: Rows, most: int, most_bytes: int) -> bool:
        """Whether the other follows this without a gap, and both are no more than that."""
        return other.first == self.end and self.count + other.count <= most and self.size + other.size <= most_bytes

    def add(self, other: Rows) -> None:
        self.envelopes += other.envelopes
        self.topics += other.topics
        self._times += other._times
        self.size += other.size

    def cut(self, most: int) -> Iterator[Rows]:
        """In pieces of no more than so many."""
        for start in range(0, self.count, most):
            stop = start + most
            parts = (self.topics[start:stop], self.envelopes[start:stop], self._times[start:stop])
            yield Rows(self.first + start, *parts)

    def batch(self) -> Any:
        """As Arrow columns."""
        return to_batch(self.envelopes, self.topics, self.offsets, self._times)

    def times(self) -> Iterable[tuple[int, int]]:
        """Each offset, and when it was appended, in microseconds."""
        return zip(self.offsets, self._times, strict=True)

    def envelopes_at(self, offsets: Sequence[int]) -> list[Envelope]:
        """Those at these offsets, as far as they are here; the offsets are in order."""
        return [self.envelopes[offset - self.first] for offset in offsets if self.first <= offset < self.end]

    def all_envelopes(self) -> list[Envelope]:
        return self.envelopes

    def types(self) -> Counter[str]:
        return Counter([envelope.type for envelope in self.envelopes])

    def topic_numbers(self) -> list[int]:
        """Each topic once."""
        return list(dict.fromkeys(self.topics))

    def timed_offsets(self) -> list[int]:
        """Those of messages with a time of their own: to be delivered at, or to expire."""
        return [
            offset
            for offset, envelope in zip(self.offsets, self.envelopes, strict=True)
            if envelope.deliver_at is not None or envelope.expires_at is not None
        ]

    def publications(self, restricted: set[int]) -> Iterator[tuple[PublicationKey, bytes | None]]:
        """What recognises a repetition of each, and its digest. `restricted`: topics whose rows went to their
        recipients only."""
        for topic, envelope in zip(self.topics, self.envelopes, strict=True):
            key: PublicationKey = envelope.publication_id
            if envelope.replay or envelope.attempt_id is not None or topic in restricted:
                recipients = envelope.recipients if topic in restricted else ()
                key = publication_key(envelope.publication_id, envelope.replay, envelope.attempt_id, recipients)
            yield key, envelope.body_digest

    def altered(self) -> list[int]:
        """The offsets of those whose body is not the one that its digest was made of."""
        return [
            offset
            for offset, each in zip(self.offsets, self.envelopes, strict=True)
            if each.body_digest
            and each.algorithm is None
            and each.payload_ref is None
            and is_altered(each.body, each.content_encoding, each.body_digest)
        ]


class KeyedRows(Rows):
    """Of which only `publications` is asked."""

    decode = staticmethod(_decode_keyed)


class Outline:
    """Of rows of which none has a time of its own: how many there are, and their topics."""

    def __init__(self, first: int, alike: int | list[int], count: int, size: int) -> None:
        self.first = first
        self.count = count
        self.size = size
        self._topics = [(alike, count)]
        """The topic of so many, or the topic of each of them."""

    @property
    def end(self) -> int:
        return self.first + self.count

    @property
    def last(self) -> int:
        return self.end - 1

    @property
    def offsets(self) -> Sequence[int]:
        return range(self.first, self.end)

    @property
    def topics(self) -> list[int]:
        spans = [[alike] * count if isinstance(alike, int) else alike for alike, count in self._topics]
        return [topic for span in spans for topic in span]

    def topic_numbers(self) -> list[int]:
        spans = [[alike] if isinstance(alike, int) else alike for alike, _ in self._topics]
        return list(dict.fromkeys(topic for span in spans for topic in span))

    def timed_offsets(self) -> list[int]:
        return []

    def gather(self, view: memoryview, found: Iterable[tuple[int, int, int, int]], most: int, most_bytes: int) -> int:
        """As `Rows.gather`, up to a frame of which there is more to say."""
        behind = 0
        for body, end, _, rows in found:
            alike = _outlined(view[body:end], rows)
            if alike is None:
                break
            self._topics.append((alike, rows))
            self.count += rows
            self.size += end - body
            behind = padded(end)
            if self.count >= most or self.size >= most_bytes:
                break
        return behind


def _outlined(body: Any, rows: int) -> int | list[int] | None:
    """The topic of all messages, or of each; None if one of them has a time of its own, or something is wrong."""
    try:
        alike, untimed = _decode_untimed(body)
    except READ_ERRORS:
        return None
    if len(untimed) != rows or (not isinstance(alike, int) and len(alike) != rows):
        return None
    return alike


class Columns:
    """Of one frame."""

    def __init__(self, batch: Any) -> None:
        offsets = batch.column("offset")
        self._batch = batch
        self.count: int = batch.num_rows
        self.first: int = offsets[0].as_py() if self.count else 0
        self.last: int = offsets[-1].as_py() if self.count else -1

    @property
    def offsets(self) -> Sequence[int]:
        if self.last - self.first + 1 == self.count:
            return range(self.first, self.last + 1)
        found: list[int] = self._batch.column("offset").to_pylist()
        return found

    @property
    def topics(self) -> list[int]:
        found: list[int] = self._batch.column("topic").to_pylist()
        return found

    def batch(self) -> Any:
        return self._batch

    def envelopes_at(self, offsets: Sequence[int]) -> list[Envelope]:
        if offsets[-1] - offsets[0] + 1 == len(offsets) and self.last - self.first + 1 == self.count:
            return to_envelopes(self._batch.slice(offsets[0] - self.first, len(offsets)))
        wanted = pa.array(offsets, pa.int64())
        return to_envelopes(self._batch.filter(pc.is_in(self._batch.column("offset"), wanted)))

    def times(self) -> Iterable[tuple[int, int]]:
        return zip(self.offsets, self._batch.column("time").view(pa.int64()).to_pylist(), strict=True)

    def all_envelopes(self) -> list[Envelope]:
        return to_envelopes(self._batch)

    def types(self) -> Counter[str]:
        counts = self._batch.column("type").value_counts().to_pylist()
        return Counter({each["values"]: each["counts"] for each in counts})

    def topic_numbers(self) -> list[int]:
        found: list[int] = pc.unique(self._batch.column("topic")).to_pylist()
        return found

    def timed_offsets(self) -> list[int]:
        due, expiring = (self._batch.column(name) for name in ("deliver_at", "expires_at"))
        if due.null_count == expiring.null_count == self.count:
            return []
        timed = pc.or_(pc.is_valid(due), pc.is_valid(expiring))
        found: list[int] = self._batch.column("offset").filter(timed).to_pylist()
        return found

    def publications(self, restricted: set[int]) -> Iterable[tuple[PublicationKey, bytes | None]]:
        digests = self._batch.column("body_digest")
        listed = repeat(None, self.count) if digests.null_count == self.count else digests.to_pylist()
        return zip(publication_keys(self._batch, restricted), listed, strict=True)

    def altered(self) -> list[int]:
        return altered_offsets(self._batch)


Messages = Rows | Columns


def read_messages(frame: Frame, body: Any) -> Messages:
    """What is in a frame of messages. Raises `READ_ERRORS`, or `ValueError`."""
    return Columns(read_batch(body)) if frame.kind == COLUMNS else Rows.read(frame, body)


def read_keyed(frame: Frame, body: Any) -> Messages:
    """The same, for who asks for `publications` only."""
    return KeyedRows.read(frame, body) if frame.kind == ROWS else read_messages(frame, body)


def read_outline(frame: Frame, body: Any) -> Messages | Outline:
    """The same, for who asks for offsets, topics and which have a time of their own."""
    alike = _outlined(body, frame.rows) if frame.kind == ROWS else None
    return read_messages(frame, body) if alike is None else Outline(frame.base, alike, frame.rows, frame.length)
