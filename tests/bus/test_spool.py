"""`bus.spool` on a transport without a spool, as brokers are: it is opened for each message."""

import asyncio

import pytest

import faregate as fg


class Placed(fg.Event):
    number: int


async def test_messages_that_are_spooled_at_once_open_the_transport_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = fg.Bus("memory:", nodes=[fg.Node("shop")])
    monkeypatch.setattr(bus.transport, "in_process", False)
    steps: list[str] = []
    for name in ("open", "close"):

        async def step(name: str = name, then: object = getattr(bus.transport, name)) -> None:
            steps.append(name)
            await asyncio.sleep(0)
            await then()  # type: ignore[operator]

        monkeypatch.setattr(bus.transport, name, step)
    await asyncio.gather(*(bus.spool(Placed(number=number), node="shop") for number in range(3)))
    assert steps == ["open", "close"] * 3
