"""The tables: every order as it was placed, what cannot be read, and what each customer has spent.

Each run of the pipeline reads what came to the journal since the last one: Spark keeps the offsets in the pipeline's
storage. Nothing is asked of the shop, and nothing is changed there.
"""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import faregate as fg


class OrderPlaced(fg.Event):
    """What the pipeline reads of an order; the shop's own class may have more."""

    order_id: str
    customer: str
    total: int


spark = SparkSession.active()
# Outside the functions: to read is to ask Spark for its schema, and in them Spark allows nothing that runs.
messages = fg.spark.read_stream(spark, str(spark.conf.get("spark.shop.journal")), OrderPlaced)


@dp.table
def orders() -> DataFrame:
    return messages.where("_error is null").select(
        "_message.offset", "_message.sent_at", "order_id", "customer", "total"
    )


@dp.table
def unreadable() -> DataFrame:
    return messages.where("_error is not null").select("_message.offset", "_error.reason", "_error.body")


@dp.materialized_view
def customers() -> DataFrame:
    spent = (F.count("*").alias("orders"), F.sum("total").alias("spent"))
    return spark.read.table("orders").groupBy("customer").agg(*spent)
