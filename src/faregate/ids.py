"""Deterministic ids: what makes a repeated execution produce the same messages.

Rules kept here:
- A root is a UUIDv7, or, with an idempotency key, a pure hash of (node, type, key).
- A derived id is a UUIDv8: the first 48 bits of the root's id, so that the ids of one conversation lie together in an
  index, then 74 bits of SHA-256 over length-prefixed fields, so that no two field lists share an encoding.
- Retry counts, times, instances and payloads never enter a hash: they differ between two executions.

Ids are canonical UUID text. It is put together from hexadecimal digits, several times faster than by `uuid.UUID`.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from zlib import crc32

from faregate.message import Envelope

VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))
"""Any hexadecimal digit to the one that carries its last two bits behind the variant bits of a UUID."""
LENGTH, ROOT = 36, 13
"""Characters of an id, and of the root's part in it."""
FIRST, SECOND, THIRD, VARIANT_AT = slice(0, 3), slice(3, 6), slice(6, 18), 18
"""The digits of a digest that stand behind the version, behind the variant and at the end; which one is the variant."""

_has_root_part = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-").match


def framed(*fields: str) -> str:
    """What is hashed: each field behind its length, so that ("ab", "c") and ("a", "bc") differ."""
    return "".join([f"{len(field)}:{field}" for field in fields])


def _digest(*fields: str) -> str:
    return sha256(framed(*fields).encode()).hexdigest()


_tails: Iterator[str] = iter(())
_last_head = (-1, "")
"""A time, and the text that every root of that millisecond begins with."""
_AT_ONCE = 512
_AS_VERSION, _AS_VARIANT = (bytes(byte & mask | bits for byte in range(256)) for mask, bits in ((15, 0x70), (63, 0x80)))


def _first_of_more_tails() -> str:
    """What stands in a root behind its time: version, variant, and 74 random bits.

    The system is asked for many at a time: each call of `os.urandom` lets other threads run, and that costs a publisher
    more than the randomness. Taking one from an iterator is atomic, so threads never share one.
    """
    global _tails
    block = bytearray(os.urandom(10 * _AT_ONCE))
    pairs, last = block[: 4 * _AT_ONCE], block[4 * _AT_ONCE :]
    pairs[0::4] = pairs[0::4].translate(_AS_VERSION)
    pairs[2::4] = pairs[2::4].translate(_AS_VARIANT)
    digits = pairs.hex(" ", 2).split()
    more = iter(list(map("-".join, zip(digits[0::2], digits[1::2], last.hex(" ", 6).split(), strict=True))))
    first, _tails = next(more), more
    return first


def _forget_tails() -> None:
    global _tails
    _tails = iter(())


os.register_at_fork(after_in_child=_forget_tails)  # or parent and child would make the same ids


def _new_head(time_ms: int) -> str:
    global _last_head
    digits = f"{time_ms & 0xFFFFFFFFFFFF:012x}"
    head = f"{digits[:8]}-{digits[8:]}-"
    _last_head = (time_ms, head)
    return head


def root_id(time_ms: int | None = None) -> str:
    """A fresh UUIDv7 whose first 48 bits are the time."""
    if time_ms is None:
        time_ms = time.time_ns() // 1_000_000
    made_for, head = _last_head
    if made_for != time_ms:
        head = _new_head(time_ms)
    return head + (next(_tails, None) or _first_of_more_tails())


def root_ids(count: int, time_ms: int) -> list[str]:
    """So many of them, of one moment."""
    head = _new_head(time_ms)
    tails = list(islice(_tails, count))
    while len(tails) < count:
        tails.append(_first_of_more_tails())
        tails += islice(_tails, count - len(tails))
    return [head + tail for tail in tails]


def idempotent_id(node: str, type: str, key: str) -> str:
    """The root id of a publication with an idempotency key: the same key is the same publication."""
    digest = _digest("root", node, type, key)
    return _first_digits(digest) + _hashed_part(digest[12:])


def is_idempotent(root: str) -> bool:
    """Whether a root's id comes from an idempotency key: a hash, where others begin with their time."""
    return root[14:15] == "8"


def publication_id(
    *, correlation_id: str, node: str, causation_id: str, handler: str, type: str, slot: int | str
) -> str:
    """The id of what a handler publishes. `slot` is the ordinal of the output, or its explicit `id_key`."""
    return publication_ids(node, handler)(correlation_id, causation_id, type, slot)


@lru_cache(1024)
def publication_ids(node: str, handler: str) -> Callable[[str, str, str, int | str], str]:
    """`publication_id` for one handler and many messages: what is the same for all is put together once."""
    head, middle = framed("publication"), framed(node)

    @lru_cache(1024)
    def tail(type: str, slot: int | str) -> str:
        return framed(handler, type, f"#{slot}" if isinstance(slot, int) else f"={slot}")

    def derive(correlation_id: str, causation_id: str, type: str, slot: int | str) -> str:
        root, cause = f"{len(correlation_id)}:{correlation_id}", f"{len(causation_id)}:{causation_id}"
        return _derived(correlation_id, f"{head}{root}{middle}{cause}{tail(type, slot)}")

    return derive


def message_id(publication_id: str, recipient: str) -> str:
    """What `recipient` deduplicates by."""
    return message_ids(recipient)(publication_id)


def message_id_of(envelope: Envelope, node: str) -> str:
    """What the node knows the message by; one without an identity is known by its content."""
    if envelope.publication_id:
        return message_id(envelope.publication_id, node)
    return idempotent_id(node, envelope.type, envelope.body.hex())


@lru_cache(1024)
def message_ids(recipient: str) -> Callable[[str], str]:
    """`message_id` for one recipient and many publications: what is the same for all is put together once."""
    head, tail = framed("message"), framed(recipient)

    def derive(publication_id: str) -> str:
        return _derived(publication_id, f"{head}{len(publication_id)}:{publication_id}{tail}")

    return derive


SLOTS = 256


def slot_of(key: str | None) -> str:
    """Where brokers put a message by its key, the same in every process and version; `-` for one without a key."""
    return "-" if key is None else str(crc32(key.encode()) % SLOTS)


PublicationKey = str | tuple[str, int, str | None, tuple[str, ...]]
"""What a repetition has in common with the first: the publication id, replay number, attempt id and, when it went to
some of its topic's recipients only, these. Nearly always the last three say nothing, and the id stands alone."""


def publication_key(
    publication_id: str, replay: int, attempt_id: str | None, recipients: Iterable[str] = ()
) -> PublicationKey:
    """`recipients`: only those of a publication that was restricted to them; their order says nothing."""
    named = tuple(sorted(recipients))
    if not replay and attempt_id is None and not named:
        return publication_id
    return (publication_id, replay, attempt_id, named)


def _derived(root: str, hashed: str) -> str:
    """A UUIDv8: the root's first 48 bits (a foreign root that is no UUID lends hashed ones instead), then the hash."""
    head = root[:ROOT] if _has_root_part(root) else _first_digits(_digest("prefix", root))
    digest = sha256(hashed.encode()).hexdigest()
    return f"{head}-8{digest[FIRST]}-{VARIANT[digest[VARIANT_AT]]}{digest[SECOND]}-{digest[THIRD]}"


def _first_digits(digest: str) -> str:
    return f"{digest[:8]}-{digest[8:12]}"


def _hashed_part(digest: str) -> str:
    """The version and variant of a UUIDv8 with 74 bits of the digest."""
    return f"-8{digest[FIRST]}-{VARIANT[digest[VARIANT_AT]]}{digest[SECOND]}-{digest[THIRD]}"
