"""Sends what is in the outbox of a store, in the order in which it was committed.

Rules kept here:
- A row is sent after its commit, and removed after the transport confirmed it. A crash in between sends it again, with
  the same id.
- One batch at a time, the next after the confirmation of the one before: so the order holds for every destination
  and key.
- Sending is tried for ever (on Spark for a while), with growing pauses and an alarm; while the breaker is open, when
  it lets one batch through as its trial. An output that nobody takes becomes a dead letter of its own.
- What waits in memory is bounded: a handler that sends waits for room before its transaction begins (never within it,
  since sending may need the store).
- A row is removed in the commit of the next unit of work on the same store, if there is one soon.
- Rows of other processes (`fg.outbox`, `faregate dead replay`) are looked for several times a second, also while there
  is much to send; more rarely the more waits here, since all of that is read again.
- What is due later waits in the table of scheduled messages (docs/decisions/0050) until its time has come by the wall
  clock. Whoever finds it due moves it into the outbox, in one commit, and sends it as if it had committed it just then.
- Where several processes send from one outbox (`outbox_place.py`), each sends what it committed. What another committed
  is left to it for a moment; then one process sends that, whoever is the lowest. Nobody sends a row with a key while an
  older one of the same destination and key is there, whoever committed it.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import msgspec

from faregate.bus.attempts import Attempts, has_strays, is_pending, is_unresolved, signals, without_attempts
from faregate.bus.outbox_place import OutboxPlace
from faregate.core.alarms import AlarmKind, Alarms
from faregate.core.breaker import Circuit, GuardedPublishing
from faregate.core.dead_letter import unsent
from faregate.core.observer import Observers, confirmed, observed
from faregate.core.outlet import OutboxOutlet, Recorded
from faregate.core.replies import Replies
from faregate.core.verdict import failure_of, first_line
from faregate.errors import CommitUnknown, Permanent, StoreConflict, StoreUnavailable, Unroutable
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.clock import Clock, Timer
from faregate.ports.presence import OutboxStatus
from faregate.ports.progress import Occupation
from faregate.ports.queue import Publishing
from faregate.ports.store import FROM_OUTSIDE, OutboxRow, Store, Transaction, is_later

log = logging.getLogger("faregate.bus")

_BATCH, _BATCH_BYTES = 500, 4 << 20
_MOST_WAITING, _MOST_WAITING_BYTES = 5_000, 16 << 20
"""When so much waits, no handler that sends begins a transaction."""
_LOOK_SECONDS = 0.25
_OTHERS_SECONDS = 2.0
"""For how long what another process committed is left to it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0
_ALARM_AFTER = 10.0
_DOUBT_SECONDS = 600.0
_LONGEST_SLEEP = 60.0
"""A wall clock that was set forward is noticed within that time."""
_MOST_DELAYS = 10_000
"""Of so many scheduled messages the delays are measured by the monotonic clock; of more by the wall clock."""
_ROUNDING = 1e-6
"""Times that differ by less are the same: a difference of wall times is no more exact."""
_STORE_ERRORS = (StoreUnavailable, StoreConflict, CommitUnknown)


