"""Several processes of one node on one PostgreSQL, to be killed, stopped past their leases, started and ended."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import faregate as fg
from faregate.bus.leases import LEASE_SECONDS
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.instance import make_node
from tests.rabbitmq.site import Site

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 8
_MOST = 5


class Fleet:
    def __init__(self, broker: str, store: str, chance: random.Random) -> None:
        self.broker, self.store = broker, store
        self._site = Site(broker, store)
        self._site.partitions = PARTITIONS
        self.author, self.name = fg.Node(self._site.author), self._site.name
        self._chance = chance
        self._prepared = fg.Bus(broker, nodes=[make_node(self.name, self.author.name, PARTITIONS)], store=store)
        self._running: list[asyncio.subprocess.Process] = []

    @asynccontextmanager
    async def running(self, instances: int) -> AsyncIterator[list[str]]:
        """Gives the names of the partitions. Afterwards all instances have ended, and their queues are gone."""
        transport = self._prepared.transport
        assert isinstance(transport, RabbitmqQueue)
        await self._prepared.prepare()  # the queues are there before anything is published
        try:
            for _ in range(instances):
                await self.start()
            yield await transport.partitions(self._site.queue)
            for process in self._running:
                process.send_signal(signal.SIGTERM)
            for process in self._running:
                await process.wait()
        finally:
            for process in self._running:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        await self._site.remove()

    async def start(self, partitions: int = PARTITIONS) -> None:
        arguments = (self.broker, self.store, self.name, self.author.name, str(partitions))
        command = (sys.executable, "-m", "tests.rabbitmq.instance", *arguments)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n", "an instance did not start"
        self._running.append(process)

    async def replace(self, partitions: int) -> None:
        """One ends, and another one comes, whose program says another number of partitions."""
        await self._take_away(signal.SIGTERM)
        await self.start(partitions)

    async def repartition(self, to: int) -> None:
        command = self._site.command("tests.rabbitmq.site:bus", "repartition", "--to", str(to))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "faregate", *command, cwd=ROOT, env=self._site.environment
        )
        assert await process.wait() == 0

    async def add(self) -> None:
        """One more; one of the others ends when there are many."""
        if len(self._running) >= _MOST:
            await self._take_away(signal.SIGTERM)
        await self.start()

    async def kill(self) -> None:
        await self._take_away(signal.SIGKILL)
        await self.start()

    async def end(self) -> None:
        await self._take_away(signal.SIGTERM)
        await self.start()

    async def stop(self) -> None:
        """Until its leases are over by the database's clock; then it goes on."""
        process = self._chance.choice(self._running)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_SECONDS + 3)
        process.send_signal(signal.SIGCONT)

    async def _take_away(self, how: signal.Signals) -> None:
        process = self._running.pop(self._chance.randrange(len(self._running)))
        process.send_signal(how)
        await process.wait()
