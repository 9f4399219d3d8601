"""Streams of typed messages, over archive and journal, and over several journals: a batch whose driver died before it
noted the end is read again, the same rows whatever has happened to the logs meanwhile, and then the rest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.child import Child
from tests.spark.stream_driver import STREAMS, Streamed, rows_of

pytestmark = pytest.mark.services
ROOT = Path(__file__).parents[2]
WAIT = 120


@pytest.fixture(params=STREAMS)
def streamed(request: pytest.FixtureRequest, tmp_path: Path) -> Streamed:
    made = STREAMS[request.param](tmp_path)
    made.make()
    return made


def check_again(spark: SparkSession, streamed: Streamed) -> None:
    """Restart: the last batch that was seen comes first, and in the end everything is there, nothing else twice."""
    before = streamed.seen()
    assert [batch for batch, _ in before] == list(range(len(before)))
    assert before[-1][1], "a batch of nothing shows nothing"
    assert streamed.start(spark).awaitTermination(WAIT), "the query did not end"
    again, *rest = streamed.seen()[len(before) :]
    assert again == before[-1]
    assert [batch for batch, _ in rest] == list(range(len(before), len(before) + len(rest))) and rest
    found = sorted(row for _, rows in [*before, *rest] for row in rows)
    assert found == rows_of(streamed.read(spark))
    assert len(found) == len(set(found)) == streamed.count


def test_a_batch_that_was_not_committed_is_read_again_the_same(spark: SparkSession, streamed: Streamed) -> None:
    assert streamed.start(spark).awaitTermination(WAIT), "the query did not end"
    last, _ = streamed.seen()[-1]
    assert last > 1
    streamed.forget_commit(last)
    streamed.go_on()
    check_again(spark, streamed)


@pytest.mark.full
def test_the_driver_is_killed_within_a_batch(spark: SparkSession, streamed: Streamed) -> None:
    command = [sys.executable, "-m", "tests.spark.stream_driver", streamed.kind, str(streamed.folder), "1"]
    with Child(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, said[-3000:]
    assert [batch for batch, _ in streamed.seen()] == [0, 1]
    assert not (streamed.checkpoint / "commits" / "1").exists()
    streamed.go_on()
    check_again(spark, streamed)
