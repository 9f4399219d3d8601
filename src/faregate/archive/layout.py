"""What lies where in an archive, and what makes a segment part of it.

_faregate/archive.json                           the format's version, and whose archive this is
_faregate/segments/BASE-END.json                 a segment that is archived: which files hold its messages
day=2026-11-17/type=OrderPlaced/LOG-BASE.parquet its messages of that day (UTC) and type, in the order of the log

Rules kept here:
- A segment is archived when its manifest is there. That is written last, so all of its files are whole by then. Files
  that no manifest names are of a run that was interrupted: the next one writes them again, under the same names.
- Names follow from the log and the segment alone, and a segment never changes: a repetition writes the same again.
- Paths are Hive's, so that every engine finds the columns `day` and `type` in them; the files do not repeat `type`.
  Engines pass over names that begin with `_`.
"""

import re
from typing import NamedTuple

import msgspec

VERSION = 1
OWN = "_faregate"
META = f"{OWN}/archive.json"
SEGMENTS = f"{OWN}/segments"

_NO_TYPE = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile(r"""[\x00-\x1f\x7f"#%'*/:=?\\{}\[\]^]""")
"""What Hive escapes in the name of a partition. Other characters stay: engines do not agree on how to escape them."""
_SPAN = re.compile(r"(\d{20})-(\d{20})\.json")


class Meta(msgspec.Struct):
    """What archive.json says."""

    log: str
    """The log's id: whose offsets these are."""
    id: str
    """The archive's own, of which the name of its reader is made: each archive of a log has one for itself."""
    format: str = "faregate-archive"
    version: int = VERSION

    @property
    def reader_name(self) -> str:
        """Under which the log knows how far it is archived."""
        return f"archive-{self.id}"


class File(msgspec.Struct):
    """Messages of one day and type of a segment."""

    path: str
    type: str
    first: int
    last: int
    """Offsets."""
    rows: int
    bytes: int
    footer_crc: int | None = None
    """Of its end, from the footer on, for which Parquet has no checksum. Older files have none."""


def footer_at(end: bytes, size: int) -> int:
    """Where the footer of a Parquet file begins, by its last eight bytes. Wrong ones lead anywhere within it."""
    return max(0, size - 8 - int.from_bytes(end[:4], "little"))


class Manifest(msgspec.Struct):
    """A segment that is archived."""

    base: int
    end: int
    """Behind its last offset: where the next one begins."""
    first_time: int
    last_time: int
    """Microseconds since the epoch."""
    messages: int
    files: list[File]


class Span(NamedTuple):
    """The offsets of an archived segment."""

    base: int
    end: int

    @property
    def manifest(self) -> str:
        """Its name has both, so that a listing says what is archived."""
        return f"{SEGMENTS}/{self.base:020d}-{self.end:020d}.json"


def span_of(name: str) -> Span | None:
    """Of the name of a manifest; None for what is none, or in the making."""
    found = _SPAN.fullmatch(name)
    return Span(int(found[1]), int(found[2])) if found else None


def file_path(log: str, base: int, day: str, type: str) -> str:
    escaped = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", type) or _NO_TYPE
    return f"day={day}/type={escaped}/{log}-{base:020d}.parquet"
