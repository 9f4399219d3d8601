"""What each queue holds when a journal is opened: the snapshot, then what was appended and settled since; and which
publications were the last.

Of messages only the topics and times are read. The common case, messages of one topic that all wait, costs the same
for one and for ten thousand. The last publications are not read before somebody asks for them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal import dead_letters, settled
from faregate.broker.journal.content import Messages, Outline, read_keyed, read_outline
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.layout import Layout, find_json
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.snapshot import QueueSnapshot, Returning, Snapshot
from faregate.errors import JournalCorrupt
from faregate.ids import PublicationKey
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import REDELIVER, REQUEUE, STARTED
from faregate.ports.topology import Reading, Topology

_END = 1 << 62
_MANY_RUNS = 4


class Runs(NamedTuple):
    """Stretches of offsets in order and apart: the first of each, and the last of each."""

    starts: array[int]
    lasts: array[int]


class Stretch(NamedTuple):
    """Plain entries: their positions and offsets."""

    positions: Sequence[int]
    offsets: Sequence[int]

    def ends_before(self, positions: range, offsets: range) -> bool:
        """Whether those go on where this one ends, and both are unbroken."""
        unbroken = isinstance(self.positions, range) and isinstance(self.offsets, range)
        return unbroken and self.positions[-1] + 1 == positions.start and self.offsets[-1] + 1 == offsets.start


class Single(NamedTuple):
    """An entry with a past or a time of its own."""

    position: int
    entry: Returning

    @property
    def offsets(self) -> Sequence[int]:
        return [self.entry.offset]


@dataclass
class Found:
    """What one queue held, in order: stretches of plain entries, and entries with a past or a time of their own.

    Each has a position. Positions follow each other only where nothing of the queue between them is done, so that a
    stretch of positions is a stretch within which everything waits.
    """

    pieces: list[Stretch | Single] = field(default_factory=list)
    dead_letters: list[tuple[int, DeadLetter]] = field(default_factory=list)
    position: int = 0
    """The next one's position."""

    def gap(self) -> None:
        """Something of the queue is done, or was before the journal's start."""
        self.position += 1

    def plain(self, offsets: range) -> None:
        """A stretch that waits as a whole."""
        positions = range(self.position, self.position + len(offsets))
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, Stretch) and last.ends_before(positions, offsets):
            positions = range(last.positions[0], positions.stop)
            offsets = range(last.offsets[0], offsets.stop)
            self.pieces.pop()
        self.pieces.append(Stretch(positions, offsets))
        self.position = positions.stop

    def scattered(self, runs: Runs) -> None:
        """Many short stretches, with something done between each two. Nothing here is done for one after the other:
        there may be a million of them."""
        starts, lasts = (_numbers(each) for each in runs)
        # Where each run ends in the row of all entries, and of each entry which run it is in.
        ends = pc.add(pc.cumulative_sum(pc.subtract(lasts, starts)), _numbers(range(1, len(starts) + 1)))
        begins = pa.concat_arrays([_numbers([0]), ends])
        count = ends[-1].as_py()
        run = pc.list_parent_indices(pa.LargeListArray.from_arrays(begins, pa.nulls(count)))
        into = pc.subtract(_numbers(range(count)), pc.take(begins, run))
        offsets = pc.add(pc.take(starts, run), into)
        positions = pc.add(_numbers(range(self.position + 1, self.position + 1 + count)), run)
        self.position += count + len(starts) + 1
        self.pieces.append(Stretch(_array(positions), _array(offsets)))

    def count(self) -> int:
        return len(self.dead_letters) + sum(len(piece.offsets) for piece in self.pieces)


