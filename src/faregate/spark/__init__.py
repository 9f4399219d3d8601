"""Faregate on Spark: the source and sink `format("faregate")`.

    import faregate as fg

    fg.spark.register(spark)        # not needed where Spark discovers installed sources by itself
    spark.read.format("faregate").load("/data/journal")

This folder is the only importer of pyspark. Without it, importing this package fails with a sentence that names the
extra. What runs in executors (`reading`, `sealing`, `staging`) needs nothing but the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from faregate.ports.extras import needs_extra

with needs_extra("spark", "Spark"):
    from faregate.spark.source import FaregateSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from faregate.spark.audit_job import audit
    from faregate.spark.drain_job import drain, letters
    from faregate.spark.jobs_settled import settlements
    from faregate.spark.jobs_store import store_table
    from faregate.spark.rates_job import rates
    from faregate.spark.replay_job import replay
    from faregate.spark.run_node import Run, run
    from faregate.spark.run_progress import RunProgress

__all__ = [
    "FaregateSource",
    "Run",
    "RunProgress",
    "audit",
    "drain",
    "letters",
    "rates",
    "register",
    "replay",
    "run",
    "settlements",
    "store_table",
]

_JOBS = {
    "Run": "faregate.spark.run_node",
    "RunProgress": "faregate.spark.run_progress",
    "audit": "faregate.spark.audit_job",
    "drain": "faregate.spark.drain_job",
    "letters": "faregate.spark.drain_job",
    "rates": "faregate.spark.rates_job",
    "replay": "faregate.spark.replay_job",
    "run": "faregate.spark.run_node",
    "settlements": "faregate.spark.jobs_settled",
    "store_table": "faregate.spark.jobs_store",
}
"""Loaded on first use: a worker that only reads messages does not pay for them."""


def __getattr__(name: str) -> Any:
    if name in _JOBS:
        with needs_extra("spark", f"fg.spark.{name}"):
            return getattr(import_module(_JOBS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(spark: "SparkSession") -> None:
    """Make `format("faregate")` known to this session; once is enough, more often does no harm."""
    spark.dataSource.register(FaregateSource)
