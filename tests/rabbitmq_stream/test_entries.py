"""What an exchange routes into a stream reads as what was appended here, and as what another program sent."""

from collections.abc import Iterator
from datetime import UTC, datetime

import aiormq
import msgspec
import pytest
from aiormq.abc import AbstractChannel
from hypothesis import given
from hypothesis import strategies as some
from pamqp.commands import Basic
from rstream import amqp_decoder

from faregate.errors import Unwritable
from faregate.message import Envelope
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq import wire
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.amqp import Malformed, read_message, text, write_body
from faregate.transports.rabbitmq_stream.entries import decode, encode
from tests.presence import address
from tests.rabbitmq_stream.streams import new_stream

texts = some.text(some.characters(exclude_categories=["Cs"]), max_size=300)
maybe = some.none() | texts
times = some.none() | some.floats(min_value=1, max_value=1e10)


@given(
    some.builds(
        Envelope,
        publication_id=texts, type=texts, source=texts, body=some.binary(max_size=300), correlation_id=texts,
        causation_id=maybe, depth=some.integers(0, 2**31 - 1), key=maybe, sent_at=some.floats(0, 1e10),
        deliver_at=times, expires_at=times, redeliveries=some.integers(0, 100),
        content_encoding=some.none() | some.just("gzip"),
        body_digest=some.none() | some.binary(min_size=16, max_size=16),
        headers=some.dictionaries(texts.map(lambda name: "h" + name), texts, max_size=3),
    )
)  # fmt: skip
def test_an_envelope_comes_back_as_it_was(envelope: Envelope) -> None:
    assert decode(encode(envelope)) == envelope


def test_another_client_can_read_an_entry() -> None:
    found = amqp_decoder(encode(Envelope("p", "OrderPlaced", "event", "shop", b"{}", correlation_id="c", sent_at=1.5)))
    assert (found.properties.message_id, found.properties.correlation_id) == (b"p", b"c")
    assert (found.properties.content_type, found.properties.creation_time) == (b"application/json", 1500)
    assert found.application_properties[b"x-basic-type"] == b"OrderPlaced"
    assert found.body == b"{}"


@given(some.binary(max_size=100))
def test_bytes_that_are_no_message_are_a_body(entry: bytes) -> None:
    try:
        read_message(entry)
    except Malformed:
        assert decode(entry) == Envelope(body=entry, content_type="application/octet-stream")


def test_what_the_broker_makes_of_properties_from_3_13_on_is_read() -> None:
    """The source is the group, and an id that is a UUID in words is one in bytes."""
    name = "urn:uuid:01234567-89ab-cdef-0123-456789abcdef"
    items = b"\x98" + bytes.fromhex("0123456789abcdef" * 2) + b"@" * 9 + text("shop")
    found = decode(b"\x00Ss\xc0" + bytes((len(items) + 1, 11)) + items + write_body(b"{}"))
    assert (found.publication_id, found.source, found.body) == (name, "shop", b"{}")


def test_an_id_that_is_cut_off_and_a_time_that_is_none_do_no_harm() -> None:
    cut = b"\x00Ss\xc0\x05\x01\x98abc"
    assert decode(cut) == Envelope(body=cut, content_type="application/octet-stream")
    items = b"@" * 9 + b"\x98" + bytes(16)
    found = decode(b"\x00Ss\xc0" + bytes((len(items) + 1, 10)) + items + write_body(b"{}"))
    assert (found.body, found.sent_at) == (b"{}", 0.0)


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(Unwritable, match="cannot be written to a stream"):
        encode(Envelope("p", "T", headers={"h": "\ud800"}))


# --- through an exchange ----------------------------------------------------------------------------------------


@pytest.fixture
def stream() -> Iterator[str]:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        yield url


async def routed(stream: str, routing_key: str, body: bytes, properties: Basic.Properties) -> Envelope:
    """What the log has of a message that was published to an exchange to which the stream is bound."""
    name = parse_address(stream).stream
    connection = await aiormq.connect(address("FAREGATE_TEST_RABBITMQ"))
    try:
        channel: AbstractChannel = await connection.channel(publisher_confirms=True)
        await channel.exchange_declare(name, exchange_type="topic", auto_delete=True)
        await channel.queue_bind(name, name, "#")
        await channel.basic_publish(body, exchange=name, routing_key=routing_key, properties=properties)
    finally:
        await connection.close()
    [(_, found)] = open_log(stream).envelopes()
    return found


