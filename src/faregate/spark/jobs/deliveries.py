"""What each recipient of each publication got, and what became of it: log and side logs, joined where they lie.

Rules kept here:
- A segment's side log speaks of that segment's offsets alone, so the join needs no shuffle: one task per segment.
- Only what went to somebody counts: a row that nobody took (topic -1) names recipients that never got it. A reader of
  the log takes what fits its subscription, also from before its node was known.
- A reader of the log settles nothing: what it has read past is told apart from what waits.
- Numbers instead of texts: a node is its place in a list, a message id two longs. What follows groups millions of them.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from faregate import ids
from faregate.columns import to_envelopes
from faregate.ports.log import DEAD, DUPLICATE, FILTERED, HANDLED, REDELIVER, REQUEUE, SKIPPED, LogPart
from faregate.spark import id_columns
from faregate.spark.jobs.settlements import HandedOverQueue, JournalPlan, batch_of
from faregate.spark.logs import dead_letters_of, open_log, open_subscribed, settlements_of
from faregate.spark.options import Place

FIELDS = (
    "node int, hi long, lo long, kind int, queue int, offset long, appended double, token boolean, delayed boolean, "
    "digest long, runs int"
)
"""`digest`: the first eight bytes of the body's. `runs`: how often a handler started on it, as far as one knows."""
UNSETTLED = 0
_DIGEST_BYTES = 16
PASSED = 9
"""Instead of unsettled: a reader of the log has dealt with it."""
_ENDED = (HANDLED, SKIPPED, DEAD, DUPLICATE, FILTERED)
_BACK = (REDELIVER, REQUEUE)


class Ends:
    """The end of each message of a segment at each node, found by (offset, node)."""

    def __init__(self, plan: JournalPlan, segment: LogPart) -> None:
        self._nodes = plan.nodes
        self._base = segment.base
        numbers = {queue.number: self._nodes.index(queue.node) for queue in plan.queues}
        records = settlements_of(plan.path, segment)
        records = records.filter(pc.is_in(records.column("queue"), value_set=pa.array(list(numbers), pa.int32())))
        offsets, queues, outcomes, tries, times = (
            records.column(name).to_numpy() for name in ("offset", "queue", "outcome", "tries", "time")
        )
        node_of = np.full(max(numbers, default=0) + 1, -1, np.int64)
        node_of[list(numbers)] = list(numbers.values())
        all_keys = self.key(offsets, node_of[queues])
        ended = np.isin(outcomes, _ENDED)
        keys, outcomes_ended = all_keys[ended], outcomes[ended]
        # Handled and later found to be a duplicate (its settling was lost) is handled: the lowest code counts.
        order = np.lexsort((outcomes_ended, keys))
        self._keys, first = np.unique(keys[order], return_index=True)
        self._outcomes = outcomes_ended[order][first]
        self._times = times[ended][order][first]
        self._back_keys, self._back_counts = np.unique(all_keys[np.isin(outcomes, _BACK)], return_counts=True)

        order = np.lexsort((-tries, all_keys))
        self._run_keys, first = np.unique(all_keys[order], return_index=True)
        self._runs = tries[order][first]

    def key(self, offsets: Any, nodes: Any) -> Any:
        return (offsets - self._base) * (len(self._nodes) + 1) + nodes

    def outcomes(self, offsets: Any, nodes: Any) -> Any:
        """How each ended; 0: not at all."""
        return self._numbers(self._keys, self._outcomes, offsets, nodes)

    def times(self, offsets: Any, nodes: Any) -> Any:
        """When each ended; NaN: not at all."""
        return self._numbers(self._keys, self._times, offsets, nodes, np.nan, np.float64)

    def redelivered(self, offsets: Any, nodes: Any) -> Any:
        """How often each went back."""
        return self._numbers(self._back_keys, self._back_counts, offsets, nodes)

    def started(self, offsets: Any, nodes: Any) -> Any:
        """How often a handler started on each."""
        return self._numbers(self._run_keys, self._runs, offsets, nodes)

    def _numbers(self, keys: Any, values: Any, offsets: Any, nodes: Any, none: float = 0, type: Any = np.int32) -> Any:
        numbers = np.full(len(offsets), none, type)
        if len(keys):
            wanted = self.key(offsets, nodes)
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            found = keys[at] == wanted
            numbers[found] = values[at[found]]
        return numbers


