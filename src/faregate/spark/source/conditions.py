"""What is looked for in a log: Spark's filters, and the options that choose messages, as conditions on its columns.

Rules kept here:
- Everything may let through too much, never too little: Spark asks its filters again of every row that it gets.
- A filter that is not understood (a column of another type, a value of a wrong one) is no condition.
- Null is as in SQL: a comparison with it is not true, nor is its opposite.
- Conditions are plain values. They travel to tasks, and are written down as JSON.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import datasource as spark

from faregate.ports.log import Stretch
from faregate.spark.schema import COLUMNS, stored

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_OF_VALUES: dict[str, Callable[[Any, tuple[Any, ...]], bool]] = {
    "in": lambda value, wanted: value in wanted,
    "<": lambda value, wanted: value < wanted[0],
    "<=": lambda value, wanted: value <= wanted[0],
    "starts": lambda value, wanted: value.startswith(wanted[0]),
    "ends": lambda value, wanted: value.endswith(wanted[0]),
    "contains": lambda value, wanted: wanted[0] in value,
}
"""Each test of a value that is not null. What is greater is the opposite of these."""
_OF_COLUMNS: dict[str, Callable[[Any, Any], Any]] = {
    "in": lambda column, wanted: pc.is_in(column, value_set=wanted),
    "<": lambda column, wanted: pc.less(column, wanted[0]),
    "<=": lambda column, wanted: pc.less_equal(column, wanted[0]),
    "starts": lambda column, wanted: pc.starts_with(column, wanted[0].as_py()),
    "ends": lambda column, wanted: pc.ends_with(column, wanted[0].as_py()),
    "contains": lambda column, wanted: pc.match_substring(column, wanted[0].as_py()),
}
"""The same of a column and an array."""


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """What a column of a message must be."""

    column: str
    """As the log names it."""
    test: str
    """One of those above, or `null`."""
    values: tuple[int | str, ...] = ()
    """Times are microseconds since the epoch."""
    negated: bool = False

    def takes(self, value: int | str | None) -> bool:
        """Whether a message with this value fits."""
        if value is None or self.test == "null":
            return self.test == "null" and (value is None) != self.negated
        return _OF_VALUES[self.test](value, self.values) != self.negated

    def may_be_between(self, low: int, high: int) -> bool:
        """Whether there may be a value that fits from one number up to the other, which is included."""
        if self.test == "in" and not self.negated:
            return any(isinstance(each, int) and low <= each <= high for each in self.values)
        # What is less, or greater, than something is so at one of the ends. What is not one of some may be anywhere.
        return (self.test == "in" and low < high) or self.takes(low) or self.takes(high)

    def may_be_in(self, stretch: Stretch) -> bool:
        """Whether a message that fits may be there, by what is known of it."""
        if self.column == "offset":
            return self.may_be_between(stretch.start, stretch.end - 1)
        if self.column == "time" and stretch.times is not None:
            return self.may_be_between(*stretch.times)
        known = {"type": stretch.types, "source": stretch.sources}.get(self.column)
        if known is not None:
            return any(map(self.takes, known))
        asked = {"key": stretch.keys, "correlation_id": stretch.correlations}.get(self.column)
        if asked is None or self.test != "in" or self.negated:
            return True
        return any(isinstance(each, str) and asked(each) for each in self.values)

    def rows(self, batch: Any) -> Any:
        """Of each row, whether it fits."""
        column = batch.column(self.column)
        if self.test == "null":
            return pc.is_valid(column) if self.negated else pc.is_null(column)
        found = _OF_COLUMNS[self.test](column, pa.array(self.values, column.type))
        return pc.and_kleene(pc.is_valid(column), pc.invert(found) if self.negated else found)


Wanted = tuple[tuple[Condition, ...], ...]
"""Messages for which all conditions of one of these hold."""
ALL: Wanted = ((),)


def may_be_in(wanted: Wanted, stretch: Stretch) -> bool:
    return any(all(each.may_be_in(stretch) for each in conditions) for conditions in wanted)


def fitting(wanted: Wanted, batch: Any) -> Any:
    """The rows that are wanted; the batch itself if all are."""
    if not all(wanted):
        return batch
    masks = (reduce(pc.and_, [each.rows(batch) for each in conditions]) for conditions in wanted)
    mask = reduce(pc.or_, masks)
    return batch if pc.all(mask).as_py() else batch.filter(mask)


def of_options(types: Sequence[str], nodes: Sequence[str]) -> tuple[Condition, ...]:
    """The messages of these types, published by these nodes; where none are named, of all."""
    named = (("type", types), ("source", nodes))
    return tuple(Condition(column, "in", tuple(values)) for column, values in named if values)


def of_filters(filters: Iterable[spark.Filter]) -> tuple[Condition, ...]:
    """All of these must hold, so one that is not understood is left out."""
    found = (_condition(each) for each in filters)
    return tuple(each for each in found if each is not None)


_TESTS: dict[type[spark.Filter], tuple[str, bool]] = {
    spark.EqualTo: ("in", False),
    spark.In: ("in", False),
    spark.LessThan: ("<", False),
    spark.LessThanOrEqual: ("<=", False),
    spark.GreaterThan: ("<=", True),
    spark.GreaterThanOrEqual: ("<", True),
    spark.StringStartsWith: ("starts", False),
    spark.StringEndsWith: ("ends", False),
    spark.StringContains: ("contains", False),
    spark.IsNull: ("null", False),
    spark.IsNotNull: ("null", True),
}
"""Each filter as a test, and whether as its opposite. `<=>`, which is about null too, is left to Spark."""


def _condition(given: Any) -> Condition | None:
    negated = isinstance(given, spark.Not)
    plain = given.child if negated else given
    test, opposite = _TESTS.get(type(plain), (None, False))
    if test is None or len(plain.attribute) != 1 or plain.attribute[0] not in COLUMNS:
        return None
    field = stored(plain.attribute[0])
    values = [] if test == "null" else list(plain.value) if isinstance(plain, spark.In) else [plain.value]
    wanted = [_plain(value, field.type) for value in values]
    if None in wanted:
        return None
    return Condition(field.name, test, tuple(wanted), negated != opposite)  # type: ignore[arg-type]


def _plain(value: Any, type: Any) -> int | str | None:
    """As the log has it in a column of that type; None: it cannot be compared with that."""
    if pa.types.is_string(type) and isinstance(value, str):
        return value
    if pa.types.is_int64(type) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if pa.types.is_timestamp(type) and isinstance(value, datetime) and value.tzinfo is not None:
        return (value - _EPOCH) // timedelta(microseconds=1)
    return None
