"""`format("faregate")`: what Spark asks for by name, and hands the options to.

Options are read, and the log is looked at, when the source is made: `load()` and `save()` fail at once with the
reason, not a job later.
"""

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from faregate.spark.logs import open_partitions
from faregate.spark.options import FOR_READING, FOR_WRITING, Options, parse_options
from faregate.spark.schema import check_schema, row_schema
from faregate.spark.sink.writer import BatchWriter, StreamWriter
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.stream_reader import StreamReader


class FaregateSource(DataSource):
    """Reads and writes the messages of a log. docs/spark/reading.md lists options and columns.

    Raises `InvalidOption`, `JournalNotFound`, `NotAJournal`, `JournalTooNew`.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = parse_options(options)
        self.schema()
        open_partitions(self._options)

    @classmethod
    def name(cls) -> str:
        return "faregate"

    def schema(self) -> StructType:
        return row_schema(self._options.columns, frames=self._options.frames)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self._for_reading(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(self._for_reading(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(self._for_writing(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(self._for_writing(), schema, overwrite)

    def _for_reading(self, schema: StructType) -> Options:
        self._options.refuse(FOR_WRITING, "is for writing; to read what a node published, use nodes")
        if schema.fieldNames() != self.schema().fieldNames():
            self._options.refuse(["columns"], "and a schema are two ways to name columns: give one of them")
        check_schema(schema)
        return self._options

    def _for_writing(self) -> Options:
        self._options.refuse(FOR_READING, "is for reading and does nothing in a write")
        return self._options
