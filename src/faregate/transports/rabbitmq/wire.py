"""An envelope as an AMQP 0.9.1 message, and back.

Rules kept here:
- Body and properties are plain for programs without Faregate: the body as it was encoded, `message_id` (the
  publication), `correlation_id`, `type`, `app_id` (the publishing node), `timestamp`, `content_type`,
  `content_encoding`.
- What AMQP has no property for is a header `x-faregate-…`, left out where it says nothing. All other headers are the
  user's; those that the broker adds (`x-death` and the like) are not.
- Whatever another program sends can be read: what is missing is taken from the routing key, and what is of no use
  is left out. Whether the message can be handled is the core's business.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pamqp.commands import Basic

from faregate.message import Envelope

OURS = "x-faregate-"
_TEXTS = {
    "causation_id": OURS + "causation-id",
    "key": OURS + "key",
    "attempt_id": OURS + "attempt-id",
    "destination": OURS + "destination",
    "key_id": OURS + "key-id",
    "algorithm": OURS + "algorithm",
    "payload_ref": OURS + "payload-ref",
    "traceparent": "traceparent",
}
_NUMBERS = {"marker": OURS + "marker", "replay": OURS + "replay"}
_TIMES = {"deliver_at": OURS + "deliver-at", "expires_at": OURS + "expires-at", "delay": OURS + "delay"}
_SENT_AT, _DIGEST = OURS + "sent-at", OURS + "digest"
REDELIVERIES, TRIES = OURS + "redeliveries", OURS + "tries"
"""How often it was put off, and how often a handler began on it: both travel with the message."""
DUE = OURS + "due"
"""When it is to be delivered again."""
REASON, ERROR, QUEUE, FAILED_AT = OURS + "reason", OURS + "error", OURS + "queue", OURS + "failed-at"
"""Why it is a dead letter, from which queue, and since when."""
_BROKERS = frozenset({"x-death", "x-delivery-count", "x-acquired-count", "x-stream-offset", "x-opt-deaths"})
_BROKERS_PREFIXES = ("x-first-death-", "x-last-death-")


def properties_of(envelope: Envelope, more: Mapping[str, Any] | None = None) -> Basic.Properties:
    """`more`: further headers of ours."""
    headers: dict[str, Any] = dict(envelope.headers)
    for field, header in _TEXTS.items():
        value = getattr(envelope, field)
        if value is not None:
            headers[header] = value
    for field, header in _NUMBERS.items():
        if number := getattr(envelope, field):
            headers[header] = number
    for field, header in _TIMES.items():
        value = getattr(envelope, field)
        if value is not None:
            headers[header] = repr(value)
    if envelope.sent_at:
        headers[_SENT_AT] = repr(envelope.sent_at)
    if envelope.body_digest is not None:
        headers[_DIGEST] = envelope.body_digest.hex()
    if more:
        headers.update(more)
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


def envelope_of(properties: Basic.Properties, body: bytes, routing_key: str, recipient: str) -> Envelope:
    """`recipient`: the node that it was delivered to."""
    headers: dict[str, Any] = properties.headers or {}
    kind, source, type = _from_routing_key(routing_key)
    destination = _text(headers.get(_TEXTS["destination"]))
    if destination is not None:
        kind = "command"
    elif kind == "command":
        destination, source = source, ""
    fields: dict[str, Any] = {
        field: _text(headers.get(header)) for field, header in _TEXTS.items() if header in headers
    }
    fields |= {field: _number(headers[header], 0) for field, header in _NUMBERS.items() if header in headers}
    fields |= {field: _time(headers[header]) for field, header in _TIMES.items() if header in headers}
    sent_at = _time(headers.get(_SENT_AT))
    if sent_at is None:
        sent_at = properties.timestamp.timestamp() if properties.timestamp is not None else 0.0
    fields |= {"destination": destination, "sent_at": sent_at, "body_digest": _digest(headers.get(_DIGEST))}
    return Envelope(
        publication_id=properties.message_id or "",
        type=properties.message_type or type,
        kind="command" if kind == "command" else "event",
        source=properties.app_id or source,
        body=body,
        recipients=(recipient,),
        correlation_id=properties.correlation_id or "",
        content_type=properties.content_type or "application/json",
        content_encoding=properties.content_encoding or None,
        headers={name: _plain(value) for name, value in headers.items() if not _is_ours(name)},
        **fields,
    )


def died_at_broker(properties: Basic.Properties) -> dict[str, Any]:
    """What the broker says of a dead letter that it made itself; nothing where it did not."""
    found = (properties.headers or {}).get("x-death")
    return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}


def count_of(properties: Basic.Properties, header: str) -> int:
    """A count that travels with the message."""
    return max(0, _number((properties.headers or {}).get(header), 0))


def text_of(properties: Basic.Properties, header: str) -> str | None:
    return _text((properties.headers or {}).get(header))


def time_of(properties: Basic.Properties, header: str) -> float | None:
    return _time((properties.headers or {}).get(header))


def _from_routing_key(routing_key: str) -> tuple[str, str, str]:
    """The kind, the address and the type that a topic's routing key says."""
    words = routing_key.split(".")
    return (words[0], words[1], words[2]) if len(words) == 4 and words[0] in ("event", "command") else ("event", "", "")


def _is_ours(name: str) -> bool:
    """Or the broker's: not a header that a user gave."""
    return (
        name.startswith(OURS) or name == "traceparent" or name in _BROKERS or name.startswith(_BROKERS_PREFIXES)
    )  # fmt: skip


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _plain(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _time(value: object) -> float | None:
    """Times travel as text: AMQP's numbers would round them."""
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        return None


def _digest(value: object) -> bytes | None:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None
