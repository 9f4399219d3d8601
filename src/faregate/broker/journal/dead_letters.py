"""Dead letters as a journal keeps them: what a reader could not tell from the envelope."""

from collections.abc import Iterable

import msgspec

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter


class _Stored(msgspec.Struct):
    """What `DeadLetter.of` is told."""

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
    stored = msgspec.msgpack.decode(body, type=list[_Stored])
    return [DeadLetter.of(**msgspec.structs.asdict(each)) for each in stored]
