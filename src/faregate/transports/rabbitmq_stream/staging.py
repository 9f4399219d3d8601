"""What many tasks made, appended as one batch: they stage it in a stream beside the messages, STREAM.staged, and one
process commits, by copying it.

Rules kept here:
- What is staged is removed by the broker a day later, committed or not.
- A query publishes under a name of its own, with numbers that grow with its batches: the broker drops a repetition.
- How large a batch is, is noted before and after it is published (STREAM.commits). So a batch that was committed is
  known when the broker has forgotten the query, and another one under its number is refused. One of which nothing was
  published yet may be another when it comes again.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import msgspec

from faregate import ids
from faregate.columns import to_envelopes
from faregate.errors import BatchDiffers, ConfigurationError
from faregate.ports.log import Piece, Staged
from faregate.transports.rabbitmq_stream.chunks import records
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.entries import encode
from faregate.transports.rabbitmq_stream.following import Following
from faregate.transports.rabbitmq_stream.pool import Pool

_STAGED = {"max-age": "1D", "stream-max-segment-size-bytes": "50000000"}
_COMMITS = {"max-length-bytes": "50000000", "stream-max-segment-size-bytes": "5000000"}
_TAG_BYTES = 16
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


class Stage:
    """Of one thread at a time."""

    def __init__(self, stream: str, pool: Pool) -> None:
        self._stream = stream
        self._staged = f"{stream}.staged"
        self._pool = pool
        self._following = Following(f"{stream}.commits")
        self._known: dict[str, dict[int, Commit]] = {}

    def stage(self, pieces: Iterable[Piece]) -> Staged:
        tag = blake2b(ids.root_id().encode(), digest_size=_TAG_BYTES).digest()
        count = rows = size = 0
        start = None
        for piece in pieces:
            if isinstance(piece, list):
                raise ConfigurationError(f"the stream {self._stream} keeps no dead letters: give the node a store")
            envelopes = to_envelopes(piece)
            with self._pool.connection() as connection:
                if start is None:
                    connection.create(self._staged, _STAGED)
                    start = connection.end(self._staged)
                connection.publish(self._staged, (tag + encode(each) for each in envelopes), "")
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
                connection.publish(self._stream, self._entries(connection, named), "")

    def _commit_once(self, connection: Connection, commit: Commit, named: Sequence[str]) -> None:
        name = "faregate-" + blake2b(commit.origin.encode(), digest_size=16).hexdigest()
        first, last = (commit.batch << _BITS) + 1, ((commit.batch + 1) << _BITS) - 1
        self._catch_up(connection)
        known = self._known.get(commit.origin, {}).get(commit.batch)
        newest = max((each.batch for each in self._known.get(commit.origin, {}).values() if each.done), default=-1)
        if (known is not None and known.done) or commit.batch <= newest:
            _check_same(known, commit)
            return
        published = connection.published(self._stream, name)
        if published >= first:
            _check_same(known, commit)
        elif known != commit:
            self._note(connection, commit)
        if named and published < last:
            connection.publish(self._stream, self._entries(connection, named), name, first, last)
        self._note(connection, msgspec.structs.replace(commit, done=True))

    def _catch_up(self, connection: Connection) -> None:
        for at, _, record in self._following.more(connection):
            if at == 0:
                self._known = {}
            found = _read_commit(record)
            self._known.setdefault(found.origin, {})[found.batch] = found

    def _note(self, connection: Connection, commit: Commit) -> None:
        self._following.publish(connection, [msgspec.msgpack.encode(commit)], _COMMITS)

    def _entries(self, connection: Connection, named: Sequence[str]) -> Iterator[bytes]:
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
        for tag in tags:
            yield from found[tag]


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
