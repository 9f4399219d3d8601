"""The broker itself dies, forgets, or takes nothing: what it confirmed is handled, once, and what waits waits on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import faregate as fg
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.rig import Counted, Shop, running
from tests.rabbitmq.server import PrivateRabbitmq, private_rabbitmq


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateRabbitmq]:
    with private_rabbitmq() as started:
        yield started


async def test_a_broker_that_is_killed_while_publishing_and_consuming_loses_and_doubles_nothing(
    server: PrivateRabbitmq, tmp_path: Path
) -> None:
    shop = Shop()
    store = {shop.reader.name: f"sqlite:{tmp_path}/reader.db"}
    async with running(f"{server.url}?confirm=120s", shop, store=store) as bus:

        async def publish(numbers: range) -> None:
            for number in numbers:
                await bus.publish(Counted(number=number), node=shop.author)

        publishing = asyncio.gather(*(publish(range(first, 4_000, 20)) for first in range(20)))
        await shop.until_seen(200)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await publishing
        await shop.until_seen(4_000)
        await bus.idle()
    assert set(shop.seen.values()) == {1}, "the ledger recognises what came twice"


async def test_a_delay_survives_the_restart_of_the_broker(server: PrivateRabbitmq) -> None:
    shop = Shop()
    failed: list[int] = []

    @shop.author.on(Counted, source=shop.reader.name, retry=fg.Retry(0), redeliver=fg.Redeliver(20))
    async def fail_first(counted: Counted) -> None:
        failed.append(counted.number)
        shop.changed.set()
        if len(failed) == 1:
            raise ValueError("not yet")

    async with running(f"{server.url}?confirm=60s", shop) as bus:
        await bus.publish(Counted(number=1), node=shop.reader)
        await shop.until(lambda: len(failed) == 1)
        await shop.until(lambda: bus.outcomes()["redelivered"] == 1)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        assert len(failed) == 1, "its time has not come"
        await shop.until(lambda: len(failed) == 2)
        assert bus.outcomes()["dead"] == 0


async def test_a_memory_alarm_is_said_and_publishing_goes_on_behind_it(server: PrivateRabbitmq) -> None:
    shop = Shop()
    async with running(f"{server.url}?confirm=2s", shop) as bus:
        await bus.publish(Counted(number=0), node=shop.author)
        await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0.0000001")
        try:
            with pytest.raises((fg.OutcomeUnknown, fg.BrokerUnavailable)):
                await bus.publish(Counted(number=1), node=shop.author)
            with pytest.raises(fg.BrokerUnavailable, match="takes no publications now"):
                await bus.publish(Counted(number=2), node=shop.author)
        finally:
            await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0.4")
        async with asyncio.timeout(60):
            while True:
                try:
                    await bus.publish(Counted(number=3), node=shop.author)
                    break
                except (fg.BrokerUnavailable, fg.OutcomeUnknown):
                    continue
        await shop.until(lambda: 3 in shop.seen)
        assert 2 not in shop.seen, "what was said not to be sent was sent"


async def test_a_queue_that_somebody_deletes_is_declared_anew(server: PrivateRabbitmq) -> None:
    shop = Shop()
    async with running(server.url, shop) as bus:
        assert isinstance(bus.transport, RabbitmqQueue)
        [queue] = [name for name in bus.transport.queue_names if not name.endswith("-dead")]
        await bus.transport.on_channel(lambda channel: channel.queue_delete(queue))
        async with asyncio.timeout(30):
            number = 0
            while not shop.seen:
                await bus.publish(Counted(number=number), node=shop.author)
                number += 1
                await asyncio.sleep(0.1)


async def test_a_body_that_the_broker_finds_too_large_is_refused_by_itself(server: PrivateRabbitmq) -> None:
    shop = Shop()
    await asyncio.to_thread(server.control, "eval", "application:set_env(rabbit, max_message_size, 100000).")
    try:
        async with running(server.url, shop) as bus:
            small = asyncio.create_task(bus.publish(Counted(number=1), node=shop.author))
            with pytest.raises(fg.MessageTooLarge, match="takes 100000 at most"):
                await bus.publish(Counted(number=2, filling="x" * 200_000), node=shop.author)
            await small
            await bus.publish(Counted(number=3), node=shop.author)
            await shop.until(lambda: set(shop.seen) == {1, 3})
    finally:
        await asyncio.to_thread(server.control, "eval", "application:set_env(rabbit, max_message_size, 134217728).")
