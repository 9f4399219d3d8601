"""Handlers on Spark: `fg.spark.run(node, spark, …)`.

    log -> micro-batch -> work rows -> shuffled by bucket, sorted by position -> units of work -> outbox -> log

Rules kept here:
- A batch is done when its handlers' commits are; Spark then writes its commit log. Whatever dies in between, the batch
  runs again, and the ledger and the positions recognise what was done.
- The numbers of batches and partitions identify nothing.
- Parked messages whose time has come join the next batch; without one they get a run of their own.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec.structs import replace
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamReader

from faregate.bus.bus import MAX_MESSAGE_BYTES, RETAIN_LEDGER
from faregate.codec import Codec, find_codec
from faregate.errors import ConfigurationError, FaregateError, check_delay
from faregate.node.node import Node
from faregate.node.sources import open_events
from faregate.ports.schemes import url_for_workers
from faregate.ports.store import BUCKETS
from faregate.spark import register
from faregate.spark.logs import log_place, open_log, options_of
from faregate.spark.runs.driver import Driver
from faregate.spark.runs.progress import RunProgress, committed_end, parse_trigger
from faregate.spark.runs.rows import WORK, Places, work_rows
from faregate.spark.runs.spec import RunSpec, load_node, load_observers, locate
from faregate.spark.runs.stateless import needs_order
from faregate.spark.runs.stateless_query import StatelessRun, check_stateless
from faregate.spark.runs.tasks import COUNTS, handle_partition
from faregate.spark.runs.unknown_sources import warn_of_unknown_sources
from faregate.spark.runs.views import bindings_of, label_of, reader_name, take_views

log = logging.getLogger("faregate.spark")

MESSAGES_PER_TRIGGER = 1_000_000
"""Of one batch, at most, unless one says otherwise; of large ones there are fewer (`MOST_STORED`)."""
ORDERED_PER_TRIGGER = 400_000
"""The same for handlers in order without a store: a task sorts all that it has in memory."""
_PARKED_SECONDS = 1.0
_STOP_SECONDS = 0.2
_SPARKS_DEFAULT = "200"
_LAST = "last"


class RunStopped(FaregateError):
    """A batch was about to start while the run was being stopped."""


class Run:
    """A node that runs on Spark. Made by `run`."""

    def __init__(
        self, spec: RunSpec, driver: Driver, partitions: int, on_progress: Callable[[RunProgress], None] | None
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self.query: StreamingQuery | None = None
        self._spec = spec
        self._places = Places(spec)
        self._driver = driver
        self._low_water = min((begin.offset for begin in spec.begins.values()), default=0)
        self._partitions = partitions
        self._on_progress = on_progress
        self._turn = threading.RLock()
        """Batches, and parked messages between them, one at a time."""
        self._stopping = threading.Event()
        self._closed = False
        self._failure: BaseException | None = None
        self._between: threading.Thread | None = None

    # --- a batch ---------------------------------------------------------------------------------------------

    def handle_batch(self, frame: DataFrame, number: int) -> None:
        """For `foreachBatch`. A run that is being stopped starts no batch."""
        while not self._turn.acquire(timeout=_STOP_SECONDS):
            self._check_going_on(number)
        try:
            self._check_going_on(number)
            parked = self._places.parked_rows(self._driver.run(self._driver.due()))
            work = frame.mapInArrow(work_rows(self._spec, self._driver.path), WORK)
            if parked:
                work = work.unionAll(frame.sparkSession.createDataFrame(parked, WORK))
            self._handle(work, number)
        finally:
            self._turn.release()

    def _check_going_on(self, number: int) -> None:
        if self._stopping.is_set():
            raise RunStopped(f"the run of {self._spec.node_name!r} is stopped; batch {number} waits for the next")

    def handle_parked(self, spark: SparkSession) -> bool:
        """Parked messages whose time has come, without a batch; whether there were any. Without any, what was recorded
        meanwhile is sent."""
        with self._turn:
            parked = self._places.parked_rows(self._driver.run(self._driver.due()))
            if parked:
                self._handle(spark.createDataFrame(parked, WORK), None)
            else:
                self.sent += self._driver.run(self._driver.send())
            return bool(parked)

    def _handle(self, work: DataFrame, number: int | None) -> None:
        started = time.monotonic()
        handled = work.repartitionById(self._partitions, "bucket").sortWithinPartitions("position")
        counts: Counter[str] = Counter()
        done = self._low_water
        for row in handled.mapInArrow(handle_partition(self._spec), COUNTS).collect():
            if row["outcome"] == _LAST:
                done = done if number is None else max(done, row["count"] + 1)
            else:
                counts[row["outcome"]] += row["count"]
        sent, parked = self._driver.run(self._driver.finish_batch(done))
        self._low_water = done
        self.outcomes.update(counts)
        self.sent += sent
        if self._on_progress is not None:
            took = time.monotonic() - started
            self._on_progress(RunProgress(number, dict(counts), sent, parked, done, took))

    # --- life ------------------------------------------------------------------------------------------------

    def start(self, stream: DataFrame, checkpoint: str, trigger: dict[str, Any]) -> None:
        """Begin; `fg.spark.run` has done so."""
        spark, ends = stream.sparkSession, "availableNow" in trigger
        if ends:
            self.handle_parked(spark)
        self.query = (
            stream.writeStream.foreachBatch(self.handle_batch)
            .option("checkpointLocation", checkpoint)
            .queryName(f"faregate-{self._spec.node_name}-{self._spec.id[:8]}")
            .trigger(**trigger)
            .start()
        )
        if not ends:
            self._start_parked(spark)

    def _start_parked(self, spark: SparkSession) -> None:
        """Look for parked messages while no batch comes."""

        def look() -> None:
            while not self._stopping.wait(_PARKED_SECONDS):
                try:
                    self.handle_parked(spark)
                except Exception as exc:
                    self._failure = exc
                    log.exception("parked messages of %s cannot be handled; the run stops", self._spec.node_name)
                    if self.query is not None:
                        self.query.stop()
                    return

        self._between = threading.Thread(target=look, name="faregate-parked", daemon=True)
        self._between.start()

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the run ends, at most `timeout` whole seconds; whether it has. Raises what it failed with."""
        assert self.query is not None
        try:
            if timeout is None:
                self.query.awaitTermination()
                ended = True
            else:  # Spark takes no less than a second
                ended = bool(self.query.awaitTermination(ceil(timeout))) if timeout > 0 else not self.query.isActive
        except StreamingQueryException as exc:
            self._close()
            if self._stopping.is_set() and RunStopped.__name__ in str(exc):
                return True  # a batch had just begun when it was stopped
            raise
        if not ended:
            return False
        self._close()
        if self._failure is not None:
            raise self._failure
        return True

    def stop(self) -> None:
        """Finish the batch that runs, start no other, and close."""
        self._stopping.set()
        if self.query is not None:
            with self._turn:
                self.query.stop()
        self._close()

    def _close(self) -> None:
        self._stopping.set()
        if self._between is not None and self._between is not threading.current_thread():
            self._between.join()
        if not self._closed:
            self._closed = True
            self._driver.close()


