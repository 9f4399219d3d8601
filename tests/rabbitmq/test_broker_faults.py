"""The broker itself dies, forgets, or takes nothing: what it confirmed is handled, once, and what waits waits on."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

import faregate as fg
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.rig import Counted, Shop, running
from tests.rabbitmq.server import PrivateRabbitmq, private_rabbitmq

_LARGEST = "N = {0}, application:set_env(rabbit, max_message_size, N), persistent_term:put(max_message_size, N)."
"""Until 3.13 and from then on."""


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
    await asyncio.to_thread(server.control, "eval", _LARGEST.format(100_000))
    try:
        async with running(server.url, shop) as bus:
            small = asyncio.create_task(bus.publish(Counted(number=1), node=shop.author))
            with pytest.raises(fg.MessageTooLarge, match="takes 100000 at most"):
                await bus.publish(Counted(number=2, filling="x" * 200_000), node=shop.author)
            await small
            await bus.publish(Counted(number=3), node=shop.author)
            await shop.until(lambda: set(shop.seen) == {1, 3})
    finally:
        await asyncio.to_thread(server.control, "eval", _LARGEST.format(16 * 2**20))


async def test_connections_that_the_server_closes_are_made_anew(server: PrivateRabbitmq, tmp_path: Path) -> None:
    shop = Shop()
    store = {shop.reader.name: f"sqlite:{tmp_path}/reader.db"}
    async with running(server.url, shop, store=store) as bus:
        for round_ in range(2):
            numbers = range(200 * round_, 200 * (round_ + 1))
            publishing = asyncio.gather(*(bus.publish(Counted(number=each), node=shop.author) for each in numbers))
            await asyncio.to_thread(server.control, "close_all_connections", "a test closes them")
            await publishing
            await shop.until_seen(len(numbers) * (round_ + 1))
        await bus.idle()
    assert set(shop.seen) == set(range(400))
    assert set(shop.seen.values()) == {1}


@pytest.mark.parametrize(
    ("rights", "told"),
    [(("", ".*", ".*"), "does not let this user declare"), ((".*", "", ".*"), "rights to configure, write and read")],
)
async def test_missing_rights_are_said_with_the_command_that_gives_them(
    server: PrivateRabbitmq, rights: tuple[str, str, str], told: str
) -> None:
    name = f"poor-{len(rights[0])}"
    await asyncio.to_thread(server.control, "add_user", name, "secret-word")
    await asyncio.to_thread(server.control, "set_permissions", "-p", "/", name, *rights)
    url = server.url.replace("faregate:", f"{name}:").replace(server.url.split(":")[2].split("@")[0], "secret-word")
    with pytest.raises(fg.ConfigurationError, match=told) as caught:
        async with running(url, Shop()):
            raise AssertionError("it started")
    assert "rabbitmqctl set_permissions" in str(caught.value)
    assert "secret-word" not in str(caught.value)


async def test_a_queue_that_is_full_gets_everything_and_no_copies(server: PrivateRabbitmq, tmp_path: Path) -> None:
    author = fg.Node("hasty-author")
    reader = fg.Node("slow-reader", schema="create table if not exists seen (at integer primary key, number integer)")

    @reader.on(Counted, source=author.name, key="filling", prefetch=2)
    async def count(counted: Counted, ctx: fg.Context) -> None:
        await asyncio.sleep(0.002)
        ctx.db.write("insert into seen (number) values (?)", (counted.number,))

    policy = ("small", "^slow-reader[.]", '{"max-length": 10}', "--apply-to", "queues")
    await asyncio.to_thread(server.control, "set_policy", *policy)
    url = f"{server.url}?confirm=120s"
    async with fg.Bus(url, nodes=[author, reader], store=f"sqlite:{tmp_path}/reader.db") as bus:
        await bus.publish_many([Counted(number=number) for number in range(150)], node=author)
        rest = (bus.publish(Counted(number=number), node=author) for number in range(150, 300))
        await asyncio.gather(*rest)
        await bus.idle()
        assert bus.outcomes()["duplicate"] == 0
    with closing(sqlite3.connect(tmp_path / "reader.db")) as database:
        seen = [number for (number,) in database.execute("select number from seen order by at")]
    assert sorted(seen) == list(range(300))
    falls = sum(after < before for before, after in pairwise(seen))
    assert falls < 60, "what was refused goes out in its order; what was taken meanwhile may be before it"


async def test_a_consumer_whose_queue_and_rights_are_taken_away_says_so_and_comes_back_with_them(
    server: PrivateRabbitmq, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop()
    await asyncio.to_thread(server.control, "add_user", "robbed", "secret-word")
    await asyncio.to_thread(server.control, "set_permissions", "-p", "/", "robbed", ".*", ".*", ".*")
    password = server.url.split(":")[2].split("@")[0]
    url = server.url.replace("faregate:", "robbed:").replace(password, "secret-word")
    async with running(url, shop) as bus:
        await asyncio.to_thread(server.control, "set_permissions", "-p", "/", "robbed", "", ".*", ".*")
        await asyncio.to_thread(server.control, "delete_queue", bus.bindings[0].queue)
        await shop.until(lambda: "cannot be consumed" in caplog.text)
        await asyncio.to_thread(server.control, "set_permissions", "-p", "/", "robbed", ".*", ".*", ".*")
        async with asyncio.timeout(90):
            while not shop.seen:  # before the queue is there again nobody takes it
                await bus.publish(Counted(number=1), node=shop.author)
                await asyncio.sleep(0.2)
        await bus.idle()
    assert caplog.text.count("cannot be consumed") == 1
    assert "secret-word" not in caplog.text


@pytest.mark.full
async def test_a_handler_that_takes_longer_than_the_broker_lets_it_is_told_of_and_has_its_effect_once(
    server: PrivateRabbitmq, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker looks once in a minute."""
    author = fg.Node("patient-author")
    reader = fg.Node("patient-reader", schema="create table if not exists seen (number integer)")

    @reader.on(Counted, source=author.name)
    async def count(counted: Counted, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into seen values (?)", (counted.number,))
        while counted.number == 1:
            await asyncio.sleep(0.5)
            if "consumer_timeout" in caplog.text:
                return

    def seen() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "reader.db")) as database:
            return [number for (number,) in database.execute("select number from seen order by number")]

    await asyncio.to_thread(server.control, "eval", "application:set_env(rabbit, consumer_timeout, 5000).")
    try:
        async with fg.Bus(server.url, nodes=[author, reader], store=f"sqlite:{tmp_path}/reader.db") as bus:
            await bus.publish_many([Counted(number=1), Counted(number=2)], node=author)
            async with asyncio.timeout(300):
                while True:
                    await asyncio.sleep(0.5)
                    if seen() == [1, 2]:
                        break
            await bus.idle()
            assert "Raise consumer_timeout" in caplog.text
    finally:
        await asyncio.to_thread(server.control, "eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
    assert seen() == [1, 2]
