"""How far the named readers of a stream have come, in a small stream beside it: STREAM.readers.

An entry says a reader's name and the next offset that it wants, or none when it was forgotten. The highest counts, so
that writers need not agree. RabbitMQ keeps a bounded number of entries; what would soon be removed is written again.

(The broker's own tracking of offsets takes up offsets of the stream itself, and cannot be listed.)
"""

import msgspec

from faregate.ports.log import ReaderOffset
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.following import Following

_RETENTION = {"max-length-bytes": "20000000", "stream-max-segment-size-bytes": "1000000"}
_KEPT = 10_000
"""Entries, of less than a kilobyte, that are surely not removed yet."""


class Entry(msgspec.Struct, array_like=True):
    name: str
    offset: int | None


_decode = msgspec.msgpack.Decoder(Entry).decode


class Readers:
    """Of one thread at a time."""

    def __init__(self, stream: str) -> None:
        self._following = Following(f"{stream}.readers")
        self._known: dict[str, tuple[int, int]] = {}
        """By name: the offset, and where the entry is that says so."""

    def offsets(self, connection: Connection) -> list[ReaderOffset]:
        self._catch_up(connection)
        return [ReaderOffset(name, offset) for name, (offset, _) in sorted(self._known.items())]

    def save(self, connection: Connection, name: str, offset: int | None) -> None:
        """None: forget it."""
        self._catch_up(connection)
        if offset is None and name not in self._known:
            return
        oldest = self._following.read - _KEPT
        again = [Entry(other, said) for other, (said, at) in self._known.items() if at < oldest and other != name]
        entries = [msgspec.msgpack.encode(entry) for entry in (Entry(name, offset), *again)]
        self._following.publish(connection, entries, _RETENTION)

    def _catch_up(self, connection: Connection) -> None:
        for at, _, record in self._following.more(connection):
            if at == 0:
                self._known = {}
            entry = _decode(record)
            if entry.offset is None:
                self._known.pop(entry.name, None)
            else:
                known = self._known.get(entry.name, (0, 0))[0]
                self._known[entry.name] = (max(known, entry.offset), at)
