"""Who waited how long for the charge: a streaming join of two types of messages, each order in it once.

    python -m examples.analysis.payments JOURNAL [CHECKPOINT]

Rules kept here:
- Two streams of one journal, `OrderPlaced` and `CardCharged`, joined by what every message of an order shares: its
  correlation id. A charge comes within an hour of its order, or the order is dropped here; so the state that Spark
  keeps is bounded, however long this runs.
- The output goes to Parquet, which Spark's file sink writes once for each batch: a restart neither loses nor repeats.
"""

import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import faregate as fg

LATEST = "1 hour"


def stream(spark: SparkSession, journal: str | Path, type: str, fields: str) -> DataFrame:
    """The messages of one type as they come, the body as a struct."""
    return (
        spark.readStream.format("faregate")
        .option("types", type)
        .option("columns", "type,sent_at,correlation_id,body")
        .option("maxMessagesPerTrigger", 20_000)
        .load(str(journal))
        .select(
            F.col("correlation_id"),
            F.col("sent_at"),
            F.from_json(F.col("body").cast("string"), fields).alias("body"),
        )
    )


def waits(spark: SparkSession, journal: str | Path) -> DataFrame:
    """A row for each charged order: order_id, customer, amount, placed_at, charged_at, seconds."""
    fg.spark.register(spark)
    orders = (
        stream(spark, journal, "OrderPlaced", "order_id string, customer string")
        .select("correlation_id", F.col("sent_at").alias("placed_at"), "body.order_id", "body.customer")
        .withWatermark("placed_at", LATEST)
    )
    charges = (
        stream(spark, journal, "CardCharged", "amount long")
        .select(F.col("correlation_id").alias("charge_of"), F.col("sent_at").alias("charged_at"), "body.amount")
        .withWatermark("charged_at", LATEST)
    )
    in_time = F.expr(f"charged_at >= placed_at and charged_at <= placed_at + interval {LATEST}")
    joined = orders.join(charges, (F.col("correlation_id") == F.col("charge_of")) & in_time)
    seconds = (F.unix_micros("charged_at") - F.unix_micros("placed_at")) / 1e6
    return joined.select("order_id", "customer", "amount", "placed_at", "charged_at", seconds.alias("seconds"))


def write_waits(spark: SparkSession, journal: str | Path, to: str | Path) -> None:
    """Bring the table in the folder `to` up to date with the journal. Call it again when there is more."""
    (
        waits(spark, journal)
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{to}/checkpoint")
        .trigger(availableNow=True)
        .start(f"{to}/waits")
        .awaitTermination()
    )


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers need Faregate, too
    # The default of 200 partitions is 800 state stores for this join; a machine needs a few.
    session = SparkSession.builder.appName("payments").config("spark.sql.shuffle.partitions", "4").getOrCreate()
    folder = sys.argv[2] if len(sys.argv) > 2 else "./payments-data"
    write_waits(session, sys.argv[1], folder)
    session.read.parquet(f"{folder}/waits").orderBy(F.desc("seconds")).show(20, truncate=False)
