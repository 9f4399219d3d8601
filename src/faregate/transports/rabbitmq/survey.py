"""What is on the broker for a subscription, as far as AMQP tells: it names no queues and no bindings by itself.

Rules kept here:
- Looking changes nothing. Each look has a channel of its own, since the broker closes it for every answer but "yes".
- A queue is asked for by each name that it may have: those of now, those of earlier generations, that without
  partitions, and that of a migration which was interrupted.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from aiormq.exceptions import ChannelLockedResource, ChannelNotFoundEntity, ChannelPreconditionFailed

from faregate.ports.queue import Binding
from faregate.ports.store import Store
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import dead_queue, moving_queue
from faregate.transports.rabbitmq.queue import RabbitmqQueue
from faregate.transports.rabbitmq.topology import arguments_of, partition_queues, quorum

Role = Literal["current", "dead letters", "moving", "left over"]
"""moving: a migration was interrupted. left over: from before the subscription, or its partitions, were changed."""

_NAMES = re.compile(r" for queue '[^']*' in vhost '[^']*'")


@dataclass(frozen=True, slots=True)
class SeenQueue:
    name: str
    role: Role
    exists: bool = True
    difference: str | None = None
    """In the broker's words; None: it is as it should be, or nobody cares."""
    waiting: int = 0
    consumers: int = 0


async def as_noted(binding: Binding, store: Store | None) -> Binding:
    """With the partitions that it has now; as it is, where none are noted."""
    if binding.partitions is None or store is None:
        return binding
    found = await store.generation(binding.node, binding.queue)
    return binding if found is None else replace(binding, generation=found.number, partitions=found.partitions)


async def look_at(
    transport: RabbitmqQueue, name: str, role: Role, arguments: dict[str, Any] | None = None
) -> SeenQueue:
    """`arguments`: what it should be declared with."""
    seen = SeenQueue(name, role, exists=False)

    async def look(channel: BatchChannel) -> None:
        nonlocal seen
        try:
            found = await channel.queue_declare(name, passive=True)
        except ChannelNotFoundEntity:
            return
        except ChannelLockedResource as exc:
            seen = SeenQueue(name, role, difference=_words(exc))
            return
        seen = SeenQueue(name, role, waiting=found.message_count or 0, consumers=found.consumer_count or 0)

    async def compare(channel: BatchChannel) -> None:
        nonlocal seen
        try:
            await channel.queue_declare(name, durable=True, arguments=arguments)
        except ChannelPreconditionFailed as exc:
            seen = replace(seen, difference=_words(exc))

    await transport.on_channel(look)
    if seen.exists and arguments is not None and seen.difference is None:
        await transport.on_channel(compare)
    return seen


async def survey(transport: RabbitmqQueue, binding: Binding) -> list[SeenQueue]:
    """The queues of a subscription; those that it should have, and those that it need not have if they are there."""
    seen = [await look_at(transport, name, "current", arguments_of(binding)) for name in partition_queues(binding)]
    seen += [moving for each in seen if (moving := await look_at(transport, moving_queue(each.name), "moving")).exists]
    return seen + [each async for each in left_over(transport, binding)]


async def survey_dead(transport: RabbitmqQueue, node: str) -> list[SeenQueue]:
    name = dead_queue(node)
    dead = await look_at(transport, name, "dead letters", quorum())
    moving = await look_at(transport, moving_queue(name), "moving")
    return [dead, moving] if moving.exists else [dead]


async def left_over(transport: RabbitmqQueue, binding: Binding) -> AsyncIterator[SeenQueue]:
    generations = range(1, binding.generation)
    if binding.partitions is None:
        generations = range(1, binding.generation + 1)
    elif (plain := await look_at(transport, binding.queue, "left over")).exists:
        yield plain
    for generation in generations:
        for number in count():
            seen = await look_at(transport, f"{binding.queue}.g{generation}-{number}", "left over")
            if not seen.exists:
                break
            yield seen


async def remove_left_over(transport: RabbitmqQueue, binding: Binding) -> list[str]:
    """Remove those that are empty, and that nobody consumes; their names. A generation goes as a whole, its last queue
    first: those before a queue that stays are how it is found. What lands in one meanwhile is a copy of what the
    current queues get, as long as these are bound."""
    generations: dict[str, list[SeenQueue]] = {}
    async for each in left_over(transport, binding):
        generations.setdefault(each.name.rpartition("-")[0], []).append(each)
    removed: list[str] = []
    for queues in generations.values():
        if not any(each.waiting or each.consumers for each in queues):
            for each in reversed(queues):
                await transport.on_channel(lambda channel, name=each.name: _delete(channel, name))  # type: ignore[misc]
            removed += [each.name for each in queues]
    return removed


async def _delete(channel: BatchChannel, name: str) -> None:
    await channel.queue_delete(name)


def _words(exc: Exception) -> str:
    """As in `inequivalent arg 'x-queue-type': received … but current is …`, without the names, which are known."""
    return _NAMES.sub("", str(exc).removeprefix("PRECONDITION_FAILED - "))
