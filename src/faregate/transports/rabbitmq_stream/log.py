"""`rabbitmq-stream://…` as a log: the messages of one RabbitMQ stream, by their offsets there.

Rules kept here:
- The broker delivers what is committed, and nothing else. The end of the log is asked of the stream's leader.
- Retention is the broker's (`max-age`, `max-length-bytes`), and waits for nobody. What was removed is an error.
- A batch with a name is published by a publisher of that name, so that the broker drops repetitions. It remembers the
  last 255 names at least. A batch that fits into a frame of the broker (1 MiB) is there as a whole or not at all; of a
  larger one a crash may leave the beginning, and appending it again adds the rest.
- Offsets have gaps where the broker keeps notes of its own, and where fences are.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from hashlib import blake2b
from itertools import islice
from threading import Lock

import msgspec

from faregate.columns import to_batch
from faregate.errors import ConfigurationError, OffsetGone
from faregate.message import Envelope
from faregate.ports.log import ArrowBatch, Handover, LogPart, Piece, ReaderOffset, Staged
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from faregate.transports.rabbitmq_stream.address import Address, parse_address
from faregate.transports.rabbitmq_stream.bindings import Bindings
from faregate.transports.rabbitmq_stream.chunks import records
from faregate.transports.rabbitmq_stream.connection import FIRST, Connection, at_time
from faregate.transports.rabbitmq_stream.entries import FENCE, decode, encode
from faregate.transports.rabbitmq_stream.pool import pool_of
from faregate.transports.rabbitmq_stream.readers import Readers
from faregate.transports.rabbitmq_stream.staging import Outlet, Stage, StreamOutlet

_ROWS = 10_000
_PART = 250_000
_NEAR = 2_000
"""Messages that are fewer offsets apart are loaded together."""
_PAUSE = 0.02


def create_stream(url: str, **arguments: str) -> None:
    """Declare the stream that a URL names, unless it is there. Arguments are RabbitMQ's, with `_` for `-`:
    `max_age="7D"`, `max_length_bytes="20000000000"`. Without them nothing is ever removed."""
    address = parse_address(url)
    connection = Connection(address)
    try:
        connection.create(address.stream, {name.replace("_", "-"): value for name, value in arguments.items()})
    finally:
        connection.close()


class RabbitmqStreamLog:
    """Raises `BrokerUnavailable`, `ConfigurationError` and `StreamNotFound`, when it is made and later."""

    def __init__(self, place: str | Address, outlet: Outlet | None = None) -> None:
        """`place`: its URL; `outlet`: where what tasks made goes, the stream unless given."""
        address = parse_address(place) if isinstance(place, str) else place
        self._stream = address.stream
        self.name = f"the stream {address.stream} of {address.url.partition('?')[0]}"
        self._pool = pool_of(address)
        self.log_id = self._pool.log_id()
        self._readers = Readers(address.stream)
        self._bindings = Bindings(address.stream)
        self._stage = Stage(address.stream, self._pool, outlet or StreamOutlet(address.stream))
        self._lock = Lock()

    # --- reading ------------------------------------------------------------------------------------------------

    def earliest(self) -> int:
        first = self._pool.ask(lambda connection: connection.probe(self._stream, FIRST))
        return 0 if first is None else first.chunk_first_offset

    def latest(self) -> int:
        return self._pool.ask(lambda connection: connection.end(self._stream))

    def offset_at(self, time: float) -> int:
        wanted = at_time(-int(-time * 1000 // 1))
        found = self._pool.ask(lambda connection: connection.probe(self._stream, wanted))
        return self.latest() if found is None else found.chunk_first_offset

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[ArrowBatch]:
        most = rows or _ROWS
        for time, found in self._chunks(start, end):
            while taken := list(islice(found, most)):
                offsets, envelopes = [offset for offset, _ in taken], [envelope for _, envelope in taken]
                topics = [self._bindings.route(each, time, offset)[0] for offset, each in taken]
                yield to_batch(envelopes, topics, offsets, time)

    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for _, found in self._chunks(start, end):
            yield from found

    def load(self, offsets: list[int]) -> list[Envelope]:
        found: list[Envelope] = []
        for stretch in _stretches(offsets):
            wanted = set(stretch)
            got = {offset: each for offset, each in self.envelopes(stretch[0], stretch[-1] + 1) if offset in wanted}
            if len(got) < len(stretch):
                raise OffsetGone(f"{self.name} has no message at offset {min(wanted - got.keys())}")
            found += [got[offset] for offset in stretch]
        return found

    def parts(self, start: int | None = None, end: int | None = None) -> list[LogPart]:
        """Stretches of offsets: the broker does not say where its segments begin."""
        first, latest = max(self.earliest(), start or 0), self.latest()
        stop = latest if end is None else min(end, latest)
        return [LogPart(base, base, min(base + _PART, stop)) for base in range(first, stop, _PART)]

    async def follow(self, start: int) -> AsyncIterator[tuple[int, Envelope]]:
        while True:
            end = await asyncio.to_thread(self.latest)
            if end <= start:
                await asyncio.sleep(_PAUSE)
                continue
            stop = min(end, start + _ROWS)
            for found in await asyncio.to_thread(list, self.envelopes(start, stop)):
                yield found
            start = stop

    def _chunks(self, start: int, end: int | None) -> Iterator[tuple[int, Iterator[tuple[int, Envelope]]]]:
        """(microseconds, messages) of each chunk that has some of those wanted. Raises `OffsetGone`."""
        latest = self.latest()
        stop = latest if end is None else min(end, latest)
        self._check(start, latest)
        if start >= stop:
            return
        self.topology()
        with (
            self._pool.connection() as connection,
            closing(connection.chunks(self._stream, start, stop)) as chunks,
        ):
            for number, chunk in enumerate(chunks):
                first = chunk.chunk_first_offset
                if number == 0 and first > start:
                    self._check(start, latest)  # a gap, or was it removed meanwhile?
                if first < stop:
                    time = chunk.timestamp * 1000
                    entries = islice(enumerate(records(chunk), first), max(0, start - first), stop - first)
                    found = ((offset, decode(entry)) for offset, entry in entries)
                    yield time, ((at, self._addressed(each, time, at)) for at, each in found if each.type != FENCE)

    def _addressed(self, envelope: Envelope, time: int, offset: int) -> Envelope:
        """One that does not name its recipients went to those who were bound then."""
        if not envelope.recipients and (nodes := self._bindings.route(envelope, time, offset)[1]):
            msgspec.structs.force_setattr(envelope, "recipients", nodes)
        return envelope

    def _check(self, start: int, latest: int) -> None:
        if start > latest:
            raise OffsetGone(f"{self.name} ends at {latest}: there is no offset {start}")
        earliest = self.earliest()
        if start < earliest and latest > 0:
            raise OffsetGone(f"{self.name} begins at {earliest}: what was at {start} was removed by retention")

    # --- appending ----------------------------------------------------------------------------------------------

    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        entries = [encode(envelope) for envelope in envelopes]
        if entries:
            publisher = "" if name is None else _publisher(name)
            with self._pool.connection() as connection:
                connection.publish(self._stream, entries, publisher)

    def waiting(self) -> Iterator[Envelope]:
        """Nothing: what is confirmed is in the stream."""
        return iter(())

    async def take_in(self) -> bool:
        return True

    def stage(self, origin: str, batch: int, attempt: str, pieces: Iterable[Piece]) -> Staged:
        return self._stage.stage(pieces)

    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        self._stage.commit(origin, batch, staged, once=once)

    def discard(self, origin: str, batch: int, staged: Iterable[Staged]) -> None:
        """The broker removes it by itself."""

    # --- subscriptions ------------------------------------------------------------------------------------------

    def topology(self) -> Topology:
        with self._lock:
            self._pool.ask(self._bindings.catch_up)
            return self._bindings.topology.copy()

    def bind(self, binding: Binding) -> None:
        """Note that this subscription gets what is appended from now on. Whoever binds its queue does so."""
        with self._lock:
            self._pool.ask(lambda connection: self._bindings.note(connection, binding, bound=True))

    def unbind(self, binding: Binding) -> None:
        """Note that it gets nothing more."""
        with self._lock:
            self._pool.ask(lambda connection: self._bindings.note(connection, binding, bound=False))

    def handover(self) -> AbstractContextManager[Handover]:
        """Raises `ConfigurationError`: there are no queues here."""
        raise ConfigurationError(
            f"{self.name} stands here alone: what a node sends would reach no queue. Name the broker, and this stream "
            f"beside its queues: amqp://USER:PASSWORD@HOST:5672/VHOST?stream={self._stream}"
        )

    def tidy(self, binding: Binding) -> None:
        """Nothing: there is no handover."""

    # --- named readers ------------------------------------------------------------------------------------------

    def reader_offsets(self) -> list[ReaderOffset]:
        with self._lock:
            return self._pool.ask(self._readers.offsets)

    def save_reader_offset(self, name: str, offset: int) -> None:
        with self._lock:
            self._pool.ask(lambda connection: self._readers.save(connection, name, offset))

    def forget_reader(self, name: str) -> None:
        with self._lock:
            self._pool.ask(lambda connection: self._readers.save(connection, name, None))


def _publisher(name: str) -> str:
    """A name that the broker takes, whatever is in it."""
    return "faregate-" + blake2b(name.encode(), digest_size=16).hexdigest()


def _stretches(offsets: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for offset in offsets:
        if not found or offset - found[-1][-1] > _NEAR:
            found.append([])
        found[-1].append(offset)
    return found