def exploded(plan: JournalPlan, segment: LogPart) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Batches of a segment's messages, and for each recipient the row it is of, its node's place and its queue; also
    those that nobody got anything of."""
    nodes = pa.array(plan.nodes, pa.string())
    readers = [(plan.nodes.index(each.queue.node), each) for each in plan.handed_over if each.reads_log]
    queues = _queue_numbers(plan)
    for batch in open_log(plan.path).batches(segment.start, segment.end):
        recipients = batch.column("recipients")
        named = pc.list_parent_indices(recipients).to_numpy()
        named_places = pc.fill_null(pc.index_in(pc.list_flatten(recipients), value_set=nodes), -1).to_numpy()
        topics = batch.column("topic").to_numpy()
        sent = (topics[named] >= 0) & (named_places >= 0)
        rows, places = named[sent], named_places[sent]
        numbers = queues[topics[rows], places]
        for place, reader in readers:
            number = reader.queue.number
            more = _taken_from_log(batch, reader, named[named_places == place], rows[numbers == number])
            rows = np.concatenate((rows, more))
            places = np.concatenate((places, np.full(len(more), place, places.dtype)))
            numbers = np.concatenate((numbers, np.full(len(more), number, numbers.dtype)))
        yield batch, rows, places, numbers


def _taken_from_log(batch: Any, reader: HandedOverQueue, named: Any, counted: Any) -> Any:
    """The rows that a reader of the log takes, and that its queue's topic does not lead to it."""
    offsets, queue, reading = batch.column("offset").to_numpy(), reader.queue, reader.reading
    address = batch.column("source" if queue.kind == "event" else "destination")
    early = (offsets < reading.history) & pc.equal(pc.fill_null(batch.column("replay"), 0), 0).to_numpy(
        zero_copy_only=False
    )
    early[named] = True
    early[counted] = False
    early &= offsets >= reading.offset
    if early.any():
        wanted = ((batch.column("type"), queue.type), (batch.column("kind"), queue.kind), (address, queue.address))
        for column, value in wanted:
            early &= pc.fill_null(pc.equal(column, value), fill_value=False).to_numpy(zero_copy_only=False)
    return np.flatnonzero(early)


def read_deliveries(plan: JournalPlan, segment: LogPart) -> Iterator[tuple[Any, Any]]:
    """Batches of a segment's messages, each with one row per recipient and copy: `FIELDS`."""
    ends = Ends(plan, segment)
    read = np.zeros(max((queue.number for queue in plan.queues), default=0) + 2, np.int64)  # the last is for queue -1
    for each in plan.handed_over:
        read[each.queue.number] = each.read
    for batch, rows, places, queues in exploded(plan, segment):
        offsets = batch.column("offset").to_numpy()[rows]
        outcomes = ends.outcomes(offsets, places)
        outcomes[(outcomes == UNSETTLED) & (offsets < read[queues])] = PASSED
        hi, lo = message_ids(batch, rows, places, plan.nodes)
        columns = {
            "node": places,
            "hi": hi,
            "lo": lo,
            "kind": outcomes,
            "queue": queues,
            "offset": offsets,
            "appended": (batch.column("time").cast(pa.int64()).to_numpy() / 1e6)[rows],
            "token": pc.is_valid(batch.column("attempt_id")).take(pa.array(rows)),
            "delayed": pc.is_valid(batch.column("deliver_at")).take(pa.array(rows)),
            "digest": _first_longs(batch.column("body_digest")).take(pa.array(rows)),
            "runs": np.maximum(1, ends.started(offsets, places)),
        }
        yield batch, batch_of(FIELDS, len(rows), columns)


def _whole(digest: bytes) -> bytes:
    """One of another length was damaged, or made elsewhere: it is like no other one."""
    return digest if len(digest) == _DIGEST_BYTES else sha256(digest).digest()