@pytest.mark.services
async def test_a_message_of_the_queues_is_the_same_in_the_stream(stream: str) -> None:
    headers = {
        "h": "ü", "traceparent": "00-1", "x-faregate-causation-id": "m", "x-faregate-key": "k", "x-faregate-depth": 7,
        "x-faregate-attempt-id": "t", "x-faregate-sent-at": "1.5", "x-faregate-deliver-at": "2.25",
        "x-faregate-expires-at": "3.125", "x-faregate-replay": 1, "x-faregate-digest": "01" * 16,
        "x-faregate-key-id": "i", "x-faregate-algorithm": "l", "x-faregate-payload-ref": "r",
    }  # fmt: skip
    found = await routed(
        stream,
        "event.shop.Noted.-",
        b"\x00\xff",
        Basic.Properties(
            content_type="x/y", content_encoding="gzip", headers=headers, delivery_mode=2, correlation_id="c",
            message_id="p", timestamp=datetime.fromtimestamp(1.5, UTC), message_type="Noted", app_id="shop",
        ),
    )  # fmt: skip
    assert found == Envelope(
        publication_id="p", type="Noted", kind="event", source="shop", body=b"\x00\xff", correlation_id="c",
        causation_id="m", depth=7, key="k", attempt_id="t", sent_at=1.5, deliver_at=2.25, expires_at=3.125, replay=1,
        content_type="x/y", content_encoding="gzip", key_id="i", algorithm="l", payload_ref="r",
        body_digest=b"\x01" * 16, traceparent="00-1", headers={"h": "ü"},
    )  # fmt: skip


@pytest.mark.services
async def test_an_id_that_is_a_uuid_stays_the_text_that_it_was(stream: str) -> None:
    name = "urn:uuid:01234567-89ab-cdef-0123-456789abcdef"
    found = await routed(stream, "event.shop.Noted.-", b"{}", Basic.Properties(message_id=name, correlation_id=name))
    assert (found.publication_id, found.correlation_id) == (name, name)


@pytest.mark.services
async def test_a_command_names_its_destination(stream: str) -> None:
    properties = Basic.Properties(
        message_id="p", message_type="Charge", app_id="shop", headers={"x-faregate-destination": "billing"}
    )
    found = await routed(stream, "command.billing.Charge.17", b"{}", properties)
    assert (found.kind, found.destination, found.source, found.type) == ("command", "billing", "shop", "Charge")


@pytest.mark.services
async def test_what_a_bare_client_left_out_is_in_the_routing_key(stream: str) -> None:
    properties = Basic.Properties(timestamp=datetime.fromtimestamp(5, UTC), headers={"n": 7, "x-death": "no header"})
    found = await routed(stream, "event.shop.Noted.-", b"{}", properties)
    assert (found.kind, found.type, found.source, found.sent_at) == ("event", "Noted", "shop", 5.0)
    assert found.headers == {"n": "7"}


@pytest.mark.services
async def test_a_bare_command_is_known_by_its_routing_key(stream: str) -> None:
    found = await routed(stream, "command.billing.Charge.-", b"{}", Basic.Properties(message_id="p"))
    assert (found.kind, found.destination, found.type) == ("command", "billing", "Charge")


@pytest.mark.services
async def test_a_queue_and_a_stream_read_the_same_of_a_message(stream: str) -> None:
    """A delivery names its one recipient; a stream knows them by bindings."""
    sent = Envelope(
        publication_id="p", type="Charge", kind="command", source="shop", body=b"\x00\xff", destination="billing",
        correlation_id="c", causation_id="m", depth=7, key="k", attempt_id="t", sent_at=1.7e9 + 0.123456, replay=1,
        deliver_at=2.25, expires_at=3.125, content_type="x/y", content_encoding="gzip", key_id="i", algorithm="l",
        payload_ref="r", body_digest=b"\x01" * 16, traceparent="00-1", headers={"h": "ü"},
    )  # fmt: skip
    properties = wire.properties_of(sent)
    by_stream = await routed(stream, "command.billing.Charge.17", sent.body, properties)
    by_queue = wire.envelope_of(properties, sent.body, "command.billing.Charge.17", "billing")
    assert by_stream == sent
    assert msgspec.structs.replace(by_queue, recipients=()) == by_stream
