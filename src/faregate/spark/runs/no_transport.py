"""In an executor there is no transport: what goes out waits in the outbox, or in a staged file, for the driver."""

from collections.abc import Sequence

from faregate.errors import ConfigurationError
from faregate.message import Envelope


class NoTransport:
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        raise ConfigurationError("a Spark task has no transport: outgoing messages are sent by the driver, afterwards")
