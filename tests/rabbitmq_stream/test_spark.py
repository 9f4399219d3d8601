"""Spark on a stream of a real broker: executors read it over the network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from faregate.message import Envelope
from faregate.ports.schemes import open_log
from tests.presence import address
from tests.rabbitmq_stream.streams import new_stream

pytestmark = [pytest.mark.services, pytest.mark.full]


@pytest.fixture
def stream() -> Iterator[str]:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        yield url


def noted(first: int, count: int) -> list[Envelope]:
    return [
        Envelope(f"p{number}", "Noted" if number % 2 else "Other", source="shop", body=b"%d" % number)
        for number in range(first, first + count)
    ]


def test_a_stream_is_rows(spark: SparkSession, stream: str) -> None:
    log = open_log(stream)
    for first in range(0, 1000, 100):
        log.append(noted(first, 100))
    read = spark.read.format("faregate").option("types", "Noted").option("startingOffsets", "200")
    frame = read.option("minPartitions", "3").load(stream)
    assert frame.rdd.getNumPartitions() == 3
    found = sorted((row.offset, row.publication_id, row.body) for row in frame.collect())
    assert found == [(n, f"p{n}", b"%d" % n) for n in range(200, 1000) if n % 2]


def test_a_query_goes_on_where_it_was(spark: SparkSession, stream: str, tmp_path: Path) -> None:
    log = open_log(stream)
    seen: list[str] = []

    def run() -> None:
        read = spark.readStream.format("faregate").option("maxMessagesPerTrigger", 40).option("readerName", "query")
        query = (
            read.option("url", stream).load()
            .writeStream.foreachBatch(lambda batch, number: seen.extend(row.publication_id for row in batch.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()

    log.append(noted(0, 100))
    run()
    assert sorted(seen) == sorted(f"p{n}" for n in range(100))
    log.append(noted(100, 30))
    run()
    assert sorted(seen) == sorted(f"p{n}" for n in range(130)), "a restart lost or repeated messages"
    [reader] = log.reader_offsets()
    assert reader.name == "query" and 0 < reader.offset <= 130


def test_what_is_wrong_with_a_stream_can_be_read_in_what_spark_raises(spark: SparkSession, stream: str) -> None:
    with pytest.raises(AnalysisException, match=r"StreamNotFound: there is no stream .*-not at"):
        spark.read.format("faregate").load(f"{stream}-not")
