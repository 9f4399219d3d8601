"""A journal of every form a segment can have, with what is in it in clusters, and Spark's filters judged in Python."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from pyspark.sql import datasource as spark

from faregate.broker.journal import sealing
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.log import Log
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.spark.options import Options
from faregate.spark.schema import row_schema
from faregate.spark.source.batch_reader import BatchReader, PushedReader
from tests.spark.rig import empty_journal, note, options, truncate

START = 1_794_733_200
COMMIT, FRAME, SEGMENT = 4, 12, 60
"""Messages in each."""
SEGMENTS = 6
"""The first is removed, three are sealed, one is rolled, and the last is hot."""


def message(number: int) -> Envelope:
    return note(
        number,
        type=("Placed", "Paid", "Refund-2")[number // 20 % 3],
        source=("shop", "web")[number // 30 % 2],
        key=None if number % 7 == 3 else f"k{number % 5}" if number % 11 else "kß",
        correlation_id=f"c{number // 2}",
        sent_at=START + number * 0.5 - number % 3,
        depth=number % 4,
        causation_id="first" if number % 9 == 0 else None,
    )


def write_every_form(path: Path) -> Path:
    layout, disk = Layout(empty_journal(path)), RealDisk()
    clock = [START * 1_000_000]
    log = Log(layout, disk, clock=lambda: clock[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealing, "_SLICE_ROWS", COMMIT)
        patch.setattr(sealing, "FRAME_ROWS", FRAME)
        for segment in range(SEGMENTS):
            for _ in range(SEGMENT // COMMIT):
                first = log.next_offset
                log.append([message(number) for number in range(first, first + COMMIT)], [-1] * COMMIT)
                clock[0] += 1_000_000 if first % 3 else 0  # so that some frames meet in one moment
            dead = DeadLetter.of("reader", message(0), "failed", "ValueError", START, queue="reader.Placed.shop")
            log.append_dead_letters([dead])  # takes an offset that no message has
            log.sync()
            if segment + 1 < SEGMENTS:
                log.roll()
            if segment == SEGMENTS - 3:
                log.close()
                log = Log(layout, disk, clock=lambda: clock[0])
                assert sealing.seal_all(layout, disk) == SEGMENTS - 2
    log.close()
    truncate(path)
    return path


COLUMNS = ("offset", "appended_at", "sent_at", "type", "source", "key", "correlation_id", "depth", "causation_id")
SCHEMA = row_schema(COLUMNS)


def rows_of(reader: BatchReader) -> list[dict[str, Any]]:
    """What Spark's tasks would get, without Spark."""
    found = [batch for span in reader.partitions() for batch in reader.read(span)]
    return [row for batch in found for row in batch.to_pylist()]


def full_scan(path: Path) -> list[dict[str, Any]]:
    return rows_of(BatchReader(options(path), SCHEMA))


def pushed_reader(path: Path, load: str, **given: object) -> PushedReader:
    chosen: Options = options(path, pushFilters=load, **given)
    return PushedReader(chosen, SCHEMA)


def new_load() -> str:
    return uuid.uuid4().hex


# --- filters, and what they mean ---------------------------------------------------------------------------------

_COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    spark.EqualTo: lambda own, given: bool(own == given),
    spark.LessThan: lambda own, given: bool(own < given),
    spark.LessThanOrEqual: lambda own, given: bool(own <= given),
    spark.GreaterThan: lambda own, given: bool(own > given),
    spark.GreaterThanOrEqual: lambda own, given: bool(own >= given),
    spark.In: lambda own, given: own in given,
    spark.StringStartsWith: lambda own, given: bool(own.startswith(given)),
    spark.StringEndsWith: lambda own, given: bool(own.endswith(given)),
    spark.StringContains: lambda own, given: given in own,
}


def holds(given: Any, row: dict[str, Any]) -> bool | None:
    """As Spark judges it; None is SQL's unknown."""
    if isinstance(given, spark.Not):
        judged = holds(given.child, row)
        return None if judged is None else not judged
    own = row[given.attribute[0]]
    if isinstance(given, spark.IsNull | spark.IsNotNull):
        return (own is None) == isinstance(given, spark.IsNull)
    if isinstance(given, spark.EqualNullSafe):
        return bool(own == given.value)
    if own is None:
        return None
    known = _COMPARED[type(given)](own, given.value)
    return None if isinstance(given, spark.In) and not known and None in given.value else known


def all_hold(filters: list[Any], row: dict[str, Any]) -> bool:
    return all(holds(each, row) is True for each in filters)


def _moments(seconds: int) -> Any:
    return st.builds(
        lambda half_seconds, more, hours: (
            datetime.fromtimestamp(START, UTC) + timedelta(seconds=half_seconds / 2, microseconds=more)
        ).astimezone(timezone(timedelta(hours=hours))),
        st.integers(-4, 2 * seconds),
        st.sampled_from([0, 0, 0, 1, -1]),
        st.integers(-11, 12),
    )


_EDGES = [
    segment * (SEGMENT + 1) + frame + more
    for segment in range(1, SEGMENTS - 2)
    for frame in range(0, SEGMENT + 1, FRAME)
    for more in (-1, 0)
]
"""The first and last offsets of frames."""
_VALUES: dict[str, Any] = {
    "offset": st.sampled_from(_EDGES) | st.integers(-2, SEGMENTS * (SEGMENT + 1) + 2),
    "appended_at": _moments(SEGMENTS * SEGMENT // COMMIT),
    "sent_at": _moments(SEGMENTS * SEGMENT // 2),
    "type": st.sampled_from(["Placed", "Paid", "Refund-2", "Nothing", "P", "", "Refund"]),
    "source": st.sampled_from(["shop", "web", "nobody"]),
    "key": st.sampled_from(["k0", "k3", "k", "K0", "kß", "ß"]),
    "correlation_id": st.integers(0, SEGMENTS * SEGMENT // 2).map("c{}".format),
    "depth": st.integers(-1, 5),
    "causation_id": st.just("first"),
}
_COMPARISONS = [
    spark.EqualTo,
    spark.EqualNullSafe,
    spark.LessThan,
    spark.LessThanOrEqual,
    spark.GreaterThan,
    spark.GreaterThanOrEqual,
]
_TEXT = [spark.StringStartsWith, spark.StringEndsWith, spark.StringContains]


@st.composite
def filters(draw: st.DrawFn) -> Any:
    """One of those that Spark hands over, on any column that they are for."""
    column = draw(st.sampled_from(COLUMNS + 3 * ("offset", "appended_at", "key", "correlation_id")))
    values, attribute = _VALUES[column], (column,)
    kind = draw(st.sampled_from(["compare", "compare", "compare", "in", "null", "text"]))
    found: Any
    if kind == "null":
        found = draw(st.sampled_from([spark.IsNull, spark.IsNotNull]))(attribute)
    elif kind == "in":
        nothing = st.none() if column == "key" else values
        found = spark.In(attribute, tuple(draw(st.lists(values | nothing, min_size=1, max_size=4))))
    elif kind == "text" and column in ("type", "source", "key", "correlation_id"):
        found = draw(st.sampled_from(_TEXT))(attribute, draw(values))
    else:
        found = draw(st.sampled_from(_COMPARISONS))(attribute, draw(values))
    return spark.Not(found) if draw(st.sampled_from([False, False, False, True])) else found
