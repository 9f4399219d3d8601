"""Run by test_connect.py in a process of its own: a Connect session cannot live beside the classic one.

python connect_session.py FOLDER        FOLDER/from is a journal with messages, FOLDER/to one without
"""

import sys
from pathlib import Path

from pyspark.sql import SparkSession

import faregate as fg


class Noted(fg.Event):
    text: int  # as JSON it is a text: no row of it can be decoded


class Wanted(fg.Event, wire="Noted"):
    text: str
    more: tuple[int, ...] = (17,)


reader = fg.Node("reader")


@reader.on(Wanted, source="author")
async def read(noted: Wanted) -> None:
    pass


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
    typed = fg.spark.read(spark, folder / "from", Wanted)
    print("typed", typed.where("_error is null and more[0] = 17").selectExpr("sum(int(text))").first()[0])
    print("wrong", fg.spark.read(spark, folder / "from", Noted).where("_error is not null and text is null").count())
    rows = (
        fg.spark.read_stream(spark, folder / "from", Wanted)
        .writeStream.format("memory")
        .queryName("typed")
        .trigger(availableNow=True)
        .start()
    )
    rows.awaitTermination(60)
    print("streamed", spark.table("typed").count())
    try:
        fg.spark.run(
            "tests.spark.connect_session:reader", spark, source=f"journal:{folder}/from", checkpoint=folder / "run"
        )
    except fg.ConfigurationError as exc:
        print("refused", exc)
    spark.stop()
