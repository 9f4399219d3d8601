"""Faregate on Spark: the source and sink `format("faregate")`.

    import faregate as fg

    fg.spark.register(spark)        # not needed where Spark discovers installed sources by itself
    spark.read.format("faregate").load("/data/journal")

This folder is the only importer of pyspark. Without it, importing this package fails with a sentence that names the
extra. What runs in executors needs this package alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from faregate.ports.extras import needs_extra

with needs_extra("spark", "Spark"):
    from faregate.spark.format import FaregateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from faregate.spark.jobs.audit import audit
    from faregate.spark.jobs.drain import drain, letters
    from faregate.spark.jobs.rates import rates
    from faregate.spark.jobs.replay import replay
    from faregate.spark.jobs.settlements import settlements
    from faregate.spark.jobs.stores import store_table
    from faregate.spark.progress import ProgressListener, StreamProgress
    from faregate.spark.runs.progress import RunProgress
    from faregate.spark.runs.run import Run, run
    from faregate.spark.source.messages import messages
    from faregate.spark.typed.read import read, read_stream

__all__ = [
    "FaregateSource",
    "ProgressListener",
    "Run",
    "RunProgress",
    "StreamProgress",
    "audit",
    "drain",
    "letters",
    "messages",
    "rates",
    "read",
    "read_stream",
    "register",
    "replay",
    "run",
    "settlements",
    "store_table",
]

_JOBS = {
    "ProgressListener": "faregate.spark.progress",
    "Run": "faregate.spark.runs.run",
    "RunProgress": "faregate.spark.runs.progress",
    "StreamProgress": "faregate.spark.progress",
    "audit": "faregate.spark.jobs.audit",
    "drain": "faregate.spark.jobs.drain",
    "letters": "faregate.spark.jobs.drain",
    "messages": "faregate.spark.source.messages",
    "rates": "faregate.spark.jobs.rates",
    "read": "faregate.spark.typed.read",
    "read_stream": "faregate.spark.typed.read",
    "replay": "faregate.spark.jobs.replay",
    "run": "faregate.spark.runs.run",
    "settlements": "faregate.spark.jobs.settlements",
    "store_table": "faregate.spark.jobs.stores",
}
"""Loaded on first use: a worker that only reads messages does not pay for them."""


if not TYPE_CHECKING:  # else every misspelled name would pass as Any

    def __getattr__(name: str) -> Any:
        if name in _JOBS:
            with needs_extra("spark", f"fg.spark.{name}"):
                return getattr(import_module(_JOBS[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_registered: "WeakSet[SparkSession]" = WeakSet()


def register(spark: "SparkSession") -> None:
    """Make `format("faregate")` known to this session; once is enough, more often does no harm."""
    if spark not in _registered:  # Spark warns of the second time
        spark.dataSource.register(FaregateSource)
        _registered.add(spark)
