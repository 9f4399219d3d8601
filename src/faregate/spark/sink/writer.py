"""The sink: tasks stage, the driver commits; a batch is in the log as a whole, once, or not at all.

Rules kept here:
- `write` and `commit` run in different processes on different copies of the writer, and `commit` is not told the
  query: each task reads query and batch from its context and returns them with what it staged.
- Handlers of ours stage their output themselves, in the same task, and pass on what they staged: the messages need not
  go through Spark once more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from faregate import ids
from faregate.errors import FaregateError, InvalidOption
from faregate.ports.log import Staged
from faregate.spark.logs import open_staging, open_subscribed
from faregate.spark.options import Options
from faregate.spark.schema import STAGED
from faregate.spark.sink.publications import BatchSealer, check_columns

_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class StagedMessage(WriterCommitMessage):
    origin: str
    """The id of the query, or of the write."""
    batch: int
    partition: int
    staged: list[Staged]


def _by_partition(messages: list[WriterCommitMessage | None]) -> list[StagedMessage]:
    found = [message for message in messages if isinstance(message, StagedMessage)]
    return sorted(found, key=lambda message: message.partition)


def task_context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise FaregateError("the sink of faregate writes in Spark tasks only")
    return context


def attempt_of(context: TaskContext) -> str:
    """What tells what a task attempt stages from what others do."""
    return f"{context.partitionId():06d}-{context.taskAttemptId()}"


def query_and_batch(context: TaskContext) -> tuple[str, int]:
    query, batch = context.getLocalProperty(_QUERY), context.getLocalProperty(_BATCH)
    if query is None or batch is None:
        raise FaregateError(f"Spark did not say which query and batch this is ({_QUERY}, {_BATCH})")
    return query, int(batch)


class _Writer:
    """What writes and streams have in common; `batchId` is given by streams alone."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidOption("a bus cannot be overwritten: use mode('append'), or outputMode('append')")
        self._is_staged = schema.simpleString() == STAGED.simpleString()
        if not self._is_staged:
            check_columns(schema, options.source)
        self._options = options
        self._write_id: str | None = None

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        context = task_context()
        origin, batch = query_and_batch(context) if self._write_id is None else (self._write_id, 0)
        partition = context.partitionId()
        if self._is_staged:
            values = [value for each in iterator for value in each.column(0).to_pylist()]
            passed_on = [msgspec.json.decode(value, type=Staged) for value in values]
            return StagedMessage(origin, batch, partition, passed_on)
        topology = open_subscribed(self._options.path).topology()
        sealer = BatchSealer(f"spark/{origin}/{batch}/{partition}", self._options.source, topology)
        pieces = (sealer.seal(each) for each in iterator if each.num_rows)
        staged = open_staging(self._options.path).stage(origin, batch, attempt_of(context), pieces)
        return StagedMessage(origin, batch, partition, [staged])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        found = _by_partition(messages)
        if found:
            staged = [each for message in found for each in message.staged]
            log = open_staging(self._options.path)
            log.commit(found[0].origin, found[0].batch, staged, once=self._write_id is None)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int = 0) -> None:
        """Only what finished attempts of this run named: another run may be staging the same batch by now."""
        for message in _by_partition(messages):
            open_staging(self._options.path).discard(message.origin, message.batch, message.staged)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """One write, with an id of its own: made on the driver, it travels to the tasks inside this object."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite)
        self._write_id = ids.root_id()


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A query's micro-batches, each once."""
