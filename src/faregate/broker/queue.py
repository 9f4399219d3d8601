"""A queue: entries in order, acquired, released to their own position, archived.

Rules kept here (each has a regression test that fails without it):
- Single-loop ownership: no method awaits, so no method sees another half-done.
- Ending an acquisition carries its lock token; a stale one is refused and changes nothing. An archived entry
  never comes back.
- Expiry takes an entry only while nobody holds it; a held one is looked at again when it is released.
- Per key, only the first living entry can be available or acquired; the others wait behind it. In a serial queue all
  wait while one waits for redelivery. An entry with several keys is available once it is the first of each. Until then
  it gives way to an earlier one in all of them, so that no two wait for each other.
- The pump forgets that it was woken *before* it looks, so a signal while it runs wakes it again; and it ends
  when a whole round over the consumers delivered nothing, so it never spins.
- Cost does not depend on length: enqueue, acquire and settle touch the ends of lines only, and references that
  went stale are dropped once they outnumber the living.

Longer than most files because all of this changes the same few fields, and must be seen together to be believed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from faregate.broker.backlog import Backlog
from faregate.broker.consumer import QueueConsumer
from faregate.broker.delivery import BrokerDelivery
from faregate.broker.entry import ACQUIRED, ARCHIVED, AVAILABLE, SCHEDULED, WITHHELD, Entry, EntryLine
from faregate.broker.in_flight import InFlight
from faregate.broker.journal.snapshot import Returning
from faregate.broker.recorder import Recorder
from faregate.broker.schedule import Schedule, ScheduledCall
from faregate.broker.selector import Selector
from faregate.errors import ConfigurationError, ConsumerRefused, StaleLock
from faregate.message import Envelope, too_late_at
from faregate.ports.clock import Clock, Timer
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.keys import Keys, keys_of
from faregate.ports.progress import Occupation
from faregate.ports.queue import Outcome

log = logging.getLogger("faregate.broker")

_DELIVERIES_PER_TURN = 256
"""How much one pump run delivers before it lets the rest of the event loop go on."""

_EXPOSURES_PER_CLEANING = 256
"""How often lines are looked at for references that went stale."""

_LOADED_AT_ONCE = 256
"""How many waiting entries are brought from the journal into memory at a time."""

_MOST_AVAILABLE = 4096
"""With a journal behind it, a queue keeps that many ready for delivery in memory; the rest waits there."""

_MOST_RESIDENT = 100_000
"""With that many in memory and none to be had (all behind busy keys), no more are brought."""

MakeDeadLetter = Callable[["Queue", Entry, str, str], None]


def _make_none(queue: "Queue", entry: Entry, reason: str, error: str) -> None:
    """A closed queue makes no dead letters any more."""


class Queue:
    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        schedule: Schedule,
        make_dead_letter: MakeDeadLetter,
        in_flight: InFlight | None = None,
        key_of: Callable[[Envelope], str | None] | None = None,
        strict: bool = True,
        serial: bool = False,
        lock_seconds: float = 60.0,
        max_deliveries: int | None = None,
        expires: float | None = None,
        on_dead_letter: Callable[[BrokerDelivery, str, str], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = name
        self.lock_seconds = lock_seconds
        self.settled: dict[str, int] = {"handled": 0, "skipped": 0, "filtered": 0, "dead": 0, "duplicate": 0}
        self._clock = clock
        self._schedule = schedule
        self._make_dead_letter = make_dead_letter
        self._in_flight = in_flight if in_flight is not None else InFlight()
        self._key_of = key_of
        self._strict = strict
        self._serial = serial
        self._redelivering = 0
        """How many entries wait for redelivery; in a serial queue nothing goes out meanwhile."""
        self._max_deliveries = max_deliveries
        self._expires = expires
        self._on_dead_letter = on_dead_letter
        self._recorder = recorder
        self._backlog = Backlog()
        self._backlog_watch: ScheduledCall | None = None
        self._scheduled = 0
        """How many entries wait for a first delivery later."""
        self._late: list[tuple[int, Entry]] = []
        """Entries that are due, but behind entries that are still in the backlog; a heap by position."""

        self._entries: dict[int, Entry] = {}
        self._next_position = 0
        self._next_lock = 0
        self._available = EntryLine(AVAILABLE, fresh_turn=1)
        self._available_count = 0
        self._lines = [self._available]
        """The line for everybody, then one for each consumer with a selector."""
        self._exposures = 0
        self._holders: dict[str, Entry] = {}
        """Per key, the one entry that may be available, acquired or (strict) waiting for redelivery; or that is
        withheld until it is the holder of its other keys, too."""
        self._behind: dict[str, EntryLine] = {}
        self._acquired: dict[int, Entry] = {}
        self._lock_timer: Timer | None = None
        self._consumers: deque[QueueConsumer] = deque()
        self._awake = False
        self._closed = False

    def __len__(self) -> int:
        """How many entries are not archived."""
        return len(self._entries) + len(self._backlog)

    @property
    def activity(self) -> int:
        """A number that grows with every enqueue and every acquisition."""
        return self._next_position + self._next_lock

    def count_in(self, in_flight: InFlight) -> None:
        """What is here counts there from now on, and no longer in the one it counted in."""
        if in_flight is not self._in_flight:
            before, self._in_flight = self._in_flight, in_flight
            here = len(self) - self._scheduled
            in_flight.count += here
            before.land(here)

    # --- entries come in ----------------------------------------------------------------------------------

    def enqueue(self, envelope: Envelope, letter: DeadLetter | None = None, offset: int = -1) -> None:
        """Add an entry at the end. A dead letter waits for people: no time in its envelope applies any more.

        With a journal behind it, a plain entry that memory has no room for waits there.
        """
        position = self._next_position
        self._next_position = position + 1
        if self._recorder is not None and letter is None and self._must_wait_in_journal(envelope):
            self._in_flight.count += 1
            self._backlog.append(position, offset)
            self._watch_backlog(envelope)
            self.signal()
            return
        self._insert(Entry(position, envelope, redeliveries=envelope.redeliveries, letter=letter, offset=offset))

    def enqueue_stored(self, envelopes: Sequence[Envelope], offsets: Sequence[int]) -> None:
        """Add entries that are in the journal, at the end and in order."""
        timed = [each for each in envelopes if each.deliver_at is not None or each.expires_at is not None]
        plain = self._expires is None and not timed
        for index, envelope in enumerate(envelopes):
            if plain and self._backlog:
                rest = offsets[index:]
                positions = range(self._next_position, self._next_position + len(rest))
                self._backlog.extend(positions, rest)
                self._next_position = positions.stop
                self._in_flight.count += len(rest)
                self.signal()
                return
            self.enqueue(envelope, offset=offsets[index])

    def _must_wait_in_journal(self, envelope: Envelope) -> bool:
        """Behind others that do, or because memory holds enough. What is scheduled for later is kept in memory."""
        if envelope.deliver_at is not None and self._seconds_until(envelope.deliver_at) > 0:
            return False
        full = self._recorder is not None and not self._recorder.has_room()
        return full or bool(self._backlog) or self._available_count >= _MOST_AVAILABLE

    def _watch_backlog(self, envelope: Envelope) -> None:
        """What waits in the journal may expire there: look at the front of it now and then, if so."""
        if (envelope.expires_at is not None or self._expires is not None) and self._backlog_watch is None:
            self._backlog_watch = self._schedule.after(1.0, self._look_at_backlog, None)

    def _look_at_backlog(self, _: None) -> None:
        self._backlog_watch = None
        if self._backlog:
            if len(self._entries) < _LOADED_AT_ONCE:
                self._refill()
            self._backlog_watch = self._schedule.after(1.0, self._look_at_backlog, None)

    def _insert(self, entry: Entry) -> None:
        """The entry is in memory from now on; see when it may be delivered."""
        self._keep(entry)
        due = entry.envelope.deliver_at
        if due is not None and entry.letter is None and (wait := self._seconds_until(due)) > 0:
            entry.state = SCHEDULED
            self._scheduled += 1
            if (delay := entry.envelope.delay) is None:
                entry.wake = self._schedule.at(due, self._due, entry)
            else:  # no longer than was asked for, should the wall clock have been set back since
                entry.wake = self._schedule.after(min(wait, delay), self._due, entry)
            return
        self._in_flight.count += 1
        if self._recorder is None and entry.key is None:  # nothing that it could be behind
            self._expose(entry)
        else:
            self._admit_in_order(entry)

    def _keep(self, entry: Entry) -> None:
        if self._recorder is not None:
            self._recorder.holds(entry.envelope)
        self._entries[entry.position] = entry
        if entry.letter is None:
            if self._key_of is not None:
                self._read_key(entry, self._key_of)
            if entry.envelope.expires_at is not None or self._expires is not None:
                self._watch_expiry(entry)

    def _seconds_until(self, wall: float) -> float:
        return wall - self._clock.time()

    def _admit_in_order(self, entry: Entry) -> None:
        """Like `_admit`, but not before those that are earlier and still in the backlog."""
        front = None if self._recorder is None else self._backlog.first_position
        if front is not None and front < entry.position:
            entry.state = WITHHELD
            heappush(self._late, (entry.position, entry))
        else:
            self._admit(entry)

    def _read_key(self, entry: Entry, key_of: Callable[[Envelope], str | None]) -> None:
        """What has no readable key holds nobody up; its handler will see what is wrong with it."""
        try:
            entry.key = key_of(entry.envelope)
        except Exception:
            log.exception("%s: the key of %s cannot be read; it is delivered without order", self.name, entry.envelope)

    def _refill(self) -> bool:
        """Bring the next waiting entries from the journal into memory; whether there were any."""
        if not self._backlog or self._recorder is None or self._closed:
            return False
        # What is scheduled for later, or waits for the backlog itself, cannot make room and does not count.
        here = len(self._entries) - self._scheduled - len(self._late)
        if here >= _MOST_RESIDENT or (here >= _LOADED_AT_ONCE and not self._recorder.has_room()):
            return False
        positions, offsets = self._backlog.first(_LOADED_AT_ONCE)
        envelopes = self._recorder.load(offsets)
        if not envelopes:
            return False
        self._backlog.drop(len(offsets))
        for position, envelope, offset in zip(positions, envelopes, offsets, strict=True):
            if self._late:
                self._admit_late(position)
            entry = Entry(position, envelope, redeliveries=envelope.redeliveries, offset=offset)
            if envelope.deliver_at is None:  # it was counted when it was put into the backlog, and is first in it
                self._keep(entry)
                self._admit(entry)
            else:
                self._in_flight.count -= 1
                self._insert(entry)
        self._admit_late(self._backlog.first_position)
        return True

    def _admit_late(self, position: int | None) -> None:
        """Entries whose time came while earlier ones were still in the backlog: now it is their turn."""
        while self._late and (position is None or self._late[0][0] < position):
            entry = heappop(self._late)[1]
            if entry.state == WITHHELD:  # it may have expired meanwhile
                self._admit(entry)

    def _admit(self, entry: Entry) -> None:
        """The entry may be delivered as far as time goes; its key decides whether it is its turn."""
        key = entry.key
        if key is not None:
            if key.__class__ is Keys:
                entry.state = WITHHELD
                held = [self._hold(each, entry) for each in keys_of(key)]  # it enters all lines at once
                if not all(held):
                    return
            elif self._holders.setdefault(key, entry) is not entry and not self._hold(key, entry):
                return
        self._expose(entry)

    def _hold(self, key: str, entry: Entry) -> bool:
        """Have the entry hold a key, or wait behind who does; whether it holds it."""
        holder = self._holders.setdefault(key, entry)
        if holder is entry:
            return True
        gives_way = holder.state == WITHHELD and holder.position > entry.position
        if gives_way:
            self._holders[key], entry = entry, holder
        entry.state = WITHHELD
        behind = self._behind.get(key)
        if behind is None:
            behind = self._behind[key] = EntryLine(WITHHELD, fresh_turn=0)
        behind.add(entry)
        return gives_way

    def _holds(self, entry: Entry) -> bool:
        """Whether it is the holder of its keys, of which there are some."""
        key, holders = entry.key, self._holders
        if key.__class__ is Keys:
            return all(holders.get(each) is entry for each in keys_of(key))
        return key is not None and holders.get(key) is entry

    def _expose(self, entry: Entry) -> None:
        entry.state = AVAILABLE
        entry.turn += 1
        self._available_count += 1
        for line in self._lines:
            line.add(entry)
        self._exposures += 1
        if not self._exposures % _EXPOSURES_PER_CLEANING:
            for line in self._lines:
                if len(line) > 2 * self._available_count:
                    line.drop_stale()
        if not self._awake:
            self.signal()

    def _due(self, entry: Entry) -> None:
        """The time that a scheduled entry waited for has come."""
        entry.wake = None
        if entry.state != SCHEDULED:
            return
        if entry.redelivering:
            entry.redelivering = False
            self._redelivering -= 1
            self.signal()
            if self._holds(entry):
                self._expose(entry)
                return
            self._pass_keys_on(entry)  # restored, it may hold some: as it waits again, an earlier one may have them
        else:
            self._scheduled -= 1
            self._in_flight.count += 1
        self._admit_in_order(entry)

    def _due_at_end(self, entry: Entry) -> None:
        """The same for one that goes behind everything that waits now: another entry for its message. A position never
        changes, and nothing follows this one, or it, without a gap (see `restore`)."""
        entry.wake = None
        if entry.state != SCHEDULED:
            return
        self._redelivering -= 1
        entry.state = ARCHIVED
        self._remove([entry])
        position = self._next_position + 1
        self._next_position = position + 2
        last = Entry(
            position,
            entry.envelope,
            entry.key,
            tries=entry.tries,
            redeliveries=entry.redeliveries,
            delivered=True,
            behind=True,
            expires_at=entry.expires_at,
            offset=entry.offset,
        )
        self._entries[position] = last
        if self._recorder is not None:
            self._recorder.holds(last.envelope)
        if last.expires_at is not None:
            last.expiry = self._schedule.after(last.expires_at - self._clock.monotonic(), self._expire, last)
        self.signal()
        self._admit_in_order(last)

    # --- entries go out -----------------------------------------------------------------------------------

    def _acquire(self, consumer: QueueConsumer, now: float) -> Entry | None:
        """The first available entry that this consumer may have, now locked by it."""
        line = self._available if consumer.line is None else consumer.line
        while True:
            entry = line.pop()
            if entry is None:
                return None
            if entry.expires_at is not None and entry.expires_at <= now:
                self._expire(entry)
            elif consumer.selector is None or consumer.selector.matches(entry.envelope.headers):
                break
        self._available_count -= 1
        self._next_lock = lock = self._next_lock + 1
        entry.state = ACQUIRED
        entry.started = False
        entry.lock = lock
        entry.lock_until = now + self.lock_seconds
        entry.consumer = consumer
        consumer.held.count += 1
        self._acquired[lock] = entry
        if self._lock_timer is None:
            self._lock_timer = self._clock.call_later(self.lock_seconds, self._check_locks)
        return entry

    def start_all(self, held: Sequence[BrokerDelivery]) -> list[StaleLock | None]:
        """Handlers start on these, but for what has expired; for each why not, if its lock is stale."""
        found: list[StaleLock | None] = []
        begun: list[Entry] = []
        for each in held:
            entry = each.entry
            if entry.lock != each.lock or entry.state != ACQUIRED:
                found.append(self._stale(entry, each.lock))
                continue
            found.append(None)
            if entry.expires_at is None or not self.has_expired(entry):
                entry.started = True
                entry.tries += 1
                begun.append(entry)
        if self._recorder is not None:
            self._recorder.started(self, begun)
        return found

    def settle_all(self, held: Sequence[BrokerDelivery], outcomes: Sequence[Outcome]) -> list[StaleLock | None]:
        """The holder is done with these; for each why not, if its lock is stale."""
        found: list[StaleLock | None] = []
        ended: list[Entry] = []
        ends: list[Outcome] = []
        consumers: list[QueueConsumer | None] = []
        for each, outcome in zip(held, outcomes, strict=True):
            entry = each.entry
            if entry.lock != each.lock or entry.state != ACQUIRED:
                found.append(self._stale(entry, each.lock))
                continue
            found.append(None)
            ended.append(entry)
            ends.append(outcome)
            consumers.append(entry.consumer)
            entry.state, entry.consumer = ARCHIVED, None
            del self._acquired[entry.lock]
        for outcome in set(ends):
            self.settled[outcome] += ends.count(outcome)
        if self._recorder is not None:
            self._recorder.ended(self, ended, ends)
        self._remove(ended)
        self._in_flight.land(len(ended))
        for consumer in dict.fromkeys(consumers):
            if consumer is not None:
                consumer.ended(consumers.count(consumer))
        return found

    def release(self, entry: Entry, lock: int, *, forgive: bool = False, begun: bool = True) -> None:
        """Back to its own position, available at once. `forgive`: the try does not count."""
        self._give_back(entry, lock)
        if forgive and entry.started:
            entry.tries -= 1
        delivered = entry.delivered
        self._return(entry, 0.0)
        if not begun:
            entry.delivered = delivered

    def redeliver(self, entry: Entry, lock: int, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        """Back to its own position after a while; `behind`: to the end of the queue, as it is then. Settling and
        rescheduling are this one step."""
        self._give_back(entry, lock)
        if counted:
            entry.redeliveries += 1
        elif entry.started:
            entry.tries -= 1
        self._return(entry, delay, behind=behind)

    def dead_letter(self, entry: Entry, lock: int, reason: str, error: str) -> None:
        """The holder stops trying it."""
        self._give_back(entry, lock)
        self._move_to_dead_letters(entry, reason, error)

    def renew(self, entry: Entry, lock: int) -> None:
        """The holder keeps it for another lock period."""
        self._check_lock(entry, lock)
        entry.lock_until = self._clock.monotonic() + self.lock_seconds

    def _stale(self, entry: Entry, lock: int) -> StaleLock | None:
        """None while this lock holds it."""
        if entry.state == ACQUIRED and entry.lock == lock:
            return None
        return StaleLock(
            f"{entry.envelope} in {self.name} is no longer held by this delivery: "
            "its lock expired, its consumer went away, or it was ended already"
        )

    def _check_lock(self, entry: Entry, lock: int) -> None:
        if (stale := self._stale(entry, lock)) is not None:
            raise stale

    def _give_back(self, entry: Entry, lock: int) -> None:
        """End the acquisition; the caller decides at once what becomes of the entry."""
        self._check_lock(entry, lock)
        del self._acquired[lock]
        consumer, entry.consumer = entry.consumer, None
        if consumer is not None:
            consumer.ended(1)

    def _return(self, entry: Entry, delay: float, *, behind: bool = False) -> None:
        entry.delivered = True
        if self._max_deliveries is not None and entry.tries >= self._max_deliveries:
            self._abandon(entry, "max-deliveries", f"delivered {entry.tries} times without being settled")
        elif self.has_expired(entry):
            self._abandon(entry, "expired", "expired while it was being handled, and came back")
        elif delay > 0 or behind:
            entry.behind = entry.behind or behind
            self._wait_for_redelivery(entry, delay, behind=behind)
            if self._recorder is not None:
                self._recorder.waits(self, entry, self._clock.time() + delay)
            if not self._strict or behind:
                self._pass_keys_on(entry)
        else:
            self._expose(entry)

    def _wait_for_redelivery(self, entry: Entry, delay: float, *, behind: bool = False) -> None:
        entry.state = SCHEDULED
        entry.redelivering = True
        self._redelivering += 1
        entry.wake = self._schedule.after(delay, self._due_at_end if behind else self._due, entry)

    def cancel(self, wanted: Callable[[Envelope], bool]) -> int:
        """Take back what waits for a first delivery later; how many entries. They count as skipped. It looks at all
        that is in memory, and what is scheduled always is."""
        found = [
            entry
            for entry in self._entries.values()
            if entry.state == SCHEDULED and not entry.redelivering and wanted(entry.envelope)
        ]
        if found and self._recorder is not None:
            self._recorder.ended(self, found, ["skipped"] * len(found))
        for entry in found:
            self.settled["skipped"] += 1
            self._archive(entry)
        return len(found)

    def _archive(self, entry: Entry) -> None:
        """One that nobody holds is done."""
        counted = entry.in_flight
        if entry.state == AVAILABLE:
            self._available_count -= 1
        withheld = entry.state == WITHHELD
        entry.state = ARCHIVED
        if withheld:
            for key in keys_of(entry.key):
                if key in self._behind and self._holders.get(key) is not entry:
                    self._behind[key].left_by_another_door()
        if entry.redelivering:
            self._redelivering -= 1
            self.signal()
        self._remove([entry])
        if counted:
            self._in_flight.land()
        else:
            self._scheduled -= 1

    def _remove(self, entries: Sequence[Entry]) -> None:
        """These are archived: nothing of the queue's own knows them any more."""
        if self._recorder is not None:
            self._recorder.leave(entries)
        for entry in entries:
            del self._entries[entry.position]
            if entry.expiry is not None or entry.wake is not None:
                self._schedule.cancel(entry.expiry)
                self._schedule.cancel(entry.wake)
            key = entry.key
            if key is not None:
                if key.__class__ is Keys:
                    self._pass_keys_on(entry)
                else:
                    self._pass_on(key, entry)

    def _pass_keys_on(self, entry: Entry) -> None:
        for key in keys_of(entry.key):
            self._pass_on(key, entry)

    def _pass_on(self, key: str, entry: Entry) -> None:
        """The entry no longer holds this key; the next of it takes its turn."""
        if self._holders.get(key) is not entry:
            return
        behind = self._behind.get(key)
        if behind is None:
            del self._holders[key]
            return
        following = behind.pop()
        if following is None:
            del self._behind[key], self._holders[key]
        else:
            self._holders[key] = following
            if following.key.__class__ is not Keys or self._holds(following):
                self._expose(following)

    def _abandon(self, entry: Entry, reason: str, error: str) -> None:
        """The queue itself makes a dead letter of an entry that nobody holds."""
        log.warning("%s: %s is a dead letter (%s): %s", self.name, entry.envelope, reason, error)
        self._move_to_dead_letters(entry, reason, error)
        if self._on_dead_letter is not None:
            self._on_dead_letter(self._handed_out(entry), reason, error)

    def _move_to_dead_letters(self, entry: Entry, reason: str, error: str) -> None:
        self._make_dead_letter(self, entry, reason, error)
        self.settled["dead"] += 1
        self._archive(entry)

    # --- time ---------------------------------------------------------------------------------------------

    def _watch_expiry(self, entry: Entry) -> None:
        until = too_late_at(entry.envelope, self._expires, self._clock.time())
        if until is not None:
            left = self._seconds_until(until)
            entry.expires_at = self._clock.monotonic() + left
            entry.expiry = self._schedule.after(left, self._expire, entry)

    def has_expired(self, entry: Entry) -> bool:
        """Whether its time is over."""
        return entry.expires_at is not None and entry.expires_at <= self._clock.monotonic()

    def _expire(self, entry: Entry) -> None:
        if entry.state in (ACQUIRED, ARCHIVED):
            return
        self._abandon(entry, "expired", "nobody took it before it expired")

    def _check_locks(self) -> None:
        """Return what was held too long. Walks only what is held, which credit bounds."""
        self._lock_timer = None
        now = self._clock.monotonic()
        for entry in [entry for entry in self._acquired.values() if entry.lock_until <= now]:
            log.warning("%s: the lock on %s expired; it is available again", self.name, entry.envelope)
            self.release(entry, entry.lock)
        if self._acquired:
            earliest = min(entry.lock_until for entry in self._acquired.values())
            self._lock_timer = self._clock.call_later(max(0.0, earliest - now), self._check_locks)

    # --- consumers and the pump ---------------------------------------------------------------------------

    def attach(
        self,
        deliver: Callable[[BrokerDelivery], None],
        *,
        credit: int = 0,
        window: bool = False,
        selector: Selector | None = None,
        exclusive: bool = False,
        single_active: bool = False,
    ) -> QueueConsumer:
        """Add a consumer with that many deliveries of credit.

        With `window`, credit comes back when a delivery ends: at most `credit` are out at a time. An exclusive
        consumer is alone; of single-active ones only the first attached gets deliveries.
        """
        if credit < 0:
            raise ValueError(f"credit cannot be negative; got {credit}")
        if self._consumers and (exclusive or self._consumers[0].exclusive):
            raise ConsumerRefused(f"{self.name} is consumed exclusively or has consumers; close the other first")
        if self._consumers and self._consumers[0].single_active != single_active:
            raise ConfigurationError(f"{self.name} has consumers that are not all single-active; choose one mode")
        consumer = QueueConsumer(
            self, deliver, window=window, selector=selector, exclusive=exclusive, single_active=single_active
        )
        if consumer.line is not None:
            for entry in self._entries.values():
                if entry.state == AVAILABLE:
                    consumer.line.add(entry)
            self._lines.append(consumer.line)
        self._consumers.append(consumer)
        consumer.grant(credit)
        return consumer

    def detach(self, consumer: QueueConsumer) -> None:
        """Remove a consumer; what it holds is available again at once."""
        if consumer not in self._consumers:
            return
        self._consumers.remove(consumer)
        consumer.paused = True
        if consumer.line is not None:
            self._lines.remove(consumer.line)
        for lock, entry in list(self._acquired.items()):
            if entry.consumer is consumer:
                self.release(entry, lock)
        self.signal()

    def detach_all(self) -> None:
        for consumer in list(self._consumers):
            self.detach(consumer)

    def signal(self) -> None:
        """Something changed that may allow a delivery: wake the pump."""
        if self._awake or self._closed or not self._consumers:
            return
        if self._available_count or self._backlog:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Deliver round-robin until no consumer wants or nothing is left."""
        self._awake = False
        now = self._clock.monotonic()
        consumers = self._served()
        delivered = idle = 0
        while idle < len(consumers):
            if delivered == _DELIVERIES_PER_TURN:
                self.signal()
                return
            consumer = consumers[0]
            consumers.rotate(-1)
            entry = None
            if consumer.credit > 0 and not consumer.paused:
                entry = self._acquire(consumer, now)
                while entry is None and self._refill():
                    entry = self._acquire(consumer, now)
            if entry is None:
                idle += 1
                continue
            idle = 0
            delivered += 1
            consumer.credit -= 1
            try:
                consumer.deliver(self._handed_out(entry))
            except Exception:
                log.exception("%s: a consumer failed to take %s and is detached", self.name, entry.envelope)
                self.detach(consumer)

    def _handed_out(self, entry: Entry) -> BrokerDelivery:
        return BrokerDelivery(self, entry, entry.lock, entry.envelope, entry.key, entry.delivered)

    def _served(self) -> deque[QueueConsumer]:
        """The consumers that may get something now."""
        if self._serial and self._redelivering:
            return deque()
        if self._consumers and self._consumers[0].single_active:
            return deque([self._consumers[0]])
        return self._consumers

    def occupations(self) -> Iterator[Occupation]:
        """What the pump could hand out now: an entry that a consumer with credit could have."""
        wanted = any(each.credit > 0 and not each.paused and each.selector is None for each in self._served())
        if wanted and (self._available_count or (self._backlog and not self._entries)):
            first = next((entry for entry in self._entries.values() if entry.state == AVAILABLE), None)
            what = "what waits in the journal" if first is None else str(first.envelope)
            message = "" if first is None else first.envelope.publication_id
            node = self.name.partition(".")[0]
            yield Occupation((self, self._next_lock), node, message, f"the pump of {self.name} hands out {what}")

    # --- looking without taking ---------------------------------------------------------------------------

    def browse(self) -> Iterator[Entry]:
        """The living entries in memory in order of position, whatever their state.

        Do not change the queue meanwhile.
        """
        return iter(self._entries.values())

    def state(self) -> tuple[list[tuple[int, int]], list[Returning]]:
        """What waits here, in terms of the journal: see `QueueSnapshot`."""
        pieces = [(entry.position, entry.offset, entry.offset, 1) for entry in self._entries.values()]
        pieces += self._backlog.runs()
        pieces.sort()
        runs: list[tuple[int, int]] = []
        following = -1
        for position, first, last, length in pieces:
            if position == following:
                runs[-1] = (runs[-1][0], last)
            else:
                runs.append((first, last))
            following = position + length
        returning = [
            Returning(entry.offset, entry.tries, entry.redeliveries, self._due_time(entry), entry.behind)
            for entry in self._entries.values()
            if entry.tries or entry.redeliveries or entry.redelivering or entry.behind
        ]
        return runs, returning

    def _due_time(self, entry: Entry) -> float | None:
        """When it comes back, by the wall clock, if it waits for redelivery."""
        return self._schedule.wall_time(entry.wake) if entry.redelivering and entry.wake is not None else None

    def restore(self, positions: Sequence[int], offsets: Sequence[int]) -> None:
        """Plain entries that wait in the journal, in order, behind what was restored before.

        Positions follow each other only where nothing of this queue between them is done; see `state`.
        """
        self._backlog.extend(positions, offsets)
        self._in_flight.count += len(positions)
        self._next_position = positions[-1] + 1

    def leave_gap(self, position: int) -> None:
        """What comes from now on does not follow what was restored: something between them may be done."""
        self._next_position = max(self._next_position, position)

    def restore_entry(
        self, position: int, envelope: Envelope, found: Returning, letter: DeadLetter | None = None
    ) -> None:
        """An entry with a past or with a time of its own, behind what was restored before."""
        self._next_position = position + 1
        entry = Entry(
            position,
            envelope,
            tries=found.tries,
            redeliveries=found.redeliveries,
            delivered=found.tries > 0,
            behind=found.behind,
            offset=found.offset,
            letter=letter,
        )
        if self._max_deliveries is not None and entry.tries >= self._max_deliveries:
            self._keep(entry)
            self._in_flight.count += 1
            self._abandon(entry, "max-deliveries", f"delivered {entry.tries} times without being settled")
        elif found.due is None and not found.behind:
            self._insert(entry)
        else:  # it goes on waiting for redelivery, holding its key if strict; or goes to the end, which it was at
            self._keep(entry)
            self._in_flight.count += 1
            if self._strict and not found.behind:
                for key in keys_of(entry.key):
                    self._holders.setdefault(key, entry)
            delay = 0.0 if found.due is None else self._seconds_until(found.due)
            self._wait_for_redelivery(entry, delay, behind=found.behind)

    def close(self) -> None:
        """Detach everybody, stop all timers, and forget the entries and who made this: cycles through entries and
        deliveries are never collected."""
        self._closed = True
        self.detach_all()
        self._recorder = self._key_of = self._on_dead_letter = None
        self._make_dead_letter = _make_none
        if self._lock_timer is not None:
            self._lock_timer.cancel()
            self._lock_timer = None
        for entry in self._entries.values():
            entry.expiry = entry.wake = None
