"""What is wrong with a journal: the logic of `faregate journal verify`.

Rules kept here:
- Looking changes nothing and works beside a running writer. Then only what the high-water mark covers is looked at, and
  things are read in the order snapshot, side logs, mark, segments, topology: each refers only to what is read later.
- An offset is never given twice: where messages are lost, their offsets stay empty. Everything that has seen an offset
  (the mark, a settlement, a named reader) is a witness that it was given.
"""

from pathlib import Path
from typing import Any

from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled
from faregate.broker.journal.disk import Disk, RealDisk, size_of
from faregate.broker.journal.findings import Act, Finding, Inspection, Offsets, Progress, Step, offsets
from faregate.broker.journal.frame import SEGMENT_BYTES, TRAILER_BYTES
from faregate.broker.journal.high_water import HighWater, read_high_water
from faregate.broker.journal.layout import Layout, T, check_meta, find_json
from faregate.broker.journal.lock import lock_holder
from faregate.broker.journal.scan import NotWhole, Scan, walk_batch
from faregate.broker.journal.settled import RECORD_BYTES
from faregate.broker.journal.snapshot import Snapshot
from faregate.broker.journal.spool import parts_of, waiting
from faregate.errors import JournalCorrupt, JournalTooNew
from faregate.ports.log import ReaderOffset
from faregate.ports.topology import Topology

_MOST_FINDINGS = 1000
_FARTHEST = 1 << 62
_NO_SNAPSHOT = ": what waits is found from the side logs"


def inspect(
    root: Path, disk: Disk | None = None, *, progress: Progress | None = None, unfinished_copy: bool = False
) -> Inspection:
    """Read everything and say what is wrong. An `unfinished_copy` has no journal.json yet.

    Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`.
    """
    inspector = Inspector(Layout(root), disk or RealDisk(), progress, unfinished_copy)
    found = inspector.run()
    if found.writer is None and (found.problems or found.notes) and lock_holder(root) is not None:
        return inspect(root, disk, progress=progress)  # a writer has started meanwhile, and changed what was looked at
    return found


