"""Handing a subscription over between its two views, queue and log, while nobody runs the nodes of the journal.

Rules kept here:
- A handover is one write of topology.json. Everything before it changes nothing for who still uses the old view, so a
  crash anywhere leaves one view or the other, and the same handover may be asked for again.
- To the log: from the lowest offset that waits in the queue. What was handled above it is recognised by the ledger;
  the queue holds nothing from then on.
- To the queue: from the lowest offset that the log's reader is not done with. What is done above it is told by whoever
  asks (the ledger knows) and settled, so the queue holds what is left, in the order of the log.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import find_json, write_json
from faregate.broker.journal.recovery import Found
from faregate.broker.journal.settled import Record
from faregate.broker.journal.snapshot import QueueSnapshot, Snapshot
from faregate.columns import to_envelopes
from faregate.ports.log import OUTCOMES, REDELIVER, Outcomes, Waits
from faregate.ports.queue import Binding
from faregate.ports.topology import QueueRecord, Reading, View


class ClosedJournal:
    """A journal that nobody runs, held by its lock. Raises `JournalLocked` when somebody does."""

    def __init__(self, path: Path) -> None:
        self._journal = Journal(path)

    def __enter__(self) -> "ClosedJournal":
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.release()

    def reading(self, queue: str) -> Reading:
        return self._journal.topology.reading(queue)

    def record(self, queue: str) -> QueueRecord | None:
        return self._journal.topology.queue(queue)

    def waiting(self, binding: Binding) -> list[int]:
        """The offsets that wait in its queue; for one that was never bound, none."""
        record = self.record(binding.queue)
        found = Found() if record is None else self._journal.recover().queues.get(record.number, Found())
        return sorted(offset for piece in found.pieces for offset in piece.offsets)

    def count(self, binding: Binding, start: int) -> int:
        """How many messages of the log are for its queue, from `start` on, or from where its view began."""
        record = self.record(binding.queue)
        begun = max(start, self.reading(binding.queue).offset, self._journal.reader.earliest())
        return 0 if record is None else sum(len(rows) for rows in self._rows(record, begun))

    def log_reading(self, binding: Binding) -> Reading:
        """How this subscription would read the log if it were taken now."""
        latest, epoch = self._journal.next_offset, self.reading(binding.queue).epoch + 1
        if (
            self.record(binding.queue) is None
        ):  # nobody ever bound it: it begins with the log, and its history is all there is
            return Reading("log", epoch, self._journal.reader.earliest(), latest)
        waiting = self.waiting(binding)
        return Reading("log", epoch, waiting[0] if waiting else latest)

    def take_log(self, binding: Binding) -> Reading:
        """Let this subscription read the log from now on."""
        wanted = self.log_reading(binding)
        self.bind(binding)
        return self._hand_over(binding.queue, "log", wanted.offset, wanted.history)

    def bind(self, binding: Binding) -> None:
        """Keep what is new of a subscription."""
        self._journal.change_topology(lambda topology: topology.add(binding))

    def take_queue(self, binding: Binding, start: int, done: Outcomes, parked: Iterable[Waits] = ()) -> Reading:
        """Let this subscription read its queue again, which then holds what is not done from `start` on."""
        record = self.record(binding.queue)
        assert record is not None, binding.queue
        start = max(start, self._journal.reader.earliest())
        for rows in self._rows(record, start):
            outcomes = done(list(zip(rows.column("offset").to_pylist(), to_envelopes(rows), strict=True)))
            self._journal.settle_now(
                [Record(offset, record.number, OUTCOMES[outcome], 1, 0, 0.0) for offset, outcome in outcomes.items()]
            )
        for one in parked:
            waits = Record(one.offset, record.number, REDELIVER, one.redeliveries, one.redeliveries, one.due)
            self._journal.settle_now([waits])
        self._fill(record.number, start)
        return self._hand_over(binding.queue, "queue", start, 0)

    def _rows(self, record: QueueRecord, start: int) -> Iterable[Any]:
        """This queue's messages from `start` on."""
        leading = {topic.number for topic in self._journal.topology.topics if record.number in topic.queues}
        for batch in self._journal.reader.batches(start):
            rows = batch.filter(pc.is_in(batch.column("topic"), value_set=pa.array(sorted(leading), pa.int32())))
            if rows.num_rows:
                yield rows

    def _fill(self, number: int, start: int) -> None:
        """A snapshot from the time of the log view knows of nothing in the queue."""
        layout, disk = self._journal.layout, self._journal.disk
        snapshot = find_json(layout.snapshot, disk, Snapshot)
        if snapshot is None:
            return
        runs = [(start, snapshot.offset - 1)] if start < snapshot.offset else []
        snapshot.queues = {**snapshot.queues, number: QueueSnapshot(runs)}
        write_json(layout.snapshot, disk, snapshot)

    def _hand_over(self, queue: str, view: View, offset: int, history: int) -> Reading:
        self._journal.change_topology(lambda topology: topology.hand_over(queue, view, offset, history))
        return self.reading(queue)