Around = Callable[[Envelope, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs the outgoing middlewares of a node around the sending of an envelope."""


class Dispatcher(OutboxOutlet):
    def __init__(
        self,
        store: Store,
        transport: Publishing,
        clock: Clock,
        alarms: Alarms,
        attempts: Attempts | None = None,
        nodes: Sequence[str] | None = None,
        around: Mapping[str, Around] | None = None,
        patience: float = float("inf"),
        place: OutboxPlace | None = None,
        replies: Replies | None = None,
        observers: Observers = (),
        circuit: Circuit | None = None,
    ) -> None:
        self._store = store
        self._nodes = nodes
        """The nodes whose rows it sends; other nodes in the same database have a dispatcher elsewhere."""
        self._around = around or {}
        """The outgoing middlewares of nodes, for what `fg.outbox` recorded without them."""
        self._patience = patience
        """For how many seconds sending is tried; then its error is raised."""
        self._place = place
        """Who else sends from this outbox; None: nobody does."""
        self._others: dict[int, float] = {}
        """Rows that others committed, and since when we know of them."""
        self._attempts = attempts
        """Prepares rows whose recipients may want tokens."""
        self._transport = transport if circuit is None else GuardedPublishing(transport, circuit, waits=True)
        self._longest_pause = _LONGEST_PAUSE if circuit is None else min(_LONGEST_PAUSE, circuit.seconds)
        """A publish waits for the breaker by itself, so it need not wait for long here."""
        self._replies = replies or Replies(transport)
        self._hand_over = observed(observers, confirmed(observers, self._publish_to_transport), outbox=True)
        self._clock = clock
        self._alarms = alarms
        self._queue: deque[OutboxRow] = deque()
        self._bytes = 0
        """The length of all their bodies."""
        self._waiting_since = 0.0
        """Since when the queue has not been empty."""
        self._sent: dict[int, None] = {}
        """Confirmed, and still in the table; in order."""
        self._held: set[int] = set()
        """All rows that this dispatcher knows: queued, being sent, or sent and still in the table."""
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        """Who waits for rows to be sent."""
        self._doubted_at: float | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._delays: dict[str, tuple[float, float]] = {}
        """Of publications that this process scheduled after a delay: when they are due, by the monotonic clock and by
        the wall clock."""
        self._look_at = math.inf
        """When to look at what is scheduled, by the monotonic clock."""
        self._look_for_others_at = math.inf
        """When to look at the table, even if there is something else to do."""
        self._timer: Timer | None = None
        self.activity = 0
        """Grows with everything that happens here."""

    # --- for units of work -----------------------------------------------------------------------------------

    async def record_rows(self, transaction: Transaction, rows: Sequence[OutboxRow]) -> Recorded:
        """Put rows into the outbox within a transaction, and take out what was sent since."""
        removed, self._sent = list(self._sent), {}
        later = [row for row in rows if row.envelope.deliver_at is not None]
        if later:  # some of it may be due by now
            now = self._clock.time()
            later = [row for row in later if is_later(row.envelope, now)]
            rows = [row for row in rows if not is_later(row.envelope, now)]
        recorded = Recorded(rows, removed=removed, later=later)
        try:
            if rows:
                recorded.seqs = await transaction.send(rows)
            if later:
                await transaction.schedule(later)
            if removed:
                await transaction.dispatched(removed)
        except BaseException:
            self.rolled_back(recorded)
            raise
        return recorded

    def committed(self, recorded: Recorded) -> None:
        self._held.difference_update(recorded.removed)
        self.activity += 1
        self.take_up([OutboxRow(seq, *row[1:]) for row, seq in zip(recorded.rows, recorded.seqs, strict=True)])
        if recorded.later:
            self._wait_for([row.envelope for row in recorded.later])

    def rolled_back(self, recorded: Recorded) -> None:
        self._sent.update(dict.fromkeys(recorded.removed))

    async def sent(self, recorded: Recorded) -> None:
        seqs = set(recorded.seqs)
        while self._task is not None and not seqs.isdisjoint([row.seq for row in self._queue]):
            self._changed.clear()
            await self._changed.wait()

    def doubt(self) -> None:
        self._doubted_at = self._clock.monotonic()
        self._wake.set()

    async def was_handled(self, node: str, message_id: str) -> None:
        if self._doubted_at is not None and self._clock.monotonic() - self._doubted_at < _DOUBT_SECONDS:
            self.take_up(await self._store.outbox_rows_of(node, message_id))

    async def dispatch(self, rows: Sequence[OutboxRow]) -> None:
        """Return once these rows are sent."""
        self.take_up(rows)
        waiting = []
        unsent = {row.seq for row in self._queue}
        for row in rows:
            if row.seq not in unsent:
                continue  # it is sent, and its removal under way
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(row.seq, []).append(future)
            waiting.append(future)
        if waiting:
            await asyncio.gather(*waiting)

    def take_up(self, rows: Sequence[OutboxRow]) -> None:
        """Send these rows of the table, unless they are known already."""
        new = [row for row in rows if row.seq not in self._held]
        if not self._queue:
            self._waiting_since = self._clock.monotonic()
        self._held.update([row.seq for row in new])
        self._queue.extend(new)
        self._bytes += sum([len(row.envelope.body) for row in new])
        if rows:
            self.activity += 1
            self._wake.set()

    async def room(self, unless: Callable[[], bool] = lambda: False) -> None:
        while (len(self._queue) >= _MOST_WAITING or self._bytes >= _MOST_WAITING_BYTES) and not unless():
            self._changed.clear()
            await self._changed.wait()

    def look_again(self) -> None:
        self._changed.set()

    # --- scheduled messages ----------------------------------------------------------------------------------

    def _wait_for(self, envelopes: Sequence[Envelope]) -> None:
        """These were scheduled."""
        wall, now = self._clock.time(), self._clock.monotonic()
        for envelope in envelopes:
            due = envelope.deliver_at or 0.0
            if envelope.delay is not None and len(self._delays) < _MOST_DELAYS:
                self._delays[envelope.publication_id] = now + due - wall, due
            self._look_in(due - wall)

    def _look_in(self, seconds: float) -> None:
        """Look at what is scheduled after so many seconds, if not before."""
        now = self._clock.monotonic()
        at = now + min(max(0.0, seconds), _LONGEST_SLEEP)
        if at < self._look_at:
            self._look_at = at
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._clock.call_later(at - now, self._wake.set)

    async def _take_due(self) -> int:
        """Move what is due into the outbox, and see when the next is; how many rows."""
        self._look_at, taken = math.inf, 0
        while True:
            rows, is_all = await self._take_some()
            taken += rows
            if is_all:
                return taken

    async def _take_some(self) -> tuple[int, bool]:
        """How many rows were due, and whether nothing more is. A delay of this process is over when the monotonic clock
        says so; everything else is due by the wall clock."""
        wall, now = self._clock.time() + _ROUNDING, self._clock.monotonic() + _ROUNDING
        over = {name for name, (at, _) in self._delays.items() if at <= now}
        also = [name for name in over if self._delays[name][1] > wall]
        but = [name for name, (_, due) in self._delays.items() if due <= wall and name not in over]
        due, rows = await self._store.next_due(self._nodes), 0
        if also or (due is not None and due <= wall):
            recorded = Recorded()
            try:
                async with self._store.transaction() as transaction:
                    found = await transaction.take_due(wall, _BATCH, self._nodes, also=also, but=but)
                    recorded = await self.record_rows(transaction, [_due_by(row, wall - _ROUNDING) for row in found])
            except BaseException:
                self.rolled_back(recorded)
                raise
            if faults.hook is not None:
                await faults.hook("dispatch.after-due")
            self.committed(recorded)
            rows = len(found)
            due = await self._store.next_due(self._nodes)
        for name in over:
            self._delays.pop(name, None)
        if self._delays:
            self._look_in(min(self._delays.values())[0] - now)
        if due is not None and due > wall:
            self._look_in(due - wall)
        return rows, not rows or due is None or due > wall

    # --- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Send what an earlier process left, before anything new can overtake it; then go on in the background. What
        another process may still send is left to it: then its keys wait for that."""
        if self._place is not None:
            await self._place.start()
        while await self.look():
            await self._send_queue()
            await self._remove()
        self._task = asyncio.create_task(self._run(), name="faregate-dispatcher")

    async def stop(self, deadline: float) -> None:
        """Send what is there within the deadline. What is not sent stays in the outbox."""
        if self._task is None:
            return
        if self._queue:
            try:
                await asyncio.wait_for(self._emptied(), deadline)
            except TimeoutError:
                log.warning("%d outgoing messages stay in the outbox of %s", len(self._queue), self._store.url)
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        self._changed.set()
        try:
            await asyncio.wait_for(self._remove(), 5)
        except (TimeoutError, *_STORE_ERRORS) as exc:
            log.info("sent messages stay in the outbox of %s, and are recognised next time: %s", self._store.url, exc)
        if self._place is not None:
            with suppress(*_STORE_ERRORS):  # then its place is free in a while
                await self._place.stop()

    async def look_around(self) -> None:
        """Before somebody else's messages are handled here: learn who may have sent for their keys."""
        if self._place is not None:
            await self._place.look()

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    def status(self) -> OutboxStatus:
        if not self._queue:
            return OutboxStatus(self._store.url, 0)
        # A message was sent when it was recorded; that of a replay long before.
        since_sent = self._clock.time() - self._queue[0].envelope.sent_at
        oldest = min(since_sent, self._clock.monotonic() - self._waiting_since)
        return OutboxStatus(self._store.url, len(self._queue), round(max(0.0, oldest), 3))

    def occupations(self) -> Iterator[Occupation]:
        if self._queue:
            row = self._queue[0]
            text = f"the dispatcher of {self._store.url} sends {row.envelope}, and {len(self._queue) - 1} more wait"
            yield Occupation((self, row.seq), row.node, row.envelope.publication_id, text)

    async def idle(self) -> None:
        """Return once everything committed was sent, and removed from the table."""
        while True:
            await self._emptied()
            await self._remove()
            if not await self.look():
                return
            self._wake.set()

    async def _emptied(self) -> None:
        while self._queue:
            self._changed.clear()
            await self._changed.wait()

    async def _run(self) -> None:
        told = ""
        while True:
            try:
                await self._send_queue()
                self._wake.clear()
                if not await self._look_in_time() and not self._queue:
                    await self._rest()
            except faults.Crash:
                self._forget()
            except Exception as exc:
                text = f"the outbox of {self._store.url} cannot be read or written now: {first_line(exc)}"
                if text != told:
                    told = text
                    self._alarms.sound("dispatch-stalled", "", "", text)
                await self._clock.sleep(_LOOK_SECONDS)
            else:
                told = ""

    async def _look_in_time(self) -> bool:
        """Look at the tables, if it is time to; whether it was."""
        now = self._clock.monotonic() + _ROUNDING
        if now >= self._look_for_others_at:
            await self.look()
        elif now >= self._look_at:
            await self._take_due()
        else:
            return False
        return True

    async def _rest(self) -> None:
        """Wait for work; now and then clean up, and look for what others left."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                await self._wake.wait()
        except TimeoutError:
            await self._remove()
            await self.look()

    def _forget(self) -> None:
        """A test crashed us: what is in memory is gone, what is in the table is not."""
        self._queue.clear()
        self._delays.clear()
        self._bytes = 0
        self._changed.set()
        self._sent.clear()
        self._held.clear()
        for futures in self._waiting.values():
            for future in futures:
                if not future.done():
                    future.set_exception(faults.Crash())
        self._waiting.clear()

    # --- work ------------------------------------------------------------------------------------------------

    async def look(self) -> int:
        """Take up rows of the table that are not known here; returns how many."""
        pause = _LOOK_SECONDS * (1 + len(self._held) / _BATCH)
        self._look_for_others_at = self._clock.monotonic() + pause
        taken = await self._take_due()
        known = self._held.copy()  # a row that is removed while we read may still be among those we read
        rows = await self._store.undispatched(_BATCH + len(known), self._nodes)
        found = [row for row in rows if row.seq not in known and row.seq not in self._held]
        if self._place is None or self._place.is_alone:
            self.take_up(found)
            return taken + len(found)
        found = self._left_by_others(found, self._place.is_lowest)
        if found:  # they go in where they belong
            self.take_up(found)
            self._queue = deque(sorted(self._queue, key=lambda row: row.seq))
        return taken + len(found)

    def _left_by_others(self, rows: list[OutboxRow], is_lowest: bool) -> list[OutboxRow]:
        """Those that nobody else sends: from outside, and those that are there for so long that their process died.
        The lowest comes first; it may be what died, so the others come behind it."""
        now = self._clock.monotonic()
        self._others = {row.seq: self._others.get(row.seq, now) for row in rows}
        long_ago = now - (0 if is_lowest else _OTHERS_SECONDS)
        return [
            row
            for row in rows
            if self._others[row.seq] <= long_ago - (0 if row.ordinal == FROM_OUTSIDE else _OTHERS_SECONDS)
        ]

    async def _send_queue(self) -> None:
        while self._queue:
            rows = self._next_batch()
            if self._place is None or self._place.is_alone:
                await self._send(rows)
                for _ in rows:
                    self._queue.popleft()
            else:
                rows = await self._not_behind_others(rows)
                if not rows:
                    await self._remove()  # others wait for that
                    await self._clock.sleep(_FIRST_PAUSE)
                    await self.look()
                    continue
                await self._send(rows)
                sent = {row.seq for row in rows}
                self._queue = deque(row for row in self._queue if row.seq not in sent)
            self._bytes -= sum([len(row.envelope.body) for row in rows])
            for row in rows if self._waiting else ():
                for future in self._waiting.pop(row.seq, ()):
                    if not future.done():
                        future.set_result(None)
            self.activity += 1
            self._changed.set()
            if self._task is not None:  # behind a batch: a store that is down must not keep what is here from going out
                await self._look_in_time()

    async def _not_behind_others(self, rows: list[OutboxRow]) -> list[OutboxRow]:
        """Without those that wait for an older one of their key that another committed."""
        last = max((row.seq for row in rows if row.key is not None), default=0)
        if not last:
            return rows
        known = self._held.copy()
        older = [each for each in await self._store.keyed_before(last, self._nodes) if each[0] not in known]
        first = {(destination, key): seq for seq, destination, key in reversed(older)}
        return [row for row in rows if first.get((row.destination, row.key or ""), row.seq) >= row.seq]

    def _next_batch(self) -> list[OutboxRow]:
        """What is sent together; it stays in the queue until it is."""
        if self._bytes < _BATCH_BYTES and not self._around:  # as nearly always
            return list(islice(self._queue, _BATCH))
        rows: list[OutboxRow] = []
        size = 0
        for row in islice(self._queue, _BATCH):
            if self._around and self._wants_middlewares(row):  # it goes alone
                return rows or [row]
            rows.append(row)
            size += len(row.envelope.body)
            if size >= _BATCH_BYTES:
                break
        return rows

    def _wants_middlewares(self, row: OutboxRow) -> bool:
        return row.ordinal == FROM_OUTSIDE and row.node in self._around

    async def _send(self, rows: list[OutboxRow]) -> None:
        """Send a batch, however long it takes."""
        pause, alarmed = _FIRST_PAUSE, False
        failing_since: float | None = None
        while True:
            try:
                if self._wants_middlewares(rows[0]):
                    await self._publish_within(self._around[rows[0].node], rows[0])
                    return
                rows = await self._without_replies(rows)
                if self._attempts is not None:
                    rows = await self._prepare(self._attempts, rows)
                if rows:
                    await self._publish(rows)
                return
            except BaseException as exc:  # whatever it is: to stop here would lose messages
                failing_since = self._clock.monotonic() if failing_since is None else failing_since
                waited = self._clock.monotonic() - failing_since
                if failure_of(exc) is None or waited >= self._patience:
                    raise
                log.warning("%d outgoing messages wait %g s, then are sent again: %s", len(rows), pause, exc)
                if waited >= _ALARM_AFTER and not alarmed:
                    alarmed = True
                    text = f"{len(self._queue)} messages cannot be sent since {waited:.0f} s: {exc}"
                    self._alarms.sound("dispatch-stalled", rows[0].node, rows[0].envelope.publication_id, text)
            await self._clock.sleep(pause)
            pause = min(2 * pause, self._longest_pause)

    async def _without_replies(self, rows: list[OutboxRow]) -> list[OutboxRow]:
        """Replies go first, to whoever waits for them; the other rows are left."""
        replies = [row for row in rows if row.envelope.kind == "reply"]
        if not replies:
            return rows
        if faults.hook is not None:
            await faults.hook("bus.before-publish")
        await self._replies.hand_over([row.envelope for row in replies if row.seq not in self._sent])
        self._sent.update(dict.fromkeys([row.seq for row in replies]))
        if faults.hook is not None:
            await faults.hook("bus.after-publish")
        return [row for row in rows if row.envelope.kind != "reply"]

    async def _publish_within(self, around: Around, row: OutboxRow) -> None:
        """Publish a row within the outgoing middlewares of its node. If they do not send it, it leaves the outbox."""
        called = ended = False
        error: BaseException | None = None
        failure: BaseException | None = None

        async def publish() -> None:
            nonlocal called, ended, error
            called = True
            try:
                rows = [row] if self._attempts is None else await self._prepare(self._attempts, [row])
                error = await self._publish(rows) if rows else None
                ended = True  # sent, or a dead letter
            except Exception as exc:
                error = exc
            if error is not None:
                raise error

        try:
            await around(row.envelope, publish)
        except BaseException as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
        if ended:
            if failure is not None and failure is not error:
                log.warning("%s was sent; an outgoing middleware failed after that: %s", row.envelope, failure)
            return
        cause = failure or error  # a middleware may swallow the error; the row is still to be sent
        if isinstance(cause, Permanent):
            await self._add_dead(row, [(row.envelope, cause)])
        elif cause is not None:
            raise cause
        elif not called:
            self._sent[row.seq] = None

    async def _publish(self, rows: list[OutboxRow]) -> Permanent | None:
        """Returns the error of a row that nobody will ever take; that is a dead letter by then."""
        refused = None
        if any(row.chosen for row in rows):
            rows = rows if self._attempts is not None else [without_attempts(row) for row in rows]
            envelopes = [signal for row in rows for signal in signals(row)]
        else:
            envelopes = [row.envelope for row in rows]
        if faults.hook is not None:
            await faults.hook("bus.before-publish")
        try:
            await self._hand_over(envelopes)
        except Permanent:
            refused = await self._publish_singly(rows)
        else:
            self._are_sent(rows)
        if faults.hook is not None:
            await faults.hook("bus.after-publish")
        if self._attempts is not None:
            await self._keep_strays(rows)
        return refused

    def _are_sent(self, rows: list[OutboxRow]) -> None:
        """They leave the table with the next commit of any task, but for those that stay because of their strays."""
        leaving = rows if self._attempts is None else [row for row in rows if not has_strays(row)]
        self._sent.update(dict.fromkeys([row.seq for row in leaving]))

    def _publish_to_transport(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        return self._transport.publish(envelopes)

    async def _prepare(self, attempts: Attempts, rows: list[OutboxRow]) -> list[OutboxRow]:
        """Resolve the recipients of each row, and create the tokens that they want. Rows keep their order; those that
        another dispatcher has sent meanwhile are left out."""
        unresolved = [row for row in rows if is_unresolved(row)]
        resolved = await attempts.resolve(unresolved) if unresolved else {}
        ready: list[OutboxRow] = []
        for row in rows:
            current = resolved.get(row.seq, row)
            if current is not None and is_pending(current):
                current = await attempts.choose(current)
            if current is None:
                self._held.discard(row.seq)
            elif row.seq not in self._sent:
                ready.append(current)
        return ready

    async def _keep_strays(self, rows: list[OutboxRow]) -> None:
        """Sent rows with attempts that were not chosen stay until no token of these can be created any more."""
        strays = [row.seq for row in rows if has_strays(row)]
        if strays:
            await self._store.keep_dispatched(strays, self._clock.time())
            self._held.difference_update(strays)

    async def discard_strays(self) -> None:
        """Remove rows that stayed because of their strays, where it is time."""
        if self._attempts is not None:
            await self._attempts.discard_strays()

    async def _publish_singly(self, rows: list[OutboxRow]) -> Permanent | None:
        """Returns the last error of those that became dead letters."""
        last = None
        for row in rows:
            if row.seq in self._sent or row.seq not in self._held:
                continue
            refused: list[tuple[Envelope, Permanent]] = []
            for signal in signals(row):
                try:
                    await self._hand_over([signal])
                except Permanent as exc:
                    last = exc
                    refused.append((signal, exc))
            if refused:
                await self._add_dead(row, refused)
            else:
                self._are_sent([row])
        return last

    async def _add_dead(self, row: OutboxRow, refused: list[tuple[Envelope, Permanent]]) -> None:
        """Nobody takes these signals of a row; the others are sent. The dead letter of the sending node is in the
        commit in which the row leaves the outbox."""
        signal, exc = refused[-1]
        recipients = tuple(name for signal, _ in refused for name in signal.recipients)
        envelope = msgspec.structs.replace(signal, recipients=recipients)
        letter = unsent(row, envelope, exc, self._clock.time())
        async with self._store.transaction() as transaction:
            await transaction.add_dead(letter)
            await transaction.dispatched([row.seq])
        self._held.discard(row.seq)
        if self._attempts is not None:
            await self._attempts.drop(row, [signal for signal, _ in refused])
        kind: AlarmKind = "unroutable" if isinstance(exc, Unroutable) else "dead-letter"
        self._alarms.sound(kind, row.node, envelope.publication_id, str(exc), envelope=envelope)

    async def _remove(self) -> None:
        """Take what was sent out of the table, in a commit of its own."""
        if not self._sent:
            return
        if faults.hook is not None:
            await faults.hook("dispatch.before-remove")
        recorded = Recorded()
        try:
            async with self._store.transaction() as transaction:
                recorded = await self.record_rows(transaction, ())
        except BaseException:
            self.rolled_back(recorded)
            raise
        self.committed(recorded)


def _due_by(row: OutboxRow, now: float) -> OutboxRow:
    """The row as it is sent: nobody waits for the rest of a microsecond."""
    if not is_later(row.envelope, now):
        return row
    return row._replace(envelope=msgspec.structs.replace(row.envelope, deliver_at=now))
