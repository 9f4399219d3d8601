"""Deterministic ids: what makes a repeated execution produce the same messages.

Rules kept here:
- A root is a UUIDv7, or, with an idempotency key, a pure hash of (node, type, key).
- A derived id is a UUIDv8: the first 48 bits of the root's id, so that the ids of one saga lie together in an
  index, then 74 bits of SHA-256 over length-prefixed fields, so that no two field lists share an encoding.
- Retry counts, times, instances and payloads never enter a hash: they differ between two executions.
"""

import os
import time
from hashlib import sha256

_VARIANT = 0x8000000000000000
_VARIANT_BITS = 0x3FFFFFFFFFFFFFFF


def _text(high: int, low: int) -> str:
    """Canonical UUID text of two 64-bit halves (several times faster than going through `uuid.UUID`)."""
    digits = f"{high:016x}{low:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _digest(*fields: str) -> bytes:
    """SHA-256 over the fields, each behind its length: ("ab", "c") and ("a", "bc") differ."""
    encoded = [field.encode() for field in fields]
    return sha256(b"".join([len(field).to_bytes(4, "big") + field for field in encoded])).digest()


def root_id(time_ms: int | None = None) -> str:
    """A fresh UUIDv7 whose first 48 bits are the time."""
    if time_ms is None:
        time_ms = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    return _text((time_ms & 0xFFFFFFFFFFFF) << 16 | 0x7000 | random >> 68, _VARIANT | random & _VARIANT_BITS)


def idempotent_id(node: str, type: str, key: str) -> str:
    """The root id of a publication with an idempotency key: the same key is the same publication."""
    hashed = int.from_bytes(_digest("root", node, type, key)[:16], "big")
    high, low = hashed >> 64, hashed & 0xFFFFFFFFFFFFFFFF
    return _text(high & 0xFFFFFFFFFFFF0FFF | 0x8000, _VARIANT | low & _VARIANT_BITS)


def publication_id(
    *, correlation_id: str, node: str, causation_id: str, handler: str, type: str, slot: int | str
) -> str:
    """The id of what a handler publishes. `slot` is the ordinal of the output, or its explicit `id_key`."""
    place = f"#{slot}" if isinstance(slot, int) else f"={slot}"
    return _derived(correlation_id, _digest("publication", correlation_id, node, causation_id, handler, type, place))


def message_id(publication_id: str, recipient: str) -> str:
    """What `recipient` deduplicates by."""
    return _derived(publication_id, _digest("message", publication_id, recipient))


def _derived(root: str, digest: bytes) -> str:
    """48 bits of the root, then 74 of the digest. A foreign root that is no UUID lends hashed bits instead."""
    try:
        head = bytes.fromhex(root[:8] + root[9:13])
    except ValueError:
        head = _digest("prefix", root)[:6]
    prefix = int.from_bytes(head, "big")
    high = int.from_bytes(digest[:2], "big")
    low = int.from_bytes(digest[2:10], "big")
    return _text(prefix << 16 | 0x8000 | high & 0x0FFF, _VARIANT | low & _VARIANT_BITS)
