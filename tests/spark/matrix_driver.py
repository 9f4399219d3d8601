"""A driver of its own that runs one node on Spark, and dies where it is told: `python -m tests.spark.matrix_driver`.

matrix_driver NODE JOURNAL STORE CHECKPOINT DIE_AT [MASTER]
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import faregate as fg
from faregate.spark import run_node, run_outbox
from faregate.spark.run_driver import Driver

POINTS = ("never", "after-offset-log", "after-handlers", "in-dispatch", "before-commit-log")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(function: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    def dying(*arguments: Any, **named: Any) -> Any:
        if before:
            die()
        function(*arguments, **named)
        die()

    return dying


def prepare(point: str) -> None:
    if point == "after-offset-log":
        run_node.Run.handle_batch = _dying(run_node.Run.handle_batch, before=True)  # type: ignore[method-assign]
    elif point == "after-handlers":
        Driver.finish_batch = _dying(Driver.finish_batch, before=True)  # type: ignore[method-assign]
    elif point == "in-dispatch":
        run_outbox.spool = _dying(run_outbox.spool, before=False)
    elif point == "before-commit-log":
        run_node.Run.handle_batch = _dying(run_node.Run.handle_batch, before=False)  # type: ignore[method-assign]


def main() -> None:
    node, journal, store, checkpoint, point, *rest = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master(rest[0] if rest else "local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.speculation", os.environ.get("MATRIX_SPECULATION", "false"))
        .config("spark.speculation.interval", "50ms")
        .config("spark.speculation.multiplier", "1.01")
        .config("spark.speculation.quantile", "0.1")
        .config("spark.speculation.minTaskRuntime", "10ms")
        .getOrCreate()
    )
    prepare(point)
    handle = fg.spark.run(
        f"tests.spark.run_shop:{node}",
        spark,
        source=journal,
        store=store,
        checkpoint=checkpoint,
        max_messages_per_trigger=int(os.environ.get("MATRIX_AT_ONCE", "8")),
    )
    handle.await_termination()
    print("outcomes", dict(handle.outcomes))
    spark.stop()


if __name__ == "__main__":
    main()
