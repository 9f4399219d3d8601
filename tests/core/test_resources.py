"""Resources that a node provides to its handlers and middlewares, one for each message."""

from collections.abc import AsyncIterator
from typing import Any

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


class Session:
    def __init__(self, number: int) -> None:
        self.number = number


def session_node(log: list[str]) -> fg.Node:
    """A node whose messages each get a numbered session; `log` tells its life."""
    billing = fg.Node("billing")
    opened = 0

    @billing.provides
    async def session(ctx: fg.Context) -> AsyncIterator[Session]:
        nonlocal opened
        opened += 1
        log.append(f"open {opened} for {ctx.source}")
        number = opened
        try:
            yield Session(number)
        except BaseException as error:
            log.append(f"failed {number}: {error}")
            raise
        else:
            log.append(f"close {number}")

    return billing


async def test_handler_and_middleware_of_one_message_share_one_resource() -> None:
    log: list[str] = []
    billing = session_node(log)

    async def with_session(ctx: fg.Context, call_next: Any, session: Session) -> None:
        log.append(f"middleware {session.number}")
        await call_next()

    billing.use(with_session)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced, ctx: fg.Context, session: Session) -> None:
        log.append(f"handler {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.publish(OrderPlaced(order_id="2"))
        await bench.settle()

    assert log == [
        "open 1 for shop",
        "middleware 1",
        "handler 1",
        "close 1",
        "open 2 for shop",
        "middleware 2",
        "handler 2",
        "close 2",
    ]


async def test_a_plain_function_handler_gets_resources_too() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop")
    def bill(order: OrderPlaced, session: Session) -> None:
        log.append(f"handler {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
    assert log == ["open 1 for shop", "handler 1", "close 1"]


async def test_a_resource_is_told_of_the_failure_and_released() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced, session: Session) -> None:
        raise RuntimeError("no luck")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert log == ["open 1 for shop", "failed 1: no luck"]


async def test_a_resource_that_cannot_be_opened_follows_the_failure_policy() -> None:
    opened = 0
    billing = fg.Node("billing")

    @billing.provides
    async def session() -> AsyncIterator[Session]:
        nonlocal opened
        opened += 1
        if opened < 3:
            raise ConnectionError("no connection")
        yield Session(opened)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=fg.Redeliver(10, 10, 10))
    async def bill(order: OrderPlaced, session: Session) -> Any:
        return Noted(text=f"session {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="session 3")]
        assert bench.outcomes()["handled"] == 1


async def test_a_handler_that_does_not_ask_opens_no_resource() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return Noted(text="done")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="done")]
    assert log == []
