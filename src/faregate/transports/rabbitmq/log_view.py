"""The log view: a stream beside the queues, which takes everything that they get.

Rules kept here:
- No binding of the stream may make a command routable that nobody handles. So it is bound for commands, and for
  messages that name their recipients, exactly as the queues are; all events go there anyway.
- A publisher does not know who gets its messages. Whoever binds or unbinds notes that in a stream of its own,
  NAME.bindings, whose form `transports/rabbitmq_stream/bindings.py` says.
- A subscription that is read from the log has a queue QUEUE@log, a mark that a bus looks for before it declares the
  queue of the subscription, and again afterwards. Whoever takes the log makes the mark first, and then looks for the
  queue. So of two that come at the same time at least one is refused.
"""

from typing import Any

import msgspec
from pamqp.commands import Basic

from faregate.ports.queue import Binding
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.names import EXCHANGE, TO, topic, view_mark
from faregate.transports.rabbitmq.topology import declare_queue, quorum

_STREAM: dict[str, Any] = {"x-queue-type": "stream"}


async def declare_stream(channel: BatchChannel, stream: str) -> None:
    for name in (stream, f"{stream}.bindings"):
        await declare_queue(channel, name, _STREAM)
    await channel.queue_bind(stream, EXCHANGE, routing_key="event.#")


async def lead_to_stream(channel: BatchChannel, stream: str, binding: Binding) -> None:
    """What this subscription gets goes into the stream, too."""
    await channel.queue_bind(stream, TO, routing_key=f"{binding.queue}.*")
    if binding.kind == "command":
        await channel.queue_bind(stream, EXCHANGE, routing_key=f"{topic(binding)}.*")


async def lead_no_more(channel: BatchChannel, stream: str, binding: Binding) -> None:
    await channel.queue_unbind(stream, TO, routing_key=f"{binding.queue}.*")
    if binding.kind == "command":
        await channel.queue_unbind(stream, EXCHANGE, routing_key=f"{topic(binding)}.*")


async def mark_view(channel: BatchChannel, queue: str) -> None:
    await declare_queue(channel, view_mark(queue), quorum(**{"x-max-length": 1}))


async def unmark_view(channel: BatchChannel, queue: str) -> None:
    await channel.queue_delete(view_mark(queue))


def ask_for_mark(queue: str) -> Publication:
    """It comes back where there is no mark. (To look for a queue that is not there costs a channel.)"""
    return Publication("", view_mark(queue), Basic.Properties(delivery_mode=2), b"")


def note(stream: str, binding: Binding, *, bound: bool) -> Publication:
    """That a subscription begins or ends now."""
    said: dict[str, Any] = {"node": binding.node, "type": binding.type, "kind": binding.kind, "bound": bound}
    if binding.source is not None:
        said["source"] = binding.source
    if binding.remembers is not None:
        said["remembers"] = binding.remembers
    properties = Basic.Properties(
        content_type="application/json", message_id=binding.queue, message_type="faregate-binding", delivery_mode=2
    )
    return Publication("", f"{stream}.bindings", properties, msgspec.json.encode(said))
