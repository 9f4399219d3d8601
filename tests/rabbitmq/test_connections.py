"""Connections to RabbitMQ fail in every way that a network knows; nothing is lost; what no waiting mends is said."""

import asyncio
import logging
import sqlite3
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import cast

import msgspec
import pytest
from pamqp.commands import Basic

import faregate as fg
from faregate.ids import slot_of
from faregate.ports.queue import Binding, dead_letter_queue
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.consumer import Session
from faregate.transports.rabbitmq.delivery import RabbitmqDelivery
from faregate.transports.rabbitmq.endings import Endings
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.names import dead_queue
from faregate.transports.rabbitmq.survey import look_at
from faregate.transports.rabbitmq.topology import partition_queues
from tests.rabbitmq.proxy import proxied
from tests.rabbitmq.rig import Counted, Shop, remove_queues, running


class Keyed(fg.Event, key="account"):
    account: str
    number: int


class Do(fg.Command):
    number: int


async def test_a_connection_that_is_cut_again_and_again_loses_nothing(broker: str) -> None:
    shop = Shop()
    async with proxied(broker) as (url, proxy), running(url, shop) as bus:

        async def cut() -> None:
            while True:
                await asyncio.sleep(0.15)
                proxy.cut()

        cutting = asyncio.create_task(cut())
        published = 0
        while proxy.connections < 12:
            numbers = range(published, published + 100)
            await asyncio.gather(*(bus.publish(Counted(number=number), node=shop.author) for number in numbers))
            published += 100
        cutting.cancel()
        await shop.until_seen(published)


@pytest.mark.parametrize("answers", [True, False], ids=["to us", "to the broker"])
async def test_bytes_that_come_twice_lose_and_double_nothing(broker: str, tmp_path: Path, answers: bool) -> None:
    """What comes twice may be whole frames, which look sound, or the end of one, which is none."""
    shop = Shop()
    shop.reader = fg.Node(shop.reader.name, schema="create table if not exists effects(number int)")

    @shop.reader.on(Counted, source=shop.author.name)
    async def write(counted: Counted, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into effects values (?)", (counted.number,))
        shop.seen[counted.number] += 1
        shop.changed.set()

    store = {shop.reader.name: f"sqlite:{tmp_path}/reader.db"}
    async with proxied(broker) as (url, proxy), running(url, shop, store=store) as bus:
        published = 0
        while proxy.repeated < 10:
            proxy.repeat(answers=answers)
            numbers = range(published, published + 50)
            await asyncio.gather(*(bus.publish(Counted(number=number), node=shop.author) for number in numbers))
            published += 50
        await shop.until_seen(published)
        await bus.idle()
    with closing(sqlite3.connect(tmp_path / "reader.db")) as database:
        assert sorted(number for (number,) in database.execute("select number from effects")) == [*range(published)]


async def test_a_missing_confirm_is_an_unknown_outcome_and_publishing_it_again_does_not_double(
    broker: str, tmp_path: Path
) -> None:
    shop = Shop()
    async with proxied(broker) as (url, proxy):
        store = {shop.reader.name: f"sqlite:{tmp_path}/reader.db"}
        async with running(f"{url}?confirm=1s", shop, store=store) as bus:
            proxy.swallow_answers()
            with pytest.raises(fg.OutcomeUnknown, match=r"Counted .* did not confirm it within 1 s") as caught:
                await bus.publish(Counted(number=1), node=shop.author)
            proxy.flow()
            await shop.until_seen(1)
            await bus.idle()  # of two copies at once both may run, and one commits
            [publication] = caught.value.publications
            assert await bus.publish(publication) == publication.publication_id
            await bus.publish(Counted(number=2), node=shop.author)
            await shop.until_seen(2)
            await bus.idle()
    assert shop.seen == {1: 1, 2: 1}


async def test_nothing_newer_of_a_key_passes_what_a_queue_refused(broker: str) -> None:
    """Others of the same type do: they have no order with it."""
    author = fg.Node(f"author-{uuid.uuid4().hex[:8]}")
    full = f"full-{author.name}"
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}

    async def declare(channel: BatchChannel) -> None:
        await channel.queue_declare(full, arguments=arguments)
        await channel.queue_bind(full, "faregate", routing_key=f"event.{author.name}.#")

    async def take(channel: BatchChannel) -> None:
        while (message := await channel.basic_get(full, no_ack=True)).delivery_tag is not None:
            found.append(message.body)

    found: list[bytes] = []
    async with fg.Bus(broker, nodes=[author]) as bus:
        transport = cast(RabbitmqQueue, bus.transport)
        await transport.on_channel(declare)
        await bus.publish(Keyed(account="a", number=0))
        refused = asyncio.create_task(bus.publish(Keyed(account="a", number=1)))
        await asyncio.sleep(0.1)  # it is refused, and rests
        await transport.on_channel(take)
        later = [asyncio.create_task(bus.publish(Keyed(account="a", number=number))) for number in (2, 3)]
        await asyncio.sleep(0.1)
        async with asyncio.timeout(60):
            while not all(task.done() for task in (refused, *later)):
                await transport.on_channel(take)
                await asyncio.sleep(0.02)
        await transport.on_channel(take)
        await transport.on_channel(lambda channel: channel.queue_delete(full))
    assert [msgspec.json.decode(body)["number"] for body in found] == [0, 1, 2, 3]


