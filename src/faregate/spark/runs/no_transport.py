"""In an executor there is no transport: what goes out waits in the outbox, or in a staged file, for the driver."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.queue import Binding, Capability, Consumer, Held


class NoTransport:
    capabilities: frozenset[Capability] = frozenset()

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def bind(self, binding: Binding) -> None:
        self._refuse()

    async def unbind(self, queue: str) -> None:
        self._refuse()

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        self._refuse()

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        self._refuse()

    async def failed(self) -> Exception:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError("a Spark task has no transport: outgoing messages are sent by the driver, afterwards")
