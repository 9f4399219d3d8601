"""Several processes of one node on one PostgreSQL: killed, stopped past their leases, started and ended while messages
come. Nothing is lost, nothing is doubled, no key is out of order, and no try is used up by any of it."""

import asyncio
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import psycopg
import pytest

import faregate as fg
from faregate.bus.leases import LEASE_SECONDS
from tests.rabbitmq.instance import Step, make_node
from tests.rabbitmq.site import Site

ROOT = Path(__file__).resolve().parents[2]
ACCOUNTS = 40
PARTITIONS = 8
_BETWEEN_SECONDS = 0.4
"""Between two messages of an account: about a hundred a second in all, which instances that catch up can follow."""


_BETWEEN_ROWS_SECONDS = 1.6
"""The same where all that waits becomes rows: about 25 a second."""
_STANDSTILL_SECONDS = 120


class Fleet:
    def __init__(self, broker: str, store: str) -> None:
        suffix = uuid.uuid4().hex[:8]
        self.broker, self.store = broker, store
        self.site = Site(broker, store, suffix)
        self.author, self.name = fg.Node(self.site.author), self.site.name
        self._running: list[asyncio.subprocess.Process] = []
        self._stopped: list[asyncio.Task[None]] = []

    async def start(self, partitions: int = PARTITIONS) -> None:
        arguments = (self.broker, self.store, self.name, self.author.name, str(partitions))
        command = (sys.executable, "-m", "tests.rabbitmq.instance", *arguments)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        self._running.append(process)

    async def restart(self, partitions: int) -> None:
        """The instance that has run longest ends, and another one comes, whose program says another number."""
        process = self._running.pop(0)
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await self.start(partitions)

    async def repartition(self, to: int) -> None:
        self.site.partitions = PARTITIONS
        command = self.site.command("tests.rabbitmq.site:bus", "repartition", "--to", str(to))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "faregate", *command, cwd=ROOT, env=self.site.environment
        )
        assert await process.wait() == 0

    async def disturb(self, chance: random.Random) -> None:
        """One thing happens to one instance."""
        process = chance.choice(self._running)
        what = chance.choice(["kill", "stop", "end", "start"])
        if what == "start" and len(self._running) < 5:
            await self.start()
        elif what == "stop":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_SECONDS + 3)  # its leases are over by the database's clock
            process.send_signal(signal.SIGCONT)
        else:
            self._running.remove(process)
            process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            await process.wait()
            await self.start()

    async def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            await process.wait()


Meanwhile = Callable[[Fleet, random.Random], Awaitable[None]]


def disturbed(times: int) -> Meanwhile:
    async def disturb(fleet: Fleet, chance: random.Random) -> None:
        for _ in range(times):
            await asyncio.sleep(0.5)
            await fleet.disturb(chance)

    return disturb


async def run_through(
    broker: str, store: str, meanwhile: Meanwhile, *, seed: int, between: float = _BETWEEN_SECONDS
) -> None:
    chance = random.Random(seed)
    fleet = Fleet(broker, store)
    # The queues are there before anything is published.
    prepared = fg.Bus(broker, nodes=[make_node(fleet.name, fleet.author.name, PARTITIONS)], store=store)
    await prepared.prepare()
    published: dict[str, int] = dict.fromkeys((f"account-{number}" for number in range(ACCOUNTS)), 0)
    over = asyncio.Event()
    async with fg.Bus(f"{broker}?confirm=120s", nodes=[fleet.author]) as bus:

        async def publish(account: str) -> None:
            while not over.is_set():
                fails = chance.choice([0] * 60 + [1, 2])
                step = Step(account=account, number=published[account], fails=fails)
                await bus.publish(step, node=fleet.author)
                published[account] += 1
                await asyncio.sleep(between)

        for _ in range(3):
            await fleet.start()
        publishing = asyncio.gather(*map(publish, published))
        await meanwhile(fleet, chance)
        over.set()
        await publishing
    total = sum(published.values())
    try:
        found = await until_handled(store, total)
    finally:
        await fleet.end()
        await fleet.site.remove()
    seen: dict[str, list[int]] = {}
    for account, number in found:
        seen.setdefault(account, []).append(number)
    lost = {account: set(range(count)) - set(seen.get(account, ())) for account, count in published.items()}
    assert not any(lost.values()), f"lost: {lost}"
    assert len(found) == total, f"{len(found) - total} effects happened twice"
    reordered = {account: numbers for account, numbers in seen.items() if numbers != sorted(numbers)}
    assert not reordered, f"out of order: {reordered}"
    async with await psycopg.AsyncConnection.connect(store) as connection:
        dead = await (await connection.execute("select count(*) from faregate_dead")).fetchone()
    assert dead == (0,), "restarts used up tries"


async def until_handled(store: str, total: int) -> list[tuple[str, int]]:
    """As long as it goes on: a busy machine takes its time."""
    found = 0
    async with (
        await psycopg.AsyncConnection.connect(store, autocommit=True) as connection,
        asyncio.timeout(_STANDSTILL_SECONDS) as limit,
    ):
        while True:
            rows = await (await connection.execute("select account, number from effects order by at")).fetchall()
            if len(rows) >= total:
                await asyncio.sleep(1)  # anything doubled would come now
                rows = await (await connection.execute("select account, number from effects order by at")).fetchall()
                return [(account, number) for account, number in rows]
            if len(rows) > found:
                found = len(rows)
                limit.reschedule(asyncio.get_running_loop().time() + _STANDSTILL_SECONDS)
            await asyncio.sleep(0.2)


@pytest.mark.services
async def test_three_instances_share_partitions_through_a_few_disturbances(broker: str, postgres_url: str) -> None:
    await run_through(broker, postgres_url, disturbed(4), seed=5)


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(900)
async def test_three_instances_through_thirty_kills_stops_starts_and_ends(broker: str, postgres_url: str) -> None:
    await run_through(broker, postgres_url, disturbed(30), seed=6)


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(900)
async def test_three_instances_go_from_eight_partitions_to_twelve_under_load(broker: str, postgres_url: str) -> None:
    """Two of them end and start meanwhile, with the new number."""

    async def meanwhile(fleet: Fleet, chance: random.Random) -> None:
        await asyncio.sleep(2)
        changing = asyncio.create_task(fleet.repartition(12))
        await fleet.restart(12)
        await fleet.restart(12)
        await changing
        await asyncio.sleep(2)

    await run_through(broker, postgres_url, meanwhile, seed=7, between=_BETWEEN_ROWS_SECONDS)


@pytest.mark.full
@pytest.mark.services
@pytest.mark.timeout(900)
async def test_partitions_change_through_kills_stops_starts_and_ends(broker: str, postgres_url: str) -> None:
    async def meanwhile(fleet: Fleet, chance: random.Random) -> None:
        changing = asyncio.create_task(fleet.repartition(12))
        for _ in range(6):
            await fleet.disturb(chance)
        await changing

    await run_through(broker, postgres_url, meanwhile, seed=8, between=_BETWEEN_ROWS_SECONDS)
