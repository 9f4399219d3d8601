"""Dead letters to Parquet, for analysts: a table that grows with each drain, and never has the same thing twice.

    PATH/node=billing/date=2026-11-15/part-….parquet        date: of the last failure, UTC, whatever the session's zone

Rules kept here:
- Files are only added. A drain adds a row for each letter that is new, or not as it was when it was drained last
  (another copy, a replay, a decision); repeating it, also after a crash, adds nothing that is there.
- A letter's latest row, by `drained_at`, is what it is now: `letters(spark, path)` gives these alone.
- Stores are only read; what became of a letter is decided with `faregate dead`.
- A body that cannot be unpacked, or would be too large, is null; the letter is there all the same.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from faregate.codec.compression import GZIP, decompress
from faregate.errors import ConfigurationError, Undecodable
from faregate.message import Envelope
from faregate.spark.jobs.stores import StoreUrls, store_table

_LETTER = ["node", "message_id"]
_STATE = [*_LETTER, "status", "copies", "replays", "last_failed"]
_TIMES = {"first_failed_at": "first_failed", "last_failed_at": "last_failed", "changed_at": "changed"}
_OPENED = "kind string, destination string, sent double, content_type string, body string, headers map<string,string>"

_BODY_LIMIT = 16 * 1024 * 1024
_HEADERS = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True)
class Drained:
    """What a drain did."""

    counts: dict[str, int]
    """found: letters in the stores; new, changed: rows added; unchanged."""
    letters: DataFrame
    """All letters that were ever drained there, each as it was drained last."""


def drain(spark: SparkSession, *, store: StoreUrls, to: str | Path) -> Drained:
    """Add the dead letters of a store, or of several, to the table in the folder `to`. Raises `ConfigurationError`."""
    if store is None:
        raise ConfigurationError("dead letters are in stores: name one, sqlite:PATH or postgresql://…")
    path = str(to)
    found = _opened(store_table(spark, store, "dead"))
    for seconds, name in _TIMES.items():
        found = found.withColumn(name, F.timestamp_micros(F.round(F.col(seconds) * 1e6).cast("long"))).drop(seconds)
    found = found.withColumn("sent", F.timestamp_micros(F.round(F.col("sent") * 1e6).cast("long")))
    found = found.withColumn("drained_at", F.timestamp_seconds(F.lit(time.time())))
    # Stores change while this runs: what is counted must be what is written.
    found = found.localCheckpoint() if hasattr(spark, "sparkContext") else found.cache()
    known = _there(spark, path)
    fresh = unseen = found
    if known is not None:
        # What there is already may be replaced by nothing while it is read: it is only added to.
        fresh = found.join(known.select(*_STATE).dropDuplicates(), _STATE, "left_anti")
        unseen = fresh.join(known.select(*_LETTER).dropDuplicates(), _LETTER, "left_anti")
    total, added, new = found.count(), fresh.count(), unseen.count()
    if added:
        dated = _dated(fresh)
        dated.repartition("node", "date").write.mode("append").partitionBy("node", "date").parquet(path)
    counts = {"found": total, "new": new, "changed": added - new, "unchanged": total - added}
    # Before the first letter no file has the columns.
    return Drained(counts, letters(spark, path) if known is not None or added else _dated(found))


def letters(spark: SparkSession, path: str | Path) -> DataFrame:
    """The dead letters drained to a folder, each as it was drained last."""
    known = _there(spark, str(path))
    if known is None:
        return spark.createDataFrame([], f"node string, message_id string, status string, {_OPENED}")
    latest = Window.partitionBy(*_LETTER).orderBy(F.desc("drained_at"))
    return known.withColumn("place", F.row_number().over(latest)).where("place = 1").drop("place")


def _dated(letters: DataFrame) -> DataFrame:
    days = F.floor(F.unix_micros("last_failed") / F.lit(86_400_000_000)).cast("int")
    return letters.withColumn("date", F.date_from_unix_date(days))


def _there(spark: SparkSession, path: str) -> DataFrame | None:
    if not any(Path(path).glob("node=*/date=*/*.parquet")):
        return None
    # Spark guesses the types of folders' names unless it is told: a node "01" would be the number 1.
    schema = spark.read.option("basePath", path).parquet(path).schema
    fields = [StructField("node", StringType()) if field.name == "node" else field for field in schema]
    return spark.read.option("basePath", path).schema(StructType(fields)).parquet(path)


def _opened(frame: DataFrame) -> DataFrame:
    """The envelope's parts that people look at, in its place."""
    schema = ", ".join(f"{name} {kind}" for name, kind in frame.dtypes if name != "envelope") + ", " + _OPENED

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        unpack = msgspec.msgpack.Decoder(Envelope).decode
        for batch in batches:
            envelopes = [unpack(each) for each in batch.column("envelope").to_pylist()]
            kept = batch.drop_columns(["envelope"])
            columns = {
                "kind": pa.array([each.kind for each in envelopes], pa.string()),
                "destination": pa.array([each.destination for each in envelopes], pa.string()),
                "sent": pa.array([each.sent_at or None for each in envelopes], pa.float64()),
                "content_type": pa.array([each.content_type for each in envelopes], pa.string()),
                "body": pa.array([_text(each) for each in envelopes], pa.string()),
                "headers": pa.array([tuple(each.headers.items()) for each in envelopes], _HEADERS),
            }
            arrays = [*kept.columns, *columns.values()]
            yield pa.RecordBatch.from_arrays(arrays, names=[*kept.schema.names, *columns])

    return frame.mapInArrow(run, schema)


def _text(envelope: Envelope) -> str | None:
    """The body, when it is text."""
    try:
        packed = envelope.content_encoding == GZIP
        return (decompress(envelope.body, GZIP, _BODY_LIMIT) if packed else envelope.body).decode()
    except (Undecodable, UnicodeDecodeError):
        return None
