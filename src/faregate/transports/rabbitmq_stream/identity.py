"""Whether a stream is the one that it was: its id, in a small stream beside it, STREAM.identity.

A stream that was deleted and declared anew has the same name and the same offsets, for other messages. So the id is
noted with a witness: an offset, and when the broker appended what is there. A stream that has something else at that
offset, or less, is another one and gets another id.

Rules kept here:
- A note says which id it follows. Of two that follow the same, the first counts: all readers have the same id.
- A witness that retention has removed tells nothing, and a newer one is noted.
"""

from typing import Literal

import msgspec

from faregate import ids
from faregate.transports.rabbitmq_stream.connection import LAST, Connection, at_offset
from faregate.transports.rabbitmq_stream.following import Following


class Note(msgspec.Struct, array_like=True, frozen=True):
    id: str
    follows: str | None
    offset: int = -1
    """-1: there was nothing yet."""
    time: int = 0
    """Of the chunk at this offset, in milliseconds."""


_decode = msgspec.msgpack.Decoder(Note).decode


def identify(connection: Connection, stream: str) -> str:
    """The id of a stream; one that has none, or is not what it was, gets a new one."""
    following = Following(f"{stream}.identity")
    known = _known(connection, following, None)
    seen = "nothing" if known is None else _look(connection, stream, known)
    if known is not None and seen == "same":
        return known.id
    last = connection.probe(stream, LAST)
    if known is not None and seen == "gone":
        if last is None:
            return known.id
        note = Note(known.id, known.id, last.chunk_first_offset, last.timestamp)
    else:
        witness = (-1, 0) if last is None else (last.chunk_first_offset, last.timestamp)
        note = Note(ids.root_id(), None if known is None else known.id, *witness)
    following.publish(connection, [msgspec.msgpack.encode(note)], {})
    settled = _known(connection, following, known)
    return note.id if settled is None else settled.id


def _known(connection: Connection, following: Following, known: Note | None) -> Note | None:
    for _, _, record in following.more(connection):
        note = _decode(record)
        if note.follows == (None if known is None else known.id):
            known = note
    return known


def _look(connection: Connection, stream: str, known: Note) -> Literal["same", "other", "gone"]:
    """What is where the witness was. The broker never changes where a chunk begins."""
    if known.offset < 0:
        return "gone"
    if known.offset >= connection.end(stream):
        return "other"
    found = connection.probe(stream, at_offset(known.offset))
    if found is None or found.chunk_first_offset > known.offset:
        return "gone"
    return "same" if (found.chunk_first_offset, found.timestamp) == (known.offset, known.time) else "other"
