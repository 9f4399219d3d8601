"""A driver of its own that runs one node on Spark, and dies where it is told: `python -m tests.spark.matrix_driver`.

matrix_driver NODE LOG STORE CHECKPOINT DIE_AT [MASTER]; a STORE of "-" is none
"""

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.types import StructType

import faregate as fg
from faregate.broker.journal import commits
from faregate.ports import faults
from faregate.spark.runs import run as run_node
from faregate.spark.runs.driver import Driver
from faregate.spark.sink.writer import StreamWriter
from faregate.transports import journal_log
from faregate.transports.rabbitmq_log.exchange import Exchange
from faregate.transports.rabbitmq_stream.staging import Stage

POINTS = ("never", "after-offset-log", "after-handlers", "in-dispatch", "before-commit-log")
TOKEN_POINTS = ("tokens.registered", "tokens.created", "tokens.chosen", "tokens.deleted")
"""Fault points of the driver's own, with tokens in another database."""
SINK_POINTS = ("before-the-spool", "after-the-spool", "after-the-record")
_DRIVER = "MATRIX_DRIVER"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(function: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    def dying(*arguments: Any, **named: Any) -> Any:
        if before:
            die()
        function(*arguments, **named)
        die()

    return dying


def _die_at(point: str) -> Callable[[str], Awaitable[None]]:
    async def hook(name: str) -> None:
        if name == point:
            die()

    return hook


def prepare(point: str) -> None:
    if point == "after-offset-log":
        run_node.Run.handle_batch = _dying(run_node.Run.handle_batch, before=True)  # type: ignore[method-assign]
    elif point == "after-handlers":
        Driver.finish_batch = _dying(Driver.finish_batch, before=True)  # type: ignore[method-assign]
    elif point == "in-dispatch":
        journal_log.spool = _dying(journal_log.spool, before=False)  # type: ignore[attr-defined]
        Exchange.send = _dying(Exchange.send, before=False)  # type: ignore[method-assign]
    elif point in TOKEN_POINTS:
        faults.hook = _die_at(point)
    elif point == "before-commit-log":
        run_node.Run.handle_batch = _dying(run_node.Run.handle_batch, before=False)  # type: ignore[method-assign]


class DyingSource(fg.spark.FaregateSource):
    """Its sink dies inside the commit, and takes the driver along."""

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return DyingWriter(self._for_writing(), schema, overwrite)


class DyingWriter(StreamWriter):
    def commit(self, messages: Any, batchId: int) -> None:
        def end(*_: Any) -> None:
            os.killpg(int(os.environ[_DRIVER]), signal.SIGKILL)
            die()

        point = os.environ["MATRIX_SINK"]
        if point == "before-the-spool":
            commits.move_into_spool = end  # type: ignore[attr-defined]
            Exchange.send = end  # type: ignore[method-assign]
        elif point == "after-the-spool":
            commits.SinkCommits.add = end  # type: ignore[method-assign]
            send = Exchange.send
            Exchange.send = lambda *given: end(send(*given))  # type: ignore[method-assign]
        else:
            commits.collect_garbage = end  # type: ignore[attr-defined]
            commit = Stage.commit
            Stage.commit = lambda *given, **more: end(commit(*given, **more))  # type: ignore[method-assign]
        super().commit(messages, batchId)


def main() -> None:
    node, log, store, checkpoint, point, *rest = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ[_DRIVER], os.environ["MATRIX_SINK"] = str(os.getpid()), point
    spark = (
        SparkSession.builder.master(rest[0] if rest else "local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.speculation", os.environ.get("MATRIX_SPECULATION", "false"))
        .config("spark.locality.wait", "0s")  # or the second task of a stage waits for the host that has its input
        .config("spark.speculation.interval", "50ms")
        .config("spark.speculation.efficiency.enabled", "false")
        .config("spark.speculation.multiplier", "1.01")
        .config("spark.speculation.quantile", "0.1")
        .config("spark.speculation.minTaskRuntime", "10ms")
        .getOrCreate()
    )
    prepare(point)
    if point in SINK_POINTS:
        spark.dataSource.register(DyingSource)
        fg.spark._registered.add(spark)
    handle = fg.spark.run(
        f"tests.spark.run_shop:{node}",
        spark,
        source=log,
        store=None if store == "-" else store,
        tokens=os.environ.get("MATRIX_TOKENS"),
        checkpoint=checkpoint,
        max_messages_per_trigger=int(os.environ.get("MATRIX_AT_ONCE", "8")),
    )
    handle.await_termination()
    print("outcomes", dict(handle.outcomes))
    print("speculative attempts", *speculative_attempts(spark))
    spark.stop()


def speculative_attempts(spark: SparkSession) -> list[str]:
    """How each attempt ended that Spark started beside another of the same task."""
    kept = spark.sparkContext._jsc.sc().statusStore()
    stages = kept.stageList(None, False, False, getattr(kept, "stageList$default$4")(), None)
    found = []
    for number in range(stages.size()):
        stage = stages.apply(number)
        tasks = kept.taskList(stage.stageId(), stage.attemptId(), 1_000)
        found += [tasks.apply(at).status() for at in range(tasks.size()) if tasks.apply(at).speculative()]
    return found


if __name__ == "__main__":
    from tests.spark import matrix_driver  # under the name that workers import it by

    matrix_driver.main()
