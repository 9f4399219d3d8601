"""Dead letters as a journal keeps them: what a reader could not tell from the envelope."""

from collections.abc import Iterable

import msgspec

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter


class _Stored(msgspec.Struct):
    node: str
    queue: str
    reason: str
    error: str
    tries: int
    redeliveries: int
    at: float
    envelope: Envelope


_FIELDS = _Stored.__struct_fields__


def encode(letters: Iterable[DeadLetter]) -> bytes:
    return msgspec.msgpack.encode([_Stored(*(getattr(each, name) for name in _FIELDS)) for each in letters])


def decode(body: bytes | memoryview) -> list[DeadLetter]:
    """Raises `msgspec.MsgspecError`."""
    return [
        DeadLetter.of(
            each.node,
            each.envelope,
            each.reason,
            each.error,
            each.at,
            queue=each.queue,
            tries=each.tries,
            redeliveries=each.redeliveries,
        )
        for each in msgspec.msgpack.decode(body, type=list[_Stored])
    ]
