"""The kill switch on a real RabbitMQ: what was fetched comes back in order, and an outage costs no dead letter."""

import asyncio
import uuid
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.bus.outage import worker_of
from tests.rabbitmq.rig import remove_queues

pytestmark = pytest.mark.services
LONG = 240
SAMPLE, TRIES = 6, 2


class Step(fg.Event, key="key"):
    key: str
    number: int


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


ORDERED = {"order": fg.ByKey(lanes=4), "partitions": 2}


@pytest.mark.parametrize("trips", ["by rate", "at once"])
@pytest.mark.parametrize(
    ("options", "has_store"),
    [(ORDERED, True), ({"order": fg.Parallel(4)}, True), ({"order": fg.Parallel(4)}, False)],
    ids=["by key", "any order", "without a store"],
)
async def test_what_was_fetched_comes_back_in_order_after_a_trip(
    options: dict[str, Any], has_store: bool, trips: str, broker: str, tmp_path: Path
) -> None:
    suffix = uuid.uuid4().hex[:8]
    author, reader = fg.Node(f"author-{suffix}"), fg.Node(f"reader-{suffix}")
    error = OSError("down") if trips == "by rate" else fg.Unavailable("down", retry_after=0.3)
    ended: dict[str, list[int]] = {}
    redeliveries: set[int] = set()
    is_down, calls = False, 0

    @reader.on(
        Step,
        source=author.name,
        retry=fg.Retry(TRIES - 1, delay=0.01),
        redeliver=fg.Redeliver(0.5, 0.5),
        kill_switch=fg.KillSwitch(sample=SAMPLE, every=0.3),
        **options,
    )
    async def work(step: Step, ctx: fg.Context) -> None:
        nonlocal calls, is_down
        calls += 1
        redeliveries.add(ctx.redeliveries)
        if calls == 40:
            is_down = True
        if is_down:
            raise copy(error)
        ended.setdefault(step.key, []).append(step.number)

    store = {"store": {reader.name: f"sqlite:{tmp_path}/store.db"}} if has_store else {}
    sent = [Step(key=f"key-{number % 5}", number=number) for number in range(200)]
    async with asyncio.timeout(LONG), fg.Bus(broker, nodes=[author, reader], **store) as bus:  # type: ignore[arg-type]
        await bus.publish_many(sent, node=author)
        await until(lambda: worker_of(bus).switch.is_open)
        await until(lambda: worker_of(bus).busy == 0)
        begun = calls
        await asyncio.sleep(1.5)
        assert calls - begun <= (1.5 / 0.3 + 2) * TRIES, "while it is open one message is tried at a time"
        is_down = False
        await until(lambda: sum(map(len, ended.values())) >= len(sent))
        assert bus.outcomes()["dead"] == 0
        assert bus.outcomes()["redelivered"] < (SAMPLE if trips == "by rate" else 1)
        assert await bus.dead_letters() == []
        assert isinstance(bus.transport, RabbitmqQueue)
        await remove_queues(bus.transport)
    assert redeliveries <= ({0, 1} if trips == "by rate" else {0})
    handled = sorted(number for numbers in ended.values() for number in numbers)
    assert (handled if has_store else sorted(set(handled))) == list(range(200))
    if "partitions" in options:
        assert ended == {key: sorted(numbers) for key, numbers in ended.items()}
