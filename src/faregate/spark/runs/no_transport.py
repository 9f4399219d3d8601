"""In an executor there is no transport: what goes out waits in the outbox, or in a staged file, for the driver."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Consumer, Delivery


class NoTransport:
    on_disagreement: Callable[[Envelope], None] | None = None

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def bind(self, binding: Binding) -> None:
        self._refuse()

    def begin(self) -> None:
        """Nothing is bound."""

    async def unbind(self, queue: str) -> None:
        self._refuse()

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        self._refuse()

    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        self._refuse()

    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        self._refuse()

    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        return []

    async def idle(self) -> None:
        """Nothing is under way here."""

    async def failed(self) -> Exception:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError("a Spark task has no transport: outgoing messages are sent by the driver, afterwards")
