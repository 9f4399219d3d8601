"""Several keys of one message, as a queue, a lane and a store see them: one text that has them all.

Rules kept here:
- The keys of a message are a set in one order, whatever order they were named in: two transfers between the same
  accounts, one each way, have the same text.
- Different sets have different texts, and none is the text of a single key, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MOST_KEYS = 16
"""Of one message. With more, what is meant is nearly always everything: an order of its own."""


class Keys(str):
    """The text of several keys, such as {"17","18"}. Where it is encoded, `str(keys)` is the text alone."""

    __slots__ = ("each",)
    each: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str]) -> str | None:
        """The key of a message that has these: None for none of them, and a single one as it is."""
        each = tuple(sorted(set(texts)))
        if len(each) < 2 and not (each and each[0].startswith("{")):
            return each[0] if each else None
        keys = cls(f"{{{','.join(msgspec.json.encode(text).decode() for text in each)}}}")
        keys.each = each
        return keys


def keys_of(key: str | None) -> tuple[str, ...]:
    """Each key that a message has, by what its delivery says: none, one or several."""
    if key.__class__ is Keys:
        return key.each
    return () if key is None else (key,)