class Inspector:
    def __init__(
        self,
        layout: Layout,
        disk: Disk,
        progress: Progress | None,
        unfinished_copy: bool = False,
        *,
        locked_here: bool = False,
    ) -> None:
        self._layout = layout
        self._disk = disk
        self._progress = progress or (lambda done, total: None)
        self._unfinished_copy = unfinished_copy
        self._found = Inspection(None if locked_here else lock_holder(layout.root))
        self._live = self._found.writer is not None
        self._total = 0
        self._topics: dict[int, tuple[Path, int]] = {}
        self._queues: dict[int, tuple[Path, int]] = {}
        """Topic and queue numbers that are referred to, and where."""
        self._witnesses: list[tuple[int, Path, str]] = []
        """The offset behind what was seen, and who has seen it."""
        self._altered: list[tuple[Path, int, int]] = []
        self._clean: list[Step] = []
        self._mark_is_wrong = False

    def run(self) -> Inspection:
        self._look_at_meta()
        self._total = self._layout.bytes(self._disk)
        self._look_at_readers()
        self._look_at_spool()
        snapshot = self._read(self._layout.snapshot, Snapshot, _NO_SNAPSHOT)
        self._look_at_side_logs()
        mark = self._read_mark()
        self._look_at_segments(mark)
        self._check_snapshot(snapshot)
        self._look_at_topology()
        self._look_at_bodies()
        for path in self._layout.foreign_files(self._disk):
            self._note(path, None, "does not belong to the journal and is left alone")
        self._found.steps += self._clean
        if self._found.steps or self._mark_is_wrong:
            self._step("write high-water anew", ("write-mark",))
        return self._found

    def _look_at_bodies(self) -> None:
        """Last, so that they crowd out no damage."""
        for path, at_byte, offset in self._altered:
            what = f"has another body at offset {offset} than the one that its digest was made of"
            self._add(self._found.problems, Finding(path, at_byte, what, is_content=True))

    def _problem(self, path: Path, at_byte: int | None, what: str, lost: Offsets | None = None) -> None:
        self._add(self._found.problems, Finding(path, at_byte, what, lost))

    def _note(self, path: Path, at_byte: int | None, what: str) -> None:
        self._add(self._found.notes, Finding(path, at_byte, what))

    def _add(self, findings: list[Finding], finding: Finding) -> None:
        if len(findings) < _MOST_FINDINGS:
            findings.append(finding)
        else:
            self._found.more += 1

    def _step(self, what: str, act: Act) -> None:
        if not self._live:
            self._found.steps.append(Step(what, act))

    def _set_aside(self, path: Path, why: str = "") -> None:
        self._step(f"move {self._name(path)} to quarantine{why}", ("set-aside", path))

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._layout.root))

    def _done(self, size: int) -> None:
        self._found.checked["bytes"] += size
        self._progress(self._found.checked["bytes"], max(self._total, self._found.checked["bytes"]))

    # --- small files ------------------------------------------------------------------------------------

    def _look_at_meta(self) -> None:
        if self._unfinished_copy:
            return
        try:
            self._found.id = check_meta(self._layout, self._disk).id
        except JournalCorrupt as exc:
            self._problem(self._layout.meta, None, f"cannot be read: {exc.__cause__}")
            self._step("move journal.json to quarantine and write a new one, with a new id", ("new-meta",))

    def _read(self, path: Path, type: type[T], without: str) -> T | None:
        """None for a file that is not there, or cannot be read: then it is set aside."""
        try:
            return find_json(path, self._disk, type)
        except FileNotFoundError:
            return None
        except JournalCorrupt as exc:
            self._problem(path, None, f"cannot be read: {exc.__cause__}")
            self._set_aside(path, without)
            return None

    def _look_at_readers(self) -> None:
        for path in self._layout.files(self._layout.readers, self._disk):
            kept = self._read(path, ReaderOffset, ": that reader starts anew")
            if kept is not None:
                self._witnesses.append((kept.offset, path, "is the offset of a reader that is farther"))

    def _look_at_spool(self) -> None:
        for path in waiting(self._layout, self._disk):
            try:
                if not self._disk.is_file(path):
                    self._problem(path, None, "is not a file")
                    self._set_aside(path)
                    continue
                walked = walk_batch(path, self._disk, self._disk.view)
                wrong = next((each for each in walked if isinstance(each, NotWhole)), None)
                size = sum(size_of(each, self._disk) for each in (path, *parts_of(path, self._disk)))
            except FileNotFoundError:
                continue  # the writer has taken it in
            except PermissionError as exc:
                self._problem(path, None, f"cannot be read ({exc.strerror}); let the user who runs the bus read it")
                continue
            self._found.checked["batches"] += 1
            self._done(size)
            if wrong is not None:
                what = "is not a whole batch" if wrong.path == path else f"is not what {path.name} was made of"
                self._problem(wrong.path, wrong.at_byte, what)
                self._set_aside(path)

    def _check_snapshot(self, snapshot: Snapshot | None) -> None:
        if snapshot is None:
            return
        wrong = None
        if snapshot.offset > self._found.end:
            wrong = f"speaks of offset {snapshot.offset}, and the log ends at {self._found.end}"
        for number, queue in snapshot.queues.items():
            self._queues.setdefault(number, (self._layout.snapshot, 0))
            flat = queue.bounds()
            if list(flat) != sorted(flat) or (flat and flat[-1] >= snapshot.offset):
                wrong = f"has stretches of queue {number} that are not in order"
        for base, size in snapshot.settled.items():
            path = self._layout.settled_log(base)
            has = size_of(path, self._disk)
            if path.name in self._disk.list(self._layout.settled) and has < size:
                wrong = f"counts {size} bytes of {self._name(path)}, which has {has}"
        if wrong:
            self._problem(self._layout.snapshot, None, wrong)
            self._set_aside(self._layout.snapshot, _NO_SNAPSHOT)
            return
        bases = self._layout.segment_bases(self._disk)
        first = min((queue.bounds()[0] for queue in snapshot.queues.values() if queue.runs), default=_FARTHEST)
        if bases and first < bases[0] and not self._live:  # retention never takes what still waits
            what = "is missing, although messages in it waited when the snapshot was made"
            self._problem(self._layout.segment(first), None, what, (first, bases[0] - 1))
            self._fill(first, bases[0])

    def _read_mark(self) -> HighWater | None:
        path = self._layout.high_water
        for _ in range(100 if self._live else 1):  # it may be just being written
            mark = read_high_water(path, self._disk)
            if mark is not None:
                self._witnesses.append((mark.offset, path, "confirms more"))
                return mark
        if path.name in self._disk.list(self._layout.root):
            self._problem(path, None, "cannot be read, so nobody knows how much was confirmed")
        elif self._layout.segment_bases(self._disk):
            self._problem(path, None, "is missing, so nobody knows how much was confirmed")
        else:
            return None
        self._mark_is_wrong = True
        return None

    def _look_at_topology(self) -> None:
        path = self._layout.topology
        hint = "restore it from a backup, repair cannot make it again"
        try:
            found = find_json(path, self._disk, Topology)
        except JournalCorrupt as exc:
            self._problem(path, None, f"cannot be read: {exc.__cause__}; {hint}")
            return
        topology = found or Topology()
        queues = {queue.number for queue in topology.queues}
        topics = {topic.number for topic in topology.topics}
        if found is None and (self._queues or set(self._topics) - {-1}):
            self._problem(path, None, f"is missing, so nothing in the log has a queue; {hint}")
            return
        if len(queues) < len(topology.queues) or len({queue.name for queue in topology.queues}) < len(queues):
            self._problem(path, None, f"has a queue twice; {hint}")
        if len(topics) < len(topology.topics) or any(set(topic.queues) - queues for topic in topology.topics):
            self._problem(path, None, f"has topics that are double or lead nowhere; {hint}")
        for number in sorted(set(self._topics) - topics - {-1}):
            self._problem(*self._topics[number], f"has messages of topic {number}, which topology.json does not know")
        for number in sorted(set(self._queues) - queues):
            self._problem(*self._queues[number], f"speaks of queue {number}, which topology.json does not know")

    # --- side logs --------------------------------------------------------------------------------------

    def _look_at_side_logs(self) -> None:
        for path in self._layout.files(self._layout.settled, self._disk):
            try:
                data = self._disk.view(path)
            except FileNotFoundError:
                continue
            whole = settled.whole(len(data))
            count = farthest = 0
            start: int | None = None
            damaged = False
            for at_byte, record in zip(range(0, whole, RECORD_BYTES), settled.walk(data), strict=True):
                if record is None:
                    start = at_byte if start is None else start
                    continue
                count, farthest = count + 1, max(farthest, record.offset)
                self._queues.setdefault(record.queue, (path, 0))
                if start is not None:
                    lost = f"{(at_byte - start) // RECORD_BYTES} damaged record(s)"
                    self._problem(path, start, f"has {lost}: their messages may be delivered again")
                    start, damaged = None, True
            self._found.checked["settlements"] += count
            self._done(len(data))
            if count:
                self._witnesses.append((farthest + 1, path, "settles more"))
            if start is not None and not self._live:
                self._note(path, start, "ends with torn records; their messages are delivered again")
            if damaged and not self._live:
                what = f"rewrite {self._name(path)} without its damaged records; the original goes to quarantine"
                self._clean.append(Step(what, ("clean-side-log", path)))
            if whole < len(data) and not self._live:
                self._note(path, whole, "ends with a torn record; its message is delivered again")

    # --- segments ---------------------------------------------------------------------------------------

    def _look_at_segments(self, mark: HighWater | None) -> None:
        bases = self._layout.segment_bases(self._disk)
        if self._live:
            bases = [base for base in bases if base <= mark.segment] if mark is not None else bases[:-1]
        gone = None
        if mark is not None and not self._live and (not bases or bases[-1] < mark.segment):
            gone = mark.segment
        expected: int | None = None
        last: tuple[int, Scan] | None = None
        kept = 0
        for base, following in zip(bases, [*bases[1:], gone][: len(bases)], strict=True):
            path = self._layout.segment(base)
            if expected is not None and base < expected:
                self._problem(path, None, f"starts within the segment before it, which ends at offset {expected}")
                self._set_aside(path)
                continue
            try:
                # One that a starting writer could cut under our eyes is read, not mapped.
                data = self._disk.view(path) if following is not None or self._live else self._disk.read(path)
            except FileNotFoundError:
                expected = None  # retention has taken it
                continue
            if expected is not None and base > expected:
                self._missing(expected, base)
            expected, scan = self._look_at_segment(base, data, following, mark)
            kept += scan is not None
            last = None if scan is None or scan.footer is not None or following is not None else (base, scan)
            self._done(len(data))
        if gone is not None and mark is not None:
            expected = self._last_is_missing(expected or 0, mark)
        if bases or expected is not None:
            self._end_at(bases[-1] if expected is None else expected, last, nothing_left=bool(bases) and not kept)

    def _last_is_missing(self, expected: int, mark: HighWater) -> int:
        lost = (expected, mark.offset - 1) if mark.offset > expected else None
        self._problem(self._layout.segment(mark.segment), None, "is missing", lost)
        self._mark_is_wrong = True
        self._fill(expected, max(mark.offset, expected + 1))
        return max(mark.offset, expected + 1)

    def _missing(self, start: int, stop: int) -> None:
        self._problem(self._layout.segment(start), None, "is missing", (start, stop - 1))
        self._fill(start, stop)

    def _fill(self, start: int, stop: int) -> None:
        lost = [(start, stop - 1)]
        what = f"put an empty segment in the place of {offsets(start, stop - 1)}"
        self._step(what, ("write-segment", start, stop, lost, 0))

    def _look_at_segment(
        self, base: int, data: Any, following: int | None, mark: HighWater | None
    ) -> tuple[int, Scan | None]:
        """The offset behind it, and its scan unless it is not to be kept."""
        path = self._layout.segment(base)
        header = frames.read_segment_header(data)
        confirmed = mark.at_byte if mark is not None and mark.segment == base else 0
        if header is None and following is None and confirmed <= SEGMENT_BYTES and data.find(frames.FRAME_MAGIC) < 0:
            self._note(path, 0, "was just being made and holds nothing; opening the journal makes it again")
            return base, Scan(base, data, header, 0)
        if header is not None and header.version > frames.VERSION:
            raise JournalTooNew(
                f"{path} is written in version {header.version} of the format and this Faregate reads up to "
                f"{frames.VERSION}: update Faregate"
            )
        if header is not None and header.base != base:
            self._problem(path, 0, f"is another segment: by its header it starts at offset {header.base}")
            self._set_aside(path)
            return base, None
        if header is not None and header.form == frames.SEALED:
            confirmed = 0  # since the mark was taken it was rolled and sealed: its footer says where it ends
        written_to = bool(confirmed) and self._live
        footer = None if header is None or written_to else frames.read_footer(data, header)
        limit = confirmed if written_to else len(data) - (TRAILER_BYTES if footer else 0)
        scan = Scan(base, data, header, limit)
        if scan.unknown is not None:  # no damage: a repair must not take it out
            raise JournalTooNew(f"{path} {scan.unknown}")
        self._count(path, scan)
        wrong = list(scan.wrong)
        if header is None:
            wrong.insert(0, (0, "has a header that cannot be read", None))
        if footer is not None and not wrong:  # where frames are lost, it differs anyway
            wrong += [(footer.bytes, what, None) for what in scan.footer_differences(footer, len(data))]
        known = set(scan.lost_before)
        if not (scan.footer is not None and scan.footer.compacted):
            wrong += [(at_byte, "lacks messages", gap) for at_byte, gap in scan.gaps if not _covered(gap, known)]
        for first, final in scan.lost_before:
            self._note(path, None, f"lost {offsets(first, final)}, and was repaired")
        if footer is not None or following is not None:
            end = max(scan.end, footer.end if footer else following or 0)
            if footer is None:
                lost = (scan.end, end - 1) if end > scan.end else None
                if scan.footer is not None:
                    lost, end = None, scan.footer.end
                wrong.append((scan.whole if scan.tail is None else scan.tail, "has no footer that can be read", lost))
            elif scan.tail is not None or (scan.footer is None and not wrong):
                wrong.append((scan.tail or scan.whole, "is damaged before its footer", None))
            for at_byte, what, lost in wrong:
                self._problem(path, at_byte, what, lost)
            if wrong:
                self._rewrite(base, end, [lost for *_, lost in wrong if lost], 0)
            return end, scan
        return self._look_at_tail(path, scan, wrong, confirmed, len(data)), scan

    def _look_at_tail(
        self, path: Path, scan: Scan, wrong: list[tuple[int, str, Offsets | None]], confirmed: int, size: int
    ) -> int:
        """The last segment, which has no footer yet."""
        for at_byte, what, lost in wrong:
            self._problem(path, at_byte, what, lost)
        scan.footer = None
        scan.wrong = wrong
        if scan.whole < confirmed:  # what follows was confirmed: the high-water mark is a witness, and tells
            scan.whole = scan.segment.at_byte
            return scan.end
        torn = scan.tail is not None or scan.whole < scan.segment.at_byte
        if torn and not wrong and not self._live:
            self._note(path, scan.whole, "ends with a torn commit, never confirmed; opening the journal cuts it off")
            what = f"move the torn end of {self._name(path)} to quarantine"
            self._step(what, ("cut-tail", path, scan.whole, size))
        return scan.whole_end

    def _end_at(self, end: int, last: tuple[int, Scan] | None, nothing_left: bool) -> None:
        """Nothing may have seen an offset behind the end. If something has, the offsets up to there were given."""
        given = end
        for seen, path, what in sorted(self._witnesses, key=lambda witness: -witness[0]):
            if end < seen < _FARTHEST:
                lost = (end, seen - 1) if seen > given else None
                given = max(given, seen)
                at_byte: int | None = None
                told = f"{what} than the log has: it goes to offset {seen - 1}, and the log ends at offset {end}"
                if last is not None and path == self._layout.high_water:
                    path, at_byte = self._layout.segment(last[0]), last[1].whole
                    told = f"is damaged or cut off here: messages up to offset {seen - 1} were confirmed"
                self._problem(path, at_byte, told, lost)
        self._found.end = given
        if nothing_left or (last is not None and last[1].wrong and given == last[0]):
            given += 1  # so that the next segment starts behind the one that is made here
        if last is not None and (given > end or last[1].wrong):
            lost_here = [lost for *_, lost in last[1].wrong if lost] + ([(end, given - 1)] if given > end else [])
            self._rewrite(last[0], given, lost_here, last[1].whole)
        elif given > end:
            self._fill(end, given)

    def _rewrite(self, base: int, end: int, lost: list[tuple[int, int]], stop: int) -> None:
        self._step(
            f"write {self._name(self._layout.segment(base))} anew from its sound frames, keeping offsets; the original "
            "goes to quarantine",
            ("write-segment", base, end, lost, stop),
        )

    def _count(self, path: Path, scan: Scan) -> None:
        checked = self._found.checked
        checked["segments"] += 1
        checked["frames"] += scan.frames
        checked["messages"] += scan.segment.messages
        checked["dead_letters"] += scan.segment.dead_letters
        for topic, at_byte in scan.topics.items():
            self._topics.setdefault(topic, (path, at_byte))
        self._altered += [(path, at_byte, offset) for at_byte, offset in scan.altered]


def _covered(gap: tuple[int, int], known: set[tuple[int, int]]) -> bool:
    return any(first <= gap[0] and gap[1] <= last for first, last in known)
