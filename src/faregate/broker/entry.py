"""An entry of a queue, and the ordered lines that entries wait in.

States and who moves an entry between them (all in `queue.py`):

    SCHEDULED  waits for a time            --due-->      WITHHELD or AVAILABLE
    WITHHELD   waits behind its key        --its turn--> AVAILABLE
    AVAILABLE  may be acquired             --acquire-->  ACQUIRED
    ACQUIRED   held by one consumer        --release-->  AVAILABLE or SCHEDULED
    ARCHIVED   done; nothing leaves this state

The design's three states are AVAILABLE, ACQUIRED and ARCHIVED; the other two are kinds of "not yet available".
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from faregate.broker.schedule import ScheduledCall
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter

if TYPE_CHECKING:
    from faregate.broker.consumer import QueueConsumer

AVAILABLE, ACQUIRED, ARCHIVED, WITHHELD, SCHEDULED = range(5)
STATE_NAMES = ("available", "acquired", "archived", "withheld", "scheduled")


class Entry(msgspec.Struct, gc=False, eq=False):
    """One message in one queue. Its position never changes.

    A struct without garbage-collector tracking: a million waiting entries must not be walked by every full
    collection. The only cycle, entry -> consumer -> entry, is broken whenever the entry leaves ACQUIRED.
    """

    position: int
    envelope: Envelope
    key: str | None = None
    state: int = WITHHELD
    turn: int = 0
    """How often it became available; a reference from an earlier availability is stale."""
    lock: int = 0
    """The token of the current acquisition."""
    lock_until: float = 0.0
    consumer: QueueConsumer | None = None
    started: bool = False
    """Whether the current acquisition counts as a try."""
    tries: int = 0
    redeliveries: int = 0
    delivered: bool = False
    redelivering: bool = False
    """Waits for redelivery, as opposed to a first delivery scheduled for later."""
    behind: bool = False
    """It was sent to the end: after a restart it goes there again, as the journal has it where it was published."""
    expires_at: float | None = None
    """On the monotonic clock."""
    expiry: ScheduledCall | None = None
    wake: ScheduledCall | None = None
    letter: DeadLetter | None = None
    offset: int = -1
    """Its place in the journal; -1 in a broker that has none."""

    @property
    def in_flight(self) -> bool:
        """Not done, and not merely scheduled for a first delivery later."""
        return self.state != ARCHIVED and (self.state != SCHEDULED or self.redelivering)


class EntryLine:
    """Entries in order of position, with O(1) append at the end and cheap return to the own position.

    Entries are not taken out when they leave the queue otherwise; a stale reference is recognised when it comes up:
    its entry is in another state, or became available again since (another turn).
    """

    __slots__ = ("_fresh", "_fresh_turn", "_returned", "_stale", "_state")

    def __init__(self, state: int, fresh_turn: int) -> None:
        self._state = state
        self._fresh_turn = fresh_turn
        self._fresh: deque[Entry] = deque()
        self._returned: list[tuple[int, int, Entry]] = []
        self._stale = 0

    def __len__(self) -> int:
        """How many references there are, stale ones included."""
        return len(self._fresh) + len(self._returned)

    def add(self, entry: Entry) -> None:
        """Add an entry at its own position: at the end if it was never here and is later than those there."""
        fresh = self._fresh
        if entry.turn == self._fresh_turn and (not fresh or fresh[-1].position < entry.position):
            fresh.append(entry)
        else:
            heappush(self._returned, (entry.position, entry.turn, entry))

    def pop(self) -> Entry | None:
        """Take the first entry that still belongs here."""
        state, fresh, returned = self._state, self._fresh, self._returned
        while fresh:
            first = fresh[0]
            if first.state == state and first.turn == self._fresh_turn:
                break
            fresh.popleft()
        if returned:
            while returned and (returned[0][2].state != state or returned[0][2].turn != returned[0][1]):
                heappop(returned)
            if returned and (not fresh or returned[0][0] < fresh[0].position):
                return heappop(returned)[2]
        return fresh.popleft() if fresh else None

    def left_by_another_door(self) -> None:
        """One of the entries in here is done; its reference is dropped with others like it."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self):
            self.drop_stale()
            self._stale = 0

    def drop_stale(self) -> None:
        """Forget references to entries that left the queue otherwise, so that memory follows what really waits."""
        self._fresh = deque(
            entry for entry in self._fresh if entry.state == self._state and entry.turn == self._fresh_turn
        )
        self._returned = [item for item in self._returned if item[2].state == self._state and item[2].turn == item[1]]
        heapify(self._returned)
