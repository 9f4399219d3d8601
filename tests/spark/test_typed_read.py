"""`fg.spark.read` and `fg.spark.read_stream` on real sessions: batch, stream, restart, options, and a main program."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import faregate as fg
from faregate.errors import ConfigurationError, InvalidOption, UnknownMessage
from faregate.message import Envelope
from tests.spark.rig import append, empty_journal
from tests.spark.typed_messages import VALUES, Everything, Placed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.services

BAD = 13


def order(number: int) -> Envelope:
    body = f'{{"order_id":"{number}","total":{number}}}' if number != BAD else "{"
    return Envelope(f"p{number}", type="OrderPlaced", source="shop", key=f"{number}", body=body.encode())


def orders(path: Path, numbers: range) -> Path:
    """A journal of orders, each behind a message of another type."""
    rows = [(Envelope(f"o{n}", type="Other", source="shop", body=b"{}"), order(n)) for n in numbers]
    append(path, [each for pair in rows for each in pair], per_frame=7)
    return path


def test_a_batch_has_the_messages_of_the_class_with_their_types(spark: "SparkSession", tmp_path: Path) -> None:
    frame = fg.spark.read(spark, orders(tmp_path / "log", range(50)), Placed)
    good = frame.where("_error is null")
    assert good.selectExpr("sum(total)", "max(_message.offset)", "count(distinct currency)").first() == (
        sum(range(50)) - BAD,
        99,
        1,
    )
    assert good.where("exists(lines, each -> each.count > 1)").count() == 0
    [bad] = frame.where("_error is not null").collect()
    assert bad["order_id"] is None and bad["_message"]["key"] == f"{BAD}"
    assert bytes(bad["_error"]["body"]) == b"{" and "truncated" in bad["_error"]["reason"]


class Pay(fg.Event, wire="Pay"):
    amount: int


class PayCommand(fg.Command, wire="Pay"):
    amount: int


@dataclass
class Paid:
    """Nobody says what it is."""

    amount: int


def test_events_and_commands_of_one_name_are_read_by_their_own_classes(spark: "SparkSession", tmp_path: Path) -> None:
    events = [Envelope(f"e{type}", type=type, source="shop", body=b'{"amount":1}') for type in ("Pay", "Paid")]
    commands = [
        Envelope(f"c{type}", type=type, source="shop", kind="command", destination="till", body=b'{"amount":2}')
        for type in ("Pay", "Paid")
    ]
    append(tmp_path / "log", [*events, *commands])

    def amounts(cls: type) -> list[int]:
        return [row["amount"] for row in fg.spark.read(spark, tmp_path / "log", cls).collect()]

    assert (amounts(Pay), amounts(PayCommand)) == ([1], [2])
    for _ in range(2):
        assert sorted(amounts(Paid)) == [1, 2]


def test_every_type_arrives_in_spark(spark: "SparkSession", tmp_path: Path) -> None:
    import msgspec

    body = msgspec.json.encode(VALUES)
    append(tmp_path / "log", [Envelope("p", type="Everything", source="shop", body=body)])
    frame = fg.spark.read(spark, f"journal:{tmp_path}/log", Everything)
    [row] = frame.collect()
    assert row["_error"] is None
    assert (row["whole"], row["price"], row["wait"]) == (VALUES.whole, VALUES.price, VALUES.wait)
    assert row["by_name"]["a"]["sku"] == "a" and row["pair"]["_2"] == "one" and row["local"] == VALUES.local
    assert frame.where("moment = timestamp '2026-11-17 08:00:00.123456Z'").count() == 1
    assert frame.schema == fg.spark.read_stream(spark, tmp_path / "log", Everything).schema


def test_options_are_those_of_the_source(spark: "SparkSession", tmp_path: Path) -> None:
    path = orders(tmp_path / "log", range(20))
    part = fg.spark.read(spark, path, Placed, startingOffsets=10, endingOffsets="20", minPartitions=3)
    assert sorted(row["total"] for row in part.collect()) == [5, 6, 7, 8, 9]
    assert part.rdd.getNumPartitions() == 3
    assert fg.spark.read(spark, path, Placed, nodes="nobody").count() == 0
    assert fg.spark.read(spark, path, Placed, nodes=["shop", "nobody"], endingOffsets=None).count() == 20
    assert fg.spark.read(spark, path, Placed, max_message_bytes=1).where("_error is null").count() == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"columns": "offset"}, "select from the result"),
        ({"TYPES": "Other"}, "once for each class"),
        ({"startingOffset": 1}, "startingOffsets"),
        ({"nodes": [1]}, "option nodes is .1.: several are a list of texts"),
    ],
)
def test_an_option_that_chooses_rows_is_refused(
    spark: "SparkSession", tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises((InvalidOption, AnalysisException), match=words):
        fg.spark.read(spark, empty_journal(tmp_path / "log"), Placed, **given)
    with pytest.raises(ConfigurationError, match="max_message_bytes is a number of bytes"):
        fg.spark.read(spark, tmp_path / "log", Placed, max_message_bytes="1M")  # type: ignore[arg-type]
    with pytest.raises(UnknownMessage):
        fg.spark.read(spark, tmp_path / "log", int)


def test_a_stream_with_an_end_is_refused_by_the_call(spark: "SparkSession", tmp_path: Path) -> None:
    path = orders(tmp_path / "log", range(1))
    for given in ({"endingOffsets": 1}, {"endingtimestamp": "1"}):
        with pytest.raises(InvalidOption, match=r"option ending\w+ is for batch reads: a stream has no end"):
            fg.spark.read_stream(spark, path, Placed, **given)  # type: ignore[arg-type]


def test_several_journals_are_refused_with_what_to_do(spark: "SparkSession", tmp_path: Path) -> None:
    for name in ("a", "b"):
        orders(tmp_path / name, range(1))
    for several in (f"{tmp_path}/*", f"{tmp_path}/a,{tmp_path}/b", [tmp_path / "a", f"journal:{tmp_path}/b"]):
        with pytest.raises(InvalidOption, match=r"fg\.spark\.read reads one journal: .* union"):
            fg.spark.read(spark, several, Placed)  # type: ignore[arg-type]  # a list


def test_a_stream_has_every_message_once_across_restarts(spark: "SparkSession", tmp_path: Path) -> None:
    path = orders(tmp_path / "log", range(20))
    seen: list[tuple[int, int | None, bool]] = []

    def keep(batch: "DataFrame", number: int) -> None:
        seen.extend((row["_message"]["offset"], row["total"], row["_error"] is None) for row in batch.collect())

    def run() -> None:
        stream = fg.spark.read_stream(spark, path, Placed, maxMessagesPerTrigger=11)
        query = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query.trigger(availableNow=True).start().awaitTermination()

    run()
    orders(path, range(20, 30))
    run()
    assert sorted(seen) == [(2 * n + 1, None if n == BAD else n, n != BAD) for n in range(30)]


PROGRAM = """
import sys
from decimal import Decimal
from enum import Enum

import msgspec
from pyspark.sql import SparkSession

import faregate as fg


class Currency(Enum):
    EUR = "EUR"


class Part(msgspec.Struct, frozen=True):
    sku: str = "none"


class Order(fg.Event, wire="OrderPlaced"):
    order_id: str
    total: Decimal
    currency: Currency = Currency.EUR
    part: Part = Part()


spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
rows = fg.spark.read(spark, sys.argv[1], Order).where("_error is null").collect()
print("found", len(rows), sum(row.total for row in rows), {(row.currency, row.part.sku) for row in rows})
"""


@pytest.mark.full
def test_a_class_of_the_main_program_is_read(tmp_path: Path) -> None:
    orders(tmp_path / "log", range(10))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "log")],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "found 10 45.000000000000000000 {('EUR', 'none')}" in done.stdout