def digest_longs(digests: Sequence[bytes | None]) -> Any:
    """The first eight bytes of each, as a long; None for what is none."""
    given = [each or b"" for each in digests]
    if set(map(len, given)) == {_DIGEST_BYTES}:  # nearly always
        return np.frombuffer(b"".join(given), ">i8")[::2].astype("i8")
    return [None if each is None else int.from_bytes(_whole(each)[:8], "big", signed=True) for each in digests]


def _queue_numbers(plan: JournalPlan) -> Any:
    """By topic and by the place of a node: the queue that a row of the topic has there, or -1."""
    topics = open_subscribed(plan.path).topology().topics
    at_node = {queue.number: plan.nodes.index(queue.node) for queue in plan.queues}
    table = np.full((len(topics) + 1, len(plan.nodes) + 1), -1, np.int32)
    for topic in topics:
        for number in at_node.keys() & topic.queues:
            table[topic.number, at_node[number]] = number
    return table


def read_dead_letters(plan: JournalPlan) -> Iterator[list[tuple[str, bytes, float]]]:
    """Node, message id and time of the dead letters in the log itself, of nodes without a store."""
    for letters in dead_letters_of(plan.path, plan.earliest):
        yield [(each.node, id_digits(each.message_id), each.at) for each in letters]


def _first_longs(digests: Any) -> Any:
    """`digest_longs` of a column of the log; nearly always each has its 16 bytes, and an empty one is none."""
    if digests.null_count or not pc.all(pc.equal(pc.binary_length(digests), _DIGEST_BYTES)).as_py():
        return pa.array(digest_longs([each or None for each in digests.to_pylist()]), pa.int64())
    first = np.ascontiguousarray(id_columns.from_arrow(digests, _DIGEST_BYTES)[:, :8])
    return pa.array(first.view(">i8").ravel().astype("i8"))


def message_ids(batch: Any, rows: Any, places: Any, nodes: Sequence[str]) -> tuple[Any, Any]:
    """The message id of each recipient, as two arrays of longs."""
    publications = batch.column("publication_id")
    if not id_columns.are_ids(publications):
        return id_pairs(_message_ids_one_by_one(batch, rows, places, nodes))
    texts = id_columns.from_arrow(publications)
    made = np.empty((len(rows), ids.LENGTH), np.uint8)
    for place, node in enumerate(nodes):
        own = np.flatnonzero(places == place)
        if len(own):
            made[own] = id_columns.message_ids(texts[rows[own]], node)
    return id_columns.as_longs(made)


def _message_ids_one_by_one(batch: Any, rows: Any, places: Any, nodes: Sequence[str]) -> list[bytes]:
    """Also of what has no id, or one that a foreign sender made up."""
    texts = batch.column("publication_id").to_pylist()
    derive = [ids.message_ids(node) for node in nodes]
    made = []
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        text = texts[row]
        if text:
            made.append(id_digits(derive[place](text)))
        else:
            [envelope] = to_envelopes(batch.slice(row, 1))
            made.append(id_digits(ids.message_id_of(envelope, nodes[place])))
    return made


def id_digits(text: str) -> bytes:
    return bytes.fromhex(text.replace("-", ""))


def id_pairs(ids: Sequence[bytes]) -> tuple[Any, Any]:
    """Ids of 16 bytes as two arrays of longs."""
    pairs = np.frombuffer(b"".join(ids), ">i8").reshape(-1, 2).astype("i8")
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def id_text(hi: int, lo: int) -> str:
    digits = f"{hi & 0xFFFFFFFFFFFFFFFF:016x}{lo & 0xFFFFFFFFFFFFFFFF:016x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def publications(path: Place, offsets: Sequence[int]) -> dict[int, tuple[str, str, str]]:
    """Publication id, type and source of the messages at some offsets."""
    wanted = sorted(set(offsets))
    found = open_log(path).load(wanted)
    return {at: (each.publication_id, each.type, each.source) for at, each in zip(wanted, found, strict=True)}
