"""A node on Spark beside services on RabbitMQ: it reads their stream, and what it sends reaches their queues."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_log, open_store
from faregate.spark.runs.handover import hand_over
from tests.presence import address
from tests.spark import run_shop
from tests.spark.rabbitmq_rig import dead_letters, rabbitmq_shop
from tests.spark.run_rig import Shop

pytestmark = pytest.mark.services


@pytest.fixture
def shop(tmp_path: Path, spark: Any) -> Iterator[Shop]:
    folder = tmp_path / "rabbitmq"
    folder.mkdir()
    with rabbitmq_shop(folder, spark) as shop:
        yield shop


def test_a_run_does_the_same_on_rabbitmq_as_on_a_journal(shop: Shop, tmp_path: Path) -> None:
    on_journal = Shop(tmp_path, shop.spark)
    on_journal.token = shop.token
    sent = []
    for each in (on_journal, shop):
        each.run_bus("payments")  # somebody takes what billing sends
        each.place(12)
        each.arm(5)
        run = each.run_to_end()
        assert (run.outcomes, run.sent) == ({"handled": 12}, 12)
        each.check(12)
        sent.append({envelope.publication_id: envelope.body for envelope in each.log("ChargeCard")})
    assert set(shop.effects()) == set(on_journal.effects())
    assert sent[0] == sent[1] and len(sent[0]) == 12
    shop.run_bus("payments")
    shop.check(12, "charges")
    with pytest.raises(fg.ViewTaken, match=r"billing\.OrderPlaced\.shop is consumed through the log, the stream log-"):
        shop.run_bus("billing")


def test_what_cannot_run_is_refused_before_anything_is_taken(shop: Shop) -> None:
    shop.run_bus("payments")
    with pytest.raises(fg.ViewTaken, match=r"payments\.ChargeCard: consumed through the queue"):
        shop.run("payments")
    name = shop.url.partition("stream=")[2].partition("&")[0]
    vhost = os.environ.get("PYTEST_XDIST_WORKER", "main")
    alone = f"{address('FAREGATE_TEST_RABBITMQ_STREAM')}{vhost}?stream={name}"
    with pytest.raises(fg.ConfigurationError, match=f"would reach no queue. Name the broker.*stream={name}"):
        shop.run(source=alone)
    with pytest.raises(fg.ConfigurationError, match=r"has no log: let everything go into a stream, too, with \?stream"):
        shop.run(source=shop.url.partition("?")[0])
    assert open_log(shop.url).topology().queue("billing.OrderPlaced.shop") is None
    shop.run_bus("billing")


@pytest.mark.full
def test_a_node_without_a_store_publishes_to_the_queues(shop: Shop) -> None:
    shop.place(6)
    shop.place(1, total=-1)
    run = shop.run_to_end("counting", store=None)
    assert run.outcomes == {"handled": 6, "dead": 1}
    assert sorted(msgspec.json.decode(each.body)["number"] for each in shop.log("Summed")) == list(range(6))
    [letter] = dead_letters(shop, run_shop.counting)
    assert (letter.queue, letter.tries) == ("counting.OrderPlaced.shop", 1)
    assert "a negative total" in letter.error
    assert shop.run_to_end("counting", store=None).outcomes == {}


@pytest.mark.full
def test_a_node_is_handed_over_and_back(shop: Shop) -> None:
    shop.run_bus("billing", "payments")
    shop.place(6)  # they wait in the queue of billing
    assert shop.run_to_end(handover=True).outcomes == {"handled": 6}
    shop.place(4)
    [done] = hand_over(run_shop.billing, shop.url, open_store(shop.store, SystemClock()), "queue")
    assert (done.view, done.epoch, done.changed) == ("queue", 2, True)
    shop.place(2)
    shop.run_bus("billing", "payments")
    shop.check(12)
    [done] = hand_over(run_shop.billing, shop.url, open_store(shop.store, SystemClock()), "log")
    assert (done.view, done.epoch) == ("log", 3)
    shop.place(3)
    assert shop.run_to_end().outcomes["handled"] == 3
    shop.check(15)
    shop.run_bus("payments")
    shop.check(15, "charges")
    found = fg.spark.audit(shop.spark, journal=shop.url, store=shop.store, at_rest=True)
    assert found.ok, found.summary


@pytest.mark.full
def test_a_stretch_is_replayed_into_the_queues_of_one_node(shop: Shop) -> None:
    shop.place(6)
    shop.run_bus("billing", "payments")  # too late for the orders
    log = open_log(shop.url)
    assert shop.effects() == []
    end = log.latest()
    choice: dict[str, Any] = {"types": ["OrderPlaced"], "recipients": ["billing"], "name": "again"}
    for _ in range(2):  # the same under one name: once
        again = fg.spark.replay(shop.spark, journal=shop.url, end=end, **choice)
        assert (again.counts["messages"], again.counts["batches"]) == (6, 1)
    assert log.latest() == end + 6, "the same replay was published twice, or not into the stream"
    shop.run_bus("billing", "payments")
    shop.check(6)
    shop.check(6, "charges")
