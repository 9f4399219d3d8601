"""What an envelope is called in the headers of an AMQP message, whichever AMQP carries it.

RabbitMQ's queues and its streams carry the same messages: the exchange puts into a stream what it puts into queues. So
both keep to these names, and to these rules:
- The body as it was encoded; `message_id` (the publication), `correlation_id`, `type`, `app_id` (the publishing node),
  `content_type` and `content_encoding` are properties. What AMQP has no property for is a header `x-faregate-…`, left
  out where it says nothing. All other headers are the user's, but for those that the broker adds; that of a request,
  `REPLY_TO`, is among the user's, since it is in the envelope's headers everywhere.
- Times travel as text: AMQP's numbers would round them.
- Whatever another program sends can be read: what is missing is taken from the routing key, what is of no use left out.
"""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from faregate.message import REPLY_TO, Envelope

OURS = "x-faregate-"
TYPE, SOURCE = "x-basic-type", "x-basic-app-id"
"""What the broker makes of the properties `type` and, before 3.13, `app_id`, which AMQP 1.0 does not have."""
ROUTING_KEY = "x-routing-key"
DESTINATION, RECIPIENTS = OURS + "destination", OURS + "recipients"
_END_OF_TIME = 253_402_300_800.0
"""The year 10000, where calendars of Python and of databases end."""
_BROKERS = ("x-basic-", "x-first-death-", "x-last-death-", "x-opt-", OURS)
_BROKERS_OWN = frozenset(
    {ROUTING_KEY, "x-exchange", "x-death", "x-delivery-count", "x-acquired-count", "x-stream-offset"}
)


def headers_of(envelope: Envelope) -> dict[str, str | int]:
    """All that is no property, the user's headers included."""
    headers: dict[str, str | int] = dict(envelope.headers)
    texts = _texts_of(envelope)
    if texts != _NO_TEXTS:
        headers |= {header: text for (_, header), text in zip(_TEXTS, texts, strict=True) if text is not None}
    numbers = _numbers_of(envelope)
    if numbers != _NO_NUMBERS:
        headers |= {header: number for (_, header), number in zip(_NUMBERS, numbers, strict=True) if number}
    for (_, header), time in zip(_TIMES, _times_of(envelope), strict=True):
        if time:
            headers[header] = repr(time)
    if envelope.body_digest is not None:
        headers[_DIGEST] = envelope.body_digest.hex()
    if envelope.recipients:
        headers[RECIPIENTS] = ",".join(envelope.recipients)
    return headers


def fields_of(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an envelope that its headers say. Those that say nothing of use are left out."""
    fields: dict[str, Any] = {}
    users: dict[str, str] = {}
    for name, value in headers.items():
        known = _READ.get(name)
        if known is not None:
            field, read = known
            found = read(value)
            if found is not None:
                fields[field] = found
        elif name == REPLY_TO or (name not in _BROKERS_OWN and not name.startswith(_BROKERS)):
            users[name] = value if isinstance(value, str) else str(value)
    if users:
        fields["headers"] = users
    if "destination" in fields:
        fields["kind"] = "command"
    elif ROUTING_KEY in headers:
        _route(headers[ROUTING_KEY], fields)
    return fields


def _route(routing_key: object, fields: dict[str, Any]) -> None:
    """A topic's routing key says the kind, the address and the type."""
    words = routing_key.split(".") if isinstance(routing_key, str) else []
    if len(words) != 4 or words[0] not in ("event", "command"):
        return
    fields.setdefault("type", words[2])
    if words[0] == "event":
        fields.setdefault("source", words[1])
    else:
        fields |= {"kind": "command", "destination": words[1]}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def time_in(value: object) -> float | None:
    try:
        found = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return None
    return found if abs(found) < _END_OF_TIME else None  # so "nan" and "inf" say nothing


def _digest(value: object) -> bytes | None:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _names(value: object) -> tuple[str, ...] | None:
    return tuple(value.split(",")) if isinstance(value, str) else None


_TEXTS = (
    ("causation_id", OURS + "causation-id"),
    ("key", OURS + "key"),
    ("attempt_id", OURS + "attempt-id"),
    ("destination", DESTINATION),
    ("key_id", OURS + "key-id"),
    ("algorithm", OURS + "algorithm"),
    ("payload_ref", OURS + "payload-ref"),
    ("traceparent", "traceparent"),
)
_NUMBERS = (("depth", OURS + "depth"), ("replay", OURS + "replay"), ("redeliveries", OURS + "redeliveries"))
_TIMES = (("sent_at", OURS + "sent-at"), ("deliver_at", OURS + "deliver-at"), ("expires_at", OURS + "expires-at"))
_DIGEST = OURS + "digest"
HEADERS = {
    **{header: (field, "text") for field, header in _TEXTS},
    **{header: (field, "number") for field, header in _NUMBERS},
    **{header: (field, "time") for field, header in _TIMES},
    _DIGEST: ("body_digest", "text"),
    RECIPIENTS: ("recipients", "text"),
}
"""All of them, for documents: which field of the envelope it is, and what kind of value it has."""
_texts_of, _numbers_of, _times_of = (attrgetter(*(field for field, _ in names)) for names in (_TEXTS, _NUMBERS, _TIMES))
_NO_TEXTS, _NO_NUMBERS = (None,) * len(_TEXTS), (0,) * len(_NUMBERS)
"""What most messages have: then nothing is looked at one by one."""
_READ: dict[str, tuple[str, Callable[[object], Any]]] = {
    **{header: (field, _text) for field, header in _TEXTS},
    **{header: (field, _number) for field, header in _NUMBERS},
    **{header: (field, time_in) for field, header in _TIMES},
    _DIGEST: ("body_digest", _digest),
    RECIPIENTS: ("recipients", _names),
    TYPE: ("type", _text),
    SOURCE: ("source", _text),
}
