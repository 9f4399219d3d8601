"""What Spark does in the demo: rates, drain and audit on the log and the stores that the workers left.

Everything here is the public `fg.spark`, on a session of two cores that ends with the demo.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .verdict import EFFECTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from .result import Result
    from .site import Site


def why_not() -> str | None:
    """Why Spark cannot be used here; None when it can."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed: pip install 'faregate[spark]'"
    java_home = os.environ.get("JAVA_HOME")
    if not (java_home and Path(java_home, "bin/java").exists()) and shutil.which("java") is None:
        return "there is no Java (17 or newer)"
    return None


@contextmanager
def session(folder: Path) -> "Iterator[SparkSession]":
    """A session that keeps its files in the folder, and is gone afterwards."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # or the workers are whatever python3 is on the PATH
    os.environ.setdefault("SPARK_LOCAL_DIRS", str(folder / "spark"))
    (folder / "log4j2.properties").write_text(_QUIET)
    from pyspark.sql import SparkSession

    with _errors_to(folder / "spark.log"):
        made = (
            SparkSession.builder.master("local[2,4]")
            .appName("faregate-demo")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config(
                "spark.driver.extraJavaOptions",
                " ".join([*_BRISK, f"-Dlog4j.configurationFile={folder}/log4j2.properties"]),
            )
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.codegen.wholeStage", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.adaptive.enabled", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )
    # pyspark's own handler talks to the JVM in the midst of whatever is said to it just then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield made
    finally:
        with suppress(Exception):  # an interrupted conversation with the JVM; it ends with this process anyway
            made.stop()


@contextmanager
def _errors_to(path: Path) -> Iterator[None]:
    """What is started meanwhile writes its errors to this file: the JVM greets with warnings that help nobody."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


_BRISK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xss4m")
"""A run of seconds gains nothing from a compiler that thinks long."""
_QUIET = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n
"""


def examine(result: "Result", site: "Site", folder: Path, most_findings: int) -> None:
    """Let Spark look at what the workers left, and put what it finds into the result."""
    import faregate as fg

    journal, store = site.log, site.stores
    effects = [f"{node}:{query}" for node, query in EFFECTS.items()]
    with session(folder) as spark:
        found = fg.spark.audit(spark, journal=journal, store=store, effects=effects, at_rest=True)
        result.judge = "Spark"
        result.audit_ok, result.audit_table = found.ok, [_lean(row, site) for row in found.table]
        result.audit_summary = _told(found.summary, found.notes)
        if not found.ok:
            result.findings = [row.asDict() for row in found.findings.limit(most_findings).collect()]
        windows = fg.spark.rates(spark, journal=journal, store=store, window="1s").collect()
        result.spark_tables["rates by Spark"] = busiest([row.asDict() for row in windows])
        drained = fg.spark.drain(spark, store=store, to=folder / "dead-letters")
        if drained.counts["found"]:
            rows = drained.letters.groupBy("reason", "node", "type").count().orderBy("reason").collect()
            result.spark_tables["dead letters drained to Parquet"] = [row.asDict() for row in rows]


_COLUMNS = ("node", "published", "handled", "duplicate", "dead", "in_flight", "missing", "double", "out_of_order")
"""What fits a table of 80 characters; what can only be 0 in this demo is left out."""


def _lean(row: dict[str, Any], site: "Site") -> dict[str, Any]:
    known = [name for name in _COLUMNS if name != "duplicate" or not site.keeps_copies]  # a stream settles nothing
    return {name: row[name] for name in known}


def _told(summary: dict[str, int], notes: list[str]) -> str:
    messages, wrong = f"{summary['published']:,} messages", summary["findings"]
    verdict = "every one handled or a dead letter, every effect once" if not wrong else f"{wrong:,} findings"
    return ". ".join([f"{messages}: {verdict}", *notes])


def busiest(windows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each node: how messages ended, the busiest second, the p50 of the usual and the p99 of the worst second."""
    nodes: dict[str, list[dict[str, Any]]] = {}
    for window in windows:
        nodes.setdefault(window["node"], []).append(window)
    table = []
    for node, found in sorted(nodes.items()):
        medians = sorted(window["p50"] for window in found if window["p50"] is not None)
        table.append(
            {
                "node": node,
                "ended": sum(window["ended"] for window in found),
                "duplicate": sum(window["duplicate"] for window in found),
                "redelivered": sum(window["redelivered"] for window in found),
                "dead": sum(window["dead"] for window in found),
                "peak/s": max(window["ended"] for window in found),
                "p50, s": medians[len(medians) // 2] if medians else None,
                "p99, s": max((window["p99"] for window in found if window["p99"] is not None), default=None),
            }
        )
    return table
