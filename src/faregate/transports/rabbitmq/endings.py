"""What becomes of messages of nodes without a store: they wait in the ladder of delays, or are dead letters in a queue.

Each is published anew, and confirmed, before the delivery is acknowledged; a crash in between leaves a copy.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from faregate.errors import BrokerUnavailable, FaregateError, StaleLock
from faregate.ids import slot_of
from faregate.message import Envelope
from faregate.ports.cancellation import end
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.consumer import stale
from faregate.transports.rabbitmq.delay import FIRST, declare_ladder, lead_to, way_to
from faregate.transports.rabbitmq.delivery import RabbitmqDelivery
from faregate.transports.rabbitmq.link import Link
from faregate.transports.rabbitmq.names import dead_queue
from faregate.transports.rabbitmq.publisher import Publisher
from faregate.transports.rabbitmq.wire import (
    DUE,
    ERROR,
    FAILED_AT,
    QUEUE,
    REASON,
    REDELIVERIES,
    TRIES,
    died_at_broker,
    properties_of,
    text_of,
    time_of,
    with_room,
)  # fmt: skip

log = logging.getLogger("faregate.rabbitmq")

_MOST_ERROR = 16_384
"""Bytes of an error that travel with a dead letter."""
_AGAIN_SECONDS = 1.0
_EARLY = 0.15
_LATE = 5.0


NO_SLOT = "no-slot"


def slot_missing(binding: Binding, envelope: Envelope, routing_key: str) -> str | None:
    """Whether it has a key, and came to the partitions of its subscription without the slot of it, in words: others of
    its key are elsewhere, so it is a dead letter."""
    if (binding.partitions or 1) == 1 or binding.key_of is None or not routing_key.endswith(f".{slot_of(None)}"):
        return None
    key = binding.key_of(envelope)
    if key is None:
        return None
    return (
        f"{binding.queue} is in partitions, and this message came without the slot of its key {key!r}: its routing key "
        f"is {routing_key} and should end in {slot_of(key)}. A node that publishes it needs the message class with "
        "key=, another program the routing key of the slot"
    )


class Endings:
    def __init__(self, link: Link, publisher: Publisher, clock: Clock) -> None:
        self._link = link
        self._publisher = publisher
        self.clock = clock
        self._ladder: asyncio.Task[None] | None = None
        self._led: set[str] = set()
        self._later: dict[tuple[str, str], float] = {}
        """What this process has put off for another try, and until when, by the monotonic clock."""
        self._tasks: set[asyncio.Task[None]] = set()

    def judge(self, delivery: RabbitmqDelivery) -> bool:
        """A message of a node without a store has arrived; whether a handler may have it now."""
        binding, now = delivery.binding, self.clock.time()
        self._later.pop((binding.queue, delivery.envelope.publication_id), None)
        if delivery.redelivered:
            delivery.tries += delivery.deliveries or 1
        due = (
            time_of(delivery.properties, DUE)
            if delivery.redeliveries or delivery.tries
            else delivery.envelope.deliver_at
        )
        if delivery.tries >= binding.max_deliveries:
            self._give_up(delivery, "max-deliveries", f"it was delivered {delivery.tries} times and never ended")
        elif delivery.expired:
            self._give_up(delivery, "expired", "its time was over before a handler could begin")
        elif due is not None and due > now + _EARLY:
            later = self.put_off(delivery, due - now, delivery.redeliveries, is_scheduled=not delivery.tries)
            self._background(delivery, later)
        else:
            return True
        return False

    def lacks_slot(self, delivery: RabbitmqDelivery, routing_key: str) -> bool:
        """Whether it is a dead letter for that (`slot_missing`)."""
        error = slot_missing(delivery.binding, delivery.envelope, routing_key)
        if error is not None:
            self._give_up(delivery, NO_SLOT, error)
        return error is not None

    def _give_up(self, delivery: RabbitmqDelivery, reason: str, error: str) -> None:
        async def end() -> None:
            await self.dead_letter(delivery, reason, error)
            if delivery.binding.on_dead_letter is not None:
                delivery.binding.on_dead_letter(delivery, reason, error)

        self._background(delivery, end())

    async def put_off(
        self, delivery: RabbitmqDelivery, delay: float, redeliveries: int, *, is_scheduled: bool = False
    ) -> None:
        if not delivery.is_held:
            raise stale(delivery.envelope)
        queue, due = delivery.binding.queue, self.clock.monotonic() + delay
        more = {DUE: repr(self.clock.time() + delay), REDELIVERIES: redeliveries, TRIES: delivery.tries}
        if not is_scheduled:
            self._later[queue, delivery.envelope.publication_id] = due
        await self._lead_to(queue)
        try:
            await self._publish(delivery.envelope, FIRST, way_to(queue, due - self.clock.monotonic()), more)
        except BrokerUnavailable:  # somebody may have deleted what leads there
            self._ladder = None
            self._led.clear()
            raise
        delivery.end()

    async def dead_letter(self, delivery: RabbitmqDelivery, reason: str, error: str) -> None:
        if not delivery.is_held:
            raise stale(delivery.envelope)
        more = {QUEUE: delivery.binding.queue, TRIES: delivery.tries, REDELIVERIES: delivery.redeliveries}
        await self.add_dead(delivery.binding.node, delivery.envelope, reason, error, more)
        delivery.end()

    async def add_dead(
        self, node: str, envelope: Envelope, reason: str, error: str, more: dict[str, Any] | None = None
    ) -> None:
        cut = error.encode(errors="backslashreplace")[:_MOST_ERROR].decode(errors="ignore")
        why = {REASON: reason, ERROR: cut, FAILED_AT: repr(self.clock.time()), **(more or {})}
        await self._publish(envelope, "", dead_queue(node), why)

    async def add_letter(self, letter: DeadLetter) -> None:
        more = {QUEUE: letter.queue, TRIES: letter.tries, REDELIVERIES: letter.redeliveries, FAILED_AT: repr(letter.at)}
        await self.add_dead(letter.node, letter.envelope, letter.reason, letter.error, more)

    def letter_of(self, delivery: RabbitmqDelivery) -> DeadLetter:
        """Of a delivery from a queue of dead letters; the broker itself has put some there."""
        properties, node = delivery.properties, delivery.binding.node
        died = died_at_broker(properties)
        reason = text_of(properties, REASON) or str(died.get("reason") or "unknown")
        return DeadLetter.of(
            node,
            delivery.envelope,
            reason,
            text_of(properties, ERROR) or f"RabbitMQ itself made a dead letter of it: {reason}",
            time_of(properties, FAILED_AT) or self.clock.time(),
            queue=text_of(properties, QUEUE) or str(died.get("queue") or ""),
            tries=delivery.tries,
            redeliveries=delivery.redeliveries,
        )

    @property
    def busy(self) -> bool:
        """Whether something is put off here and has not come back."""
        now = self.clock.monotonic()
        self._later = {each: due for each, due in self._later.items() if now < due + _LATE}
        return bool(self._later or self._tasks)

    async def close(self) -> None:
        for task in (*self._tasks, self._ladder):
            await end(task)

    async def _publish(self, envelope: Envelope, exchange: str, routing_key: str, more: dict[str, Any]) -> None:
        returned = await self._publisher.publish(
            [Publication(exchange, routing_key, with_room(properties_of(envelope, more), more), envelope.body)]
        )
        if returned:
            raise StaleLock(f"{envelope} cannot go to {routing_key}: {returned[0]}; it is delivered again")

    async def _lead_to(self, queue: str) -> None:
        if queue in self._led:
            return
        if self._ladder is None:
            self._ladder = asyncio.create_task(self._on_channel(declare_ladder))
        try:
            await asyncio.shield(self._ladder)
        except BaseException:
            if self._ladder is not None and self._ladder.done():
                self._ladder = None
            raise
        await self._on_channel(lambda channel: lead_to(channel, queue))
        self._led.add(queue)

    async def _on_channel(self, work: Callable[[BatchChannel], Awaitable[None]]) -> None:
        channel = await self._link.channel(BatchChannel)
        await work(channel)
        await channel.close()

    def _background(self, delivery: RabbitmqDelivery, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as exc:
                unforeseen = None if isinstance(exc, FaregateError) else exc
                log.warning("a message stays with RabbitMQ, and comes again: %s", exc, exc_info=unforeseen)
                self.clock.call_later(_AGAIN_SECONDS, delivery.let_go)

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
