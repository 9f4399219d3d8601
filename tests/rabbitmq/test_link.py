"""How a connection comes back; its broker is a stand-in that loses connections as soon as they are made."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from faregate.ports.queue import Binding
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq import link as module
from faregate.transports.rabbitmq.address import Address
from faregate.transports.rabbitmq.link import Link
from faregate.transports.rabbitmq.queue import _Queue


class Losing(Link):
    """Every connection is lost at once, until it was made so often."""

    def __init__(self, times: int) -> None:
        super().__init__(cast(Address, SimpleNamespace(brokers=["first", "second"], url="amqp://here/")), "test")
        self.made = 0
        self.lasts = asyncio.Event()
        self._times = times

    async def _connect(self) -> None:
        self.made += 1
        closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.made < self._times:
            closing.set_result(None)
        else:
            self.lasts.set()
        self._connection = cast(Any, SimpleNamespace(closing=closing, close=self._close))
        self._connected.set()

    async def _close(self) -> None:
        pass


class Hanging(Link):
    """No channel is ever opened."""

    def __init__(self) -> None:
        super().__init__(cast(Address, SimpleNamespace(brokers=["first"], url="amqp://here/")), "test")
        self.asked = asyncio.Event()

    async def channel(self, kind: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_consumer_whose_making_is_cancelled_is_closed() -> None:
    """As that of a kill switch's trial, when somebody resumes by hand."""
    before = asyncio.all_tasks()
    transport = RabbitmqQueue("amqp://here/")
    transport._consuming, transport._endings = (link := Hanging()), cast(Any, None)
    binding = Binding(node="reader", type="Noted", kind="event", source="author")
    transport._queues[binding.queue] = _Queue(binding.queue, binding)
    making = asyncio.ensure_future(transport.consume(binding.queue, lambda held: None, prefetch=1))
    await link.asked.wait()
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert asyncio.all_tasks() == before, "it goes on until it has a channel, and consumes"
    assert not transport._consumers


async def test_connections_that_are_lost_as_soon_as_they_are_made_are_made_anew_ever_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", note)
    monkeypatch.setattr(module.random, "uniform", lambda low, high: high)
    link = Losing(8)
    await link._connect()
    link._task = asyncio.create_task(link._keep())
    await link.lasts.wait()
    await link.close()
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
