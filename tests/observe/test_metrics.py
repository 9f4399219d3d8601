"""Metrics by OpenTelemetry and for Prometheus say what happened (docs/observability.md has the list)."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import faregate as fg
from faregate.observe.measuring import BOUNDS, Tries
from faregate.observe.metrics import METRICS, BusMetrics, buckets
from faregate.testing.clock import FakeClock
from faregate.transports.memory import MemoryTransport
from tests.observe.rig import LONG, OrderPlaced, Telemetry, three_nodes, until

PAGE = Path(__file__).parents[2] / "docs" / "observability.md"


def scraped(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """By the name of a sample, then by the values of its labels in the order of their names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


class Shop:
    """A node whose handler does what the order says, observed both ways."""

    def __init__(self, **options: Any) -> None:
        self.telemetry = Telemetry()
        self.prometheus = fg.observe.Prometheus(CollectorRegistry())
        self.shop, self.billing = fg.Node("shop"), fg.Node("billing")
        self.go_on = asyncio.Event()

        @self.billing.on(OrderPlaced, source="shop", retry=fg.Retry(1, delay=0), redeliver=fg.Redeliver(10))
        async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
            if order.order_id == "waits":
                await self.go_on.wait()
            if order.order_id == "retried" and ctx.attempt == 1:
                raise ValueError("once")
            if order.order_id == "dead":
                raise fg.Permanent("never")
            if order.order_id == "later" and not ctx.redeliveries:
                raise fg.RetryAfter(0.01)

        self.bus = fg.Bus(
            options.pop("transport", "memory:"),
            nodes=[self.shop, self.billing],
            observe=[self.telemetry.observer, self.prometheus],
            **options,
        )

    async def handle(self, *orders: str) -> None:
        for order in orders:
            await self.bus.publish(OrderPlaced(order_id=order))
        await self.bus.idle(LONG)


async def test_counts_of_outcomes_failures_and_retries_are_those_of_the_bus() -> None:
    shop = Shop()
    async with shop.bus:
        await shop.handle("fine", "fine", "retried", "dead")
        page = scraped(await shop.prometheus.page())
        otel = shop.telemetry.metrics()
    place = ("billing", "OrderPlaced", "shop")
    for outcome, count in (("handled", 3), ("dead", 1), ("skipped", 0), ("duplicate", 0), ("redelivered", 0)):
        assert page["faregate_messages_total"]["billing", outcome, "shop", "OrderPlaced"] == count
        assert otel["faregate.messages"][(*place, outcome)] == count
    assert page["faregate_failures_total"] == {
        ("ValueError", "billing", "shop", "OrderPlaced"): 1,
        ("Permanent", "billing", "shop", "OrderPlaced"): 1,
    }
    assert otel["faregate.failures"] == {(*place, "ValueError"): 1, (*place, "Permanent"): 1}
    assert page["faregate_retries_total"]["billing", "shop", "OrderPlaced"] == 1 == otel["faregate.retries"][place]
    assert page["faregate_published_total"]["shop", "OrderPlaced"] == 4
    assert otel["faregate.published"]["shop", "OrderPlaced"] == 4
    assert page["faregate_alarms_total"][("dead-letter",)] == 1 == otel["faregate.alarms"][("dead-letter",)]


async def test_every_try_is_in_the_histogram() -> None:
    shop = Shop()
    async with shop.bus:
        await shop.handle("fine", "retried", "dead")
        page = scraped(await shop.prometheus.page())
        otel = shop.telemetry.metrics()
    place = ("billing", "OrderPlaced", "shop")
    assert page["faregate_try_seconds_count"]["billing", "shop", "OrderPlaced"] == 4
    assert page["faregate_try_seconds_bucket"]["+Inf", "billing", "shop", "OrderPlaced"] == 4
    assert page["faregate_try_seconds_sum"]["billing", "shop", "OrderPlaced"] > 0
    assert otel["faregate.try_seconds.count"][place] == 4
    assert otel["faregate.try_seconds.bucket"][(*place, "+Inf")] == 4
    assert otel["faregate.try_seconds.sum"][place] > 0


def test_a_duration_is_counted_up_to_its_bound_and_above() -> None:
    tries = Tries(("billing", "OrderPlaced", "shop"))
    for seconds in (0.0, BOUNDS[0], 0.002, 0.04, 1_000.0):
        tries.add(seconds, 1)
    found = dict(buckets(tries))
    assert [found[bound] for bound in ("0.001", "0.0025", "0.025", "0.05", "60.0", "+Inf")] == [2, 3, 3, 4, 4, 5]


async def test_what_waits_what_is_busy_and_what_is_paused() -> None:
    shop = Shop()
    place = ("billing", "shop", "OrderPlaced")
    async with shop.bus:
        await shop.bus.publish(OrderPlaced(order_id="waits"))
        await until(lambda: shop.bus.counts()[0].busy)
        page = scraped(await shop.prometheus.page())
        assert page["faregate_busy_lanes"][place] == 1 and page["faregate_waiting_messages"][place] == 1
        assert page["faregate_paused"][place] == 0
        await shop.bus.pause("billing", OrderPlaced)
        assert scraped(await shop.prometheus.page())["faregate_paused"][place] == 1
        assert shop.telemetry.metrics()["faregate.paused"]["billing", "OrderPlaced", "shop"] == 1
        shop.go_on.set()
        await shop.bus.resume("billing", OrderPlaced)
        await shop.bus.idle(LONG)
        assert scraped(await shop.prometheus.page())["faregate_waiting_messages"][place] == 0


