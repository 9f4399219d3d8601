"""An envelope as an entry of a stream, and back.

An entry is the AMQP 1.0 message that the broker makes of what an exchange routes into a stream. What is appended here
looks the same, so that there is one way to read them all, ours and other programs'.

Bytes that are no such message are an envelope too: without type or id, with these bytes as its body.
"""

from functools import lru_cache
from typing import Any

from faregate.errors import Unwritable
from faregate.message import Envelope
from faregate.transports.amqp_wire import SOURCE, TYPE, fields_of, headers_of
from faregate.transports.rabbitmq_stream import amqp

FENCE = "faregate-fence"
"""The type of a message that tells only that what stands before it has arrived (`rabbitmq_log/handover.py`). Readers
pass over it."""
_UNKNOWN = "application/octet-stream"
_MESSAGE_ID, _CORRELATION_ID, _CONTENT_TYPE, _CONTENT_ENCODING, _CREATED, _GROUP = 0, 5, 6, 7, 9, 10
_name = lru_cache(maxsize=1024)(amqp.text)
_content = lru_cache(maxsize=1024)(amqp.content)
_TYPE, _SOURCE = amqp.text(TYPE), amqp.text(SOURCE)


def encode(envelope: Envelope) -> bytes:
    """Raises `Unwritable`."""
    try:
        headers = [_TYPE, _name(envelope.type), _SOURCE, _name(envelope.source)]
        for name, value in headers_of(envelope).items():
            headers.append(_name(name))
            headers.append(amqp.text(value) if isinstance(value, str) else amqp.number(value))
        content = _content(envelope.content_type, envelope.content_encoding)
        created = int(envelope.sent_at * 1000)
        properties = amqp.write_properties(envelope.publication_id, envelope.correlation_id, content, created)
    except (ValueError, OverflowError, TypeError, AttributeError) as exc:
        raise Unwritable(f"{envelope} cannot be written to a stream: {exc}") from exc
    return b"".join((properties, amqp.write_headers(headers), amqp.write_body(envelope.body)))


def decode(entry: bytes) -> Envelope:
    try:
        properties, headers, body = amqp.read_message(entry)
    except amqp.Malformed:
        return Envelope(body=entry, content_type=_UNKNOWN)
    fields = fields_of(headers)
    if len(properties) < _GROUP + 1:
        properties += [None] * (_GROUP + 1 - len(properties))
    fields["publication_id"] = _text(properties[_MESSAGE_ID])
    fields["correlation_id"] = _text(properties[_CORRELATION_ID])
    if properties[_CONTENT_TYPE]:
        fields["content_type"] = properties[_CONTENT_TYPE]
    if properties[_CONTENT_ENCODING]:
        fields["content_encoding"] = properties[_CONTENT_ENCODING]
    if "sent_at" not in fields and isinstance(properties[_CREATED], int):
        fields["sent_at"] = properties[_CREATED] / 1000
    if properties[_GROUP] and SOURCE not in headers:  # from 3.13 on that is where the broker puts `app_id`
        fields["source"] = _text(properties[_GROUP])
    return Envelope(body=body, **fields)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else str(value)
