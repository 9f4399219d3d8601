"""Declares exchanges, queues and bindings. Declaring what is there already does nothing.

Rules kept here:
- Every queue is a quorum queue. What the broker itself dead-letters goes to the node's dead letters, at least once.
- The limit of deliveries is so high that it is never reached: the bus counts tries. (From 4.0 on, a queue that does not
  say so drops a message after 20.)
- A queue that is there with other properties is `QueueDiffers`, never touched.
- The queue of an ordered subscription has one active consumer at a time.
"""

import re
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

from aiormq.exceptions import ChannelAccessRefused, ChannelNotFoundEntity, ChannelPreconditionFailed

from faregate.errors import ConfigurationError, QueueDiffers, QueueNotFound
from faregate.ids import SLOTS, slot_of
from faregate.ports.queue import Binding
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import EXCHANGE, TO, check_queue, dead_queue, topic

DELIVERY_LIMIT = 1_000_000_000


def quorum(**more: Any) -> dict[str, Any]:
    """The arguments of a queue."""
    return {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT, **more}


def arguments_of(binding: Binding) -> dict[str, Any]:
    found = quorum(
        **{
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": dead_queue(binding.node),
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    )
    return found if binding.partitions is None else {**found, "x-single-active-consumer": True}


def partition_queues(binding: Binding) -> list[str]:
    if binding.partitions is None:
        return [binding.queue]
    return [f"{binding.queue}.g{binding.generation}-{number}" for number in range(binding.partitions)]


def is_partition(binding: Binding, name: str) -> bool:
    """Of this subscription, in whatever generation. Names of others may begin as its name does."""
    return re.fullmatch(rf"{re.escape(binding.queue)}\.g[0-9]+-[0-9]+", name) is not None


def queue_of_slot(queues: Sequence[str], slot: str) -> str:
    """Which of the partitions takes it. The first takes what has no slot, too (`endings.slot_missing`)."""
    return queues[int(slot) % len(queues) if slot.isdigit() else 0]


def routes_of(binding: Binding) -> Iterator[tuple[str, str, str]]:
    """(queue, exchange, routing key) of each of its bindings. With one queue it takes every slot."""
    queues = partition_queues(binding)
    for slot in ["*"] if len(queues) == 1 else [*map(str, range(SLOTS)), slot_of(None)]:
        queue = queue_of_slot(queues, slot)
        yield queue, EXCHANGE, f"{topic(binding)}.{slot}"
        yield queue, TO, f"{binding.queue}.{slot}"


async def declare_exchanges(channel: BatchChannel) -> None:
    for name in (EXCHANGE, TO):
        await declare_exchange(channel, name)


async def declare_exchange(channel: BatchChannel, name: str) -> None:
    await _declared(name, channel.exchange_declare(name, exchange_type="topic", durable=True))


async def declare_queue(channel: BatchChannel, name: str, arguments: dict[str, Any]) -> None:
    await _declared(check_queue(name), channel.queue_declare(name, durable=True, arguments=arguments))


async def declare(channel: BatchChannel, binding: Binding) -> None:
    """A subscription's queues with their bindings, and the dead letters of its node."""
    await declare_queue(channel, dead_queue(binding.node), quorum())
    for queue in partition_queues(binding):
        await declare_queue(channel, queue, arguments_of(binding))
    routes = list(routes_of(binding))
    for place, (queue, exchange, key) in enumerate(routes):
        # A round trip for each would take long. The broker answers the last one when all others are done, and the first
        # one of each exchange, so that missing rights are said of that.
        if 1 < place < len(routes) - 1:
            await channel.queue_bind(queue, exchange, routing_key=key, nowait=True)
        else:
            await _declared(queue, channel.queue_bind(queue, exchange, routing_key=key))


async def undeclare(channel: BatchChannel, binding: Binding) -> None:
    """Its queues collect no more; what is in them stays."""
    for queue, exchange, key in routes_of(binding):
        await _declared(queue, channel.queue_unbind(queue, exchange, routing_key=key))


async def waiting_in(channel: BatchChannel, queue: str) -> int:
    """How many messages a queue could hand out now. Raises `QueueNotFound`, after which the channel is closed."""
    try:
        found = await channel.queue_declare(queue, passive=True)
    except ChannelNotFoundEntity as exc:
        raise QueueNotFound(f"there is no queue {queue} on this RabbitMQ") from exc
    return found.message_count or 0


async def _declared(name: str, step: Awaitable[Any]) -> None:
    try:
        await step
    except ChannelPreconditionFailed as exc:
        raise QueueDiffers(
            f"{name} is declared otherwise on this RabbitMQ: {exc}. `faregate rabbitmq doctor` shows the difference, "
            "and `faregate rabbitmq migrate` makes it anew without losing a message"
        ) from exc
    except ChannelAccessRefused as exc:
        raise ConfigurationError(
            f"RabbitMQ does not let this user declare {name}: {exc}. Give it the rights to configure, write and read "
            "(rabbitmqctl set_permissions)"
        ) from exc