def run(
    node: Node | str,
    spark: SparkSession,
    *,
    source: str | Path,
    store: str | None = None,
    tokens: str | None = None,
    checkpoint: str | Path,
    trigger: str | float = "available-now",
    max_messages_per_trigger: int = MESSAGES_PER_TRIGGER,
    on_progress: Callable[[RunProgress], None] | None = None,
    handover: bool = False,
    start: int | None = None,
    codec: str | Codec = "json",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    retain_ledger: float = RETAIN_LEDGER,
    observe: str | None = None,
) -> "Run | StatelessRun":
    """Run a node's handlers on Structured Streaming, from the log view of a bus: `source` is its URL, `journal:PATH` or
    `amqp://…?stream=NAME`. Returns once it is started.

    `node` is an `fg.Node` or `module:attribute`. `trigger` is "available-now" (handle what is there, and end), or how
    often to look: "5s", "500ms", or seconds. Without `store` handlers have no effect but what they send, and take the
    fast path; it is a URL, never an object, as each worker opens it for itself. `handover` takes subscriptions over
    from their queues. `tokens` is the token store of the bus, a URL, where that is another database than `store`.
    `start` is the offset at which a subscription begins that has not run on Spark yet; without it,
    it begins with what waits for it, or with the log.
    `retain_ledger`, `codec` and `max_message_bytes` are those of the bus; a codec of your own is one that the node's
    module registers (`fg.register_codec`), as the workers import that. `observe` names who observes the run, as
    `module:attribute`: one of `fg.observe`, or a list of them; the driver and each worker import it for themselves.

    Raises `ViewTaken` for a subscription that a bus consumes, `JournalNotFound`, `JournalLocked`, `BelowFloor`,
    `ConfigurationError`. When it raises, no view was taken unless the query itself could not start.
    """
    if not isinstance(node, Node | str):
        raise ConfigurationError(f"fg.spark.run(node, spark, …) begins with a node; it got a {type(node).__name__}")
    path = log_place(source)
    options = parse_trigger(trigger)
    target, folder = (node, str(Path.cwd())) if isinstance(node, str) else locate(node)
    found = load_node(node, folder) if isinstance(node, str) else node
    observers = load_observers(observe, folder)
    content_type = _check(found, store, tokens, codec, max_messages_per_trigger)
    open_log(path)  # raises when there is none
    if store is None and needs_order(found):
        max_messages_per_trigger = min(max_messages_per_trigger, ORDERED_PER_TRIGGER)
    reader = _reader(spark, found, max_messages_per_trigger).options(**options_of(path))
    partitions = _partitions(spark)
    driver = None
    if store is not None:
        retain = check_delay(retain_ledger, "retain_ledger")
        driver = Driver(found, store, path, retain, max_message_bytes, observers, tokens)
    try:
        bindings = bindings_of(found, max_message_bytes)
        if driver is not None:
            driver.run(driver.open())
            bindings = driver.run(driver.with_generations(bindings))
        begins = take_views(
            path,
            bindings,
            has_store=driver is not None,
            handover=handover,
            check=lambda begins: None if driver is None else driver.run(driver.check(begins, start)),
            check_bound=lambda bound: None if driver is None else driver.run(driver.check_parked(bound)),
        )
        label = label_of(path, found, max_message_bytes)
        place = f"{checkpoint}/{label}"
        if driver is not None:
            driver.run(driver.subscribe())
            begins = driver.run(driver.begin(label, begins, start, committed_end(place)))
        elif start is not None:
            begins = {queue: replace(begin, offset=max(begin.offset, start)) for queue, begin in begins.items()}
        spec = RunSpec(
            uuid4().hex,
            found.name,
            target,
            folder,
            store,
            content_type,
            max_message_bytes,
            begins,
            observe,
            None if driver is None else driver.tokens,
        )
        reader = reader.option("startingOffsets", min(begin.offset for begin in begins.values()))
        handle: Run | StatelessRun
        if driver is not None:
            handle = Run(spec, driver, partitions, on_progress)
        else:
            handle = StatelessRun(spec, path, partitions, on_progress)
            reader = reader.option("readerName", reader_name(found.name))
        warn_of_unknown_sources(found, path)
        handle.start(reader.load(), place, options)
        return handle
    except BaseException:
        if driver is not None:
            driver.close()
        raise


