"""An envelope as an AMQP 0.9.1 message, and back. What headers are called, and what is plain, `amqp_wire.py` says.

Beside the envelope, headers of ours say how often a message of a node without a store was put off and why it is a dead
letter.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pamqp.commands import Basic
from pamqp.encode import field_table

from faregate.errors import MessageTooLarge, Permanent
from faregate.message import Envelope
from faregate.plain import plain
from faregate.transports.amqp_wire import OURS, ROUTING_KEY, fields_of, headers_of, time_in

log = logging.getLogger("faregate.rabbitmq")

_MOST_HEADERS = 65_536
"""Bytes. All properties of a message are one frame of 128 KiB, and the error of a dead letter needs its place there."""
_MOST_PROPERTIES = 130_000
_LONGEST_NAME = 255
REDELIVERIES, TRIES = OURS + "redeliveries", OURS + "tries"
"""How often it was put off, and how often a handler began on it: both travel with the message."""
DUE = OURS + "due"
"""When it is to be delivered again."""
REASON, ERROR, QUEUE, FAILED_AT = OURS + "reason", OURS + "error", OURS + "queue", OURS + "failed-at"
"""Why it is a dead letter, from which queue, and since when."""


def check_headers(envelope: Envelope) -> None:
    """Raises `MessageTooLarge`, and `Permanent` for what is no text. A frame that is too long costs the connection,
    and again with each new one."""
    try:
        size = len((envelope.key or "").encode())
        size += sum(len(name.encode()) + len(value.encode()) for name, value in envelope.headers.items())
    except UnicodeEncodeError as exc:
        raise Permanent(f"{envelope} has a header or a key that cannot be written as UTF-8: {exc}") from exc
    if size > _MOST_HEADERS:
        raise MessageTooLarge(
            f"{envelope} has headers and a key of {size} bytes, and RabbitMQ has room for {_MOST_HEADERS}: put them "
            "into the message"
        )
    for name in envelope.headers:
        if len(name.encode()) > _LONGEST_NAME:
            raise MessageTooLarge(f"{envelope} has a header whose name is longer than {_LONGEST_NAME} bytes: {name!r}")


def properties_of(envelope: Envelope, more: Mapping[str, Any] | None = None) -> Basic.Properties:
    """`more`: further headers of ours."""
    headers: dict[str, Any] = headers_of(envelope)
    if more:
        headers |= more
    return Basic.Properties(
        content_type=envelope.content_type,
        content_encoding=envelope.content_encoding,
        headers=headers,
        delivery_mode=2,
        correlation_id=envelope.correlation_id or None,
        message_id=envelope.publication_id,
        timestamp=datetime.fromtimestamp(envelope.sent_at, UTC) if envelope.sent_at > 0 else None,
        message_type=envelope.type,
        app_id=envelope.source,
    )


def with_room(properties: Basic.Properties, more: Mapping[str, Any]) -> Basic.Properties:
    """With these headers, and without the largest others where all of them are too much for a frame. A message of ours
    has room (`check_headers`), one of another program may not."""
    headers = properties.headers or {}
    excess = len(properties.marshal()) - _MOST_PROPERTIES
    sizes = (
        {name: len(field_table({name: headers[name]})) for name in headers.keys() - more.keys()} if excess > 0 else {}
    )
    dropped: list[str] = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if excess <= 0:
            break
        excess -= sizes[name] - 4  # each table has its length in front
        del headers[name]
        dropped.append(name)
    if dropped:
        told = f"{plain(dropped[0])} and {len(dropped) - 1} more" if len(dropped) > 1 else plain(dropped[0])
        log.warning("message %s loses its header %s: RabbitMQ has no room", properties.message_id, told)
    return properties


def envelope_of(properties: Basic.Properties, body: bytes, routing_key: str, recipient: str) -> Envelope:
    """`recipient`: the node that it was delivered to."""
    fields = fields_of({**(properties.headers or {}), ROUTING_KEY: routing_key})
    if "sent_at" not in fields and properties.timestamp is not None:
        fields["sent_at"] = properties.timestamp.timestamp()
    fields |= {"recipients": (recipient,), "redeliveries": 0}
    if properties.message_type:
        fields["type"] = properties.message_type
    if properties.app_id:
        fields["source"] = properties.app_id
    return Envelope(
        publication_id=properties.message_id or "",
        body=body,
        correlation_id=properties.correlation_id or "",
        content_type=properties.content_type or "application/json",
        content_encoding=properties.content_encoding or None,
        **fields,
    )


def died_at_broker(properties: Basic.Properties) -> dict[str, Any]:
    """What the broker says of a dead letter that it made itself; nothing where it did not."""
    found = (properties.headers or {}).get("x-death")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}


def count_of(properties: Basic.Properties, header: str) -> int:
    """A count that travels with the message."""
    found = (properties.headers or {}).get(header)
    return max(0, found) if isinstance(found, int) else 0


def text_of(properties: Basic.Properties, header: str) -> str | None:
    found = (properties.headers or {}).get(header)
    return found if isinstance(found, str) else None


def time_of(properties: Basic.Properties, header: str) -> float | None:
    """Times travel as text."""
    return time_in(text_of(properties, header))
