"""A message that a consumer holds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from faregate.errors import StaleLock
from faregate.message import Envelope, too_late_at
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Outcome
from faregate.transports.rabbitmq.consumer import Session, stale
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.wire import REDELIVERIES, TRIES, count_of, envelope_of

if TYPE_CHECKING:
    from faregate.transports.rabbitmq.endings import Endings

_DAY = 86_400.0
_FEW = 2
"""So often a message may have been delivered before, and still counts as started as often. Behind that nobody knows:
it may have lain beside others that ended their process. The bus then counts the starts in the store."""


class RabbitmqDelivery:
    """Nobody takes it away but the loss of its channel, so there is no lock to renew."""

    __slots__ = (
        "_ended", "_endings", "_session", "_tag", "binding", "envelope", "expires_at", "letter", "properties",
        "redelivered", "redeliveries", "tries",
    )  # fmt: skip
    key: str | None = None
    position: int | None = None
    lock_seconds = _DAY

    def __init__(
        self, session: Session, message: Arrived, binding: Binding, endings: "Endings", arrived_at: float
    ) -> None:
        properties = message.properties
        envelope = envelope_of(properties, message.body, message.routing_key, binding.node)
        self.envelope: Envelope = envelope
        self.binding = binding
        self.properties = properties
        self.redelivered = message.redelivered
        self.letter: DeadLetter | None = None
        self._session = session
        self._tag = message.delivery_tag
        self._endings = endings
        self._ended = False
        self.redeliveries = count_of(properties, REDELIVERIES)
        self.tries = count_of(properties, TRIES)
        self.expires_at = (
            None
            if binding.expires is None and envelope.expires_at is None
            else too_late_at(envelope, binding.expires, arrived_at)
        )

    @property
    def deliveries(self) -> int:
        """How often it was delivered before, as far as the broker says; 0 where it does not."""
        return max(count_of(self.properties, header) for header in ("x-delivery-count", "x-acquired-count"))

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= self._endings.clock.time()

    def count_deliveries(self) -> None:
        """The bus parks what has to wait, and counts starts there. Before that they are its deliveries, if few."""
        self.tries = self.deliveries if self.deliveries <= _FEW else 0

    def start(self) -> None:
        if self._ended or self._session.lost:
            raise stale(self.envelope)
        if not self.expired:
            self.tries += 1

    def renew(self) -> None:
        if self._ended or self._session.lost:
            raise stale(self.envelope)

    async def settle(self, outcome: Outcome) -> None:
        self.end()

    async def release(self, *, begun: bool = True) -> None:
        self.end(done=False)

    async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        """What comes down the ladder of delays is at the end of its queue in any case."""
        if self.letter is not None:  # there is a store, which is away: it stays with us
            self._endings.clock.call_later(delay, self.let_go)
            return
        await self._endings.put_off(self, delay, self.redeliveries + (1 if counted else 0))

    def let_go(self) -> None:
        """It is delivered again."""
        if self.is_held:
            self.end(done=False)

    async def dead_letter(self, reason: str, error: str) -> None:
        await self._endings.dead_letter(self, reason, error)

    def end(self, *, done: bool = True) -> None:
        if self._ended or not self._session.end(self._tag, done=done):
            raise stale(self.envelope)
        self._ended = True

    @property
    def is_held(self) -> bool:
        return not self._ended and not self._session.lost

    # --- several at once -------------------------------------------------------------------------------------

    def start_all(self, deliveries: "Sequence[RabbitmqDelivery]") -> list[StaleLock | None]:
        return [_stale(delivery.start) for delivery in deliveries]

    def settle_all(
        self, deliveries: "Sequence[RabbitmqDelivery]", outcomes: Sequence[Outcome]
    ) -> list[StaleLock | None]:
        return [_stale(delivery.end) for delivery in deliveries]


def _stale(step: object) -> StaleLock | None:
    try:
        step()  # type: ignore[operator]
    except StaleLock as exc:
        return exc
    return None
