"""`ctx.session` on Spark, as on the bus: what it writes commits with what the handler sends, once."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from tests.spark.session_nodes import Asked, Told, book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.services
COUNT = 8


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def test_both_kinds_of_handlers_write_through_sqlalchemy_once(
    spark: "SparkSession", tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    journal = tmp_path / "journal"
    store_url = f"sqlite:{tmp_path}/store.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")

    async def publish() -> None:
        async with fg.Bus(f"journal:{journal}", nodes=[fg.Node("author")]) as bus:
            for number in range(COUNT):
                await bus.publish(Asked(number=number), node="author")
                await bus.publish(Told(number=number), node="author")

    async def rows(sql: str) -> list[tuple[object, ...]]:
        store = open_store(store_url, SystemClock())
        await store.open()
        try:
            async with store.transaction() as transaction:
                return [tuple(row) for row in await transaction.fetchall(sql)]
        finally:
            await store.close()

    asyncio.run(publish())
    for wrong, words in (((spark, book), "begins with a node; it got a S"), ((book, None), "needs a Spark session")):
        with pytest.raises(fg.ConfigurationError, match=words):
            fg.spark.run(*wrong, source=f"journal:{journal}", store=store_url, checkpoint=tmp_path / "none")
    outcomes: Counter[str] = Counter()
    for turn in range(2):  # the second finds nothing to do
        checkpoint = tmp_path / f"checkpoint-{turn}"
        run = fg.spark.run(
            book, spark, source=f"journal:{journal}", store=store_url, checkpoint=checkpoint, trigger="available-now"
        )
        run.await_termination()
        outcomes += Counter(run.outcomes)
    left = [number for number in range(COUNT) if number % 4 != 1]
    found = asyncio.run(rows("select number, kind from notes order by number"))
    assert found == [*((n, "async def") for n in left), *((100 + n, "def") for n in left)]
    errors = asyncio.run(rows("select error from faregate_dead"))
    assert Counter(str(error).partition(":")[0] for (error,) in errors) == {"RuntimeError": 2, "TransactionMisused": 2}
    assert outcomes["handled"] == 2 * len(left)
    sent = Counter(envelope.type for _, envelope in JournalReader(journal).envelopes(0))
    assert sent["Noted"] == 2 * len(left)
