"""The broker on a journal: the same queues, filled after the commit, told to the side logs as they change.

What a queue cannot hold in memory waits in the journal; see `Backlog`.
"""

import asyncio
import logging
from collections.abc import Sequence

from faregate.broker.broker import Broker
from faregate.broker.entry import Entry
from faregate.broker.journal.errors import JournalFailed
from faregate.broker.journal.journal import Append, Journal
from faregate.broker.journal.recovery import Found, Single
from faregate.broker.journal.settled import OUTCOMES, REDELIVER, STARTED, Record
from faregate.broker.journal.snapshot import QueueSnapshot, ReturningRecord, Snapshot
from faregate.broker.queue import Queue
from faregate.broker.recorder import Returning
from faregate.broker.topics import Route
from faregate.errors import FaregateError, Unroutable
from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.queue import Binding, Poisoned, poison_queue

log = logging.getLogger("faregate.broker")

RESIDENT_BYTES = 64 * 1024 * 1024
_ENVELOPE_BYTES = 700
"""What an envelope costs in memory beside its body, roughly."""
_SETTLEMENTS_PER_SNAPSHOT = 100_000
_CAREFUL_STARTS = 10_000


class DurableBroker(Broker):
    """Made on an open journal. `bind` every queue, then `begin`."""

    def __init__(self, clock: Clock, journal: Journal, *, resident_bytes: int = RESIDENT_BYTES) -> None:
        super().__init__(clock)
        self._journal = journal
        journal.on_appended = self._appended
        self._numbers: dict[str, int] = {}
        self._topics: dict[int, int] = {-1: -1}
        self._found = journal.recover()
        self._resident = 0
        self._resident_limit = resident_bytes
        self._settled = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._enqueued = journal.next_offset
        self._last: Snapshot | None = None
        self._begun = False
        """Whether every queue of the journal is here; before that a snapshot would forget the others."""
        self._careful = _CAREFUL_STARTS
        """After an opening, starts are written at once: a message that kills the process must be counted."""
        for publication_id, replay in journal.recent_publications(self.recent.window):
            self.recent.add(publication_id, replay)

    # --- queues -------------------------------------------------------------------------------------------

    def bind(self, binding: Binding) -> Queue:
        self._journal.bind(binding)
        queue = super().bind(binding)
        self._adopt(queue, timed=binding.expires is not None)
        self._adopt(self.queue(poison_queue(binding.node)))
        return queue

    def begin(self) -> None:
        """The queues that this process does not consume go on collecting; then messages may come and go."""
        self._begun = True
        for record in self._journal.topology.queues:
            if record.name not in self._queues:
                if record.is_poison or record.kind is None or record.type is None:
                    self._adopt(self._make(record.name))
                else:
                    known = Binding(record.node, record.type, record.kind, record.source)
                    self._adopt(super().bind(known))

    def _make(self, name: str, **properties: object) -> Queue:
        return super()._make(name, **properties, recorder=self)

    def _adopt(self, queue: Queue, *, timed: bool = False) -> None:
        """Give a queue its number and what the journal holds for it."""
        if queue.name in self._numbers:
            return
        for record in self._journal.topology.queues:
            if record.name == queue.name:
                self._numbers[queue.name] = record.number
                self._fill(queue, self._found.pop(record.number, Found()), timed)

    def _fill(self, queue: Queue, found: Found, timed: bool) -> None:
        for piece in found.pieces:
            if isinstance(piece, Single):
                queue.restore_entry(piece.position, self.load([piece.entry.offset])[0], piece.entry)
            elif timed:
                for position, offset, envelope in zip(*piece, self.load(list(piece.offsets)), strict=True):
                    queue.restore_entry(position, envelope, Returning(offset, 0, 0, None))
            else:
                queue.restore(piece.positions, piece.offsets)
        for index, (offset, record) in enumerate(found.poison):
            returning = Returning(offset, record.tries, 0, None)
            queue.restore_entry(found.position + 2 * index, record.envelope, returning, record)
        queue.leave_gap(found.position + 2 * len(found.poison) + 1)

    def _topic(self, envelope: Envelope, route: Route) -> int:
        """The number under which the journal knows where this publication goes."""
        number = self._topics.get(route.number)
        if number is None:
            address = envelope.source if envelope.kind == "event" else envelope.destination
            topic = self._journal.topology.topic(envelope.kind, address, envelope.type)
            if topic is None:
                return -1
            number = self._topics[route.number] = topic.number
        return number

    # --- publications -------------------------------------------------------------------------------------

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """Append all or none; returns when they are durable and in their queues."""
        if not envelopes:
            return
        if len(envelopes) == 1:
            await self._publish_one(envelopes)
            return
        routes = self.routes(envelopes)
        add = self.recent.add
        known = [not add(envelope.publication_id, envelope.replay) for envelope in envelopes]
        if any(known):
            envelopes = [envelope for envelope, seen in zip(envelopes, known, strict=True) if not seen]
            routes = [route for route, seen in zip(routes, known, strict=True) if not seen]
            if not envelopes:
                await self._journal.barrier()  # the first copy may still be on its way to the disk
                return
        if self._journal.is_behind:
            await self._journal.wait_for_room()
        await self._commit(envelopes, routes, self._topics_of(envelopes, routes))

    async def _publish_one(self, envelopes: Sequence[Envelope]) -> None:
        """The same without the lists that many need."""
        envelope = envelopes[0]
        route = self.route(envelope)
        if not self.recent.add(envelope.publication_id, envelope.replay):
            await self._journal.barrier()
            return
        if self._journal.is_behind:
            await self._journal.wait_for_room()
        await self._commit(envelopes, (route,), (self._topic(envelope, route),))

    async def _commit(self, envelopes: Sequence[Envelope], routes: Sequence[Route], topics: Sequence[int]) -> None:
        waiter = asyncio.get_running_loop().create_future()
        try:
            self._journal.append(Append(envelopes, routes, topics, waiter))
            await waiter
        except FaregateError:
            self._forget(envelopes)
            raise

    def _topics_of(self, envelopes: Sequence[Envelope], routes: Sequence[Route]) -> list[int]:
        known = self._topics
        try:
            return [known[route.number] for route in routes]
        except KeyError:
            return [self._topic(envelope, route) for envelope, route in zip(envelopes, routes, strict=True)]

    def _appended(self, item: Append, offsets: Sequence[int], error: BaseException | None) -> None:
        """The journal has committed a publication, or refused it."""
        if error is None:
            self._put_into_queues(item, offsets)
            self._enqueued = max(self._enqueued, offsets[-1] + 1)
        elif item.batch is not None:
            self._forget(item.envelopes)  # the file is still there: it is taken in again
        if item.waiter is not None and not item.waiter.done():
            if error is None:
                item.waiter.set_result(None)
            else:
                item.waiter.set_exception(error)

    def _put_into_queues(self, item: Append, offsets: Sequence[int]) -> None:
        first = item.routes[0]
        if len(offsets) > 1 and item.routes.count(first) == len(offsets):
            for queue in first.queues:
                queue.enqueue_stored(item.envelopes, offsets)
            return
        for envelope, route, offset in zip(item.envelopes, item.routes, offsets, strict=True):
            for queue in route.queues:
                queue.enqueue(envelope, None, offset)

    def _forget(self, refused: Sequence[Envelope]) -> None:
        for envelope in refused:
            self.recent.forget(envelope.publication_id, envelope.replay)

    def take_in_spool(self) -> None:
        """Append the batches that other processes left. What became unroutable meanwhile is given up."""
        for path, envelopes in self._journal.spooled():
            fresh: list[Envelope] = []
            routes: list[Route] = []
            for envelope in envelopes:
                try:
                    [route] = self.routes([envelope])
                except Unroutable as exc:
                    self.bury(envelope.source, envelope, exc.reason, f"Unroutable: {exc}")
                    continue
                if self.recent.add(envelope.publication_id, envelope.replay):
                    fresh.append(envelope)
                    routes.append(route)
            if fresh:
                self._journal.append(Append(fresh, routes, self._topics_of(fresh, routes), batch=path))
            else:
                self._journal.discard(path)

    # --- giving up ----------------------------------------------------------------------------------------

    def poison(self, record: Poisoned) -> None:
        self._bury(record, None)

    def bury(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        """A message that never reached a queue."""
        self._bury(
            Poisoned(
                node=node,
                queue=node,
                reason=reason,
                error=error,
                tries=0,
                redeliveries=0,
                at=self._clock.time(),
                envelope=envelope,
            ),
            None,
        )

    def _give_up(self, queue: Queue, entry: Entry, reason: str, error: str) -> None:
        dead = self._record(queue, entry, OUTCOMES["dead"], self._clock.time())
        self._bury(self._describe(queue, entry, reason, error), dead)

    def _bury(self, record: Poisoned, dead: Record | None) -> None:
        """It is in flight until its poison record is durable."""
        self.flight.count += 1
        name = poison_queue(record.node)
        if name not in self._queues:
            self._journal.add_poison_queue(record.node)
            self._adopt(self._make(name))

        def committed(offsets: Sequence[int], error: BaseException | None) -> None:
            if error is None:
                self._queues[name].enqueue(record.envelope, poisoned=record, offset=offsets[0])
                self._enqueued = max(self._enqueued, offsets[0] + 1)
            self.flight.land()

        self._journal.bury(record, dead, committed)

    # --- what queues tell (Recorder) ----------------------------------------------------------------------

    def started(self, queue: Queue, entry: Entry) -> None:
        record = self._record(queue, entry, STARTED, 0.0)
        if self._careful:
            self._careful -= 1
            self._journal.settle_now(record)
        else:
            self._journal.settle(record)

    def ended(self, queue: Queue, entry: Entry, outcome: str) -> None:
        if outcome != "dead":  # a dead one is marked when its poison record is durable
            self._journal.settle(self._record(queue, entry, OUTCOMES[outcome], self._clock.time()))
        self._settled += 1
        if self._settled >= _SETTLEMENTS_PER_SNAPSHOT and self._journal.failure is None:
            self._settled = 0
            self._snapshotting = asyncio.ensure_future(self._keep())

    def waits(self, queue: Queue, entry: Entry, due: float) -> None:
        self._journal.settle(self._record(queue, entry, REDELIVER, due))

    def _record(self, queue: Queue, entry: Entry, outcome: int, time: float) -> Record:
        return Record(entry.offset, self._numbers[queue.name], outcome, entry.tries, entry.redeliveries, time)

    def load(self, offsets: list[int]) -> list[Envelope]:
        return self._journal.reader.load(offsets)

    def has_room(self) -> bool:
        return self._resident < self._resident_limit

    def holds(self, envelope: Envelope) -> None:
        self._resident += len(envelope.body) + _ENVELOPE_BYTES

    def leaves(self, envelope: Envelope) -> None:
        self._resident -= len(envelope.body) + _ENVELOPE_BYTES

    # --- keeping ------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What waits now."""
        queues: dict[int, QueueSnapshot] = {}
        for name, number in self._numbers.items():
            state = self._queues[name].state()
            if state.runs:
                returning = [ReturningRecord(*entry) for entry in state.returning]
                queues[number] = QueueSnapshot(state.runs, returning)
        return Snapshot(offset=self._enqueued, queues=queues)

    async def _keep(self) -> None:
        try:
            snapshot = self.snapshot()
            await self._journal.snapshot(snapshot)
            await self._journal.retain({number: queue.runs for number, queue in snapshot.queues.items()})
        except JournalFailed:
            log.debug("no snapshot: the journal has failed")

    def close(self) -> None:
        """Everybody gives back what he holds; then what waits is remembered, before the timers are gone."""
        if self._last is None and self._begun and self._journal.failure is None:
            for queue in self._queues.values():
                queue.detach_all()
            self._last = self.snapshot()
        super().close()

    async def close_journal(self) -> None:
        if self._snapshotting is not None:
            await asyncio.gather(self._snapshotting, return_exceptions=True)
        await self._journal.close(self._last if self._journal.failure is None else None)
