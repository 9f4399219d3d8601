"""Running the shop's nodes on Spark and on asyncio, and comparing what they did."""

import asyncio
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_log, open_store
from faregate.spark.runs.handover import hand_over
from tests.spark import run_shop
from tests.spark.run_shop import OrderPlaced

TABLES = {"billing": "invoices", "payments": "charges", "shipping": "parcels"}
KEYS = 4


class Shop:
    """A journal, or another log, a store and checkpoints in one folder."""

    def __init__(self, folder: Path, spark: Any, url: str | None = None) -> None:
        self.folder = folder
        self.spark = spark
        self.journal = folder / "journal"
        self.url = url or f"journal:{self.journal}"
        self.store = f"sqlite:{folder / 'shop.db'}"
        self.tokens: str | None = None
        """Where tokens are, if that is elsewhere."""
        self.node, self.table = "billing", "invoices"
        """Who runs on Spark, and where its effects are."""
        self.token = os.urandom(3).hex()
        self.placed = 0

    def key(self, number: int) -> str:
        return f"{self.token}-{number % KEYS}"

    # --- publishing ---

    def place(self, count: int, *, total: int = 10, nodes: Any = (run_shop.shop,)) -> None:
        """Append orders; keys take turns, numbers grow."""

        async def main() -> None:
            store = None if self.tokens is None else self.store  # a token is made by way of the outbox
            async with fg.Bus(self.url, nodes=list(nodes), store=store, tokens=self.tokens) as bus:
                for number in range(self.placed, self.placed + count):
                    order = OrderPlaced(order_id=self.key(number), number=number, total=total)
                    await bus.publish(order, node="shop", idempotency_key=f"order-{number}")

        asyncio.run(main())
        self.placed += count

    def arm(self, number: int, what: str = "bill", more: str = "", *, says: str = "") -> None:
        """Let the handler of this order misbehave, once."""
        run_shop.WORDS.mkdir(exist_ok=True)
        self._word(number, what, more).write_text(says)

    def is_armed(self, number: int, what: str, more: str = "") -> bool:
        return self._word(number, what, more).exists()

    def hits(self, what: str, numbers: Sequence[int]) -> int:
        """How many of these have misbehaved by now: that is when their word goes."""
        return sum(not self.is_armed(number, what) for number in numbers)

    def _word(self, number: int, what: str, more: str = "") -> Path:
        return run_shop.WORDS / f"{what}-{self.key(number)}-{number}{more}"

    def wait_for_slow(self, number: int, seconds: float) -> int:
        """Until the handler of this order takes its time; the process in which it does."""
        word = self._word(number, "pid")
        until = time.monotonic() + seconds
        while not (word.exists() and (said := word.read_text())):
            assert time.monotonic() < until, f"order {number} was not handled within {seconds} s"
            time.sleep(0.05)  # it is in a process of Spark's, which gives no signal
        word.unlink()
        return int(said)

    # --- engines ---

    def run(self, node: str = "", **more: Any) -> fg.spark.Run:
        node = node or self.node
        options: dict[str, Any] = {"source": self.url, "store": self.store, "trigger": "available-now"}
        options["tokens"] = self.tokens
        options.update(checkpoint=self.folder / f"checkpoint-{node}", **more)
        return fg.spark.run(getattr(run_shop, node), self.spark, **options)

    def run_to_end(self, node: str = "", **more: Any) -> fg.spark.Run:
        handle = self.run(node, **more)
        handle.await_termination()
        return handle

    def run_bus(self, *names: str) -> None:
        async def main() -> None:
            nodes = [getattr(run_shop, name) for name in names]
            async with fg.Bus(self.url, nodes=nodes, store=self.store, tokens=self.tokens) as bus:
                await bus.idle(timeout=30)

        asyncio.run(main())

    # --- looking ---

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "shop.db")) as connection:
            return connection.execute(sql).fetchall()

    def effects(self, table: str = "") -> list[tuple[str, int, str]]:
        return self.rows(f"select order_id, number, message_id from {table or self.table} order by seq")

    def check(self, count: int, table: str = "", *, but: Any = ()) -> None:
        """Every order once, those of a key in order."""
        found = self.effects(table)
        assert sorted(number for _, number, _ in found) == [each for each in range(count) if each not in but]
        assert len({message_id for _, _, message_id in found}) == len(found)
        for key in {order_id for order_id, _, _ in found}:
            numbers = [number for order_id, number, _ in found if order_id == key]
            assert numbers == sorted(numbers), f"{key} is out of order: {numbers}"

    def set_marks(self, offset: int) -> None:
        """As if the store had not learned of anything behind that offset."""
        with closing(sqlite3.connect(self.folder / "shop.db")) as connection, connection:
            connection.execute("update faregate_positions set position = ? where handler = ''", (offset,))

    def make_due(self) -> None:
        """As if the time of everything parked had come."""
        with closing(sqlite3.connect(self.folder / "shop.db")) as connection, connection:
            connection.execute("update faregate_parked set due_at = 0")

    def unhandled(self) -> list[int]:
        """Orders without an effect; of each key, the first of these is parked, or comes next."""
        known = self.rows(f"select 1 from sqlite_master where name = '{self.table}'")  # else nobody ran yet
        return sorted({*range(self.placed)} - {number for _, number, _ in (self.effects() if known else ())})

    def count_parked(self) -> int:
        [(count,)] = self.rows("select count(*) from faregate_parked")
        return int(count)

    def log(self, type: str) -> list[Any]:
        log = open_log(self.url)
        return [envelope for _, envelope in log.envelopes(log.earliest()) if envelope.type == type]


@pytest.fixture
def the_shop(tmp_path: Path, spark: Any) -> Shop:
    return Shop(tmp_path, spark)


class TokenShop(Shop):
    """Its node deduplicates by tokens, and these are in a database of their own."""

    def __init__(self, folder: Path, spark: Any, url: str | None = None) -> None:
        super().__init__(folder, spark, url)
        self.tokens = f"sqlite:{folder / 'tokens.db'}"
        self.node, self.table = "stamping", "stamps"

    def left(self) -> dict[str, int]:
        """What is left of what came to the node: nothing, once everything is sent. (Of what it sends, a driver that
        died leaves tokens that no signal carries, for a minute.)"""
        with closing(sqlite3.connect(self.folder / "tokens.db")) as connection:
            sql = "select count(*) from faregate_tokens where recipient = ?"
            [(tokens,)] = connection.execute(sql, (self.node,)).fetchall()
        [(claims, outbox)] = self.rows(
            "select (select count(*) from faregate_claims), "
            "(select count(*) from faregate_outbox where dispatched_at is null)"
        )
        return {"tokens": tokens, "claims": claims, "outbox": outbox}

    def check_all(self, count: int) -> None:
        """Effects, those of who it sends to, and that nothing is left."""
        self.check(count)
        self.run_bus("payments", "filing")
        self.check(count, "charges")
        self.check(count, "files")
        assert self.left() == {"tokens": 0, "claims": 0, "outbox": 0}


@pytest.fixture
def token_shop(tmp_path: Path, spark: Any) -> TokenShop:
    return open_token_shop(tmp_path, spark)


def open_token_shop(folder: Path, spark: Any) -> TokenShop:
    """Somebody takes what its node sends; and senders know that this wants tokens, as it was on a bus before."""
    shop = TokenShop(folder, spark)
    shop.run_bus("shop", "payments", "filing", "stamping")
    hand_over(run_shop.stamping, shop.url, open_store(shop.store, SystemClock()), "log")
    return shop