async def test_a_broker_that_is_away_is_said_to_be_unavailable_in_time(broker: str) -> None:
    shop = Shop()
    async with proxied(broker) as (url, proxy), running(f"{url}?confirm=1s", shop) as bus:
        proxy.refusing = True
        proxy.cut()
        await asyncio.sleep(0.1)  # the cut is noticed
        with pytest.raises(fg.BrokerUnavailable, match="nothing was sent"):
            await bus.publish(Counted(number=1), node=shop.author)
        proxy.refusing = False
        async with asyncio.timeout(30):
            while True:
                try:
                    await bus.publish(Counted(number=2), node=shop.author)
                    break
                except fg.BrokerUnavailable:
                    continue
        await shop.until_seen(1)
        assert set(shop.seen) == {2}, "what was said not to be sent was sent"


async def test_an_exchange_that_somebody_deleted_is_said_and_a_start_mends_it(
    broker: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    bus = fg.Bus(broker, nodes=[shop.author, shop.reader])
    async with bus:
        transport = cast(RabbitmqQueue, bus.transport)
        await transport.on_channel(lambda channel: channel.exchange_delete("faregate"))
        await bus.publish(Counted(number=1), node=shop.author)
    assert ["start all nodes again" in record.message for record in caplog.records if record.levelname == "ERROR"] == [
        True
    ]
    async with running(broker, shop) as bus:
        await bus.publish(Counted(number=2), node=shop.author)
        await shop.until_seen(1)
        assert set(shop.seen) == {2}


async def test_what_one_of_two_queues_refuses_has_an_unknown_outcome(broker: str) -> None:
    shop = Shop()
    full = f"full-{shop.author.name}"
    async with running(f"{broker}?confirm=1s", shop) as bus:
        assert isinstance(bus.transport, RabbitmqQueue)

        async def declare(channel: BatchChannel) -> None:
            await channel.queue_declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
            await channel.queue_bind(full, "faregate", routing_key=f"event.{shop.author.name}.#")

        await bus.transport.on_channel(declare)
        await bus.publish(Counted(number=1), node=shop.author)
        with pytest.raises(fg.OutcomeUnknown, match="refuses it: a queue that it goes to is full") as caught:
            await bus.publish(Counted(number=2), node=shop.author)
        await shop.until_seen(2)  # the other queue took it
        await bus.transport.on_channel(lambda channel: channel.queue_delete(full))
        [publication] = caught.value.publications
        await bus.publish(publication)


async def test_a_stalled_connection_is_given_up_and_made_anew(broker: str) -> None:
    shop = Shop()
    async with proxied(broker) as (url, proxy), running(f"{url}?heartbeat=1s&confirm=60s", shop) as bus:
        proxy.stall()
        waiting = asyncio.create_task(bus.publish(Counted(number=1), node=shop.author))
        async with asyncio.timeout(60):
            await proxy.until_connected(3)  # three heartbeats are missed, and it is given up
            proxy.flow()
            await waiting
        await shop.until_seen(1)


# --- bad input -----------------------------------------------------------------------------------------------


async def test_nobody_answers_at_the_address(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "faregate.rabbitmq"),
        pytest.raises(
            fg.BrokerUnavailable,
            match=r"no RabbitMQ answered at amqp://user:\*\*\*@127.0.0.1:1/\?connect=1s within 1 s",
        ),
    ):
        await RabbitmqQueue("amqp://user:secret@127.0.0.1:1/?connect=1s").open()
    assert time.monotonic() - began >= 1.0, "it gave up early"
    assert "waiting for RabbitMQ at amqp://user:***@127.0.0.1:1/" in caplog.text
    assert "secret" not in caplog.text


