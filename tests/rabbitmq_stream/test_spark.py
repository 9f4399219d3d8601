"""Spark on a stream of a real broker: executors read it over the network."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

import faregate as fg
from faregate import ids
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.ports.schemes import open_log
from tests.presence import address
from tests.rabbitmq_stream.streams import new_stream
from tests.spark.jobs_rig import DEAD, HANDLED, ORDERS, SKIPPED, TWICE, World, build, glance

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


def test_rows_are_written_to_a_stream_once(spark: SparkSession, stream: str, tmp_path: Path) -> None:
    log = open_log(stream)
    rows = spark.range(100).selectExpr("'Noted' as type", "cast(id as string) as body", "cast(id as string) as key")
    rows.write.format("faregate").mode("append").option("url", stream).option("source", "shop").save()
    assert sorted(int(envelope.key) for _, envelope in log.envelopes()) == list(range(100))
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as copy:

        def run() -> None:
            read = spark.readStream.format("faregate").option("maxMessagesPerTrigger", 40).load(stream)
            query = (
                read.select("publication_id", "type", "body", "key").writeStream.format("faregate").option("url", copy)
                .option("source", "copier").option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True).start()
            )  # fmt: skip
            query.awaitTermination()

        run()
        commits = tmp_path / "checkpoint" / "commits"
        for each in commits.iterdir():
            if "2" in each.name:
                each.unlink()  # Spark died before it noted that the last batch was done
        run()
        found = [int(envelope.key) for _, envelope in open_log(copy).envelopes()]
        assert sorted(found) == list(range(100)), "a batch that came again was appended twice, or lost"


def deployment(stream: str, world: World) -> Any:
    """What a bus on RabbitMQ leaves: its messages in the stream, without recipients, and its subscriptions noted."""
    log, journal = open_log(stream), open_log(world.journal)
    topology = journal.topology()
    for queue in topology.queues:
        if queue.type is not None:
            [way] = topology.ways(queue.name)
            log.bind(Binding(queue.node, queue.type, queue.kind, queue.source, remembers=way))
    log.append([msgspec.structs.replace(each, recipients=()) for _, each in journal.envelopes()])
    return log


def test_an_audit_finds_what_a_stream_has_and_no_ledger_knows(spark: SparkSession, stream: str, tmp_path: Path) -> None:
    world = build(tmp_path)
    log = deployment(stream, world)
    found = fg.spark.audit(spark, journal=stream, store=world.store, at_rest=True)
    assert found.ok, found.summary
    assert found.summary["published"] == 2 * ORDERS, "billing and stock got each order"
    lost = Envelope(
        ids.root_id(), "OrderPlaced", "event", "shop", b'{"order_id":"x","customer":"c"}', sent_at=time.time()
    )
    log.append([lost])
    found = fg.spark.audit(spark, journal=stream, store=world.store, at_rest=True)
    assert not found.ok
    assert {row["publication_id"] for row in found.findings.collect()} == {lost.publication_id}


def test_rates_of_a_stream_come_from_the_ledgers(spark: SparkSession, stream: str, tmp_path: Path) -> None:
    world = build(tmp_path)
    deployment(stream, world)
    rows = fg.spark.rates(spark, journal=stream, store=world.store, window="1d").collect()
    ended = {row["node"]: (row["handled"], row["skipped"], row["duplicate"], row["dead"]) for row in rows}
    assert ended == {
        "billing": (HANDLED, len(SKIPPED), len(TWICE), len(DEAD)),
        "stock": (ORDERS, 0, len(TWICE), 0),
    }


def test_handlers_do_not_run_on_a_stream_alone(spark: SparkSession, stream: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="what a node sends would reach no queue"):
        fg.spark.run(glance, spark, source=stream, checkpoint=str(tmp_path / "c"))


def test_what_is_wrong_with_a_stream_can_be_read_in_what_spark_raises(spark: SparkSession, stream: str) -> None:
    with pytest.raises(AnalysisException, match=r"StreamNotFound: there is no stream .*-not at"):
        spark.read.format("faregate").load(f"{stream}-not")
