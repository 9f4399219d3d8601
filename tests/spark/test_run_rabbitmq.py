"""A node on Spark beside services on RabbitMQ: it reads their stream, and what it sends reaches their queues."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from tests.spark import run_shop
from tests.spark.rabbitmq_rig import rabbitmq_shop
from tests.spark.run_rig import Shop

pytestmark = pytest.mark.services


@pytest.fixture
def on_rabbitmq(tmp_path: Path, spark: Any) -> Iterator[Shop]:
    folder = tmp_path / "rabbitmq"
    folder.mkdir()
    with rabbitmq_shop(folder, spark) as shop:
        yield shop


def test_a_run_does_the_same_on_rabbitmq_as_on_a_journal(on_rabbitmq: Shop, tmp_path: Path) -> None:
    on_journal = Shop(tmp_path, on_rabbitmq.spark)
    on_journal.token = on_rabbitmq.token
    sent = []
    for shop in (on_journal, on_rabbitmq):
        shop.run_bus("payments")  # somebody takes what billing sends
        shop.place(12)
        shop.arm(5)
        run = shop.run_to_end()
        assert (run.outcomes, run.sent) == ({"handled": 12}, 12)
        shop.check(12)
        sent.append({each.publication_id: each.body for each in shop.log("ChargeCard")})
    assert set(on_rabbitmq.effects()) == set(on_journal.effects())
    assert sent[0] == sent[1] and len(sent[0]) == 12
    assert on_rabbitmq.run_to_end().outcomes == {}
    on_rabbitmq.run_bus("payments")
    on_rabbitmq.check(12, "charges")
