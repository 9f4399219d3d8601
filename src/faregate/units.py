"""Lengths of time, sizes, numbers and moments as people write and read them. One grammar, wherever text stands for one.

- A length of time is a number and a unit: 500ms, 10s, 5m (or min), 12h, 7d, 2w. `m` is minutes; units are lower case,
  as a capital M would be read as months.
- A size is a number of bytes, or of K, M, G or T: powers of 1024, with or without B or iB behind, in any case.
- Neither is negative or without end.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from faregate.errors import ConfigurationError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_QUANTITY = re.compile(r"\s*([\d.+_e-]{1,30}?)\s*([A-Za-z]*)\s*")


def parse_seconds(text: str, name: str, *, bare: bool = False) -> float:
    """A length of time. `bare`: a number alone is seconds. Raises `ConfigurationError`, which calls it by its name."""
    seconds = _quantity(text, {**_SECONDS, "": 1.0} if bare else _SECONDS)
    if seconds is None:
        alone = ", or a number of seconds" if bare else ""
        raise ConfigurationError(f"{name} {text!r} is no length of time: write 10s, 500ms, 5m, 12h or 7d{alone}")
    return seconds


def parse_bytes(text: str, name: str) -> int:
    """A size. Raises `ConfigurationError`, which calls it by its name."""
    size = _quantity(re.sub("i?b$", "", text.strip().lower()), _BYTES)
    if size is None:
        raise ConfigurationError(f"{name} {text!r} is no size: write a number of bytes such as 1000000 or 64M")
    return int(size)


def _quantity(text: str, units: Mapping[str, float]) -> float | None:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        return None
    try:
        value = float(found[1]) * units[found[2]]
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def counted(count: int, thing: str, things: str | None = None) -> str:
    """1 message, 2 messages."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def bytes_text(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def age(moment: float, now: float) -> str:
    """How long ago."""
    count = max(0.0, now - moment)
    if count < 1:
        return "just now"
    for most, unit in ((60, "s"), (60, "min"), (24, "h")):
        if count < most:
            return f"{int(count)} {unit} ago"
        count /= most
    return "1 day ago" if count < 2 else f"{int(count)} days ago"


def iso(moment: float) -> str:
    """A moment, in seconds since the epoch, as UTC to the millisecond."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
