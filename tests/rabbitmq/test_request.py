"""Requests over RabbitMQ: whoever asks and whoever answers are processes of their own."""

import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate import ids
from faregate.message import REPLY_TO
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.bus.test_request import AskPrice, PriceFound, Shop
from tests.rabbitmq.proxy import proxied
from tests.rabbitmq.rig import remove_queues

LONG = 60.0
ROOT = Path(__file__).parents[2]


def make_prices() -> Shop:
    """With names of its own, so that no test sees the messages of another."""
    return Shop(f"-{uuid.uuid4().hex[:8]}")


@asynccontextmanager
async def answering(broker: str, prices: Shop, store: str | None) -> AsyncIterator[fg.Bus]:
    async with fg.Bus(broker, nodes=[prices.prices], store=store) as bus:
        yield bus
        assert isinstance(bus.transport, RabbitmqQueue)
        await remove_queues(bus.transport)


def asking(broker: str, prices: Shop) -> fg.Bus:
    return fg.Bus(broker, nodes=[prices.shop])


def ask(bus: fg.Bus, prices: Shop, sku: str, **more: Any) -> Any:
    return bus.request(AskPrice(sku=sku), **{"to": prices.prices, "timeout": LONG, **more})


@pytest.fixture(params=[False, True], ids=["without-store", "with-store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return f"sqlite:{tmp_path}/prices.db" if request.param else None


async def test_a_thousand_requests_at_once_each_have_their_own_answer(broker: str, store: str | None) -> None:
    prices = make_prices()
    async with answering(broker, prices, store) as there, asking(broker, prices) as bus:
        found = await asyncio.gather(*(ask(bus, prices, str(number)) for number in range(1000)))
        assert found == [PriceFound(sku=str(number), cents=100) for number in range(1000)]
        assert bus.request_counts() == fg.RequestCounts(0, 1000, 0, 0, 0, 0, 0)
        assert there.request_counts() == fg.RequestCounts(0, 0, 0, 0, 0, 0, 0)
        await there.idle(LONG)
    assert set(prices.calls.values()) == {1}


async def test_late_replies_failures_and_replies_to_nobody(broker: str, store: str | None) -> None:
    prices = make_prices()
    async with answering(broker, prices, store) as there, asking(broker, prices) as bus:
        with pytest.raises(fg.RequestFailed, match="no such shelf"):
            await ask(bus, prices, "broken")
        await bus.send(AskPrice(sku="17"), to=prices.prices)
        prices.may_answer.clear()
        with pytest.raises(fg.RequestTimeout):
            await ask(bus, prices, "18", timeout=0.2)
        prices.may_answer.set()
        assert (await ask(bus, prices, "19")).sku == "19"
        await there.idle(LONG)
        while not bus.request_counts().late:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert bus.request_counts() == fg.RequestCounts(0, 1, failed=1, timed_out=1, late=1, unasked=0, unreached=0)
        assert there.request_counts().unasked == 1


async def test_a_request_to_a_node_that_nobody_runs_is_refused_at_once(broker: str) -> None:
    prices = make_prices()
    async with asking(broker, prices) as bus:
        with pytest.raises(fg.Unroutable, match=prices.prices.name):
            await ask(bus, prices, "17")
        assert bus.request_counts().waiting == 0


async def test_whoever_asked_is_killed_and_nobody_else_is_hurt(broker: str, store: str | None) -> None:
    prices = make_prices()
    prices.may_answer.clear()
    async with answering(broker, prices, store) as there:
        command = (sys.executable, "-m", "tests.rabbitmq.asker", broker, prices.shop.name, prices.prices.name)
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        async with asyncio.timeout(LONG):
            await prices.begun.wait()
            process.send_signal(signal.SIGKILL)
            await process.wait()
            address = prices.contexts[0].envelope.headers[REPLY_TO]
            while not await there.transport.reply([probe(address)]):  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # until the broker notices
        prices.may_answer.set()
        await there.idle(LONG)
        assert there.request_counts().unreached == 1
        assert not await there.dead_letters()
        if store is not None:
            assert not await there.store_of(prices.prices).undispatched(10, None)  # type: ignore[union-attr]
        async with asking(broker, prices) as bus:
            assert (await ask(bus, prices, "18")).sku == "18"
    assert prices.calls == {"17": 1, "18": 1}


async def test_a_request_goes_on_waiting_over_a_lost_connection(broker: str) -> None:
    prices = make_prices()
    prices.may_answer.clear()
    async with (
        answering(broker, prices, None) as there,
        proxied(broker) as (url, proxy),
        asking(url, prices) as bus,
    ):
        waiting = asyncio.ensure_future(ask(bus, prices, "17"))
        await prices.begun.wait()
        address = prices.contexts[0].envelope.headers[REPLY_TO]
        proxy.cut()
        async with asyncio.timeout(LONG):
            await proxy.until_connected(proxy.connections + 2)
            while bus.request_counts().late == 0:  # the queue is there again, under its name
                await there.transport.reply([probe(address)])  # type: ignore[attr-defined]
                await asyncio.sleep(0.05)
        prices.may_answer.set()
        assert (await waiting).sku == "17"


async def test_nobody_is_answered_outside_of_queues_for_replies(broker: str) -> None:
    """An address is what anybody wrote into a header."""
    prices = make_prices()
    async with answering(broker, prices, None) as there, asking(broker, prices) as bus:
        queue = f"{prices.prices.name}.AskPrice"
        await bus.send(AskPrice(sku="17"), to=prices.prices, headers={REPLY_TO: queue})
        await prices.begun.wait()
        await there.idle(LONG)
        assert there.request_counts().unreached == 1
        assert there.outcomes()["handled"] == 1 and not await there.dead_letters()


def probe(address: str) -> fg.Envelope:
    return fg.Envelope(ids.root_id(), "Probe", "reply", "test", destination=address)
