"""Values as columns hold them, the same on every SQL store: packed envelopes, ids, lists of attempts, dead letters."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import OutboxRow
from faregate.ports.tokens import Mode, Recipients

pack = msgspec.msgpack.Encoder().encode
unpack = msgspec.msgpack.Decoder(Envelope).decode

_attempts = msgspec.json.Decoder(tuple[str, ...]).decode
_modes = msgspec.json.Decoder(dict[str, Mode]).decode
_json = msgspec.json.Encoder(order="deterministic").encode


def id_bytes(text: str) -> bytes:
    """A UUID's text as 16 bytes."""
    return bytes.fromhex(text.replace("-", ""))


def id_text(value: bytes) -> str:
    """16 bytes as a UUID's canonical text."""
    digits = value.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def attempts_text(attempts: Sequence[str]) -> str | None:
    """Attempt ids as JSON; None when there are none, as in nearly all rows."""
    return _json(tuple(attempts)).decode() if attempts else None


def attempts(text: str | None) -> tuple[str, ...]:
    return _attempts(text) if text else ()


def modes_text(modes: Mapping[str, Mode]) -> str:
    return _json(dict(modes)).decode()


def recipients(version: int, modes: str) -> Recipients:
    return Recipients(version, _modes(modes))


def outbox_row(row: Sequence[Any], id_out: Callable[[Any], str]) -> OutboxRow:
    """From the columns in the order of `OutboxRow`."""
    seq, node, message_id, ordinal, destination, key, envelope, registered, chosen, *others = row
    cause = None if message_id is None else id_out(message_id)
    tried = (attempts(registered), attempts(chosen))
    return OutboxRow(seq, node, cause, ordinal, destination, key, unpack(envelope), *tried, *others)


def are_plain(rows: Sequence[OutboxRow]) -> bool:
    """Whether none of them has attempts, as nearly always."""
    return {*map(_attempts_of, rows)} <= {_PLAIN}


_attempts_of = itemgetter(slice(7, None))
_PLAIN = tuple(OutboxRow._field_defaults.values())
DEAD_COLUMNS = DeadLetter.__struct_fields__


def dead_values(letter: DeadLetter, message_id: Any) -> list[Any]:
    """The values of a dead letter in the order of its fields; the id as the store keeps it."""
    values = [getattr(letter, name) for name in DEAD_COLUMNS]
    values[1] = message_id
    values[-1] = pack(letter.envelope)
    return values


def dead_letter(row: Sequence[Any], id_out: Callable[[Any], str]) -> DeadLetter:
    """From the columns in the order of its fields."""
    node, message_id, *others, envelope = row
    return DeadLetter(**dict(zip(DEAD_COLUMNS, (node, id_out(message_id), *others, unpack(envelope)), strict=True)))


def dead_state(letter: DeadLetter, message_id: Any) -> tuple[Any, ...]:
    """Node and id, then the fields of which one changes whenever a dead letter changes."""
    return letter.node, message_id, letter.status, letter.copies, letter.replays, letter.last_failed_at
