"""`journal:PATH` as a log: the journal's read side, and what other processes may do to it.

Appending goes through the spool, staging through files beside it; nothing here writes a segment. Only `take_in` and
`handover` hold the journal's lock, for as long as they last.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from faregate.broker.journal import dead_letters, settled
from faregate.broker.journal.commits import commit_staged
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.lock import lock_holder
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.spool import read_spooled, spool, waiting
from faregate.broker.journal.staging import batch_folder, discard, stage
from faregate.broker.journal.views import ClosedJournal
from faregate.errors import JournalCorrupt, JournalLocked
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import LogPart, Piece, Staged
from faregate.ports.queue import Binding
from faregate.transports.journal import JournalTransport

PATIENCE = 10.0
"""Seconds that a writer may take, on a busy disk, from its first segment to its first mark, or to take the spool in."""
_PAUSE = 0.05
_LOOK = 0.005
_LOOKS = 5
"""How often who takes in looks again for what others left meanwhile."""


class JournalLog(JournalReader):
    """Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`."""

    def __init__(self, place: str | Path) -> None:
        path = place if isinstance(place, Path) else Path(place.removeprefix("journal:").partition("?")[0])
        super().__init__(path)
        self.path = path
        self.name = f"the journal {path}"
        self.log_id = self.meta.id

    # --- reading -------------------------------------------------------------------------------------------------

    def high_water(self) -> HighWater:
        """A journal that is opened for the first time has a segment before it has a mark, and a reader takes that for
        damage. A stream that waits on an empty journal meets that moment, and must outlast it."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return super().high_water()
            except JournalCorrupt:
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE)

    def parts(self, start: int | None = None, end: int | None = None) -> list[LogPart]:
        """The segments."""
        sizes = dict.fromkeys(self._disk.list(self.layout.settled), 0)
        bases = self.layout.segment_bases(self._disk)
        for base in bases:
            side = self.layout.settled_log(base)
            if side.name in sizes:
                sizes[side.name] = settled.whole(self._disk.size(side))
        first, latest = max(self.earliest(), start or 0), self.latest()
        stop = latest if end is None else min(end, latest)
        return [
            LogPart(base, max(base, first), min(following, stop), sizes.get(self.layout.settled_log(base).name, 0))
            for base, following in zip(bases, [*bases[1:], latest], strict=False)
            if max(base, first) < min(following, stop)
        ]

    # --- appending -----------------------------------------------------------------------------------------------

    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        spool(self.layout, self._disk, envelopes, name)

    def waiting(self) -> Iterator[Envelope]:
        for path in waiting(self.layout, self._disk):
            try:
                yield from read_spooled(path, self._disk).envelopes
            except (OSError, JournalCorrupt):
                continue  # it is in the log by now; or nobody can tell what is in it

    async def take_in(self) -> bool:
        """Whether everything is in the log now, but for what cannot be read: that is told, and waited for no longer.
        False while another process holds the lock: a bus takes it in, and so does another run, which looks again at its
        end; if it is neither, it waits for the next one who opens the journal. False, too, where others append without
        end. Retention is not ours to decide: nothing is removed."""
        left = waiting(self.layout, self._disk)
        for _ in range(_LOOKS):
            if not left:
                return True
            if lock_holder(self.layout.root) is not None:
                return False
            transport = JournalTransport(f"{self.path}?retain=forever", clock=SystemClock())
            try:
                await transport.open()
            except JournalLocked:
                return False
            try:
                went_on = await self._take_in(transport, left)
            finally:
                await transport.close()
            left = self._left(transport, waiting(self.layout, self._disk))
            if not went_on:
                break
        return not left

    async def _take_in(self, transport: JournalTransport, wanted: Sequence[Path]) -> bool:
        """Until these are in the log; False if it did not go on any more."""
        transport.begin()
        before, until = None, 0.0
        while found := self._left(transport, [path for path in wanted if path.exists()]):
            if found != before:
                before, until = found, time.monotonic() + PATIENCE
            elif time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK)
        return True

    def _left(self, transport: JournalTransport, paths: Iterable[Path]) -> list[Path]:
        return [path for path in paths if not transport.journal.intake.is_put_off(path)]

    def stage(self, origin: str, batch: int, attempt: str, pieces: Iterable[Piece]) -> Staged:
        return stage(batch_folder(self.layout, origin, batch), attempt, pieces)

    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        commit_staged(self.layout, origin, batch, staged, once=once)

    def discard(self, origin: str, batch: int, staged: Iterable[Staged]) -> None:
        discard(self.layout, origin, batch, staged)

    # --- subscriptions -------------------------------------------------------------------------------------------

    def handover(self) -> ClosedJournal:
        return ClosedJournal(self.path)

    def tidy(self, binding: Binding) -> None:
        """Nothing: a handover is one write."""

    # --- what became of messages ---------------------------------------------------------------------------------

    def settlements(self, part: LogPart) -> Any:
        from faregate.broker.journal.settled_columns import read_settled  # numpy: nobody else needs it

        return read_settled(self.layout.settled_log(part.base), part.settled)

    def dead_letters(self, start: int) -> Iterator[list[DeadLetter]]:
        for _, body in self.dead_letter_frames(start):
            yield dead_letters.decode(body)
