"""How far the named readers of a stream have come, in a small stream beside it: STREAM.readers.

An entry says a reader's name and the next offset that it wants, or none when it was forgotten. The highest counts, so
that writers need not agree. RabbitMQ keeps a bounded number of entries; what would soon be removed is written again.

(The broker's own tracking of offsets takes up offsets of the stream itself, and cannot be listed.)
"""

import msgspec

from faregate.errors import StreamNotFound
from faregate.ports.log import ReaderOffset
from faregate.transports.rabbitmq_stream.chunks import behind, records
from faregate.transports.rabbitmq_stream.connection import LAST, Connection

_RETENTION = {"max-length-bytes": "20000000", "stream-max-segment-size-bytes": "1000000"}
_KEPT = 10_000
"""Entries, of less than a kilobyte, that are surely not removed yet."""


class Entry(msgspec.Struct, array_like=True):
    name: str
    offset: int | None


_decode = msgspec.msgpack.Decoder(Entry).decode


class Readers:
    def __init__(self, stream: str) -> None:
        self._stream = f"{stream}.readers"
        self._known: dict[str, tuple[int, int]] = {}
        """By name: the offset, and where the entry is that says so."""
        self._read = 0

    def offsets(self, connection: Connection) -> list[ReaderOffset]:
        self._catch_up(connection)
        return [ReaderOffset(name, offset) for name, (offset, _) in sorted(self._known.items())]

    def save(self, connection: Connection, name: str, offset: int | None) -> None:
        """None: forget it."""
        self._catch_up(connection)
        if offset is None and name not in self._known:
            return
        entries = [Entry(name, offset)]
        entries += [
            Entry(old, said) for old, (said, at) in self._known.items() if at < self._read - _KEPT and old != name
        ]
        packed = [msgspec.msgpack.encode(entry) for entry in entries]
        try:
            connection.publish(self._stream, packed, "")
        except StreamNotFound:
            connection.create(self._stream, _RETENTION)
            connection.publish(self._stream, packed, "")

    def _catch_up(self, connection: Connection) -> None:
        try:
            last = connection.probe(self._stream, LAST)
        except StreamNotFound:
            self._known, self._read = {}, 0
            return
        if last is None or behind(last) == self._read:
            return
        end = behind(last)
        if end < self._read:  # it was made anew
            self._known, self._read = {}, 0
        for chunk in connection.chunks(self._stream, self._read, end):
            for at, record in enumerate(records(chunk), chunk.chunk_first_offset):
                if at >= self._read:
                    self._apply(at, _decode(record))
        self._read = end

    def _apply(self, at: int, entry: Entry) -> None:
        if entry.offset is None:
            self._known.pop(entry.name, None)
        else:
            known = self._known.get(entry.name, (0, 0))[0]
            self._known[entry.name] = (max(known, entry.offset), at)
