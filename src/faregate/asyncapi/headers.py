"""The headers that a message has besides its user's own, as a JSON Schema. Their names are those of `amqp_wire`."""

from typing import Any

from faregate.message import REPLY_TO
from faregate.transports.amqp_wire import HEADERS

_TOLD = {
    "causation_id": "The id of the message whose handling published this one",
    "key": "What the message is ordered by",
    "attempt_id": "With tokens: the attempt that made them",
    "destination": "The node that a command goes to",
    "key_id": "Reserved for encryption",
    "algorithm": "Reserved for encryption",
    "payload_ref": "Where a large payload is kept",
    "traceparent": "W3C trace context",
    "depth": "How many messages precede it in its conversation, 0 for a root",
    "replay": "How often a person had it handled again",
    "redeliveries": "How often it was put off to be tried later",
    "sent_at": "When it was published, in seconds since the epoch",
    "deliver_at": "When it is delivered, in seconds since the epoch",
    "expires_at": "From when on it is not handled any more, in seconds since the epoch",
    "body_digest": "The first 16 bytes of the SHA-256 of the plain body, as hexadecimal digits",
    "recipients": "The nodes that it goes to, with commas between them, where it names them itself",
}


def headers_schema() -> dict[str, Any]:
    asked = {REPLY_TO: {"type": "string", "description": "Of a request: the address for its reply"}}
    return {
        "type": "object",
        "description": "What Faregate adds, each where it says something. All other headers are the publisher's own.",
        "properties": {header: _property(field, kind) for header, (field, kind) in HEADERS.items()} | asked,
        "additionalProperties": {"type": "string"},
    }


def _property(field: str, kind: str) -> dict[str, Any]:
    made = {"type": "integer" if kind == "number" else "string"}
    if kind == "time":
        made["pattern"] = r"^-?\d+(\.\d+)?(e[+-]?\d+)?$"
    return {**made, "description": _TOLD.get(field, field.replace("_", " "))}
