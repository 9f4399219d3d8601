"""The options of `format("faregate")`: names, meaning, and errors that say what is allowed.

Rules kept here:
- An option that is not known is an error: a misspelt `startingOffset` must not read everything.
- Every error names the option, what was given, and what is allowed.
- Whether there are several journals is decided by what was asked for, not by how many match: columns stay the same.
- Paths are made absolute on the driver; executors may run elsewhere in the tree.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyspark.sql.utils import to_str

from faregate.archive.target import absolute
from faregate.errors import ConfigurationError, InvalidOption
from faregate.message import check_name
from faregate.ports.schemes import LOGS, hide_password, is_known
from faregate.spark import other_sources
from faregate.spark.source.bounds import (
    ALLOWED,
    ALLOWED_TIMES,
    EARLIEST,
    LATEST,
    Bounds,
    MalformedBound,
    parse_bounds,
    parse_time,
)
from faregate.units import parse_bytes

Value = str | int | bool | datetime | Sequence[str] | None
"""What Python has for the value of an option. None: it is not set."""
Place = str | Path
"""Where a log lies: a journal's folder, or the URL of another log. It travels to executors, and each opens it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user asked for. Plain values: it travels to executors."""

    places: tuple[Place, ...]
    """Where the log lies; where several journals do, or patterns of their folders."""
    several: bool = False
    starting: Bounds = EARLIEST
    ending: Bounds = LATEST
    fail_on_data_loss: bool = True
    max_messages: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 1
    types: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    ranges: bool = False
    """Whether a row is a range of offsets instead of a message."""
    load: str | None = None
    """Under which the filters of its queries are remembered; None: Spark's filters are not asked for."""
    reader_name: str | None = None
    archive: str | None = None
    """Where the messages are that the log has no more."""
    source: str | None = None
    given: frozenset[str] = frozenset()
    """The names of the options that were set."""

    @property
    def path(self) -> Place:
        """Where the one log lies. Raises `InvalidOption` for several."""
        if self.several:
            raise InvalidOption(f"option path names several journals, and this needs one: {', '.join(self.named)}")
        return self.places[0]

    @property
    def named(self) -> list[str]:
        """The places as people may see them."""
        return [shown(place) for place in self.places]

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raises `InvalidOption` when one of these was set: an option without effect is a misunderstanding."""
        for name in sorted(self.given.intersection(names)):
            raise InvalidOption(f"option {name} {why}")


def as_texts(given: Mapping[str, Value]) -> dict[str, str]:
    """As Spark has them; several names are separated by commas. Raises `InvalidOption`."""
    texts = {name: value if isinstance(value, str) else _text(name, value) for name, value in given.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(name: str, value: Value) -> str | None:
    if not isinstance(value, Sequence):
        return to_str(value)
    if isinstance(value, bytes) or not all(isinstance(each, str) for each in value):
        raise InvalidOption(f"option {name} is {value!r}: several are a list of texts")
    return ",".join(value)


def parse_options(given: Mapping[str, str]) -> Options:
    """Raises `InvalidOption`."""
    by_lower = {name.lower(): name for name in (*_PARSERS, *_SYNONYMS, *_OF_SPARK)}
    parsed: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for key, value in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            raise InvalidOption(f"there is no option {key!r} of faregate: {_hint(key, by_lower)}")
        if name in _OF_SPARK:
            continue
        field, parse = (_PARSERS | _SYNONYMS)[name]
        try:
            parsed[field] = parse(name, value)
        except InvalidOption:
            raise
        except ConfigurationError as exc:
            raise InvalidOption(str(exc)) from exc
        if field in fields:
            raise InvalidOption(
                f"options {' and '.join(sorted((name, fields[field])))} mean the same: give one of them"
            )
        fields[field] = name
    if "places" not in parsed:
        raise InvalidOption(
            "option path is missing: the journal's folder, for example load('/data/journal'). (Of a table whose CREATE "
            "TABLE named columns Spark passes no options on: create it without them, and say option columns)"
        )
    several = len(parsed["places"]) > 1 or is_pattern(parsed["places"][0])
    options = Options(**parsed, several=several, given=frozenset(fields.values()))
    if several:
        options.refuse(["archive"], "belongs to one journal: read the others by themselves, and union the rows")
    return options


def over(given: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
    """Both, where what `given` says counts, by whichever name `kept` says the same."""
    said = {_field_of(name) for name in given}
    return {**{name: value for name, value in kept.items() if _field_of(name) not in said}, **given}


def _field_of(key: str) -> str:
    """What an option is about; of one that is not known, its name."""
    fields = {name.lower(): field for name, (field, _) in (_PARSERS | _SYNONYMS).items()}
    return fields.get(key.lower(), key.lower())


def names_place(given: Mapping[str, str]) -> bool:
    return any(name.lower() in PLACES for name in given)


def shown(place: Place) -> str:
    """Without a password."""
    return str(place) if isinstance(place, Path) else hide_password(place)


def is_pattern(place: Place) -> bool:
    """Whether it stands for all folders that match it. One that is there is meant itself, whatever its name."""
    return isinstance(place, Path) and has_magic(str(place)) and not place.is_dir()


def _hint(key: str, by_lower: Mapping[str, str]) -> str:
    if instead := other_sources.hint(key):
        return instead
    close = get_close_matches(key.lower(), by_lower, n=1)
    known = ", ".join(name for name in _PARSERS if name != _BY_HELPER)
    return f"did you mean {by_lower[close[0]]!r}?" if close else f"there are {known}"


def _wrong(name: str, value: str, allowed: str) -> InvalidOption:
    return InvalidOption(f"option {name} is {value!r}: {allowed}")


def _places(name: str, value: str) -> tuple[Place, ...]:
    """One, or several: separated by commas, or a JSON array, as Spark makes of `load([…])`."""
    if not value.lstrip().startswith("["):
        whole = _place(name, value)
        if "," not in value or isinstance(whole, str) or whole.is_dir():
            return (whole,)
        if "{" in value:
            raise _wrong(name, value, "braces are not known here: write whole folders, with commas between them")
    return tuple(_place(name, item) for item in _list(name, value))


def _place(name: str, value: str) -> Place:
    parts = urlsplit(value)
    if parts.scheme and parts.scheme != "journal" and is_known(LOGS, parts.scheme):
        return value
    if parts.scheme == "journal":
        raise _wrong(name, value, "give the folder alone, without 'journal:'")
    if parts.scheme not in ("", "file"):
        raise _wrong(name, value, "it must be a folder that driver and executors can reach as a file path")
    if parts.scheme == "file":
        # In the address of a folder ? is of a pattern, and # of a name; neither begins another part of it.
        parts = urlsplit(value.replace("?", "%3F").replace("#", "%23"))
    folder = unquote(parts.path) if parts.scheme == "file" else value
    if not folder.strip():
        raise _wrong(name, value, "it must be the journal's folder, for example /data/journal")
    return Path(folder).absolute()


def _url(name: str, value: str) -> tuple[Place, ...]:
    scheme = value.partition(":")[0]
    if scheme == "journal" or not is_known(LOGS, scheme):
        raise InvalidOption(
            f"option {name}: {scheme}: is no log of a package that is installed here; read a journal with option path, "
            "the folder behind journal: in the URL of the bus"
        )
    return (value,)


def _bounds(name: str, value: str) -> Bounds:
    try:
        return parse_bounds(value)
    except MalformedBound as exc:
        raise _wrong(name, value, f"{exc}; allowed are {ALLOWED}") from exc


def _time(name: str, value: str) -> Bounds:
    try:
        return parse_time(value)
    except MalformedBound as exc:
        raise _wrong(name, value, f"{exc}; allowed are {ALLOWED_TIMES}") from exc


def _flag(name: str, value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise _wrong(name, value, "it must be true or false")
    return value.strip().lower() == "true"


def _count(name: str, value: str) -> int:
    if not re.fullmatch(r"\d{1,18}", value.strip()) or not int(value):
        raise _wrong(name, value, "it must be a whole number, 1 or more")
    return int(value)


def _bytes(name: str, value: str) -> int:
    size = parse_bytes(value, f"option {name}")
    if not size:
        raise _wrong(name, value, "it must be 1 byte or more, such as 1000000 or 64M")
    return size


def _list(name: str, value: str) -> tuple[str, ...]:
    """Separated by commas, or a JSON array."""
    try:
        items = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
    except ValueError as exc:
        raise _wrong(name, value, f"it is not JSON: {exc}") from exc
    stripped = tuple(item.strip() if isinstance(item, str) else "" for item in items)
    if not all(stripped) or not stripped:
        raise _wrong(name, value, "it must be names separated by commas, or a JSON array of names")
    return stripped


def _rows(name: str, value: str) -> bool:
    if value.strip().lower() not in ("messages", "ranges"):
        raise _wrong(name, value, "it must be messages, one a row, or ranges of their offsets")
    return value.strip().lower() == "ranges"


def _load(name: str, value: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", value):
        raise _wrong(name, value, "it cannot be set by hand; fg.spark.messages(spark, journal) reads with filters")
    return value


def _names(name: str, value: str) -> tuple[str, ...]:
    return tuple(_name(name, item) for item in _list(name, value))


def _name(name: str, value: str) -> str:
    return check_name(value, f"option {name}:")


def _archive(name: str, value: str) -> str:
    try:
        return absolute(value)
    except ConfigurationError as exc:
        raise InvalidOption(f"option {name}: {exc}") from exc


_BY_HELPER = "pushFilters"
"""Not for people: `fg.spark.messages` sets it."""

_PARSERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "path": ("places", _places),
    "startingOffsets": ("starting", _bounds),
    "endingOffsets": ("ending", _bounds),
    "failOnDataLoss": ("fail_on_data_loss", _flag),
    "maxMessagesPerTrigger": ("max_messages", _count),
    "maxBytesPerTrigger": ("max_bytes", _bytes),
    "minPartitions": ("min_partitions", _count),
    "types": ("types", _names),
    "nodes": ("nodes", _names),
    "columns": ("columns", _list),
    "rows": ("ranges", _rows),
    _BY_HELPER: ("load", _load),
    "readerName": ("reader_name", _name),
    "archive": ("archive", _archive),
    "source": ("source", _name),
    "url": ("places", _url),
}
"""Each option, the field it fills, and how its text is read."""

_SYNONYMS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "paths": ("places", _places),  # what Spark makes of load([…])
    "maxOffsetsPerTrigger": ("max_messages", _count),
    "startingTimestamp": ("starting", _time),
    "endingTimestamp": ("ending", _time),
}
"""Other names that mean the same, most of them Kafka's."""

PLACES = ("path", "paths", "url")
FOR_WRITING = ("source",)
ENDING = ("endingOffsets", "endingTimestamp")
NO_END = "is for batch reads: a stream has no end; to read what is there and stop, use trigger(availableNow=True)"
FOR_READING = tuple(name for name in (*_PARSERS, *_SYNONYMS) if name not in (*PLACES, *FOR_WRITING))

_OF_SPARK = ("checkpointLocation",)
"""Known as well: they are Spark's, and passed on by it."""