async def test_a_thread_that_collects_asks_the_transport_on_the_loop_of_the_bus() -> None:
    shop = Shop()
    async with shop.bus:
        await shop.bus.pause("billing", OrderPlaced)
        await shop.bus.publish(OrderPlaced(order_id="fine"))
        found = await asyncio.to_thread(shop.telemetry.metrics)
        assert found["faregate.waiting_messages"]["billing", "OrderPlaced", "shop"] == 1
        page = await asyncio.to_thread(generate_latest, shop.prometheus._registry)
        assert scraped(page)["faregate_waiting_messages"]["billing", "shop", "OrderPlaced"] == 1


async def test_the_outbox_shows_what_it_holds_and_since_when(tmp_path: Path) -> None:
    class Refusing(MemoryTransport):
        refuses = True

        async def publish(self, envelopes: Any) -> None:
            if self.refuses and envelopes[0].causation_id is not None:
                raise fg.BrokerUnavailable("down")
            await super().publish(envelopes)

    clock = FakeClock()
    transport, telemetry = Refusing(clock=clock), Telemetry()
    prometheus = fg.observe.Prometheus(CollectorRegistry())
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> OrderPlaced:
        return order

    url = f"sqlite:{tmp_path / 'shop.db'}"
    observe = [telemetry.observer, prometheus]
    async with fg.Bus(transport, nodes=[shop, billing], store=url, clock=clock, observe=observe) as bus:
        await bus.publish(OrderPlaced(order_id="17"), node="shop")
        await until(lambda: bus.outboxes()[0].waiting)
        clock.jump(5)
        page = scraped(await prometheus.page())
        shown = ("sqlite:shop.db",)  # and not where that is
        assert page["faregate_outbox_messages"] == {shown: 1}
        assert page["faregate_outbox_oldest_seconds"][shown] == pytest.approx(5, abs=0.5)
        assert telemetry.metrics()["faregate.outbox_messages"][shown] == 1
        transport.refuses = False
        await clock.advance(60)
        await until(lambda: not bus.outboxes()[0].waiting)
        assert bus.outboxes()[0].oldest_seconds is None


async def test_a_store_is_shown_without_folder_user_and_password(tmp_path: Path) -> None:
    names = ["one", "two", "three", "four"]
    urls = [
        f"sqlite:{tmp_path / 'a' / 'shop.db'}",
        f"sqlite:{tmp_path / 'b' / 'shop.db'}",
        "postgresql://zoe:s3cret@db.example:5433/shop?sslpassword=s3cret&application_name=me",
        "postgresql://zoe@db.example/till?password=s3cret&user=zoe",
    ]
    bus = fg.Bus("memory:", nodes=[fg.Node(name) for name in names], store=dict(zip(names, urls, strict=True)))
    read = dict(BusMetrics(bus, None).read("outbox_messages"))
    assert read == {
        ("sqlite:shop.db",): 0,  # both: a page may name a series once
        ("postgresql://db.example:5433/shop",): 0,
        ("postgresql://db.example/till",): 0,
    }


async def test_what_comes_again_later_is_counted_as_redelivered() -> None:
    shop = Shop()
    async with shop.bus:
        await shop.bus.publish(OrderPlaced(order_id="later"))
        await until(lambda: shop.bus.counts()[0].redelivered)
        page = scraped(await shop.prometheus.page())
        assert page["faregate_messages_total"]["billing", "redelivered", "shop", "OrderPlaced"] >= 1


async def test_a_stopped_bus_is_gone_from_both() -> None:
    shop = Shop()
    async with shop.bus:
        await shop.handle("fine")
    assert b"faregate" not in generate_latest(shop.prometheus._registry)
    assert "faregate.messages" not in shop.telemetry.metrics()


async def test_roots_that_go_through_the_outbox_for_tokens_are_published_once(tmp_path: Path) -> None:
    telemetry = Telemetry()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", dedup="tokens")
    async def bill(order: OrderPlaced) -> None:
        pass

    url = f"sqlite:{tmp_path / 'shop.db'}"
    async with fg.Bus("memory:", nodes=[shop, billing], store=url, observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        assert telemetry.metrics()["faregate.published"] == {("shop", "OrderPlaced"): 1}
    assert [span.name for span in telemetry.spans if span.name.startswith("publish")] == ["publish shop.OrderPlaced"]


async def test_nothing_that_handlers_return_or_raise_changes(tmp_path: Path) -> None:
    async with three_nodes(tmp_path, [Telemetry().observer, fg.observe.Prometheus(CollectorRegistry())]) as bus:
        await bus.publish_many([OrderPlaced(order_id=str(number)) for number in range(60)])
        await bus.idle(LONG)
        assert bus.outcomes()["handled"] == 180


def rows() -> Iterator[str]:
    for name, metric in METRICS.items():
        yield f"faregate_{name}{'_total' if metric.kind == 'counter' else ''}"


def test_the_docs_list_every_metric_and_no_other() -> None:
    listed = re.findall(r"^\| `(faregate_\w+)`", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(rows())
