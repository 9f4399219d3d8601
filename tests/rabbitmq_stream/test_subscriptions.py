"""Who gets what of a stream: noted beside it, and resolved by the time at which a message was appended."""

import time
from collections.abc import Iterator

import aiormq
import pytest

from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.log import Settled
from faregate.ports.queue import Binding
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.bindings import Bindings
from tests.presence import address
from tests.rabbitmq_stream.streams import connected, new_stream

pytestmark = pytest.mark.services

BILLING = Binding("billing", "OrderPlaced", "event", "shop", remembers="ledger")
STOCK = Binding("stock", "OrderPlaced", "event", "shop")
CHARGE = Binding("billing", "Charge", "command")


@pytest.fixture
def stream() -> Iterator[str]:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        yield url


def order(number: int, **more: object) -> Envelope:
    return Envelope(f"p{number}", "OrderPlaced", "event", "shop", b"{}", **more)  # type: ignore[arg-type]


def later() -> None:
    """The broker's clock shows another millisecond."""
    time.sleep(0.005)


def test_a_message_goes_to_those_who_are_bound_when_it_is_appended(stream: str) -> None:
    log = open_log(stream)
    log.append([order(0)])
    later()
    log.bind(BILLING)
    later()
    log.append([order(1)])
    later()
    log.bind(STOCK)
    log.bind(CHARGE)
    later()
    log.append(
        [order(2), order(3, recipients=("stock",)), Envelope("c", "Charge", "command", "shop", destination="billing")]
    )
    later()
    log.unbind(BILLING)
    later()
    log.append([order(4), Envelope("q", "Other", "event", "shop")])
    for reader in (log, open_log(stream)):
        found = {envelope.publication_id: envelope.recipients for _, envelope in reader.envelopes()}
        assert found == {
            "p0": (), "p1": ("billing",), "p2": ("billing", "stock"), "p3": ("stock",), "c": ("billing",),
            "p4": ("stock",), "q": (),
        }  # fmt: skip
        topics = [topic for batch in reader.batches() for topic in batch.column("topic").to_pylist()]
        queues = {topic.number: topic.queues for topic in reader.topology().topics}
        names = {queue.number: queue.name for queue in reader.topology().queues}
        led = [sorted(names[queue] for queue in queues.get(topic, ())) for topic in topics]
        both = ["billing.OrderPlaced.shop", "stock.OrderPlaced.shop"]
        assert led == [[], both[:1], both, both, ["billing.Charge"], both[1:], []]


def test_what_is_noted_already_is_noted_once(stream: str) -> None:
    log = open_log(stream)
    for _ in range(2):
        log.bind(BILLING)
    version = log.topology().version
    log.bind(BILLING)
    log.unbind(STOCK)
    assert open_log(stream).topology().version == version
    assert log.topology().ways(BILLING.queue) == ("ledger",)


async def test_another_program_can_note_a_subscription(stream: str) -> None:
    log = open_log(stream)
    log.bind(STOCK)
    connection = await aiormq.connect(address("FAREGATE_TEST_RABBITMQ"))
    try:
        channel = await connection.channel(publisher_confirms=True)
        queue = f"{parse_address(stream).stream}.bindings"
        for body in (b'{"node":"billing","type":"OrderPlaced","kind":"event","source":"shop"}', b"no note"):
            await channel.basic_publish(body, routing_key=queue)
    finally:
        await connection.close()
    assert log.topology().nodes("event", "shop", "OrderPlaced") == {"billing", "stock"}


def test_a_note_survives_a_new_stream_of_notes(stream: str) -> None:
    """One that was made anew is read from its beginning."""
    log = open_log(stream)
    log.bind(BILLING)
    log.bind(STOCK)
    known = Bindings(parse_address(stream).stream)
    with connected(stream) as connection:
        known.catch_up(connection)
        connection.delete(f"{parse_address(stream).stream}.bindings")
        open_log(stream).bind(CHARGE)
        known.catch_up(connection)
    assert [queue.name for queue in known.topology.queues if not queue.is_dead_letter_queue] == ["billing.Charge"]


def test_what_a_stream_lacks_is_said(stream: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"the stream test-.* cannot be used for this: it lacks .*Needed is a log"
    ):
        open_log(stream, Settled)
