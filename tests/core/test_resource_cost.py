"""The alarm about a resource that is made for each message and takes longer than what it is made for."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

import faregate as fg
from faregate.core import pipeline
from faregate.core.resource_cost import SAMPLE, Cost


def noted(cost: Cost, making: float, using: float) -> None:
    for _ in range(SAMPLE):
        cost.note(making, using)


def test_told_once_until_it_recovers() -> None:
    told: list[tuple[float, float]] = []
    cost = Cost(lambda making, using: told.append((round(making, 6), round(using, 6))))
    noted(cost, 0.005, 0.01)
    assert not told
    noted(cost, 0.02, 0.01)
    noted(cost, 0.02, 0.01)
    assert told == [(0.02, 0.01)]
    noted(cost, 0.009, 0.01)  # hardly better
    noted(cost, 0.02, 0.01)
    assert len(told) == 1
    noted(cost, 0.004, 0.01)
    noted(cost, 0.02, 0.01)
    assert len(told) == 2


def test_what_takes_no_time_is_not_told() -> None:
    noted(Cost(lambda making, using: pytest.fail("it was told")), 0.0009, 0.0)


class OrderPlaced(fg.Event):
    order_id: str


class Client: ...


@pytest.mark.parametrize("making, alarms", [(0.02, 1), (0.005, 0)])
async def test_the_bus_sounds_it(monkeypatch: pytest.MonkeyPatch, making: float, alarms: int) -> None:
    now, billing = 0.0, fg.Node("billing")
    monkeypatch.setattr(pipeline, "perf_counter", lambda: now)

    @billing.provides
    async def client() -> AsyncIterator[Client]:
        nonlocal now
        now += making
        yield Client()

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced, client: Client) -> None:
        nonlocal now
        now += 0.01

    told: list[Any] = []
    async with fg.testing.bench(billing) as bench:
        bench.bus.on_alarm(told.append)
        for number in range(3 * SAMPLE):
            await bench.publish(OrderPlaced(order_id=str(number)))
        await bench.settle()
    assert [(each.kind, each.node) for each in told] == [("slow-resource", "billing")] * alarms
    if told:
        assert "the provider 'client' of node 'billing' takes 20.0 ms to make a Client" in told[0].text
        assert "10.0 ms" in told[0].text and 'scope="bus"' in told[0].text
