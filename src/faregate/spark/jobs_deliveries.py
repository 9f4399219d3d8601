"""What each recipient of each publication got, and what became of it: journal and side logs, joined where they lie.

Rules kept here:
- A segment's side log speaks of that segment's offsets alone, so the join needs no shuffle: one task per segment.
- Only what went to somebody counts: a row that nobody took (topic -1) names recipients that never got it.
- Numbers instead of texts: a node is its place in a list, a message id two longs. What follows groups millions of them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal import settled
from faregate.broker.journal.reader import JournalReader
from faregate.ids import message_id
from faregate.spark.jobs_settled import JournalPlan, SegmentPlan, side_log

FIELDS = "node int, hi long, lo long, kind int, queue int, offset long, appended double, token boolean, delayed boolean"
UNSETTLED = 0
_ENDED = (settled.HANDLED, settled.SKIPPED, settled.DEAD, settled.DUPLICATE)


class Settled:
    """The end of each message of a segment at each node, found by (offset, node)."""

    def __init__(self, plan: JournalPlan, segment: SegmentPlan) -> None:
        self._nodes = plan.nodes
        self._base = segment.base
        numbers = {number: self._nodes.index(node) for number, _, node, _ in plan.queues}
        records = side_log(plan.path, segment)
        records = records[np.isin(records["queue"], list(numbers))]
        ended = records[np.isin(records["outcome"], _ENDED)]
        node_of = np.full(max(numbers, default=0) + 1, -1, np.int64)
        node_of[list(numbers)] = list(numbers.values())
        keys = self.key(ended["offset"].astype("i8"), node_of[ended["queue"]])
        # Handled and later found to be a duplicate (its settling was lost) is handled: the lowest code counts.
        order = np.lexsort((ended["outcome"], keys))
        keys, self._first = np.unique(keys[order], return_index=True)
        self._keys = keys
        self.outcomes = ended["outcome"][order][self._first].astype("i4")
        self.times = ended["time"][order][self._first]
        back = records[records["outcome"] == settled.REDELIVER]
        back_keys = self.key(back["offset"].astype("i8"), node_of[back["queue"]])
        self._back_keys, self._back_counts = np.unique(back_keys, return_counts=True)

    def key(self, offsets: Any, nodes: Any) -> Any:
        return (offsets - self._base) * (len(self._nodes) + 1) + nodes

    def look_up(self, offsets: Any, nodes: Any) -> tuple[Any, Any]:
        """Outcome (0: none) and time (NaN: none) of each."""
        outcomes = np.zeros(len(offsets), np.int32)
        times = np.full(len(offsets), np.nan)
        if len(self._keys):
            wanted = self.key(offsets, nodes)
            at = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
            found = self._keys[at] == wanted
            outcomes[found] = self.outcomes[at[found]]
            times[found] = self.times[at[found]]
        return outcomes, times

    def redelivered(self, offsets: Any, nodes: Any) -> Any:
        """How often each went back."""
        counts = np.zeros(len(offsets), np.int32)
        if len(self._back_keys):
            wanted = self.key(offsets, nodes)
            at = np.minimum(np.searchsorted(self._back_keys, wanted), len(self._back_keys) - 1)
            found = self._back_keys[at] == wanted
            counts[found] = self._back_counts[at[found]]
        return counts


def exploded(plan: JournalPlan, segment: SegmentPlan) -> Iterator[tuple[Any, Any, Any]]:
    """Batches of a segment's messages, and for each recipient the row it is of and its node's place (-1: unknown)."""
    nodes = pa.array(plan.nodes, pa.string())
    for whole in JournalReader(plan.path).batches(segment.start, segment.end):
        batch = whole.filter(pc.greater_equal(whole.column("topic"), 0))
        if not batch.num_rows:
            continue
        recipients = batch.column("recipients")
        rows = pc.list_parent_indices(recipients).to_numpy()
        places = pc.fill_null(pc.index_in(pc.list_flatten(recipients), value_set=nodes), -1).to_numpy()
        yield batch, rows, places


def read_deliveries(plan: JournalPlan, segment: SegmentPlan) -> Iterator[Any]:
    """One row per recipient and copy: `FIELDS`."""
    ends = Settled(plan, segment)
    queue_of = Queues(plan)
    for batch, rows, places in exploded(plan, segment):
        known = places >= 0
        rows, places = rows[known], places[known]
        offsets = batch.column("offset").to_numpy()[rows]
        outcomes, _ = ends.look_up(offsets, places)
        hi, lo = id_pairs(message_ids(batch.column("publication_id"), rows, places, plan.nodes))
        columns = [
            pa.array(places.astype("i4")),
            pa.array(hi),
            pa.array(lo),
            pa.array(outcomes),
            pa.array(queue_of.numbers(batch, rows, places)),
            pa.array(offsets),
            pa.array((batch.column("time").cast(pa.int64()).to_numpy() / 1e6)[rows]),
            pc.is_valid(batch.column("attempt_id")).take(pa.array(rows)),
            pc.is_valid(batch.column("deliver_at")).take(pa.array(rows)),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=[field.split()[0] for field in FIELDS.split(", ")])


class Queues:
    """The queue that a row of a topic has at a node."""

    def __init__(self, plan: JournalPlan) -> None:
        topology = JournalReader(plan.path).topology()
        place = {node: index for index, node in enumerate(plan.nodes)}
        at_node = {number: place[node] for number, _, node, _ in plan.queues}
        self._table = np.full((len(topology.topics) + 1, len(plan.nodes) + 1), -1, np.int32)
        for topic in topology.topics:
            for number in topic.queues:
                if number in at_node:
                    self._table[topic.number, at_node[number]] = number

    def numbers(self, batch: Any, rows: Any, places: Any) -> Any:
        return self._table[batch.column("topic").to_numpy()[rows], places]


def message_ids(publications: Any, rows: Any, places: Any, nodes: Sequence[str]) -> list[bytes]:
    texts = publications.to_pylist()
    made = [message_id(texts[row], nodes[place]) for row, place in zip(rows.tolist(), places.tolist(), strict=True)]
    return [bytes.fromhex(each.replace("-", "")) for each in made]


def id_pairs(ids: Sequence[bytes]) -> tuple[Any, Any]:
    """Ids of 16 bytes as two arrays of longs."""
    pairs = np.frombuffer(b"".join(ids), ">i8").reshape(-1, 2).astype("i8")
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def id_text(hi: int, lo: int) -> str:
    digits = f"{hi & 0xFFFFFFFFFFFFFFFF:016x}{lo & 0xFFFFFFFFFFFFFFFF:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def publications(path: Path, offsets: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Publication id and type of the messages at some offsets."""
    wanted = sorted(set(offsets))
    found = JournalReader(path).load(wanted)
    return {at: (each.publication_id, each.type) for at, each in zip(wanted, found, strict=True)}
