"""The shop's orders with Spark SQL: `python -m examples.analysis.orders JOURNAL`.

A notebook as a script: each `# %%` is a cell (editors show them so). It reads the journal beside the running shop and
changes nothing there.
"""

# %% A table of all messages ------------------------------------------------------------------------------------------
# One row a message, the body as it was encoded. Spark cannot tell a source which columns a query needs, so name them.

import os
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import faregate as fg


def read_messages(spark: SparkSession, journal: str | Path) -> None:
    """Make the view `messages`."""
    fg.spark.register(spark)
    columns = "offset,sent_at,type,correlation_id,body"
    spark.read.format("faregate").option("columns", columns).load(str(journal)).createOrReplaceTempView("messages")


# %% Bodies as columns ------------------------------------------------------------------------------------------------
# Everything that an order causes shares its correlation id: the whole life of an order is one `group by`. A body that
# cannot be read gives nulls; such an order is a dead letter of the shop, and a row here.

LIVES = """
create or replace temporary view orders as
select
    correlation_id,
    max(case when type = 'OrderPlaced' then order.order_id end) as order_id,
    max(case when type = 'OrderPlaced' then order.customer end) as customer,
    max(case when type = 'OrderPlaced' then order.total end) as total,
    min(case when type = 'OrderPlaced' then sent_at end) as placed_at,
    min(case when type = 'CardCharged' then sent_at end) as charged_at,
    min(case when type = 'OrderShipped' then sent_at end) as shipped_at
from (
    select *, from_json(cast(body as string), 'order_id string, customer string, total long') as order from messages
)
group by correlation_id
"""

# %% Questions --------------------------------------------------------------------------------------------------------

BEST_CUSTOMERS = """
select customer, count(*) as orders, sum(total) as spent
from orders where shipped_at is not null
group by customer order by spent desc, customer limit 10
"""

DURATIONS = """
select
    count(*) as shipped,
    round(percentile_approx(unix_micros(shipped_at) - unix_micros(placed_at), 0.5) / 1e6, 3) as p50_seconds,
    round(percentile_approx(unix_micros(shipped_at) - unix_micros(placed_at), 0.99) / 1e6, 3) as p99_seconds
from orders where shipped_at is not null
"""

NEVER_SHIPPED = """
select order_id, customer, total, placed_at
from orders where shipped_at is null order by placed_at, order_id
"""


def analyse(spark: SparkSession, journal: str | Path) -> dict[str, DataFrame]:
    """The answers, by name. Nothing is read before one of them is looked at."""
    read_messages(spark, journal)
    spark.sql(LIVES)
    return {
        "best customers": spark.sql(BEST_CUSTOMERS),
        "from placed to shipped": spark.sql(DURATIONS),
        "never shipped": spark.sql(NEVER_SHIPPED),
    }


# %% Run --------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers need Faregate, too
    session = SparkSession.builder.appName("orders").getOrCreate()
    for title, answer in analyse(session, sys.argv[1]).items():
        print(title)
        answer.show(truncate=False)
