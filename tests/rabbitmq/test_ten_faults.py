"""A hundred thousand messages through ten faults of broker, network and processes: what was published is handled, each
effect happens once, each key keeps its order. What is broken on purpose the judge names."""

import asyncio
import random
import sqlite3
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

import faregate as fg
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.fleet import Fleet
from tests.rabbitmq.instance import Step, make_node
from tests.rabbitmq.judge import Effect, judge
from tests.rabbitmq.load import Load
from tests.rabbitmq.proxy import Proxy, proxied
from tests.rabbitmq.rig import remove_queues
from tests.rabbitmq.server import PrivateRabbitmq, private_rabbitmq

TOTAL, ACCOUNTS, PUBLISHERS = 100_000, 2_000, 20
OPTIONS = "?confirm=5s&heartbeat=2s"
CLOSE_CHANNELS = "[rabbit_channel:do(Channel, {'basic.ack', 1000000000, false}) || Channel <- rabbit_channel:list()]."
"""An acknowledgement of what was never delivered: the broker closes the channel that it came on."""


@dataclass
class Site:
    server: PrivateRabbitmq
    publishers: Proxy
    consumers: Proxy
    fleet: Fleet
    load: Load


async def the_broker_is_killed(site: Site) -> None:
    await asyncio.to_thread(site.server.kill)
    await asyncio.to_thread(site.server.start)


async def the_broker_closes_all_connections(site: Site) -> None:
    await asyncio.to_thread(site.server.control, "close_all_connections", "a fault")


async def the_broker_closes_all_channels(site: Site) -> None:
    await asyncio.to_thread(site.server.control, "eval", CLOSE_CHANNELS)


async def every_connection_is_cut(site: Site) -> None:
    for proxy in (site.publishers, site.consumers):
        proxy.cut()


async def every_connection_stalls_until_it_is_given_up(site: Site) -> None:
    for proxy in (site.publishers, site.consumers):
        proxy.stall()
    await site.publishers.until_connected(site.publishers.connections + 1)
    await site.consumers.until_connected(site.consumers.connections + 1)
    for proxy in (site.publishers, site.consumers):
        proxy.flow()


async def confirmations_do_not_arrive(site: Site) -> None:
    site.publishers.swallow_answers()
    await site.load.until_refused()
    site.publishers.flow()


async def the_broker_lacks_memory(site: Site) -> None:
    await asyncio.to_thread(site.server.control, "set_vm_memory_high_watermark", "0.0000001")
    await site.load.until_refused()
    await asyncio.to_thread(site.server.control, "set_vm_memory_high_watermark", "0.4")


async def an_instance_is_killed(site: Site) -> None:
    await site.fleet.kill()


async def an_instance_stands_still_past_its_leases(site: Site) -> None:
    await site.fleet.stop()


FAULTS: list[Callable[[Site], Awaitable[None]]] = [
    the_broker_is_killed,
    confirmations_do_not_arrive,
    an_instance_is_killed,
    every_connection_is_cut,
    the_broker_closes_all_channels,
    an_instance_stands_still_past_its_leases,
    the_broker_lacks_memory,
    the_broker_closes_all_connections,
    every_connection_stalls_until_it_is_given_up,
    the_broker_is_killed,
]


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(3600)
async def test_a_hundred_thousand_messages_through_ten_faults(postgres_url: str) -> None:
    with private_rabbitmq() as server:
        async with proxied(server.url) as (for_publishers, publishers), proxied(server.url) as (for_fleet, consumers):
            fleet = Fleet(for_fleet + OPTIONS, postgres_url, random.Random(11))
            load = Load(fleet, accounts=ACCOUNTS, publishers=PUBLISHERS, ahead=TOTAL // 100)
            site = Site(server, publishers, consumers, fleet, load)
            async with fleet.running(2):
                async with load.running(for_publishers + OPTIONS):
                    for number, fault in enumerate(FAULTS, 1):
                        await load.until_at_least(TOTAL * number // (len(FAULTS) + 1))
                        await fault(site)
                    await load.until_at_least(TOTAL)
                found = await load.verdict()
    assert len(load.published) >= TOTAL
    assert found == []


# --- the judge -------------------------------------------------------------------------------------------------


def test_the_judge_names_what_is_wrong() -> None:
    steps = [Step(account=account, number=number) for number in range(2) for account in ("one", "two")]
    published = {f"{step.account}-{step.number}": step for step in steps}
    right = [Effect(step.account, step.number, 0, publication) for publication, step in published.items()]
    assert judge(published, right) == []
    assert judge(published, right[:-1])[0].startswith("1 lost")
    assert judge(published, [*right, right[-1]])[0].startswith("1 happened twice")
    assert judge(published, [*right, Effect("three", 0, 0, "three-0")])[0].startswith("1 never confirmed")
    assert judge(published, [right[2], *right[:2], right[3]])[0].startswith("1 out of order")
    assert judge(published, [*right[:-1], right[-1]._replace(tries=1)])[0].startswith("1 other tries")


@pytest.mark.services
@pytest.mark.parametrize(
    ("dedup", "same", "wrong"),
    [("ledger", True, []), ("off", True, ["happened twice"]), ("ledger", False, ["happened twice", "never confirmed"])],
    ids=["as it is", "without dedup", "a repeat under a new id"],
)
async def test_the_judge_sees_an_unconfirmed_message_that_was_doubled(
    broker: str, tmp_path: Path, dedup: str, same: bool, wrong: list[str]
) -> None:
    """Its confirmation does not arrive, and it is published again: under its id, or as a new one by mistake."""
    suffix = uuid.uuid4().hex[:8]
    author = fg.Node(f"author-{suffix}")
    node = make_node(f"ledger-{suffix}", author.name, 1, "integer primary key", dedup=dedup)  # type: ignore[arg-type]
    store = f"sqlite:{tmp_path}/store.db"
    steps = [Step(account=f"account-{number % 3}", number=number) for number in range(30)]
    async with (
        fg.Bus(broker, nodes=[node], store=store) as consuming,
        proxied(broker) as (url, proxy),
        fg.Bus(f"{url}?confirm=1s", nodes=[author]) as bus,
    ):
        published = dict(zip(await bus.publish_many(steps[:10]), steps[:10], strict=True))
        proxy.swallow_answers()
        with pytest.raises(fg.OutcomeUnknown) as caught:
            await bus.publish_many(steps[10:20])
        proxy.flow()
        unknown = caught.value.publications
        again = [await bus.publish(each) for each in unknown] if same else await bus.publish_many(steps[10:20])
        published |= zip(again, steps[10:20], strict=True)
        published |= zip(await bus.publish_many(steps[20:]), steps[20:], strict=True)
        await consuming.idle()
        with closing(sqlite3.connect(tmp_path / "store.db")) as database:
            rows = database.execute("select account, number, tries, publication from effects order by at").fetchall()
        transport = consuming.transport
        assert isinstance(transport, RabbitmqQueue)
        await remove_queues(transport)
    found = judge(published, [Effect(*row) for row in rows])
    assert [finding.partition(":")[0].partition(" ")[2] for finding in found if "order" not in finding] == wrong