async def test_wrong_credentials_are_said_at_once(broker: str) -> None:
    wrong = broker.replace("faregate:", "nobody:")
    with pytest.raises(fg.ConfigurationError, match="refuses the user or the password") as caught:
        await RabbitmqQueue(wrong).open()
    assert broker.split(":")[2].split("@")[0] not in str(caught.value)


async def test_a_virtual_host_that_is_not_there_is_said_at_once(broker: str) -> None:
    wrong = broker.rpartition("/")[0] + "/nowhere"
    with pytest.raises(fg.ConfigurationError, match="Name a virtual host that is there") as caught:
        await RabbitmqQueue(wrong).open()
    assert "object at" not in str(caught.value), "what the driver did not understand helps nobody"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("amqp:", "is no address of a RabbitMQ"),
        ("amqp://u:secret@h:port/", "is not HOST:PORT"),
        ("amqp://u:secret@h/a/b", "write that as %2F"),
        ("amqp://u:secret@h/?prefetch=7", "knows the options confirm, connect, heartbeat, stream, .* not prefetch"),
        ("amqp://u:secret@h/?confirm=soon", "confirm"),
    ],
)
def test_a_url_that_says_nothing_is_refused(url: str, told: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=told) as caught:
        fg.Bus(url, nodes=[fg.Node("shop")])
    assert "secret" not in str(caught.value)


async def test_a_queue_that_is_declared_otherwise_is_left_as_it_is(broker: str) -> None:
    shop = Shop()
    transport = RabbitmqQueue(broker)
    await transport.open()
    name = f"{shop.reader.name}.Counted.{shop.author.name}"
    await transport.on_channel(lambda channel: channel.queue_declare(name, durable=True))
    with pytest.raises(fg.QueueDiffers, match=f"{name} is declared otherwise .*faregate rabbitmq doctor"):
        await fg.Bus(broker, nodes=[shop.author, shop.reader]).start()
    await transport.on_channel(lambda channel: channel.queue_delete(name))
    await transport.close()


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"note": "x" * 200_000}, "headers and a key of 200004 bytes, and RabbitMQ has room for 65536"),
        ({"x" * 256: "note"}, "a header whose name is longer than 255 bytes"),
        ({"note": "\ud800"}, "a header or a key that cannot be written as UTF-8"),
    ],
)
async def test_headers_for_which_a_frame_has_no_room_are_refused_and_cost_no_connection(
    broker: str, caplog: pytest.LogCaptureFixture, headers: dict[str, str], told: str
) -> None:
    shop = Shop()
    async with running(broker, shop) as bus:
        with pytest.raises(fg.Permanent, match=told):
            await bus.publish(Counted(number=1), node=shop.author, headers=headers)
        await bus.publish(Counted(number=2), node=shop.author, headers={"note": "x" * 60_000})
        await shop.until_seen(1)
    assert set(shop.seen) == {2}
    assert "is lost" not in caplog.text


async def test_a_command_that_nobody_takes_names_exchange_and_key(broker: str) -> None:
    shop = Shop()
    async with running(broker, shop) as bus:
        with pytest.raises(fg.Unroutable, match=r"'nobody' .*exchange 'faregate', routing key 'command.nobody.Do.-'"):
            await bus.send(Do(number=1), to="nobody", node=shop.author)