def _reader(spark: SparkSession, node: Node, max_messages_per_trigger: int) -> DataStreamReader:
    """Raises `ConfigurationError` for what is no session, or one of Spark Connect."""
    if not hasattr(spark, "readStream"):
        raise ConfigurationError(f"fg.spark.run(node, spark, …) needs a Spark session; it got a {type(spark).__name__}")
    if not hasattr(spark, "sparkContext"):
        raise ConfigurationError(
            f"node {node.name!r} cannot run over Spark Connect: handlers run beside the driver, which is on the server "
            "there. Use a session of your own, SparkSession.builder.master(…), or faregate spark run"
        )
    register(spark)
    return (
        spark.readStream.format("faregate")
        .option("rows", "ranges")
        .option("maxMessagesPerTrigger", max_messages_per_trigger)
        .option("minPartitions", max(1, spark.sparkContext.defaultParallelism))
    )


def _check(node: Node, store: str | None, tokens: str | None, codec: str | Codec, max_messages_per_trigger: int) -> str:
    """The content type of the codec, by which the workers find it."""
    content_type = find_codec(codec if isinstance(codec, str) else codec.content_type).content_type
    if max_messages_per_trigger < 1:
        raise ConfigurationError(f"max_messages_per_trigger must be 1 or more; got {max_messages_per_trigger}")
    if not node.subscriptions:
        raise ConfigurationError(f"node {node.name!r} handles nothing: give it a handler with @{node.name}.on(…)")
    if node.schedules:
        raise ConfigurationError(
            f"node {node.name!r} has the schedule {next(iter(node.schedules))!r}, and on Spark nobody makes its ticks: "
            "declare it with a node that runs on a bus, and have that send a command here"
        )
    for subscription in open_events(node):
        raise ConfigurationError(f"{subscription}: on Spark a node runs alone; say who publishes this, with source=")
    if store is None:
        check_stateless(node)
    else:
        url_for_workers(store)
    if tokens is not None:
        url_for_workers(tokens, "tokens=")
        if store is None:
            raise ConfigurationError(
                f"tokens= belongs to a node with a store, and {node.name!r} has none here: say which, with store="
            )
    return content_type


def _partitions(spark: SparkSession) -> int:
    """As many tasks as the session shuffles into, or, where nobody chose, as it has cores; at most one a bucket."""
    chosen = spark.conf.get("spark.sql.shuffle.partitions", _SPARKS_DEFAULT) or _SPARKS_DEFAULT
    count = spark.sparkContext.defaultParallelism if chosen == _SPARKS_DEFAULT else int(chosen)
    return max(1, min(BUCKETS, count))
