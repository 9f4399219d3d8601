"""What many tasks made, appended as one batch: they stage it in a stream beside the messages, STREAM.staged, and one
process commits, by copying it.

Rules kept here:
- What is staged is removed by the broker a day later, committed or not.
- Where it goes is an `Outlet`: the stream alone, or (`transports/rabbitmq_log`) the exchange, and by that the queues.
- A query publishes under a name of its own, with numbers that grow with its batches: the broker drops a repetition. An
  exchange cannot; what was published when the process died is published again, under the same ids.
- How large a batch is, is noted before and after it is published (STREAM.commits). So a batch that was committed is
  known when the broker has forgotten the query, and another one under its number is refused. One of which nothing was
  published yet may be another when it comes again.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from faregate import ids
from faregate.columns import to_envelopes
from faregate.errors import BatchDiffers, ConfigurationError
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import Piece, Staged
from faregate.transports.rabbitmq_stream.chunks import records
from faregate.transports.rabbitmq_stream.connection import COMPLETE, Connection
from faregate.transports.rabbitmq_stream.entries import encode
from faregate.transports.rabbitmq_stream.following import Following
from faregate.transports.rabbitmq_stream.pool import Pool

_STAGED = {"max-age": "1D", "stream-max-segment-size-bytes": "50000000"}
_COMMITS = {"max-length-bytes": "50000000", "stream-max-segment-size-bytes": "5000000"}
_TAG_BYTES = 16
_MESSAGE, _LETTER = b"m", b"d"
"""What a staged record is; it stands behind the tag."""
_BITS = 20
"""Of the numbers within a batch."""


class Commit(msgspec.Struct, array_like=True):
    origin: str
    batch: int
    rows: int
    bytes: int
    done: bool = False
    """Whether all of it was published."""


_read_commit = msgspec.msgpack.Decoder(Commit).decode
_write_letter = msgspec.msgpack.Encoder().encode
_read_letter = msgspec.msgpack.Decoder(DeadLetter).decode


class Outlet(Protocol):
    """Where a batch goes."""

    keeps_letters: bool
    """Whether there is a place for dead letters."""

    def published(self, connection: Connection, name: str) -> int:
        """The last number under a name; 0 when there is none, or nobody knows."""

    def publish(self, connection: Connection, entries: Sequence[bytes], name: str, first: int, last: int) -> None:
        """As `Connection.publish`."""

    def add_letters(self, letters: Sequence[DeadLetter]) -> None: ...


class StreamOutlet:
    """The stream alone."""

    keeps_letters = False

    def __init__(self, stream: str) -> None:
        self._stream = stream

    def published(self, connection: Connection, name: str) -> int:
        return connection.published(self._stream, name)

    def publish(self, connection: Connection, entries: Sequence[bytes], name: str, first: int, last: int) -> None:
        connection.publish(self._stream, entries, name, first, last)

    def add_letters(self, letters: Sequence[DeadLetter]) -> None:
        raise ConfigurationError(f"the stream {self._stream} keeps no dead letters: give the node a store")


class Stage:
    """Of one thread at a time."""

    def __init__(self, stream: str, pool: Pool, outlet: Outlet) -> None:
        self._staged = f"{stream}.staged"
        self._pool = pool
        self._outlet = outlet
        self._following = Following(f"{stream}.commits")
        self._known: dict[str, dict[int, Commit]] = {}

    def stage(self, pieces: Iterable[Piece]) -> Staged:
        tag = blake2b(ids.root_id().encode(), digest_size=_TAG_BYTES).digest()
        count = rows = size = 0
        start = None
        for piece in pieces:
            if isinstance(piece, list):
                if not self._outlet.keeps_letters:
                    self._outlet.add_letters(piece)
                staged = [tag + _LETTER + _write_letter(each) for each in piece]
                envelopes = [each.envelope for each in piece]
            else:
                envelopes = to_envelopes(piece)
                staged = [tag + _MESSAGE + encode(each) for each in envelopes]
            with self._pool.connection() as connection:
                if start is None:
                    connection.create(self._staged, _STAGED)
                    start = connection.end(self._staged)
                connection.publish(self._staged, staged, "")
            count, rows, size = count + 1, rows + len(envelopes), size + sum(len(each.body) for each in envelopes)
        if start is None:
            return Staged(None)
        end = self._pool.ask(lambda connection: connection.end(self._staged))
        return Staged(f"{start}-{end}-{tag.hex()}", count, rows, size)

    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        named = [each.name for each in staged if each.name is not None]
        with self._pool.connection() as connection:
            if once:
                commit = Commit(origin, batch, sum(each.rows for each in staged), sum(each.bytes for each in staged))
                self._commit_once(connection, commit, named)
            elif named:
                self._publish(connection, named, "", 1, COMPLETE)

    def _commit_once(self, connection: Connection, commit: Commit, named: Sequence[str]) -> None:
        name = "faregate-" + blake2b(commit.origin.encode(), digest_size=16).hexdigest()
        first, last = (commit.batch << _BITS) + 1, ((commit.batch + 1) << _BITS) - 1
        self._catch_up(connection)
        known = self._known.get(commit.origin, {}).get(commit.batch)
        newest = max((each.batch for each in self._known.get(commit.origin, {}).values() if each.done), default=-1)
        if (known is not None and known.done) or commit.batch <= newest:
            _check_same(known, commit)
            return
        published = self._outlet.published(connection, name)
        if published >= first:
            _check_same(known, commit)
        elif known != commit:
            self._note(connection, commit)
        if named and published < last:
            self._publish(connection, named, name, first, last)
        self._note(connection, msgspec.structs.replace(commit, done=True))

    def once(self, name: str, rows: int, publish: Callable[[], None]) -> None:
        """For what is published where no repetition is recognised by a name: note the name behind it."""
        with self._pool.connection() as connection:
            self._catch_up(connection)
        if 0 not in self._known.get(name, {}):
            publish()
            with self._pool.connection() as connection:
                self._note(connection, Commit(name, 0, rows, 0, done=True))

    def _publish(self, connection: Connection, named: Sequence[str], name: str, first: int, last: int) -> None:
        found = self._records(connection, named)
        letters = [_read_letter(record[1:]) for record in found if record[:1] == _LETTER]
        messages = [record[1:] for record in found if record[:1] == _MESSAGE]
        if letters:
            self._outlet.add_letters(letters)
        if messages:
            self._outlet.publish(connection, messages, name, first, last)

    def _catch_up(self, connection: Connection) -> None:
        for at, _, record in self._following.more(connection):
            if at == 0:
                self._known = {}
            found = _read_commit(record)
            self._known.setdefault(found.origin, {})[found.batch] = found

    def _note(self, connection: Connection, commit: Commit) -> None:
        self._following.publish(connection, [msgspec.msgpack.encode(commit)], _COMMITS)

    def _records(self, connection: Connection, named: Sequence[str]) -> list[bytes]:
        """What was staged under these names, in their order; read as a whole, as tasks stage side by side."""
        spans = [name.split("-") for name in named]
        tags = [bytes.fromhex(tag) for _, _, tag in spans]
        found: dict[bytes, list[bytes]] = {tag: [] for tag in tags}
        start, end = min(int(first) for first, _, _ in spans), max(int(last) for _, last, _ in spans)
        for chunk in connection.chunks(self._staged, start, end):
            for record in records(chunk):
                own = found.get(record[:_TAG_BYTES])
                if own is not None:
                    own.append(record[_TAG_BYTES:])
        return [record for tag in tags for record in found[tag]]


def _check_same(known: Commit | None, commit: Commit) -> None:
    """Raises `BatchDiffers`."""
    if known is not None and (known.rows, known.bytes) == (commit.rows, commit.bytes):
        return
    before = "is no longer remembered" if known is None else f"had {known.rows} messages, {known.bytes} bytes"
    raise BatchDiffers(
        f"batch {commit.batch} of query {commit.origin} was committed before and {before}; now it has {commit.rows} "
        f"messages, {commit.bytes} bytes. Either an older checkpoint was restored, or the query does not compute the "
        "same from the same input. Nothing was written; go on with a new checkpointLocation, and give rows a "
        "publication_id so that the bus recognises those it has"
    )