async def test_messages_of_other_programs_that_cannot_be_read_are_dead_letters(broker: str, tmp_path: Path) -> None:
    shop = Shop()
    key = f"event.{shop.author.name}.Counted.-"
    async with running(broker, shop, store=f"sqlite:{tmp_path}/shop.db") as bus:
        assert isinstance(bus.transport, RabbitmqQueue)

        async def publish(body: bytes, **properties: object) -> None:
            async def send(channel: object) -> None:
                await channel.basic_publish(  # type: ignore[attr-defined]
                    body, exchange="faregate", routing_key=key, properties=Basic.Properties(**properties)
                )

            await bus.transport.on_channel(send)  # type: ignore[attr-defined]

        await publish(b"{}", message_id="no-number")
        await publish(b"\xff\x00", message_id="no-json")
        await publish(b'{"number": 1}', message_id="another", message_type="Another")
        await publish(b'{"number": 7}', message_id="fine", message_type="Counted")
        await shop.until_seen(1)
        await bus.idle()
        reasons = sorted((letter.publication_id, letter.reason) for letter in await bus.dead_letters())
    assert reasons == [("another", "unknown-type"), ("no-json", "undecodable"), ("no-number", "undecodable")]
    assert shop.seen == {7: 1}


class Placed(fg.Event, key="order"):
    order: str | None
    number: int


async def test_a_message_for_partitions_that_came_without_its_slot_is_a_dead_letter(
    broker: str, tmp_path: Path
) -> None:
    author, reader = (fg.Node(f"{name}-{uuid.uuid4().hex[:8]}") for name in ("author", "reader"))
    seen: list[int] = []

    @reader.on(Placed, source=author.name, key="order", partitions=4)
    async def note(placed: Placed) -> None:
        seen.append(placed.number)

    topic = f"event.{author.name}.Placed"
    async with fg.Bus(broker, nodes=[author, reader], store=f"sqlite:{tmp_path}/shop.db") as bus:
        assert isinstance(bus.transport, RabbitmqQueue)

        async def publish(slot: str, body: bytes, name: str) -> None:
            properties = Basic.Properties(message_id=name, message_type="Placed")
            await bus.transport.put([Publication("faregate", f"{topic}.{slot}", properties, body)])  # type: ignore[attr-defined]

        await publish("-", b'{"order": "a", "number": 1}', "no-slot")
        await publish(slot_of("a"), b'{"order": "a", "number": 2}', "slot")
        await publish("-", b'{"order": null, "number": 3}', "no-key")
        await bus.publish(Placed(order=None, number=4), node=author)
        await bus.publish(Placed(order="a", number=5), node=author)
        await bus.idle()
        async with asyncio.timeout(30):
            while True:  # it is drained from the broker's queue into the store
                if letters := await bus.dead_letters():
                    break
                await asyncio.sleep(0.05)
        await remove_queues(bus.transport)
    [letter] = letters
    assert (letter.publication_id, letter.reason) == ("no-slot", "no-slot")
    assert f"should end in {slot_of('a')}" in letter.error
    assert sorted(seen) == [2, 3, 4, 5]


@pytest.mark.parametrize(("headers", "tries"), [({}, 0), ({"x-delivery-count": 1}, 1), ({"x-delivery-count": 3}, 0)])
async def test_a_message_that_was_delivered_a_few_times_counts_as_started_as_often(
    headers: dict[str, int], tries: int
) -> None:
    """0: nobody knows, and the bus counts."""
    [subscription] = Shop().reader.subscriptions.values()
    arrived = Arrived(1, True, "event.author.Counted.-", Basic.Properties(headers=headers), b"{}")  # type: ignore[arg-type]
    delivery = RabbitmqDelivery(cast(Session, None), arrived, subscription.binding(1000), cast(Endings, None), 0.0)
    delivery.count_deliveries()
    assert delivery.tries == tries


async def test_dead_letters_whose_queue_is_gone_get_it_back_and_nothing_else(broker: str) -> None:
    """What a node has bound first may be a former generation by then."""
    node = f"reader-{uuid.uuid4().hex[:8]}"
    former = Binding(node=node, type="Placed", kind="event", source="author", partitions=2)
    transport = RabbitmqQueue(broker)
    await transport.open()
    await transport.bind(former)
    consumer = await transport.consume(dead_letter_queue(node), lambda held: None, prefetch=1)
    assert (await look_at(transport, dead_queue(node), "dead letters")).consumers == 1
    await remove_queues(transport)
    async with asyncio.timeout(60):
        consumers = 0
        while not consumers:
            await asyncio.sleep(0.05)
            consumers = (await look_at(transport, dead_queue(node), "dead letters")).consumers
    assert not [name for name in partition_queues(former) if (await look_at(transport, name, "left over")).exists]
    await consumer.close()
    await remove_queues(transport)
    await transport.close()
