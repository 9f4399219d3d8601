"""A journal that this process writes: the log, its commit thread, side logs, snapshots, spool, retention and sealing.

Rules kept here:
- One commit thread does all writing. A group is whatever arrived while the last one was being synced; no lingering.
- A message is confirmed, and put into queues, after its group is synced.
- A message is marked dead only after its dead letter is synced.
- After a failed write or sync nothing is confirmed any more; the failure is told to everyone who waits.

Everything public is called from the event loop; what starts with `_in_thread` runs in the commit thread. Both are in
this one file because they share a few fields, and which of them may touch what must be seen in one place.
"""

import asyncio
import contextlib
import errno
import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from faregate.broker.journal import settled
from faregate.broker.journal.bell import Bell
from faregate.broker.journal.disk import Disk, File, RealDisk, is_full, size_of
from faregate.broker.journal.items import Append, AppendDeadLetter, Call, Item, SnapshotPoint, resolve
from faregate.broker.journal.layout import Layout, find_json, prepare, raise_version, write_json
from faregate.broker.journal.lock import WriterLock
from faregate.broker.journal.log import MOST_BYTES, MOST_ROWS, SEGMENT_SIZE, Log, now_us
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import Recovered, recover
from faregate.broker.journal.retention import Retention, apply_retention, keeps_all
from faregate.broker.journal.sealing import Sealer, remove_garbage
from faregate.broker.journal.settled import Row
from faregate.broker.journal.snapshot import Snapshot
from faregate.broker.journal.spool import Intake, batch_id, remove_batch
from faregate.errors import (
    ConfigurationError,
    FaregateError,
    JournalFailed,
    JournalFull,
    MessageTooLarge,
    QueueNotFound,
    Unwritable,
)
from faregate.ports.topology import Topology

log = logging.getLogger("faregate.journal")

_Appended = tuple[Sequence[Append], Sequence[int], BaseException | None]
"""Publications that were written together: the offsets of all their messages, one after another, or what went wrong."""
_Other = tuple[AppendDeadLetter | Call, Sequence[int], BaseException | None]

_OPEN_SIDE_LOGS = 16
_SETTLE_SECONDS = 0.005
_MOST_PENDING_BYTES = 64 * 1024 * 1024
_SNAPSHOT_BYTES = 4 * 1024 * 1024
"""Of frames and side logs: what opening reads at the most, apart from what waits."""
_SNAPSHOT_SHARE = 8
"""A snapshot is at most one part in so many of what is written."""


