"""Run by test_connect.py in a process of its own: a Connect session cannot live beside the classic one.

python connect_session.py FOLDER        FOLDER/from is a journal with messages, FOLDER/to one without
"""

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import faregate as fg

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    assert type(spark).__module__.startswith("pyspark.sql.connect"), type(spark)
    discovered = spark.read.format("faregate").load(str(folder / "from")).count()
    fg.spark.register(spark)
    registered = spark.read.format("faregate").option("columns", "offset").load(str(folder / "from")).count()
    query = (
        spark.readStream.format("faregate")
        .option("columns", "type,source,body")
        .load(str(folder / "from"))
        .writeStream.format("faregate")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "to"))
    )
    query.awaitTermination(60)
    print("counted", discovered, registered)
    spark.stop()
