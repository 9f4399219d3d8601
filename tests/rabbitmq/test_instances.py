"""Several processes of one node on one PostgreSQL: killed, stopped past their leases, started and ended while messages
come, and their broker with them. Nothing is lost, nothing is doubled, no key is out of order, and no try is used up by
any of it."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.rabbitmq.fleet import Fleet
from tests.rabbitmq.load import Load
from tests.rabbitmq.server import PrivateRabbitmq, private_rabbitmq

ACCOUNTS, AHEAD = 40, 400
_BETWEEN = 50
"""Effects between two disturbances."""

Disturbance = Callable[[Fleet], Awaitable[None]]


async def run_through(broker: str, store: str, disturbances: Sequence[Disturbance], chance: random.Random) -> None:
    fleet = Fleet(broker, store, chance)
    load = Load(fleet, accounts=ACCOUNTS, publishers=ACCOUNTS, ahead=AHEAD)
    async with fleet.running(3):
        async with load.running(f"{broker}?confirm=120s"):
            for disturb in disturbances:
                await load.until_more(_BETWEEN)
                await disturb(fleet)
            await load.until_more(_BETWEEN)
        found = await load.verdict()
    assert found == []


def restart(server: PrivateRabbitmq) -> Disturbance:
    async def disturb(fleet: Fleet) -> None:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    return disturb


@pytest.mark.services
@pytest.mark.timeout(600)
async def test_three_instances_share_partitions_through_a_few_disturbances(broker: str, postgres_url: str) -> None:
    await run_through(broker, postgres_url, [Fleet.end, Fleet.kill, Fleet.add], random.Random(5))


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(3600)
async def test_three_instances_through_thirty_kills_stops_starts_ends_and_restarts_of_the_broker(
    postgres_url: str,
) -> None:
    chance = random.Random(6)
    with private_rabbitmq() as server:
        disturbances = [Fleet.kill] * 8 + [Fleet.stop] * 6 + [Fleet.end] * 7 + [Fleet.add] * 6 + [restart(server)] * 3
        chance.shuffle(disturbances)
        await run_through(server.url, postgres_url, disturbances, chance)


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(3600)
async def test_three_instances_go_from_eight_partitions_to_twelve_under_load(broker: str, postgres_url: str) -> None:
    """Two of them end and start meanwhile, with the new number."""

    async def change(fleet: Fleet) -> None:
        changing = asyncio.create_task(fleet.repartition(12))
        await fleet.replace(12)
        await fleet.replace(12)
        await changing

    await run_through(broker, postgres_url, [change], random.Random(7))


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(3600)
async def test_partitions_change_through_kills_stops_starts_and_ends(broker: str, postgres_url: str) -> None:
    async def change(fleet: Fleet) -> None:
        changing = asyncio.create_task(fleet.repartition(12))
        for disturb in (fleet.kill, fleet.add, fleet.stop, fleet.end, fleet.kill):
            await disturb()
        await changing

    await run_through(broker, postgres_url, [change], random.Random(8))
