"""`format("faregate")`: what Spark asks for by name, and hands the options to.

Options are read, and the log is looked at, when the source is made: `load()` and `save()` fail at once with the
reason, not a job later. (Whether it will be read as a stream, Spark says only when the query starts.)
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

from faregate.errors import InvalidOption
from faregate.spark import tables
from faregate.spark.logs import open_partitions
from faregate.spark.options import FOR_READING, FOR_WRITING, Options, names_place, over, parse_options
from faregate.spark.schema import check_schema, row_schema
from faregate.spark.sink.writer import BatchWriter, StreamWriter
from faregate.spark.source.batch_reader import BatchReader, PushedReader
from faregate.spark.source.stream_reader import StreamReader


class FaregateSource(DataSource):
    """Reads and writes the messages of a log. docs/spark/reading.md lists options and columns.

    Raises `InvalidOption`, `JournalNotFound`, `NotAJournal`, `JournalTooNew`.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._is_new_table = tables.is_creation(options)
        self._given = tables.given_for_table(options) if self._is_new_table else dict(options)
        self._options = parse_options(self._given) if names_place(self._given) or self._is_new_table else None
        """None without a place: then this is a table of a catalog, whose schema says more, or an error."""
        if self._options is not None:
            self.schema()
            open_partitions(self._options)

    @classmethod
    def name(cls) -> str:
        return "faregate"

    def schema(self) -> StructType:
        options = self._options or parse_options(self._given)
        schema = row_schema(options.columns, ranges=options.ranges, several=options.several)
        return tables.keep(schema, options, self._given) if self._is_new_table else schema

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = self._for_reading(schema)
        return BatchReader(chosen, schema) if chosen.load is None else PushedReader(chosen, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(self._for_reading(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return BatchWriter(self._for_writing(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return StreamWriter(self._for_writing(), schema, overwrite)

    def _for_reading(self, schema: StructType) -> Options:
        options = self._options or parse_options(over(self._given, tables.kept_in(schema)))
        options.refuse(FOR_WRITING, "is for writing; to read what a node published, use nodes")
        own = row_schema(options.columns, ranges=options.ranges, several=options.several)
        if schema.fieldNames() != own.fieldNames():
            options.refuse(["columns"], "and a schema are two ways to name columns: give one of them")
        check_schema(schema)
        return options

    def _for_writing(self) -> Options:
        if self._options is None:
            raise InvalidOption(
                "a write says where its journal lies, for example save('/data/journal'). A table of a catalog is for "
                "reading, as Spark passes its options on for that alone: INSERT INTO goes through CREATE TEMPORARY "
                "VIEW … USING faregate OPTIONS (path …)"
            )
        options = self._options
        options.refuse(FOR_READING, "is for reading and does nothing in a write")
        if options.several:
            raise InvalidOption(f"a write goes to one journal; option path names {', '.join(options.named)}")
        return options
