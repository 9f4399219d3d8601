"""What the audit finds of a message, as one number: what became of it, and signs that stand for more.

Millions of messages travel through Spark with this number and are counted by it; names come back on the driver.
"""

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F

FLAGS = ("double", "ghost", "not_sent", "sent_other", "altered", "unpublished")
"""What may be wrong with a message, whatever became of it. (Order is found later: `disorder`.)"""
SIGNS = (*FLAGS, "again", "uncounted", "with_effects", "in_ledger")
CLASSES = (
    *("beyond", "handled", "effectless", "unrecorded", "unrecorded_bare", "skipped", "filtered", "dead", "no_letter"),
    *("parked", "in_flight", "trusted", "passed", "passed_bare"),
)
_CLASS_BITS = 8
_CLASS = (1 << _CLASS_BITS) - 1
_BIT = {sign: 1 << _CLASS_BITS + place for place, sign in enumerate(SIGNS)}


def class_of(name: str) -> Column:
    return F.lit(CLASSES.index(name))


def verdict(what: Column, signs: Mapping[str, Column]) -> Column:
    """Of a class and of all signs, no more and no fewer; a sign that is null is not there."""
    for sign in {**_BIT, **signs}:
        what = what + F.when(signs[sign], _BIT[sign]).otherwise(0)
    return what


def is_of_class(number: Column, *names: str) -> Column:
    """Whether a verdict, or a class, is one of these."""
    return number.bitwiseAND(_CLASS).isin(*map(CLASSES.index, names))


def is_wrong(number: Column) -> Column:
    """Whether it has one of the `FLAGS`."""
    return number.bitwiseAND(sum(_BIT[flag] for flag in FLAGS)) != 0


def told(number: int) -> tuple[str, dict[str, bool]]:
    """Its class, and each sign with whether it is there."""
    return CLASSES[number & _CLASS], {sign: bool(number & bit) for sign, bit in _BIT.items()}
