"""What a sink has committed, by query: the guard that makes a replayed batch a no-op.

    JOURNAL/sinks/QUERY.json

The journal itself appends a batch of one name once, for as long as it remembers the name; this record also knows
those that retention forgot, and notices a batch that is *not* a replay although it has the number of one: Spark
restored from an older checkpoint cuts its input anew, and skipping such a batch would lose messages.

A query's id lives in its checkpoint, so a new checkpoint that restarts at batch 0 has a record of its own.

Order of a commit: guard, spool file (durable), record, garbage. After a crash between any two the replayed batch is
recognised: by the record, or by the spool file's name.
"""

from collections.abc import Sequence

import msgspec

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, find_json
from faregate.broker.journal.staging import collect_garbage, move_into_spool
from faregate.errors import BatchDiffers, FaregateError
from faregate.ports.log import Staged

_KEPT = 1000
"""Batches remembered with their size; Spark replays the last one, a restored checkpoint some more."""


class CommittedBatch(msgspec.Struct, frozen=True):
    batch: int
    rows: int
    bytes: int


class SinkRecord(msgspec.Struct):
    query: str
    batches: list[CommittedBatch] = []


class SinkCommits:
    """The record of one query in one journal."""

    def __init__(self, layout: Layout, query: str) -> None:
        self._disk = RealDisk()
        self._folder = layout.sinks
        self._path = self._folder / f"{query}.json"
        self._query = query

    def has(self, batch: CommittedBatch) -> bool:
        """Whether it was committed before. Raises `BatchDiffers` when what has its number was something else."""
        known = self._read().batches
        if not known or batch.batch > known[-1].batch:
            return False
        found = next((each for each in known if each.batch == batch.batch), None)
        if found != batch:
            before = "is no longer remembered" if found is None else f"had {found.rows} messages, {found.bytes} bytes"
            raise BatchDiffers(
                f"batch {batch.batch} of query {self._query} was committed before and {before}; now it has "
                f"{batch.rows} messages, {batch.bytes} bytes. Either an older checkpoint was restored, or the query "
                "does not compute the same from the same input. Nothing was written; go on with a new "
                "checkpointLocation, and give rows a publication_id so that the bus recognises those it has"
            )
        return True

    def add(self, batch: CommittedBatch) -> None:
        """Durable when it returns. Another driver may be further by now: what it has noted stays."""
        record = self._read()
        known = {each.batch: each for each in (*record.batches, batch)}
        record.batches = [known[number] for number in sorted(known)][-_KEPT:]
        self._disk.make_folder(self._folder)
        self._disk.replace(self._path, msgspec.json.encode(record))

    def _read(self) -> SinkRecord:
        return find_json(self._path, self._disk, SinkRecord) or SinkRecord(self._query)


def commit_staged(layout: Layout, origin: str, number: int, staged: Sequence[Staged], *, once: bool) -> None:
    """One batch of what tasks staged; with `once`, one that was committed before is passed over."""
    batch = CommittedBatch(number, sum(each.rows for each in staged), sum(each.bytes for each in staged))
    commits = SinkCommits(layout, origin)
    if once and commits.has(batch):
        collect_garbage(layout, origin, number)
        return
    try:
        move_into_spool(layout, origin, number, staged)
    except FileNotFoundError as exc:
        if once and commits.has(batch):  # another driver on the same checkpoint was faster
            return
        raise FaregateError(
            f"{exc.filename}, which a task staged, is not there for the driver: driver and executors must see the "
            "journal's folder under the same path"
        ) from exc
    if once:
        commits.add(batch)
    collect_garbage(layout, origin, number)
