"""A cluster of three nodes, whose queue leaders are killed while messages come and go. The others take over, clients go
on at the next address: nothing is lost, doubled or out of order."""

import asyncio
import random

import pytest

from tests.rabbitmq.fleet import Fleet
from tests.rabbitmq.load import Load
from tests.rabbitmq.server import private_cluster

ACCOUNTS, AHEAD = 200, 400
_WHILE_AWAY = 500
"""Effects that have to happen while a node is away."""


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(1800)
async def test_a_queue_leader_that_is_killed_loses_doubles_and_reorders_nothing(postgres_url: str) -> None:
    with private_cluster() as cluster:
        fleet = Fleet(f"{cluster.url}?heartbeat=2s", postgres_url, random.Random(3))
        load = Load(fleet, accounts=ACCOUNTS, publishers=20, ahead=AHEAD)
        async with fleet.running(2) as [queue, *_]:
            async with load.running(f"{cluster.url}?confirm=120s&heartbeat=2s"):
                for _ in range(2):
                    await load.until_more(_WHILE_AWAY)
                    await asyncio.to_thread(cluster.wait_for_all_copies)
                    leader = await asyncio.to_thread(cluster.leader_of, queue)
                    await asyncio.to_thread(leader.kill)
                    await load.until_more(_WHILE_AWAY)
                    await asyncio.to_thread(leader.start)
            found = await load.verdict()
    assert found == []
