"""`journal:PATH`: the embedded broker on a durable journal. One process runs the nodes; others use the spool.

    journal:./data
    journal:./data?retain=7d&retain_bytes=10G

`retain` (seconds, or with s, m, h, d; `forever`) and `retain_bytes` (with K, M, G) bound the log view.

While a journal is being made, whoever opens it at the same moment waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from faregate.broker.durable import RESIDENT_BYTES, DurableBroker
from faregate.broker.journal import JournalReader
from faregate.broker.journal.disk import RealDisk, is_full
from faregate.broker.journal.journal import Journal, log_unreadable
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.log import SEGMENT_SIZE
from faregate.broker.journal.retention import Retention
from faregate.broker.journal.spool import spool
from faregate.errors import ConfigurationError, JournalFailed, JournalFull, JournalLocked
from faregate.message import Envelope
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.progress import Occupation
from faregate.ports.queue import EVERY_CAPABILITY, Binding, Consumer, Delivery, dead_letter_queue
from faregate.units import parse_bytes, parse_seconds

log = logging.getLogger("faregate.journal")

_SPOOL_SECONDS = 0.1
_LOCKED_SECONDS = 0.03
_MOMENT = 1.0
"""Seconds in which who makes it adds one more subscription."""
_MADE_WITHIN = 10.0
"""Seconds in which a new journal is made, on a slow disk as well."""


class JournalTransport:
    capabilities = EVERY_CAPABILITY - {"partitions"}

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        segment_size: int = SEGMENT_SIZE,
        resident_bytes: int = RESIDENT_BYTES,
    ) -> None:
        path, _, query = url.removeprefix("journal:").partition("?")
        if not path:
            raise ConfigurationError("journal: needs a folder behind the colon, for example journal:./data")
        self.path = Path(path)
        self.retention = _retention(query)
        self._clock = clock or SystemClock()
        self._segment_size = segment_size
        self._resident_bytes = resident_bytes
        self._broker: DurableBroker | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._begun = False
        self._failed: asyncio.Future[Exception] | None = None
        self.on_disagreement: Callable[[Envelope], None] | None = None
        self.on_unreadable: Callable[[str, str], None] | None = None

    @property
    def broker(self) -> DurableBroker:
        if self._broker is None:
            raise ConfigurationError(f"the journal {self.path} is not open")
        return self._broker

    @property
    def log_place(self) -> Path:
        return self.path

    async def open(self) -> None:
        """Recover what is there. Raises `JournalLocked`, `JournalCorrupt`, `JournalTooNew`, `NotAJournal`."""
        self.journal = await self._open_journal()
        try:
            self._broker = DurableBroker(
                self._clock,
                self.journal,
                resident_bytes=self._resident_bytes,
                on_disagreement=self._disagreed,
            )
        except BaseException:
            self.journal.release()
            raise
        self.journal.start()
        self._begun = False
        self._failed = asyncio.get_running_loop().create_future()

    async def _open_journal(self) -> Journal:
        begun, seen, until = time.monotonic(), None, 0.0
        while True:
            opening = asyncio.get_running_loop().run_in_executor(None, self._make_journal)
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_let_go)  # its thread goes on
                raise
            except JournalLocked:
                now, before, seen = time.monotonic(), seen, _last_subscribed(Layout(self.path))
                if seen is None or seen != before:
                    until = min(now + _MOMENT, begun + _MADE_WITHIN)
                if now >= until:
                    raise
            await asyncio.sleep(_LOCKED_SECONDS)

    def _make_journal(self) -> Journal:
        return Journal(
            self.path,
            segment_size=self._segment_size,
            retention=self.retention,
            on_failure=self._journal_failed,
            on_unreadable=self._unreadable,
        )

    async def close(self) -> None:
        if self._broker is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        broker, self._broker = self._broker, None
        broker.close()
        await broker.close_journal()

    def _journal_failed(self, failure: JournalFailed) -> None:
        """Nothing can be confirmed any more: stop handing out messages whose end could not be kept."""
        if self._broker is not None:
            self._broker.close()
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(failure)

    def occupations(self) -> Iterator[Occupation]:
        return iter(()) if self._broker is None else self._broker.occupations()

    async def bind(self, binding: Binding) -> None:
        self.broker.bind(binding)

    async def unbind(self, queue: str) -> None:
        """Also one that this process has not bound; further queues may be bound afterwards."""
        self.broker.unbind(queue)

    def _disagreed(self, envelope: Envelope) -> None:
        if self.on_disagreement is not None:
            self.on_disagreement(envelope)

    def _unreadable(self, name: str, text: str) -> None:
        (self.on_unreadable or log_unreadable)(name, text)

    def begin(self) -> None:
        """All queues are bound: what other processes left, and what they will leave, may come in."""
        if not self._begun:
            self._begun = True
            self.broker.begin()
            self.broker.keep()
            self._look_into_spool()

    def _look_into_spool(self) -> None:
        if self._broker is None or self.journal.failure is not None:
            return
        self._watch = asyncio.get_running_loop().call_later(_SPOOL_SECONDS, self._look_into_spool)
        self.broker.take_in_spool()

    def publish(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        if not self._begun:
            self.begin()
        return self.broker.publish(envelopes)

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        self.begin()
        return self.broker.consume(queue, on_delivery, prefetch=prefetch, selector=selector, exclusive=exclusive)

    async def spool(self, envelopes: Sequence[Envelope]) -> None:
        """For processes that do not run the nodes. The journal must be there: its topology says what is routable."""
        try:
            reader = JournalReader(self.path)
            topology = reader.topology()
            for envelope in envelopes:
                topology.check_command(envelope)
            await asyncio.to_thread(spool, reader.layout, RealDisk(), envelopes)
        except OSError as exc:
            kind = JournalFull if is_full(exc) else JournalFailed
            raise kind(f"nothing can be published to the journal {self.path}: {exc}") from exc

    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        await self.broker.dead_letter_unsent(node, envelope, reason, error)

    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        self.begin()
        await self.journal.barrier()
        entries = self.broker.browse(dead_letter_queue(node))
        return [entry.letter for entry in islice(entries, limit) if entry.letter is not None]

    async def open_replies(self, on_reply: Callable[[Envelope], None]) -> str:
        return self.broker.open_replies(on_reply)

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return self.broker.reply(envelopes)

    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        self.begin()
        return await self.broker.cancel_durably(source, publication_id, key)

    async def waiting(self, queue: str) -> int:
        return len(self.broker.queue(queue))

    async def idle(self) -> None:
        """Raises `JournalFailed` when nothing can be confirmed any more."""
        self.begin()
        assert self._failed is not None
        landed = asyncio.ensure_future(self.broker.in_flight.landed())
        either: set[asyncio.Future[Any]] = {landed, self._failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            landed.cancel()
        if self._failed.done():
            raise self._failed.result()

    async def failed(self) -> Exception:
        assert self._failed is not None
        return await asyncio.shield(self._failed)


def _let_go(opening: asyncio.Future[Journal]) -> None:
    """Nobody waits for this journal any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().release()


def _last_subscribed(layout: Layout) -> int | None:
    """When a subscription was last added, by the clock of the disk; None as long as the journal is not there."""
    try:
        return layout.topology.stat().st_mtime_ns if layout.meta.exists() else None
    except FileNotFoundError:  # it is being replaced
        return None


def _retention(query: str) -> Retention:
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = set(given) - {"retain", "retain_bytes"}
    if unknown:
        raise ConfigurationError(
            f"journal: knows the options retain and retain_bytes, not {', '.join(sorted(unknown))}"
        )
    seconds: float | None = Retention().seconds
    if "retain" in given:
        seconds = None if given["retain"] == "forever" else parse_seconds(given["retain"], "retain", bare=True)
    return Retention(seconds, parse_bytes(given["retain_bytes"], "retain_bytes") if "retain_bytes" in given else None)
