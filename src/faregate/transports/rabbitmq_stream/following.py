"""A small stream beside the messages that is read whole, once, and then as it grows. Made when it is first written."""

from collections.abc import Iterator

from faregate.errors import StreamNotFound
from faregate.transports.rabbitmq_stream.chunks import records
from faregate.transports.rabbitmq_stream.connection import Connection


class Following:
    """Of one thread at a time."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.read = 0
        """Behind what was read."""

    def publish(self, connection: Connection, entries: list[bytes], arguments: dict[str, str]) -> None:
        """`arguments`: what it is made with."""
        try:
            connection.publish(self._stream, entries, "")
        except StreamNotFound:
            connection.create(self._stream, arguments)
            connection.publish(self._stream, entries, "")

    def more(self, connection: Connection) -> Iterator[tuple[int, int, bytes]]:
        """(offset, milliseconds, record) of what is new; from the beginning when the stream was made anew."""
        try:
            end = connection.end(self._stream)
        except StreamNotFound:
            self.read = 0
            return
        if end < self.read:
            self.read = 0
        if end == self.read:
            return
        start, self.read = self.read, end
        for chunk in connection.chunks(self._stream, start, end):
            for at, record in enumerate(records(chunk), chunk.chunk_first_offset):
                if start <= at < end:
                    yield at, chunk.timestamp, record
