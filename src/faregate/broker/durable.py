"""The broker on a journal: the same queues, filled after the commit, told to the side logs as they change.

What a queue cannot hold in memory waits in the journal; see `Backlog`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import compress, repeat
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import TypeVar

from faregate.broker.broker import Broker, unsent
from faregate.broker.entry import Entry
from faregate.broker.journal.disk import is_full
from faregate.broker.journal.items import Append, AppendDeadLetter, SnapshotPoint, resolve
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.recovery import Found, Single
from faregate.broker.journal.settled import Row
from faregate.broker.journal.snapshot import QueueSnapshot, Returning, Snapshot
from faregate.broker.journal.spool import Spooled
from faregate.broker.queue import Queue
from faregate.broker.topics import Route
from faregate.errors import ConfigurationError, FaregateError, JournalFailed, JournalFull, Unroutable, ViewTaken
from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import OUTCOMES, REDELIVER, REQUEUE, STARTED
from faregate.ports.progress import Occupation
from faregate.ports.queue import Binding, Outcome, dead_letter_queue

log = logging.getLogger("faregate.broker")

T = TypeVar("T")
RESIDENT_BYTES = 64 * 1024 * 1024
_ENVELOPE_BYTES = 700
"""What an envelope costs in memory beside its body, roughly."""
_RESTS, _FAILED_SECONDS = 50, 1.0
"""To take a snapshot may take one part in so many of the time; after one that failed comes a pause."""
_CAREFUL_STARTS = 10_000
_WRITE_AGAIN_SECONDS = 1.0
_READ_AHEAD = 50_000
"""So many messages of the spool are read before those read so far are committed; a batch is read as a whole."""


_is_partial = attrgetter("partial")


def _place(letter: DeadLetter) -> tuple[str, str, str]:
    """What tells a dead letter from others."""
    return letter.node, letter.queue, letter.envelope.publication_id


class LogView(Queue):
    """Of a subscription that reads the log: a recipient like any other, but what goes to it stays in the log."""

    def enqueue(self, envelope: Envelope, letter: DeadLetter | None = None, offset: int = -1) -> None:
        """It is in the log."""

    def enqueue_stored(self, envelopes: Sequence[Envelope], offsets: Sequence[int]) -> None:
        """They are in the log."""


class DurableBroker(Broker):
    """Made on an open journal. `bind` every queue, then `begin`."""

    def __init__(
        self,
        clock: Clock,
        journal: Journal,
        *,
        resident_bytes: int = RESIDENT_BYTES,
        on_disagreement: Callable[[Envelope], None] | None = None,
    ) -> None:
        super().__init__(clock, on_disagreement=on_disagreement)
        self._journal = journal
        journal.on_appended = self._appended
        self._numbers: dict[str, int] = {}
        self._topics: dict[int, int] = {-1: -1}
        self._alone: dict[int, tuple[tuple[Route], tuple[int] | None]] = {}
        """By number of the route: the route and its topic as a publication that goes alone has them."""
        recovered = journal.recover(self.recent.window)
        self._found = recovered.queues
        self._resident = 0
        self._resident_limit = resident_bytes
        self._keeping: asyncio.Task[None] | None = None
        self._rests_until = 0.0
        """No snapshot is taken before then."""
        self._retained_at = -1
        """The last segment when retention was applied."""
        self._enqueued = journal.next_offset
        self._last: tuple[Snapshot, SnapshotPoint] | None = None
        """What waited when this was closed."""
        self._writing = asyncio.Lock()
        """Held from a snapshot's state until it is on the disk: one after another, so that the newest counts."""
        self._next_write: asyncio.Task[None] | None = None
        """The snapshot that all cancels wait for which came since the last one was begun."""
        self._undurable: set[tuple[int, int]] = set()
        """(queue number, offset) of dead messages whose dead letter is not durable yet."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._taking_in = asyncio.Lock()
        self._begun = False
        """Whether every queue of the journal is here; before that a snapshot would forget the others."""
        self._careful = _CAREFUL_STARTS
        """After an opening, starts are written at once: a message that kills the process must be counted."""
        self.recent.restore(lambda: self._confirmed(recovered.recent))

    # --- queues -------------------------------------------------------------------------------------------

    def bind(self, binding: Binding, *, consumed: bool = True) -> Queue:
        """Raises `ViewTaken` for a subscription that reads the log, not its queue."""
        if self._journal.topology.reading(binding.queue).view == "log":
            raise ViewTaken(
                f"{binding.queue} is consumed through the log of this journal, on Spark: run it there, or leave node "
                f"{binding.node!r} out of this bus, or bring it back with "
                f"'faregate spark handover MODULE:BUS {binding.node} --to queue'"
            )
        self._journal.change_topology(lambda topology: topology.add(binding))
        queue = super().bind(binding, consumed=consumed)
        self._adopt(queue, timed=binding.expires is not None)
        self._adopt(self.queue(dead_letter_queue(binding.node)))
        return queue

    def unbind(self, name: str) -> None:
        """Durable when it returns, also for a queue that this process has not bound."""
        self._journal.unbind(name)
        if name in self._bindings:
            super().unbind(name)

    def begin(self) -> None:
        """The queues that this process does not consume go on collecting; then messages may come and go.

        An unbound one is here as well, for what waits in it, but no topic leads there.
        """
        self._begun = True
        topology = self._journal.topology
        for record in topology.queues:
            if record.name in self._queues:
                continue
            if record.kind is None or record.type is None:  # of dead letters
                self._adopt(self._make(record.name))
                continue
            known = Binding(record.node, record.type, record.kind, record.source)
            bound = topology.is_bound(record)
            queue = super().bind(known, consumed=False) if bound else self._declare(known, consumed=False)
            self._adopt(queue)
            log.info("%s is not consumed here; %d messages wait in it", queue.name, len(queue))

    def _make(self, name: str, kind: type[Queue] = Queue, **properties: object) -> Queue:
        if self._journal.topology.reading(name).view == "log":
            kind = LogView
        return super()._make(name, kind, **properties, recorder=self)

    def _adopt(self, queue: Queue, *, timed: bool = False) -> None:
        """Give a queue its number and what the journal holds for it."""
        if queue.name in self._numbers:
            return
        record = self._journal.topology.queue(queue.name)
        if record is not None:
            self._numbers[queue.name] = record.number
            self._fill(queue, self._found.pop(record.number, Found()), timed)

    def _fill(self, queue: Queue, found: Found, timed: bool) -> None:
        load = self._journal.reader.load
        for piece in found.pieces:
            if isinstance(piece, Single):
                queue.restore_entry(piece.position, load([piece.entry.offset])[0], piece.entry)
            elif timed:
                for position, offset, envelope in zip(*piece, load(list(piece.offsets)), strict=True):
                    queue.restore_entry(position, envelope, Returning(offset, 0, 0, None))
            else:
                queue.restore(piece.positions, piece.offsets)
        for index, (offset, record) in enumerate(found.dead_letters):
            returning = Returning(offset, record.tries, 0, None)
            queue.restore_entry(found.position + 2 * index, record.envelope, returning, record)
        queue.leave_gap(found.position + 2 * len(found.dead_letters) + 1)

    def _topic(self, envelope: Envelope, route: Route) -> int:
        """The number under which the journal knows where this publication goes."""
        number = self._topics.get(route.number)
        if number is None:
            address = envelope.source if envelope.kind == "event" else envelope.destination
            topic = (envelope.kind, address, envelope.type)
            # By its queues: what is current now need not be what was when the route was found.
            queues = [self._numbers[queue.name] for queue in route.queues]
            if route.partial:
                self._journal.change_topology(lambda topology: topology.add_partial(*topic, queues))
            topology = self._journal.topology
            record = topology.leading(*topic, queues, partial=route.partial) or topology.topic(*topic)
            if record is None:
                return -1
            number = self._topics[route.number] = record.number
            self._alone[route.number] = (route,), (number,)
        return number

    # --- publications -------------------------------------------------------------------------------------

    def publish(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        """Append all or none; what it gives is done when they are durable and in their queues.

        A copy of something that is still on its way to the disk shares its fate: if that is refused, this one is
        appended. One that is published alone, as most are, is handed in at once: thousands may wait, and whatever is
        made for each is felt.
        """
        if len(envelopes) != 1 or self._journal.is_behind:
            return self._publish_all(envelopes)
        [envelope] = envelopes
        route = self.route(envelope)
        if not self.recent.add(envelope, route.partial):
            return self._publish_unless_known(envelope, route)
        return self._commit(envelopes, *self._alone.get(route.number, ((route,), None)))

    async def _publish_unless_known(self, envelope: Envelope, route: Route) -> None:
        await self._journal.barrier()
        if not self.recent.knows(envelope, route.partial):
            await self.publish((envelope,))

    async def _publish_all(self, envelopes: Sequence[Envelope]) -> None:
        while envelopes:
            if self._journal.is_behind:
                await self._journal.wait_for_room()
            routes = self.routes(envelopes)
            add, knows = self.recent.add, self.recent.knows
            if any(map(_is_partial, routes)):
                added = [add(envelope, route.partial) for envelope, route in zip(envelopes, routes, strict=True)]
            else:
                added = self.recent.add_all(envelopes)
            if all(added):
                await self._commit(envelopes, routes)
                return
            if any(added):
                await self._commit(list(compress(envelopes, added)), list(compress(routes, added)))
            else:
                await self._journal.barrier()
            envelopes = [
                envelope
                for envelope, route, new in zip(envelopes, routes, added, strict=True)
                if not new and not knows(envelope, route.partial)
            ]

    def _commit(
        self, envelopes: Sequence[Envelope], routes: Sequence[Route], topics: Sequence[int] | None = None
    ) -> "asyncio.Future[None]":
        """Hand them in; the future is done when they are durable."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            topics = topics or self._topics_of(envelopes, routes)
            self._journal.hand_in(Append(envelopes, routes, topics, waiter))
        except FaregateError:
            self._forget(envelopes, routes)
            raise
        return waiter

    def _topics_of(self, envelopes: Sequence[Envelope], routes: Sequence[Route]) -> list[int]:
        known = self._topics
        try:
            return [known[route.number] for route in routes]
        except KeyError:
            return [self._topic(envelope, route) for envelope, route in zip(envelopes, routes, strict=True)]

    def _appended(self, items: Sequence[Append], offsets: Sequence[int], error: BaseException | None) -> None:
        """The journal has committed publications, or refused them."""
        if error is None:
            if len(items) == 1:
                self._put_into_queues(items[0].envelopes, items[0].routes, offsets)
            else:
                envelopes = [envelope for item in items for envelope in item.envelopes]
                self._put_into_queues(envelopes, [route for item in items for route in item.routes], offsets)
            self._enqueued = max(self._enqueued, offsets[-1] + 1)
            self._keep_by_amount()
        for item in items:
            if error is not None:
                self._forget(item.envelopes, item.routes)
            if item.batch is not None:
                self.in_flight.land()
            resolve(item.waiter, error)

    def _put_into_queues(self, envelopes: Sequence[Envelope], routes: Sequence[Route], offsets: Sequence[int]) -> None:
        first = routes[0]
        if len(offsets) == 1:
            for queue in first.queues:
                queue.enqueue(envelopes[0], None, offsets[0])
            return
        if routes.count(first) == len(offsets):
            for queue in first.queues:
                queue.enqueue_stored(envelopes, offsets)
            return
        for envelope, route, offset in zip(envelopes, routes, offsets, strict=True):
            for queue in route.queues:
                queue.enqueue(envelope, None, offset)

    def _forget(self, refused: Sequence[Envelope], routes: Sequence[Route]) -> None:
        for envelope, route in zip(refused, routes, strict=True):
            self.recent.forget(envelope, route.partial)

    def occupations(self) -> Iterator[Occupation]:
        yield from super().occupations()
        oldest = self._journal.intake.oldest()
        if oldest is not None:
            yield Occupation((self, oldest), "", "", f"the intake takes in {oldest.name} from the spool")

    def take_in_spool(self) -> None:
        """Append the batches that other processes left."""
        found = self._journal.spooled()
        if found:
            self.in_flight.count += len(found)  # until they are in their queues
            task = asyncio.ensure_future(self._take_in_order(found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take_in_order(self, found: list[Path]) -> None:
        """One batch after the other: a later one never overtakes an earlier one. What was read is committed before
        much more is read: a run on Spark may have left more than fits the memory."""
        async with self._taking_in:
            read = 0
            for path in found:
                read += await self._take_in(path)
                if read > _READ_AHEAD:
                    read = 0
                    with contextlib.suppress(FaregateError):  # the next batch meets it too, and is told
                        await self._journal.barrier()

    async def _take_in(self, path: Path) -> int:
        """Append a batch; what became unroutable meanwhile is a dead letter; the file goes when both are durable.
        Returns how many messages were read."""
        fresh: list[Envelope] = []
        routes: list[Route] = []
        spooled: Spooled | None = None
        try:
            spooled = self._journal.intake.read(path)
            if spooled is None:
                self.in_flight.land()
                return 0
            await self._take_in_dead_letters(spooled.dead_letters)
            for envelope in spooled.envelopes:
                try:
                    route = self.route(envelope)
                except Unroutable as exc:
                    await self.dead_letter_unsent(envelope.source, envelope, exc.reason, f"Unroutable: {exc}")
                    continue
                if self.recent.add(envelope, route.partial):
                    fresh.append(envelope)
                    routes.append(route)
            if fresh:
                self._journal.hand_in(Append(fresh, routes, self._topics_of(fresh, routes), batch=path))
            else:
                self._journal.discard(path)
                self.in_flight.land()
        except Exception as exc:  # whatever is in it, the others must go on
            self.in_flight.land()
            self._forget(fresh, routes)
            self._journal.intake.returned(path)
            if isinstance(exc, FaregateError):
                log.warning("a batch in the spool has to wait: %s", exc)
            else:
                self._journal.intake.set_aside(path, exc)
        return 0 if spooled is None else len(spooled.envelopes)

    async def _take_in_dead_letters(self, records: Sequence[DeadLetter]) -> None:
        """Write what came with a batch. After a crash between this and the batch it comes again, and is there."""
        known: set[tuple[str, str, str]] = set()
        for name in {dead_letter_queue(record.node) for record in records} & self._queues.keys():
            known.update(_place(entry.letter) for entry in self._queues[name].browse() if entry.letter)
        for record in records:
            if _place(record) not in known:
                waiter = asyncio.get_running_loop().create_future()
                self._write_letter(record, None, waiter)
                await waiter

    async def cancel_durably(self, source: str, publication_id: str | None, key: str | None) -> bool:
        """Returns when it is in a snapshot: a settlement alone may be lost with the machine, and then it would be
        delivered."""
        await self._journal.barrier()  # what is on its way into a queue is there then
        if self._last is not None:
            raise ConfigurationError(f"the journal {self._journal.layout.root} is closed: nothing was cancelled")
        if not self.cancel(source, publication_id, key):
            return False
        if self._next_write is None:
            self._next_write = asyncio.ensure_future(self._write_next())
        try:
            await asyncio.shield(self._next_write)  # the others wait for it, too
        except OSError as exc:
            kind = JournalFull if is_full(exc) else JournalFailed
            raise kind(
                f"{publication_id or key} of node {source!r} is cancelled, but no snapshot of "
                f"{self._journal.layout.root} could be written ({exc.strerror or exc}): should this machine stop "
                "before the next one, it is delivered. See to the disk; the bus writes a snapshot when it stops, too"
            ) from exc
        return True

    async def _write_next(self) -> None:
        async with self._writing:
            self._next_write = None
            snapshot, point = self._waiting_now()
            self._journal.settle_now([])
            await self._journal.snapshot(snapshot, point)

    # --- dead letters -------------------------------------------------------------------------------------

    def dead_letter(self, record: DeadLetter) -> None:
        self._write_letter(record, None, None)

    async def dead_letter_unsent(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        """A message that never reached a queue: returns when its dead letter is durable."""
        waiter = asyncio.get_running_loop().create_future()
        self._write_letter(unsent(node, envelope, reason, error, self._clock.time()), None, waiter)
        await waiter

    def _make_dead_letter(self, queue: Queue, entry: Entry, reason: str, error: str) -> None:
        [dead] = self._records(queue, [entry], [OUTCOMES["dead"]], self._clock.time())
        self._undurable.add((dead[1], dead[0]))
        self._write_letter(self._describe(queue, entry, reason, error), dead, None)
        self._keep_by_amount()

    def _write_letter(self, letter: DeadLetter, dead: Row | None, waiter: "asyncio.Future[None] | None") -> None:
        """It is in flight until its dead letter is durable; when the disk has no room, until it has."""
        name = dead_letter_queue(letter.node)
        if name not in self._queues:
            self._journal.change_topology(lambda topology: topology.add_dead_letter_queue(letter.node))
            self._adopt(self._make(name))
        self.in_flight.count += 1

        def committed(offsets: Sequence[int], error: BaseException | None) -> None:
            if error is None:
                self._queues[name].enqueue(letter.envelope, letter=letter, offset=offsets[0])
                self._enqueued = max(self._enqueued, offsets[0] + 1)
                if dead is not None:
                    # In one step as far as snapshots can tell: no longer waiting, and marked as dead.
                    self._undurable.discard((dead[1], dead[0]))
                    self._journal.settle([dead])
            elif waiter is None and isinstance(error, JournalFull):
                self.in_flight.count += 1
                asyncio.get_running_loop().call_later(_WRITE_AGAIN_SECONDS, self._write_again, letter, dead)
            resolve(waiter, error)
            self.in_flight.land()

        try:
            self._journal.hand_in(AppendDeadLetter(letter, committed))
        except FaregateError:
            self.in_flight.land()
            if waiter is not None:
                raise

    def _write_again(self, letter: DeadLetter, dead: Row | None) -> None:
        self.in_flight.land()
        if self._last is None and self._journal.failure is None:
            self._write_letter(letter, dead, None)

    # --- what queues tell (Recorder) ----------------------------------------------------------------------

    def started(self, queue: Queue, entries: Sequence[Entry]) -> None:
        records = self._records(queue, entries, repeat(STARTED), 0.0)
        if self._careful > 0:
            self._careful -= len(records)
            self._journal.settle_now(records)
        else:
            self._journal.settle(records)

    def ended(self, queue: Queue, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
        codes = [OUTCOMES[outcome] for outcome in outcomes]
        self._journal.settle(self._records(queue, entries, codes, self._clock.time()))
        self._keep_by_amount()

    def _keep_by_amount(self) -> None:
        journal = self._journal
        is_due = journal.wants_snapshot or journal.segments != self._retained_at
        if is_due and self._begun and journal.failure is None and monotonic() >= self._rests_until:
            self.keep()

    def waits(self, queue: Queue, entry: Entry, due: float) -> None:
        self._journal.settle(self._records(queue, [entry], [REQUEUE if entry.behind else REDELIVER], due))

    def _records(self, queue: Queue, entries: Sequence[Entry], outcomes: Iterable[int], time: float) -> list[Row]:
        number = self._numbers[queue.name]
        return [
            (entry.offset, number, outcome, entry.tries, entry.redeliveries, time)
            for entry, outcome in zip(entries, outcomes, strict=False)
        ]

    def load(self, offsets: list[int]) -> list[Envelope]:
        try:
            return self._confirmed(lambda: self._journal.reader.load(offsets))
        except JournalFailed:
            return []

    def _confirmed(self, read: Callable[[], T]) -> T:
        """What was confirmed and cannot be read ends everything. Raises `JournalFailed`."""
        try:
            return read()
        except (FaregateError, OSError) as exc:
            self._journal.fail(exc)
            raise self._journal.failure or exc from exc

    def has_room(self) -> bool:
        return self._resident < self._resident_limit

    def holds(self, envelope: Envelope) -> None:
        self._resident += len(envelope.body) + _ENVELOPE_BYTES

    def leave(self, entries: Sequence[Entry]) -> None:
        self._resident -= sum([len(entry.envelope.body) for entry in entries]) + _ENVELOPE_BYTES * len(entries)

    # --- keeping ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What waits now; a dead message waits until its dead letter is durable."""
        queues: dict[int, QueueSnapshot] = {}
        for name, number in self._numbers.items():
            runs, returning = self._queues[name].state()
            undurable = [(offset, offset) for queue, offset in self._undurable if queue == number]
            if runs or undurable:
                queues[number] = QueueSnapshot.of(sorted([*runs, *undurable]), returning)
        return Snapshot(offset=self._enqueued, queues=queues)

    def _waiting_now(self) -> tuple[Snapshot, SnapshotPoint]:
        """The state for a snapshot, and where it stands between settlements; once this is closed, the last one."""
        return self._last or (self.snapshot(), self._journal.snapshot_point())

    def keep(self) -> None:
        """Write a snapshot and, once a new segment has begun, apply retention and seal the ones before it; in the
        background."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        try:
            async with self._writing:
                begun = monotonic()
                snapshot, point = self._waiting_now()
                # Nothing else runs meanwhile: where much waits in a scattered way, that is done the more rarely.
                self._rests_until = begun + _RESTS * (monotonic() - begun)
                segments = self._journal.segments
                await self._journal.snapshot(snapshot, point)
            if segments != self._retained_at:
                if not self._journal.retains_all():
                    self.recent.load()  # what it is read from may be gone afterwards
                await self._journal.retain(snapshot)
                self._journal.seal()
                self._retained_at = segments
        except (OSError, FaregateError) as exc:
            self._rests_until = monotonic() + _FAILED_SECONDS
            log.warning("no snapshot and no retention this time: %s", exc)

    def close(self) -> None:
        """Everybody gives back what he holds; then what waits is remembered, before the timers are gone."""
        if self._last is None and self._begun and self._journal.failure is None:
            for queue in self._queues.values():
                queue.detach_all()
            self._last = self._waiting_now()
        super().close()

    async def close_journal(self) -> None:
        if self._keeping is not None:
            await asyncio.wait({self._keeping})
        for task in list(self._tasks):
            task.cancel()
        async with self._writing:
            await self._journal.close(*self._last or (None, None))
