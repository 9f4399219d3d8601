"""The order of commits as the audit judges it, compared with a check of one line after the other; and verdicts, which
are numbers in Spark and names here."""

import random
from collections import Counter
from itertools import groupby

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from faregate.ports.log import OUTCOME_NAMES
from faregate.spark.jobs import audit, audit_evidence
from faregate.spark.jobs.audit_verdicts import CLASSES, FLAGS, SIGNS, class_of, is_of_class, is_wrong, told, verdict
from faregate.spark.jobs.deliveries import PASSED, UNSETTLED
from faregate.spark.jobs.settlements import batch_of, by_task
from faregate.spark.source.reading import BATCH_ROWS, together

LINES = 300
Message = tuple[int, int, int | None, bool]
"""Line, when it was written, its position, and whether it has no order."""
_SCHEMA = "node int, line long, written long, position long, free boolean, disorder boolean, overtaken long"


def random_lines(seed: int) -> list[Message]:
    """Some in order, some nearly, some not at all; several of one transaction, and some without a position."""
    draw = random.Random(seed)
    found: list[Message] = []
    for line in range(LINES):
        positions: list[int | None] = sorted(draw.sample(range(1000), draw.randint(1, 12)))
        for _ in range(draw.choice((0, 0, 1, 2, 20))):
            one, other = (draw.randrange(len(positions)) for _ in range(2))
            positions[one], positions[other] = positions[other], positions[one]
        if draw.random() < 0.2:
            positions.insert(draw.randrange(len(positions) + 1), None)
        written, free = 0, draw.random() < 0.1
        for position in positions:
            written += draw.choice((0, 1, 1, 5))
            found.append((line, written, position, free))
    draw.shuffle(found)
    return found


def stretches(messages: list[Message]) -> dict[tuple[int, int | None], int]:
    """By line and position, the first message of each stretch that is out of order, and the lowest position behind
    it."""
    found = {}
    by_line = sorted(messages, key=lambda each: (each[0], each[1], -1 if each[2] is None else each[2]))
    for line, group in groupby(by_line, key=lambda each: each[0]):
        members = list(group)
        positions = [position for _, _, position, free in members if position is not None and not free]
        for place, position in enumerate(positions):
            before, lowest = max(positions[:place], default=-1), min(positions[place:])
            if before < lowest < position:
                found[line, position] = lowest
    return found


def test_a_late_message_at_the_position_of_another_is_out_of_order(spark: SparkSession) -> None:
    places = [(0, 7, written, position, False, False, None) for written, position in ((1, 10), (2, 20), (3, 10))]
    rows = spark.createDataFrame(places, _SCHEMA)
    assert audit._late(rows).where("late").count() == 1
    assert audit._stretches(audit._disorder(rows)) == {0: 1}


@pytest.mark.parametrize("seed", range(3))
def test_each_stretch_out_of_order_is_found_once_and_none_is_where_nobody_is_late(
    spark: SparkSession, seed: int
) -> None:
    messages = random_lines(seed)
    wanted = stretches(messages)
    assert 50 < len(wanted) < len(messages) / 3
    rows = spark.createDataFrame([(each[0] % 3, *each, False, None) for each in messages], _SCHEMA)
    found = audit._disorder(rows).where("disorder").collect()
    assert {(each.line, each.position): each.overtaken for each in found} == wanted
    assert len(found) == len(wanted)
    assert audit._stretches(audit._disorder(rows)) == Counter(line % 3 for line, _ in wanted)
    late = {each.line for each in audit._late(rows).where("late").select("line").distinct().collect()}
    assert late == {line for line, _ in wanted}


def test_a_verdict_says_in_python_what_it_was_made_of_in_spark(spark: SparkSession) -> None:
    draw = random.Random(7)
    given = [
        (number % len(CLASSES), *(draw.choice((True, False, None)) for _ in SIGNS))
        for number in range(5 * len(CLASSES))
    ]
    rows = spark.createDataFrame(given, ", ".join(("class int", *(f"{sign} boolean" for sign in SIGNS))))
    number = verdict(F.col("class"), {sign: F.col(sign) for sign in SIGNS})
    found = rows.select("*", number.alias("verdict")).select(
        "*", is_wrong(F.col("verdict")).alias("wrong"), is_of_class(F.col("verdict"), "dead", "parked").alias("put_off")
    )
    for row in found.collect():
        name = CLASSES[row["class"]]
        assert told(row.verdict) == (name, {sign: bool(row[sign]) for sign in SIGNS})
        assert row.wrong is any(row[flag] for flag in FLAGS)
        assert row.put_off is (name in ("dead", "parked"))
    assert rows.where(F.col("class") == class_of("handled")).count() == 5
    for odd in ({}, {"unheard_of": F.lit(True)}):
        with pytest.raises(KeyError):
            verdict(F.col("class"), {**{sign: F.col(sign) for sign in SIGNS[1:]}, **odd})


def test_every_kind_of_evidence_is_a_bit_of_a_long() -> None:
    kinds = [value for name, value in vars(audit_evidence).items() if name.isupper() and isinstance(value, int)]
    kinds += [*OUTCOME_NAMES, PASSED, UNSETTLED]
    assert len(kinds) > 15 and max(kinds) < 63


@pytest.mark.parametrize(("each", "tasks"), [(1, 9), (4, 3), (20, 1)])
def test_a_task_reads_so_many_items_one_after_the_other(spark: SparkSession, each: int, tasks: int) -> None:
    def read(item: int):  # type: ignore[no-untyped-def]
        for piece in range(3):
            yield batch_of("item int, piece int", 2, {"item": [item] * 2, "piece": [piece] * 2})

    rows = by_task(spark, range(9), read, "item int, piece int", each)
    found = rows.withColumn("task", F.spark_partition_id()).collect()
    assert [(row.item, row.piece) for row in found] == [
        (item, piece) for item in range(9) for piece in (0, 0, 1, 1, 2, 2)
    ]
    assert len({row.task for row in found}) == tasks


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((), []),
        ((0,), []),
        ((0, 0), []),
        ((0, 0, BATCH_ROWS + 1), [BATCH_ROWS + 1]),
        ((2, 0, 3), [5]),
        ((BATCH_ROWS, 0, 1), [BATCH_ROWS, 1]),
    ],
)
def test_small_batches_are_put_together_and_empty_ones_left_out(sizes: tuple[int, ...], wanted: list[int]) -> None:
    batches = [batch_of("n int", size, {"n": range(size)}) for size in sizes]
    found = list(together(iter(batches)))
    assert [batch.num_rows for batch in found] == wanted
    rows = [value for batch in found for value in batch.column(0).to_pylist()]
    assert rows == [value for size in sizes for value in range(size)]
