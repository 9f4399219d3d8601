"""`memory:`: the embedded broker within one process. What it holds is gone with the process."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from faregate.broker import Broker
from faregate.broker.broker import unsent
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.progress import Occupation
from faregate.ports.queue import EVERY_CAPABILITY, Binding, Consumer, Delivery, dead_letter_queue

_APPENDS_PER_TURN = 128
"""Publishing never waits here, so now and then it lets consumers run; else a busy publisher would starve them."""


class MemoryTransport:
    capabilities = EVERY_CAPABILITY - {"partitions"}
    in_process = True

    def __init__(self, rest: str = "", *, clock: Clock | None = None) -> None:
        rest = rest.removeprefix("memory:")
        if rest:
            raise ConfigurationError(f"memory: takes nothing behind the colon; got {rest!r}")
        self._clock = clock or SystemClock()
        self.on_disagreement: Callable[[Envelope], None] | None = None
        self.broker = Broker(self._clock, on_disagreement=self._disagreed)
        self._appended = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        self.broker.close()

    def occupations(self) -> Iterator[Occupation]:
        return self.broker.occupations()

    async def bind(self, binding: Binding) -> None:
        self.broker.bind(binding)

    async def unbind(self, queue: str) -> None:
        self.broker.unbind(queue)

    def _disagreed(self, envelope: Envelope) -> None:
        if self.on_disagreement is not None:
            self.on_disagreement(envelope)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        self.broker.append(envelopes)
        self._appended += len(envelopes)
        if self._appended >= _APPENDS_PER_TURN:
            self._appended = 0
            await asyncio.sleep(0)

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        return self.broker.consume(queue, on_delivery, prefetch=prefetch, selector=selector, exclusive=exclusive)

    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        self.broker.dead_letter(unsent(node, envelope, reason, error, self._clock.time()))

    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        entries = self.broker.browse(dead_letter_queue(node))
        return [entry.letter for entry in islice(entries, limit) if entry.letter is not None]

    async def open_replies(self, on_reply: Callable[[Envelope], None]) -> str:
        return self.broker.open_replies(on_reply)

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return self.broker.reply(envelopes)

    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        return self.broker.cancel(source, publication_id, key) > 0

    async def waiting(self, queue: str) -> int:
        return len(self.broker.queue(queue))

    async def idle(self) -> None:
        await self.broker.in_flight.landed()

    async def failed(self) -> Exception:
        """Memory does not fail."""
        never: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        return await never
