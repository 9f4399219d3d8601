"""What other programs write into headers costs nobody more than their own message."""

import msgspec
import pytest
from pamqp.commands import Basic

from faregate.message import Envelope
from faregate.transports.amqp_wire import fields_of
from faregate.transports.rabbitmq.wire import ERROR, envelope_of, properties_of, with_room


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e300", "253402300800", "never", 2**62, b"5", None])
def test_times_that_no_calendar_has_are_left_out(text: object) -> None:
    headers = {f"x-faregate-{name}": text for name in ("sent-at", "deliver-at", "expires-at")}
    assert fields_of(headers) == {}


def test_times_that_a_calendar_has_are_read() -> None:
    assert fields_of({"x-faregate-sent-at": "1700000000.25"}) == {"sent_at": 1700000000.25}


def test_a_message_that_is_sent_on_has_room_for_what_is_added() -> None:
    """A frame that is too long would cost the connection."""
    given = Basic.Properties(message_id="m", headers={"small": "s", "large": "l" * 100_000, "other": "o" * 30_000})
    envelope = envelope_of(given, b"{}", "event.shop.Placed.-", "reader")
    more = {ERROR: "e" * 16_000}
    found = with_room(properties_of(envelope, more), more)
    assert set(found.headers or ()) == {"small", "other", "x-faregate-recipients", ERROR}
    small = msgspec.structs.replace(envelope, headers={"small": "s"})
    assert with_room(properties_of(small, more), more) == properties_of(small, more)


def test_the_depth_of_a_message_is_a_header_of_that_name() -> None:
    envelope = Envelope(publication_id="p", type="Placed", source="shop", body=b"{}", depth=7)
    headers = properties_of(envelope).headers or {}
    assert headers["x-faregate-depth"] == 7 and "x-faregate-marker" not in headers
    assert fields_of(headers)["depth"] == 7
    assert "depth" not in fields_of({"x-faregate-marker": 7})
