"""A node with a name of its own on a broker, with its store, and the commands that look after it.

As a module it is what a command line names: `tests.rabbitmq.site:bus` is the bus of the site in FAREGATE_TEST_SITE.
"""

import asyncio
import json
import os
import sqlite3
import sys
import uuid
from contextlib import closing
from types import ModuleType
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

import faregate as fg
from faregate.cli import app
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.names import moving_queue
from faregate.transports.rabbitmq.survey import look_at
from tests.rabbitmq.instance import Step, make_node
from tests.rabbitmq.rig import remove_queues

MOST_PARTITIONS = 12


class Site:
    def __init__(self, broker: str, store: str, suffix: str | None = None) -> None:
        self.suffix = suffix or uuid.uuid4().hex[:8]
        self.broker, self.store = broker, store
        self.author, self.name = f"author-{self.suffix}", f"ledger-{self.suffix}"
        self.queue = f"{self.name}.Step.{self.author}"
        parted = [f"{self.queue}.g{each}-{number}" for each in (1, 2) for number in range(MOST_PARTITIONS)]
        self.partitions, self.ordered = 4, True
        self.names = [self.queue, f"{self.name}-dead", *parted]

    def bus(self, partitions: int | None = None) -> fg.Bus:
        at = "integer primary key" if self.store.startswith("sqlite:") else "serial"
        node = make_node(self.name, self.author, partitions or self.partitions, at=at, ordered=self.ordered)
        return fg.Bus(self.broker, nodes=[node], store=self.store)

    async def publish(self, count: int) -> None:
        await self.publish_more(0, count)

    async def publish_more(self, first: int, end: int, *, fails: int = 0) -> None:
        """`fails`: how many tries of every tenth one fail."""
        async with fg.Bus(self.broker, nodes=[fg.Node(self.author)]) as bus:
            for number in range(first, end):
                await bus.publish(step(number, fails if number % 10 == 0 else 0))

    async def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, Any]:
        """`faregate rabbitmq …` on this bus: its exit status, and what it says in JSON."""
        module = ModuleType("site_under_test")
        module.bus = self.bus  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "site_under_test", module)
        command = self.command("site_under_test:bus", *arguments)
        result = await asyncio.to_thread(CliRunner().invoke, app, command, catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)

    def command(self, target: str, name: str, *more: str) -> list[str]:
        subscription = [self.name, "Step"] if name == "repartition" else []
        return ["rabbitmq", name, target, *subscription, *more, "--json"]

    @property
    def environment(self) -> dict[str, str]:
        """For a process that runs a command on `tests.rabbitmq.site:bus`."""
        given = [self.broker, self.store, self.suffix, self.partitions, self.ordered]
        return {**os.environ, "FAREGATE_TEST_SITE": json.dumps(given)}

    # --- what is there -------------------------------------------------------------------------------------------

    async def left(self) -> list[str]:
        """Which of the queues that the node may have are there."""
        transport = RabbitmqQueue(self.broker)
        await transport.open()
        seen = [await look_at(transport, name, "current") for name in self.names]
        await transport.close()
        return [each.name for each in seen if each.exists]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        if self.store.startswith("sqlite:"):
            with closing(sqlite3.connect(self.store.removeprefix("sqlite:"))) as connection:
                return connection.execute(query).fetchall()
        with psycopg.connect(self.store) as server:
            return server.execute(query).fetchall()  # type: ignore[arg-type]

    def parked(self) -> int:
        """How many wait in the store."""
        [(count,)] = self.rows("select count(*) from faregate_parked")
        return int(count)

    def seen(self) -> dict[str, list[int]]:
        """The effects by account, in their order."""
        found: dict[str, list[int]] = {}
        for account, number in self.rows("select account, number from effects order by at"):
            found.setdefault(account, []).append(number)
        return found

    async def until_seen(self, count: int) -> None:
        found = 0
        async with asyncio.timeout(120):
            while found < count:
                await asyncio.sleep(0.1)
                found = sum(map(len, self.seen().values()))

    async def effects(self, count: int) -> dict[str, list[int]]:
        """What the node does when it starts, by account, in its order."""
        bus = self.bus()
        async with bus:
            await self.until_seen(count)
            await bus.idle()
        return self.seen()

    async def remove(self) -> None:
        transport = RabbitmqQueue(self.broker)
        await transport.open()
        await remove_queues(transport, *self.names, *map(moving_queue, self.names))
        await transport.close()


def step(number: int, fails: int = 0) -> Step:
    return Step(account=f"account-{number % 7}", number=number, fails=fails)


def in_order(count: int) -> dict[str, list[int]]:
    return {f"account-{each}": list(range(each, count, 7)) for each in range(7)}


def bus() -> fg.Bus:
    broker, store, suffix, partitions, ordered = json.loads(os.environ["FAREGATE_TEST_SITE"])
    site = Site(broker, store, suffix)
    site.partitions, site.ordered = partitions, ordered
    return site.bus()