class _Waiting:
    """Which offsets of one queue wait: inside the runs, not ended since, with what is known of their tries."""

    def __init__(self, kept: QueueSnapshot, offset: int, reading: Reading) -> None:
        """A queue that was handed over holds nothing from before; while its subscription reads the log, nothing."""
        bounds = kept.bounds()
        begin = _END if reading.view == "log" else reading.offset
        self._runs = Runs(bounds[0::2], bounds[1::2])
        self._runs.starts.append(offset)
        self._runs.lasts.append(_END)
        self._runs = self.within(begin, _END)
        self.start = self._runs.starts[0]
        self.ended: set[int] = set()
        self.past = {entry.offset: entry for entry in kept.returning}
        self._known: list[int] = []

    def sort(self) -> None:
        """Nothing more becomes known."""
        self._known = sorted([*self.past, *self.ended])

    def within(self, first: int, last: int) -> Runs:
        """The parts of these offsets that lie in runs."""
        starts, lasts = self._runs
        low, high = bisect_left(lasts, first), bisect_right(starts, last)
        found = Runs(starts[low:high], lasts[low:high])
        if found.starts:
            found.starts[0] = max(found.starts[0], first)
            found.lasts[-1] = min(found.lasts[-1], last)
        return found

    def untouched(self, first: int, stop: int) -> bool:
        """Whether nothing is known about any single offset in [first, stop)."""
        return bisect_left(self._known, first) == bisect_left(self._known, stop)


class Recovered(NamedTuple):
    queues: dict[int, Found]
    """By queue number, what waits."""
    recent: Callable[[], list[tuple[PublicationKey, bytes | None]]]
    """Reads key and body digest of the last messages, in their order. Raises `JournalCorrupt`, `OffsetGone`."""


def recover(
    layout: Layout,
    disk: Disk,
    reader: JournalReader,
    topology: Topology,
    window: int = 0,
    snapshot: Snapshot | None = None,
) -> Recovered:
    """`window`: how many publications are to be recognised when they come again. `snapshot`: the one that is there."""
    snapshot = snapshot or find_json(layout.snapshot, disk, Snapshot) or Snapshot()
    bases = layout.segment_bases(disk)
    waiting: dict[int, _Waiting] = {}
    for queue in topology.queues:
        kept = snapshot.queues.get(queue.number, QueueSnapshot([]))
        waiting[queue.number] = _Waiting(kept, snapshot.offset, topology.reading(queue.name))
    _apply_side_logs(layout, disk, bases, snapshot, waiting)
    for one in waiting.values():
        one.sort()
    found: dict[int, Found] = defaultdict(Found)
    latest = reader.latest()
    if bases:
        start = max(bases[0], min((one.start for one in waiting.values()), default=_END))
        topics = {-1: [], **{topic.number: topic.queues for topic in topology.topics}}
        for messages in reader.stored(start, latest, read_outline):
            for number in messages.topic_numbers():
                if number not in topics or any(queue not in waiting for queue in topics[number]):
                    raise JournalCorrupt(
                        f"{layout.topology} is missing or too old: messages from offset {messages.first} on "
                        f"went to topic {number}, which it does not know. Restore it from a backup"
                    )
            _sort_out(messages, topics, waiting, found)
        _find_dead_letters(reader, topology, start, waiting, found)
    return Recovered(found, lambda: _last_publications(reader, topology, latest, window))


def _last_publications(
    reader: JournalReader, topology: Topology, latest: int, window: int
) -> list[tuple[PublicationKey, bytes | None]]:
    """Of the messages before that offset."""
    # Restricted to its recipients was what has a partial topic, and what none of the named recipients wanted.
    restricted = {-1, *(topic.number for topic in topology.topics if topic.partial)}
    found: list[tuple[PublicationKey, bytes | None]] = []
    if window:
        for messages in reader.stored(max(reader.earliest(), latest - window), latest, read_keyed):
            found += messages.publications(restricted)
    return found[-window:]


def _apply_side_logs(
    layout: Layout, disk: Disk, bases: list[int], snapshot: Snapshot, waiting: dict[int, _Waiting]
) -> None:
    names = set(disk.list(layout.settled))
    for base in bases:
        path = layout.settled_log(base)
        if path.name not in names:
            continue
        for record in settled.walk(disk.view(path), snapshot.settled.get(base, 0)):
            one = None if record is None else waiting.get(record.queue)
            if record is None or one is None:
                continue  # damaged, which only delivers again; or of a queue that is gone
            if record.outcome in (STARTED, REDELIVER, REQUEUE):
                due = None if record.outcome == STARTED else record.time
                past = one.past.get(record.offset)
                behind = record.outcome == REQUEUE or (past is not None and past.behind)
                one.past[record.offset] = Returning(record.offset, record.tries, record.redeliveries, due, behind)
            else:
                one.ended.add(record.offset)


