"""What comes for a channel is read out of the bytes of a connection, however they are cut; the rest is aiormq's."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import frame as frames
from pamqp.body import ContentBody
from pamqp.commands import Basic, Channel
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from faregate.transports.rabbitmq.frames import Arrived, Incoming, Receiver, Returned, read_properties


class Line:
    """A receiver with one channel, number 1."""

    def __init__(self) -> None:
        self.receiver = Receiver(asyncio.get_running_loop())
        self.arrived: list[Arrived] = []
        self.confirmed: list[tuple[int, bool, bool]] = []
        self.returned: list[Returned] = []
        self.failed: list[Exception] = []
        incoming = Incoming(self.failed.append, lambda *each: self.confirmed.append(each), self.returned.append)
        incoming.delivered = self.arrived.append
        self.receiver.channels[1] = incoming

    async def passed_on(self) -> list[Any]:
        self.receiver.feed_eof()
        data = await self.receiver.read()
        found = []
        while data:
            size, channel, frame = frames.unmarshal(data)
            data = data[size:]
            if not isinstance(frame, Heartbeat):
                found.append((channel, type(frame)))
        return found


def delivery(tag: int, body: bytes, *pieces: bytes, redelivered: bool = False, channel: int = 1) -> bytes:
    properties = Basic.Properties(message_id=f"m{tag}", headers={"x": tag}, timestamp=datetime(2026, 1, 2, tzinfo=UTC))
    parts: list[Any] = [
        Basic.Deliver("consumer", tag, redelivered, "faregate", "event.shop.Placed.-"),
        ContentHeader(body_size=len(body), properties=properties),
        *map(ContentBody, pieces or ([body] if body else [])),
    ]
    return b"".join(frames.marshal(part, channel) for part in parts)


@pytest.mark.parametrize("cut", [1, 2, 7, 8, 9, 50, 10_000])
async def test_frames_are_read_however_the_bytes_are_cut(cut: int) -> None:
    line = Line()
    data = (
        frames.marshal(Basic.ConsumeOk("consumer"), 1)
        + delivery(1, b"one")
        + delivery(2, b"other", channel=2)
        + frames.marshal(Basic.Ack(7, True), 1)
        + delivery(3, b"long and longer", b"long ", b"and ", b"longer", redelivered=True)
        + frames.marshal(Basic.Nack(8, False), 1)
        + delivery(4, b"")
        + frames.marshal(Channel.Close(404, "gone", 0, 0), 1)
    )
    for at in range(0, len(data), cut):
        line.receiver.feed_data(data[at : at + cut])
    assert [(each.delivery_tag, each.body, each.redelivered) for each in line.arrived] == [
        (1, b"one", False), (3, b"long and longer", True), (4, b"", False),
    ]  # fmt: skip
    assert {each.routing_key for each in line.arrived} == {"event.shop.Placed.-"}
    assert [each.properties.message_id for each in line.arrived] == ["m1", "m3", "m4"]
    assert line.confirmed == [(7, True, True), (8, False, False)]
    assert await line.passed_on() == [
        (1, Basic.ConsumeOk), (2, Basic.Deliver), (2, ContentHeader), (2, ContentBody), (1, Channel.Close),
    ]  # fmt: skip
    assert line.failed == []


async def test_a_returned_message_says_why_and_which() -> None:
    line = Line()
    parts = (
        Basic.Return(312, "NO_ROUTE", "faregate", "command.nobody.Do.-"),
        ContentHeader(body_size=2, properties=Basic.Properties(message_id="m1")),
        ContentBody(b"{}"),
    )
    line.receiver.feed_data(b"".join(frames.marshal(part, 1) for part in parts))
    [returned] = line.returned
    assert returned.text == "NO_ROUTE (exchange 'faregate', routing key 'command.nobody.Do.-')"
    assert returned.properties.message_id == "m1"
    assert await line.passed_on() == []


async def test_an_answer_to_get_and_whatever_else_nobody_takes_is_passed_on() -> None:
    line = Line()
    parts = (Basic.GetOk(1, False, "", "q", 0), ContentHeader(body_size=1), ContentBody(b"x"))
    line.receiver.feed_data(b"".join(frames.marshal(part, 1) for part in parts))
    assert await line.passed_on() == [(1, Basic.GetOk), (1, ContentHeader), (1, ContentBody)]
    assert line.arrived == []


async def test_an_error_costs_the_channel_and_not_what_comes_behind() -> None:
    line = Line()
    broken = ValueError("a handler of deliveries that fails")

    def fail(arrived: Arrived) -> None:
        raise broken

    line.receiver.channels[1].delivered = fail
    other = Incoming(line.failed.append)
    other.delivered = line.arrived.append
    line.receiver.channels[2] = other
    line.receiver.feed_data(delivery(1, b"one") + delivery(2, b"two", channel=2) + delivery(3, b"three"))
    line.receiver.channels[1].delivered = line.arrived.append
    line.receiver.feed_data(delivery(4, b"four") + frames.marshal(Channel.CloseOk(), 1))
    assert line.failed == [broken]
    assert [each.body for each in line.arrived] == [b"two"], "nothing overtakes what could not be taken"
    assert await line.passed_on() == [(1, Channel.CloseOk)]


async def test_a_delivery_that_comes_again_under_its_tag_costs_the_channel() -> None:
    line = Line()
    line.receiver.feed_data(delivery(1, b"one") * 2 + delivery(2, b"two"))
    assert [each.body for each in line.arrived] == [b"one"]
    [failure] = line.failed
    assert "delivery 1 came after 1" in str(failure)


async def test_headers_that_nobody_can_read_cost_nothing_but_themselves() -> None:
    line = Line()
    properties = Basic.Properties(message_id="m1", headers={"name": "x" * 9}, app_id="somebody")
    for tag, damage in enumerate((b"na\xffe", b"name"), 1):
        header = ContentHeader(body_size=2, properties=properties).marshal().replace(b"name", damage)
        header = header.replace(b"nameS", b"name?").replace(b"somebody", b"some\xffody")
        framed = b"\x02\x00\x01" + len(header).to_bytes(4, "big") + header + b"\xce"
        deliver, body = Basic.Deliver("consumer", tag, False, "faregate", "key"), ContentBody(b"{}")
        line.receiver.feed_data(frames.marshal(deliver, 1) + framed + frames.marshal(body, 1))
    assert line.failed == []
    assert [(each.properties.message_id, each.properties.headers) for each in line.arrived] == [("m1", None)] * 2
    assert {each.properties.app_id for each in line.arrived} == {"some\\xffody"}


def test_headers_that_are_nested_too_deeply_are_left_out() -> None:
    value = b"t\x01"
    for _ in range(2000):
        entry = b"\x01a" + value
        value = b"F" + len(entry).to_bytes(4, "big") + entry
    table = b"\x01a" + value
    data = b"\x20\x80" + len(table).to_bytes(4, "big") + table + b"\x02id"
    assert (read_properties(data, 0).headers, read_properties(data, 0).message_id) == (None, "id")


def test_ids_that_are_no_text_stay_different_and_can_be_sent_on() -> None:
    raw = [b"\xff" * 250, b"\xfe" * 250, b"\x80", b"\x81", b"a\x00b", b"ab", "ü".encode() * 127]
    found = [str(read_properties(b"\x00\x80" + bytes([len(each)]) + each, 0).message_id) for each in raw]
    assert len(set(found)) == len(raw)
    assert all(len(each.encode()) < 256 and "\0" not in each for each in found)
    assert found[2:] == ["\\x80", "\\x81", "a\\x00b", "ab", "ü" * 127]


@pytest.mark.parametrize(
    "data",
    [b"AMQP\x00\x00\x09\x01", b"\x01\x00\x01\xff\xff\xff\xff and so on", b"\x01\x00\x01\x00\x00\x00\x01x?garbage"],
)
async def test_what_is_no_frame_goes_to_aiormq_as_it_is(data: bytes) -> None:
    line = Line()
    line.receiver.feed_data(data)
    line.receiver.feed_data(b"more")
    line.receiver.feed_eof()
    assert await line.receiver.read() == data + b"more"


async def test_half_a_frame_at_the_end_is_not_lost() -> None:
    line = Line()
    whole = delivery(1, b"one")
    line.receiver.feed_data(whole[:-3])
    line.receiver.feed_eof()
    rest = await line.receiver.read()
    assert rest
    assert whole[:-3].endswith(rest.replace(b"\x08\x00\x00\x00\x00\x00\x00\xce", b""))


async def test_aiormq_sees_a_sign_of_life_while_frames_are_taken() -> None:
    line = Line()
    line.receiver.feed_data(delivery(1, b"one"))
    line.receiver.feed_data(delivery(2, b"two"))
    line.receiver.feed_eof()
    assert await line.receiver.read() == b"\x08\x00\x00\x00\x00\x00\x00\xce", "one for both"


_text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=40).filter(
    lambda text: len(text.encode()) < 256
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "content_type": _text, "content_encoding": _text, "correlation_id": _text, "reply_to": _text,
            "expiration": _text, "message_id": _text, "message_type": _text, "user_id": _text, "app_id": _text,
            "delivery_mode": st.sampled_from([1, 2]), "priority": st.integers(1, 9),
            "timestamp": st.integers(1, 2**32 - 1).map(lambda at: datetime.fromtimestamp(at, UTC)),
            "headers": st.dictionaries(_text, _text | st.integers(-(2**31), 2**31 - 1) | st.booleans(), min_size=1),
        },
    )
)  # fmt: skip
def test_properties_are_read_as_pamqp_reads_them(properties: dict[str, Any]) -> None:
    """But for NUL, which PostgreSQL does not keep."""
    data = ContentHeader(body_size=3, properties=Basic.Properties(**properties)).marshal()
    expected = ContentHeader()
    expected.unmarshal(data)
    assert dict(read_properties(data, 12)) == dict(expected.properties)
