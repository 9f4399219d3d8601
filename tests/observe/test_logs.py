"""Log records of a handler's own logger name its node, message, correlation, key and lane."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator

import pytest

import faregate as fg
from faregate.core import at_hand
from faregate.testing import FakeClock
from tests.observe.rig import LONG, OrderPlaced

log = logging.getLogger("tests.observe.shop")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def starting(self, *texts: str) -> logging.LogRecord:
        [record] = [each for each in self.records if each.getMessage().startswith(texts)]
        return record

    def about(self, text: str) -> tuple[str, ...]:
        [record] = [each for each in self.records if each.getMessage() == text]
        return self.fields(record)

    def fields(self, record: logging.LogRecord) -> tuple[str, ...]:
        fields = ("node", "message_id", "correlation_id", "key", "lane")
        return tuple(getattr(record, field) for field in fields)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept()
    handler.addFilter(fg.observe.LogContext())
    log.addHandler(handler)
    log.setLevel("INFO")
    bus_log = logging.getLogger("faregate.bus")
    bus_log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    bus_log.removeHandler(handler)
    at_hand.wanted = False


def about(publication_id: str, key: str, lane: str = "lane-0") -> tuple[str, ...]:
    return "billing", fg.ids.message_id(publication_id, "billing"), publication_id, key, lane


async def test_in_an_async_handler_its_tasks_and_its_threads(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    async def task() -> None:
        log.info("task")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced) -> None:
        log.info("handler")
        await asyncio.gather(task(), asyncio.to_thread(log.info, "thread"))

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        publication_id = await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        log.info("outside")
    for text in ("handler", "task", "thread"):
        assert kept.about(text) == about(publication_id, "17")
    assert kept.about("outside") == ("-",) * 5


async def test_in_a_def_handler_and_in_a_middleware(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.use
    async def first(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None:
        log.info("middleware")
        await call_next()

    @billing.on(OrderPlaced, source="shop", key="order_id")
    def bill(order: OrderPlaced) -> None:
        log.info("handler")

    async with fg.Bus("memory:", nodes=[shop, billing], store="memory:") as bus:
        publication_id = await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    assert kept.about("handler") == kept.about("middleware") == about(publication_id, "17")


async def test_handlers_that_interleave_are_told_apart_and_what_is_left_behind_keeps_its_message(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")
    left: list[asyncio.Task[None]] = []
    go_on, both = asyncio.Event(), asyncio.Barrier(2)

    async def stay(name: str) -> None:
        await go_on.wait()
        log.info("left behind by %s", name)

    @billing.on(OrderPlaced, source="shop", key="order_id", order=fg.ByKey(lanes=2))
    async def bill(order: OrderPlaced) -> None:
        left.append(asyncio.create_task(stay(order.order_id)))
        await both.wait()
        log.info("handling %s", order.order_id)

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        ids = {name: await bus.publish(OrderPlaced(order_id=name)) for name in ("a", "b")}
        await bus.idle(LONG)
        more = {name: await bus.publish(OrderPlaced(order_id=name)) for name in ("c", "d")}
        await bus.idle(LONG)
        go_on.set()
        await asyncio.gather(*left)
    lanes = set()
    for name, publication_id in {**ids, **more}.items():
        found = kept.about(f"handling {name}")
        assert found[:4] == about(publication_id, name)[:4]
        assert kept.about(f"left behind by {name}") == found
        lanes.add(found[4])
    assert lanes == {"lane-0", "lane-1"}


async def test_a_key_cannot_break_the_line_and_fields_of_the_program_stay(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced) -> None:
        log.info("plain")
        log.info("own", extra={"key": "mine"})

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        await bus.publish(OrderPlaced(order_id="17\nERROR forged"))
        await bus.idle(LONG)
    assert kept.about("plain")[3] == "17\\nERROR forged"
    assert kept.about("own")[3] == "mine"


async def test_a_message_that_comes_again_and_becomes_a_dead_letter_is_named(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")
    again = fg.Redeliver(2.14655)

    @billing.on(OrderPlaced, source="shop", key="order_id", retry=fg.Retry(0), redeliver=again)
    async def bill(order: OrderPlaced) -> None:
        raise ValueError("broken\nline two")

    clock = FakeClock()
    async with fg.Bus("memory:", nodes=[shop, billing], clock=clock, stall_seconds=None) as bus:
        publication_id = await bus.publish(OrderPlaced(order_id="17"))
        while not bus.alarms:
            await clock.advance(1.0)
    later = kept.starting("OrderPlaced ")
    assert later.getMessage().endswith("failed and is delivered again in 2.1 s: ValueError: broken")
    alarm = kept.starting("alarm dead-letter at billing, message ")
    assert kept.fields(later) == kept.fields(alarm) == about(publication_id, "17")


async def test_an_alarm_about_no_message_has_its_node_only_whichever_message_came_last(kept: Kept) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")
    asked: list[bool] = []

    async def probe() -> bool:
        log.info("probe")
        asked.append(True)
        return True

    switch = fg.KillSwitch(probe=probe, every=0.01)

    @billing.on(OrderPlaced, source="shop", key="order_id", retry=fg.Retry(0), kill_switch=switch)
    async def bill(order: OrderPlaced) -> None:
        if not asked:
            raise fg.Unavailable("the bank is down\nsince noon", retry_after=0.01)

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    alarm = kept.starting("alarm kill-switch at billing: ")
    assert "consumes no more: Unavailable: the bank is down. What" in alarm.getMessage()
    assert kept.fields(alarm) == ("billing", "-", "-", "-", "-")
    assert kept.about("probe") == ("-",) * 5


async def test_nothing_is_noted_until_somebody_asks() -> None:
    assert not at_hand.wanted
    found: list[object] = []
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        found.append(at_hand.message_at_hand())

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    assert found == [None]