def _sort_out(
    messages: Messages | Outline, topics: dict[int, list[int]], waiting: dict[int, _Waiting], found: dict[int, Found]
) -> None:
    """Give messages to the queues that they wait in."""
    numbers = messages.topic_numbers()
    first, last = messages.first, messages.last
    whole = last - first + 1 == messages.count
    special = frozenset(messages.timed_offsets())
    if len(numbers) == 1 and whole and not special:
        for queue in topics.get(numbers[0], ()):
            one, held = waiting[queue], found[queue]
            edge = first
            runs = one.within(first, last)
            if len(runs.starts) > _MANY_RUNS and one.untouched(first, last + 1):
                held.scattered(runs)
                continue
            for start, end in zip(*runs, strict=True):
                if start != edge:
                    held.gap()
                edge = end + 1
                if one.untouched(start, edge):
                    held.plain(range(start, edge))
                else:
                    _one_by_one(range(start, edge), one, held, ())
            if edge != last + 1:
                held.gap()
        return
    by_topic = messages.topics
    for leading, queues in _by_topics(numbers, topics).items():
        pairs = zip(messages.offsets, by_topic, strict=True)
        own = array("q", [offset for offset, topic in pairs if topic in leading])
        for queue in queues:
            one, held = waiting[queue], found[queue]
            for start, end in zip(*one.within(own[0], own[-1]), strict=True):
                held.gap()
                _one_by_one(own[bisect_left(own, start) : bisect_right(own, end)], one, held, special)
            held.gap()


def _numbers(values: Iterable[int]) -> Any:
    """As Arrow has them. Its own way from Python's numbers would import pandas where that is installed."""
    found = values if isinstance(values, array) else array("q", values)
    return pa.Array.from_buffers(pa.int64(), len(found), [None, pa.py_buffer(found)])


def _array(numbers: Any) -> array[int]:
    found = array("q")
    found.frombytes(memoryview(numbers.buffers()[1])[: 8 * len(numbers)])
    return found


def _by_topics(numbers: list[int], topics: dict[int, list[int]]) -> dict[frozenset[int], list[int]]:
    """The queues that these topics lead to, by the set of those that do.

    Several may lead to one queue: all of a topic, and parts of it for named recipients. Its rows have one order.
    """
    leading: dict[int, set[int]] = defaultdict(set)
    for number in numbers:
        for queue in topics.get(number, ()):
            leading[queue].add(number)
    grouped: dict[frozenset[int], list[int]] = defaultdict(list)
    for queue, those in leading.items():
        grouped[frozenset(those)].append(queue)
    return grouped


def _one_by_one(offsets: Any, one: _Waiting, found: Found, special: Any) -> None:
    positions: array[int] = array("q")
    plain: array[int] = array("q")
    for offset in offsets:
        past = one.past.get(offset)
        if offset in one.ended:
            pass
        elif past is None and offset not in special:
            positions.append(found.position)
            plain.append(offset)
        else:
            if plain:
                found.pieces.append(Stretch(positions, plain))
                positions, plain = array("q"), array("q")
            found.pieces.append(Single(found.position, past or Returning(offset, 0, 0, None)))
        found.position += 1
    if plain:
        found.pieces.append(Stretch(positions, plain))


def _find_dead_letters(
    reader: JournalReader, topology: Topology, start: int, waiting: dict[int, _Waiting], found: dict[int, Found]
) -> None:
    numbers = {queue.node: queue.number for queue in topology.queues if queue.is_dead_letter_queue}
    for frame, body in reader.dead_letter_frames(start):
        records = dead_letters.decode(body)
        for offset, record in enumerate(records, frame.base):
            queue = numbers.get(record.node)
            if queue is None:
                continue
            one = waiting[queue]
            if one.within(offset, offset).starts and offset not in one.ended:
                found[queue].dead_letters.append((offset, record))