class Journal:
    def __init__(
        self,
        path: str | Path,
        *,
        disk: Disk | None = None,
        segment_size: int = SEGMENT_SIZE,
        retention: Retention | None = None,
        clock: Callable[[], int] = now_us,
        on_failure: Callable[[JournalFailed], None] | None = None,
        on_unreadable: Callable[[str, str], None] | None = None,
    ) -> None:
        self.layout = Layout(Path(path))
        self.failure: JournalFailed | None = None
        self.disk = disk or RealDisk()
        self._retention = retention or Retention()
        self._on_failure = on_failure
        self._clock = clock
        self.on_appended: Callable[[Sequence[Append], Sequence[int], BaseException | None], None] = _unheard
        self._lock = self._take_lock() if disk is None else None
        try:
            self.meta = raise_version(self.layout, self.disk, prepare(self.layout, self.disk))
            remove_garbage(self.layout, self.disk)
            for found in self.layout.foreign_files(self.disk):
                log.warning("%s does not belong to the journal and is left alone", found)
            self._snapshot = find_json(self.layout.snapshot, self.disk, Snapshot)
            point = None if self._snapshot is None else self._snapshot.log
            self._log = Log(self.layout, self.disk, segment_size=segment_size, clock=clock, point=point)
            self.reader = JournalReader(self.layout.root, self.disk)
            if point is not None and self._log.places:
                self.reader.knows(point.segment_id, self._log.places)
            self.topology = self.reader.topology()
        except OSError as exc:
            self._release_lock()
            if is_full(exc):
                raise JournalFull(f"the disk of {path} has no room to open a journal: make room, try again") from exc
            raise JournalFailed(f"the journal {path} cannot be opened: {exc}") from exc
        except BaseException:
            self._release_lock()
            raise
        self._items: SimpleQueue[list[Item] | None] = SimpleQueue()
        self._handed_in: list[Item] = []
        """What this turn of the event loop has handed in; the thread gets it as one at the turn's end."""
        self._settlements: deque[Sequence[Row] | SnapshotPoint] = deque()
        self._flush_planned = False
        self._closed = False
        self._side_lock = threading.Lock()
        self._side_logs: dict[int, tuple[File, int]] = {}
        self.intake = Intake(self.layout, self.disk, self._log.batches.__contains__, on_unreadable or log_unreadable)
        self._pending_bytes = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self._sealer = Sealer(self.layout, self.disk, self._call_and_wait)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bell: Bell | None = None
        self._results: deque[tuple[list[_Appended], list[_Other]]] = deque()
        """What the commit thread has to tell."""
        self._thread: threading.Thread | None = None
        self._side_bytes = 0
        """Written to side logs since the journal was opened."""
        self._keep_from = _SNAPSHOT_BYTES
        """How much has to be written until the next snapshot."""

    # --- life ---------------------------------------------------------------------------------------------

    def _take_lock(self) -> WriterLock:
        root = self.layout.root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            return WriterLock(
                root,
                "one process runs the nodes of a journal; others publish through its spool ('faregate publish')",
                on_fork=self._forked,
            )
        except OSError as exc:
            raise JournalFailed(f"the journal {root} cannot be opened for writing: {exc.strerror or exc}") from exc

    def _forked(self) -> None:
        """This is a child of the process that writes: it has copies of its files, and must not touch them."""
        self.failure = JournalFailed(
            f"this process was forked from the one that writes the journal {self.layout.root}, and must not write to "
            "it: return the result to that process, or publish through the spool, with a bus of your own (bus.spool(…))"
        )
        self._on_failure = None
        self._thread = None
        self._side_lock = threading.Lock()  # the commit thread, which is not here, may have held it

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start(self) -> None:
        """Start the commit thread; from now on the event loop is told what was committed."""
        self._loop = asyncio.get_running_loop()
        self._bell = Bell(self._loop, self._tell_results)
        self._thread = threading.Thread(target=self._in_thread_run, name="faregate-journal", daemon=True)
        self._thread.start()

    async def close(self, snapshot: Snapshot | None, point: SnapshotPoint | None = None) -> None:
        """Commit what was handed in, write the snapshot, let the lock go."""
        if self._thread is not None:
            await asyncio.to_thread(self._sealer.stop)
            try:
                if snapshot is not None and point is not None and self.failure is None:
                    await self.snapshot(snapshot, point)
            except (OSError, FaregateError) as exc:
                log.warning("no snapshot of %s (%s): the next opening takes longer", self.layout.root, exc)
            self._closed = True
            self._pass_on()
            self._items.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
            self._tell_results()
            if self._bell is not None:
                self._bell.close()
        self.release()

    def release(self) -> None:
        """Let go of files and lock, whatever happened before."""
        try:
            self._flush_side_logs()
            if self.failure is None:
                self._sync_side_logs()
        except OSError as exc:
            log.warning("the side logs of %s are not synced: %s", self.layout.root, exc)
        finally:
            for file, _ in self._side_logs.values():
                file.close()
            self._side_logs.clear()
            self._log.close()
            self._release_lock()

    # --- handing in ---------------------------------------------------------------------------------------

    @property
    def next_offset(self) -> int:
        return self._log.next_offset

    @property
    def is_behind(self) -> bool:
        """Whether more was handed in than should wait in memory."""
        return self._pending_bytes > _MOST_PENDING_BYTES

    @property
    def segments(self) -> int:
        """A number that grows when a new segment is started."""
        return self._log.bases[-1]

    async def wait_for_room(self) -> None:
        """Backpressure: return once the commit thread is not too far behind."""
        while self._pending_bytes > _MOST_PENDING_BYTES and self.failure is None:
            room = asyncio.get_running_loop().create_future()
            self._room.append(room)
            await room

    async def call(self, function: Callable[[], None]) -> None:
        """Run something in the commit thread, behind what was handed in."""
        done = asyncio.get_running_loop().create_future()
        self.hand_in(Call(function, lambda _, error: resolve(done, error)))
        await done

    async def barrier(self) -> None:
        """Return once everything handed in so far is durable."""
        await self.call(lambda: None)

    def hand_in(self, item: Item) -> None:
        """Give something to the commit thread.

        Who handed it in is told when it is durable, in the order of handing in; publications through `on_appended`.
        """
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise ConfigurationError(f"the journal {self.layout.root} is closed")
        self._pending_bytes += item.size
        if not self._handed_in and self._loop is not None:
            self._loop.call_soon(self._pass_on)
        self._handed_in.append(item)

    def _pass_on(self) -> None:
        if self._handed_in:
            items, self._handed_in = self._handed_in, []
            self._items.put(items)

    def settle(self, records: Sequence[Row]) -> None:
        """Note what became of messages; written soon, lost at worst with the machine, and then delivered again."""
        self._settlements.append(records)
        if not self._flush_planned and self._loop is not None and self.failure is None:
            self._flush_planned = True
            self._loop.call_later(_SETTLE_SECONDS, self._flush_soon)

    def _flush_soon(self) -> None:
        """The thread writes what was settled with whatever it commits next; see to it that there is a next."""
        self._flush_planned = False
        if self._settlements:
            self._items.put([])

    def settle_now(self, records: Sequence[Row]) -> None:
        """The same, written before this returns: it survives the end of this process."""
        self._settlements.append(records)
        self._flush_side_logs()

    def snapshot_point(self) -> SnapshotPoint:
        """Stand between what was settled so far and what will be; taken at the very moment of a snapshot's state."""
        point = SnapshotPoint()
        self._settlements.append(point)
        return point

    async def snapshot(self, snapshot: Snapshot, point: SnapshotPoint) -> None:
        """Keep what waited when the point was taken, so that the next opening starts from there. Written outside of the
        commit thread: no publish waits for it. Never call it while another call is under way. Raises `OSError` if the
        disk does not take it."""

        open_logs: list[Path] = []

        def take() -> None:
            snapshot.log = self._log.point()
            with self._side_lock:
                open_logs.extend(map(self.layout.settled_log, self._side_logs))
            self._keep_from = self._written + _SNAPSHOT_BYTES

        await self.call(take)
        if point.sizes is None:
            code = point.errno or errno.EIO
            raise self.failure or OSError(code, f"its side logs: {os.strerror(code)}")
        snapshot.settled = point.sizes
        await asyncio.to_thread(self._write_snapshot, snapshot, open_logs)

    def _write_snapshot(self, snapshot: Snapshot, side_logs: list[Path]) -> None:
        for path in side_logs:
            if size_of(path, self.disk):  # or else retention has taken it
                file = self.disk.open(path)  # so that nobody who writes to it waits
                try:
                    file.sync()
                finally:
                    file.close()
        write_json(self.layout.snapshot, self.disk, snapshot)
        # One that is large is taken the less often.
        self._keep_from += _SNAPSHOT_SHARE * self.disk.size(self.layout.snapshot)

    @property
    def _written(self) -> int:
        return self._log.written + self._side_bytes

    @property
    def wants_snapshot(self) -> bool:
        """Whether so much was written since the last one that opening would take its time."""
        return self._written >= self._keep_from

    def seal(self) -> None:
        """Rewrite what was rolled, in the background."""
        if self.failure is None and self._thread is not None:
            self._sealer.look()

    def _call_and_wait(self, function: Callable[[], object]) -> None:
        """Run something in the commit thread; for other threads. Raises what it raised."""
        ended = threading.Event()
        errors: list[BaseException] = []

        def done(_: Sequence[int], error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            ended.set()

        self._items.put([Call(function, done, told_in_thread=True)])
        while not ended.wait(1.0):
            if self._thread is None or not self._thread.is_alive():
                return
        if errors:
            raise errors[0]

    def unbind(self, name: str) -> None:
        """Lead no topic to that queue any more. Raises `QueueNotFound`."""
        queue = self.topology.queue(name)
        if queue is None or queue.is_dead_letter_queue:
            bound = sorted(each.name for each in self.topology.queues if not each.is_dead_letter_queue)
            names = ", ".join(bound) or "none"
            raise QueueNotFound(f"there is no bound queue {name!r} in {self.layout.root}; there are: {names}")
        self.change_topology(lambda topology: topology.remove(queue))

    def change_topology(self, change: Callable[[Topology], object]) -> None:
        """Durable before anything refers to it. What could not be written is not there, and may be tried again.

        `change` says whether it changed anything.
        """
        changed = self.topology.copy()
        if not change(changed):
            return
        if self.failure is not None:
            raise self.failure
        try:
            write_json(self.layout.topology, self.disk, changed)
        except OSError as exc:
            path = self.layout.topology
            if is_full(exc):
                raise JournalFull(f"the disk has no room to write {path}: make room, try again") from exc
            self.fail(exc)
            raise self.failure or JournalFailed(f"{path} cannot be written: {exc}") from exc
        self.topology = changed

    def recover(self, window: int = 0) -> Recovered:
        """What waits in each queue, and the last publications, so many."""
        # What was read at opening, for the broker, which asks first and once. It may be large, and change later.
        snapshot, self._snapshot = self._snapshot if window else None, None
        try:
            return recover(self.layout, self.disk, self.reader, self.topology, window, snapshot)
        except OSError as exc:
            raise JournalFailed(f"the journal {self.layout.root} cannot be opened: {exc}") from exc

    def fail(self, error: Exception) -> None:
        """Something that was confirmed cannot be had: go no further, and say so."""
        if self.failure is None:
            self.failure = JournalFailed(f"the journal in {self.layout.root} cannot go on: {error}")
            log.critical("%s", self.failure)
            self._tell_failure()

    def _tell_failure(self) -> None:
        """Once."""
        if self.failure is not None and self._on_failure is not None:
            tell, self._on_failure = self._on_failure, None
            tell(self.failure)

    def spooled(self) -> list[Path]:
        """Batches from other processes."""
        return [] if self.failure is not None else self.intake.look()

    def discard(self, path: Path) -> None:
        """Everything in this batch is in the log already."""

        def removed(_: Sequence[int], error: BaseException | None) -> None:
            self.intake.returned(path)
            if isinstance(error, OSError):
                self.intake.put_off(path, error)

        self.hand_in(Call(lambda: remove_batch(path, self.layout, self.disk), removed))

    def retains_all(self) -> bool:
        """Whether retention would remove nothing now."""
        now = max(self._log.time, self._clock())
        return keeps_all(self.layout, self.disk, JournalReader(self.layout.root, self.disk), self._retention, now)

    async def retain(self, snapshot: Snapshot) -> None:
        """Remove what retention no longer keeps, as far as the snapshot knows what waits."""
        reader = JournalReader(self.layout.root, self.disk)
        bounds = [queue.bounds() for queue in snapshot.queues.values()]
        runs = sorted(run for each in bounds for run in zip(each[0::2], each[1::2], strict=True))
        await self.call(lambda: self._in_thread_retain(reader, runs, snapshot.offset))

    def _in_thread_retain(self, reader: JournalReader, runs: list[tuple[int, int]], upto: int) -> None:
        now = max(self._log.time, self._clock())
        for base in apply_retention(self.layout, self.disk, reader, self._retention, runs, now, upto):
            with self._side_lock:
                side = self._side_logs.pop(base, None)
            if side is not None:
                side[0].close()
            self.disk.remove(self.layout.settled_log(base))
        self._log.bases = self.layout.segment_bases(self.disk)

    # --- the commit thread --------------------------------------------------------------------------------

    def _in_thread_run(self) -> None:
        while True:
            first = self._items.get()
            if first is None:
                return
            group, last = self._in_thread_gather(first)
            try:
                appended, others = self._in_thread_commit(group)
            except Exception as exc:
                # Whatever it was, what is on the disk is unknown now, and nobody may wait for ever.
                log.exception("the commit thread of %s failed", self.layout.root)
                self.failure = JournalFailed(f"committing to the journal in {self.layout.root} failed: {exc!r}")
                appended = [([item], (), self.failure) for item in group if isinstance(item, Append)]
                others = [(item, (), self.failure) for item in group if not isinstance(item, Append)]
            if appended or others or self.failure is not None:
                self._results.append((appended, others))
                if self._bell is not None:
                    self._bell.ring()
            if last:
                return

    def _in_thread_gather(self, group: list[Item]) -> tuple[list[Item], bool]:
        """What is there now, up to what fits a frame; whether the end was reached."""
        size = sum([item.size for item in group])
        while len(group) < MOST_ROWS and size < MOST_BYTES:
            try:
                more = self._items.get_nowait()
            except Empty:
                break
            if more is None:
                return group, True
            group += more
            size += sum([item.size for item in more])
        return group, False

    def _in_thread_commit(self, group: list[Item]) -> tuple[list[_Appended], list[_Other]]:
        """Write and sync a group; what to tell whom, in the order of offsets, so that queues are filled in it.

        Publishes are written together, and dead letters; a batch of the spool is a unit of its own.
        """
        plain = [item for item in group if isinstance(item, Append) and item.batch is None]
        rest = [item for item in group if not isinstance(item, Append) or item.batch is not None]
        spooled = [item for item in rest if isinstance(item, Append)]
        dead = [item for item in rest if isinstance(item, AppendDeadLetter)]
        appended: list[_Appended] = []
        others: list[_Other] = []
        try:
            full = self._in_thread_append([plain, *([item] for item in spooled)], appended)
            if dead:
                others += self._in_thread_append_dead(dead, full)
            if any(result[2] is None for result in (*appended, *others)):
                self._log.sync()
        except JournalFailed as exc:
            self.failure = exc
            appended = [([item], (), exc) for item in (*plain, *spooled)]
            others = [(item, (), exc) for item in dead]
        for items, _, error in appended if spooled else ():
            if items[0].batch is not None and error is None:
                # In the log, so the file may go later: the next look at the spool tries again, and tells.
                with contextlib.suppress(OSError):
                    remove_batch(items[0].batch, self.layout, self.disk)
        self._flush_side_logs()
        # Then whoever waits behind all of them.
        for call in rest:
            if isinstance(call, Call):
                error = self._in_thread_call(call)
                if call.told_in_thread:
                    call.done((), error)
                else:
                    others.append((call, (), error))
        return appended, others

    def _in_thread_append(self, units: list[list[Append]], appended: list[_Appended]) -> JournalFull | None:
        """Each unit becomes a frame; if one publish spoils it, each has one of its own. When the disk is full the rest
        is refused, and what was written before counts once it is synced."""
        full: JournalFull | None = None
        left = deque(units)
        while left:
            unit = left.popleft()
            if not unit:
                continue
            try:
                appended.append((unit, () if full else self._in_thread_append_unit(unit), full))
            except JournalFull as exc:
                full = exc
                appended.append((unit, (), exc))
            except (Unwritable, MessageTooLarge) as exc:
                if len(unit) == 1:
                    appended.append((unit, (), exc))
                else:
                    left.extendleft([item] for item in reversed(unit))
        return full

    def _in_thread_append_unit(self, items: list[Append]) -> Sequence[int]:
        if len(items) == 1:
            [item] = items
            return self._log.append(
                item.envelopes, item.topics, batch=None if item.batch is None else batch_id(item.batch)
            )
        envelopes = [envelope for item in items for envelope in item.envelopes]
        return self._log.append(envelopes, [topic for item in items for topic in item.topics])

    def _in_thread_append_dead(self, items: list[AppendDeadLetter], full: JournalFull | None) -> list[_Other]:
        try:
            if full is None:
                offsets = self._log.append_dead_letters([item.letter for item in items])
                return [(item, (offset,), None) for item, offset in zip(items, offsets, strict=True)]
        except JournalFull as exc:
            full = exc
        return [(item, (), full) for item in items]

    def _in_thread_call(self, item: Call) -> BaseException | None:
        if self.failure is not None:
            return self.failure
        try:
            item.function()
        except (OSError, FaregateError) as exc:
            return exc
        return None

    def _tell_results(self) -> None:
        try:
            while self._results:
                self._tell(*self._results.popleft())
        finally:  # should telling one fail, the others learn it all the same
            if self._results and self._loop is not None:
                self._loop.call_soon(self._tell_results)

    def _tell(self, appended: list[_Appended], others: list[_Other]) -> None:
        for items, offsets, error in appended:
            self._pending_bytes -= sum([item.size for item in items])
            if items[0].batch is not None:
                self.intake.returned(items[0].batch, error)
            self.on_appended(items, offsets, error)
        for other, offsets, error in others:
            self._pending_bytes -= other.size
            other.done(offsets, error)
        while self._room and (self._pending_bytes <= _MOST_PENDING_BYTES or self.failure is not None):
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)
        self._tell_failure()

    # --- side logs ----------------------------------------------------------------------------------------

    def _flush_side_logs(self) -> None:
        with self._side_lock:
            records: list[Row] = []
            while self._settlements:
                item = self._settlements.popleft()
                if not isinstance(item, SnapshotPoint):
                    records += item
                    continue
                item.errno = self._write_records(records)
                if item.errno:
                    return  # the point goes without sizes: there will be no snapshot this time
                records = []
                item.sizes = self._side_log_sizes()
            self._write_records(records)

    def _write_records(self, records: list[Row]) -> int:
        """Write what was settled; 0, or the number of the error. What the disk refuses is kept for the next time:
        losing it only delivers again."""
        if self.failure is not None:
            return errno.EIO
        bases = self._log.bases
        by_base: dict[int, list[Row]] = {}
        if records and min(records)[0] >= bases[-1]:  # as nearly always
            by_base[bases[-1]] = records
        else:
            for record in records:
                base = bases[max(0, bisect_right(bases, record[0]) - 1)]
                by_base.setdefault(base, []).append(record)
        while by_base:
            base, own = by_base.popitem()
            try:
                file, size = self._side_log(base)
                written = file.write(size, (settled.pack_all(own),))
            except OSError as exc:
                log.warning("a side log of %s cannot be written now: %s", self.layout.root, exc.strerror or exc)
                self._settlements.extendleft([own, *by_base.values()])
                return exc.errno or errno.EIO
            self._side_logs[base] = (file, size + written)
            self._side_bytes += written
        return 0

    def _side_log(self, base: int) -> tuple[File, int]:
        if base not in self._side_logs:
            while len(self._side_logs) >= _OPEN_SIDE_LOGS:
                oldest = next(iter(self._side_logs))
                self._side_logs.pop(oldest)[0].close()
            path = self.layout.settled_log(base)
            file = self.disk.open(path)
            self._side_logs[base] = (file, settled.whole(self.disk.size(path)))
        return self._side_logs[base]

    def _sync_side_logs(self) -> None:
        with self._side_lock:
            for file, _ in self._side_logs.values():
                file.sync()

    def _side_log_sizes(self) -> dict[int, int]:
        sizes = {base: size_of(self.layout.settled_log(base), self.disk) for base in self._log.bases}
        return {base: settled.whole(size) for base, size in sizes.items() if size}


def _unheard(items: Sequence[Append], offsets: Sequence[int], error: BaseException | None) -> None:
    """Nobody has asked to be told."""


def log_unreadable(name: str, text: str) -> None:
    log.error("%s", text)
