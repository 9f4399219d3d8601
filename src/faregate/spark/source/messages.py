"""`fg.spark.messages`: the messages of a log as a DataFrame whose filters decide what is read of the log."""

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from faregate.spark import register
from faregate.spark.logs import options_of_all
from faregate.spark.options import Value, as_texts, parse_options
from faregate.spark.source.pushed import NO_OFFSET

SETTING = "spark.sql.python.filterPushdown.enabled"
"""Without it Spark refuses a source that asks for filters."""


def messages(spark: SparkSession, journal: str | Path | Sequence[str | Path], **options: Value) -> DataFrame:
    """The rows of `format("faregate")`, with its options for batch reads; a list where names are separated by commas.
    An option that is None is not set.

    Filters on offset, appended_at, type and source, and `=` and `in` on key and correlation_id, keep parts of the log
    from being read at all; those on other texts and times keep rows from Spark. The rows are always those of a full
    scan. Each call gives a DataFrame of its own: one that several queries use reads what any of them has asked for.

    Raises `InvalidOption`, `ConfigurationError`, and what Spark makes of `JournalNotFound`.
    """
    given = as_texts(options)
    place = options_of_all(journal)
    chosen = parse_options({**given, **place})
    chosen.refuse(["rows"], "is not for fg.spark.messages, whose rows are messages")
    columns = chosen.columns
    if columns and "offset" not in columns:
        given["columns"] = ",".join((*columns, "offset"))
    register(spark)
    spark.conf.set(SETTING, "true")
    read = spark.read.format("faregate").options(**given, **place, pushFilters=uuid4().hex).load()
    # Spark plans for each filter, and would use the plan of the query before for one without.
    filtered = read.filter(F.col("offset") > NO_OFFSET)
    return filtered.select(*columns) if columns else filtered
