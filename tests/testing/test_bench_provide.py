"""`provide=` of a bench: resources of the test in place of the nodes' own."""

from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str


class Paid(fg.Event):
    by: str


class Bank:
    name = "the real bank"


class Session:
    def __init__(self, bank: Bank) -> None:
        self.name = f"session at {bank.name}"


class FakeBank:
    def __init__(self, name: str = "a fake") -> None:
        self.name = name


def paying_node(name: str = "payments") -> fg.Node:
    payments = fg.Node(name)

    @payments.provides(scope="bus")
    async def bank() -> AsyncIterator[Bank]:
        raise AssertionError("the real bank was opened")
        yield Bank()

    @payments.provides
    async def session(bank: Bank) -> AsyncIterator[Session]:
        yield Session(bank)

    @payments.on(OrderPlaced, source="shop")
    async def pay(order: OrderPlaced, session: Session) -> Any:
        return Paid(by=session.name)

    return payments


async def paid(*nodes: fg.Node, **options: Any) -> list[str]:
    async with fg.testing.bench(*nodes, **options) as bench:
        for number in ("1", "2"):
            await bench.publish(OrderPlaced(order_id=number))
            await bench.settle()
        return sorted(each.by for each in bench.sent(Paid))


async def test_an_instance_goes_to_every_node_that_asks_for_it() -> None:
    nodes = [paying_node(), paying_node("audit")]
    assert await paid(*nodes, provide={Bank: FakeBank()}) == ["session at a fake"] * 4
    with pytest.raises(fg.ResourceFailed, match="the real bank was opened"):  # the nodes are as they were
        await paid(*nodes)


async def test_a_fake_that_can_be_called_is_an_instance_all_the_same() -> None:
    fake = Mock()
    fake.name = "a mock"
    assert await paid(paying_node(), provide={Session: fake, Bank: FakeBank()}) == ["a mock"] * 2
    assert not fake.called


async def test_a_function_lives_as_long_as_what_it_stands_in_for() -> None:
    log: list[str] = []

    def bank() -> Iterator[FakeBank]:
        log.append("open bank")
        yield FakeBank(f"fake {len(log)}")
        log.append("close bank")

    async def session(bank: Bank, ctx: fg.Context) -> AsyncIterator[Any]:
        log.append(f"open session for {ctx.type}")
        yield Session(bank)
        log.append("close session")

    assert await paid(paying_node(), provide={Bank: bank, Session: session}) == ["session at fake 1"] * 2
    own = ["open session for OrderPlaced", "close session"]
    assert log == ["open bank", *own, *own, "close bank"]


async def test_a_lambda_and_a_resource_that_no_provider_makes() -> None:
    payments = fg.Node("payments")

    @payments.on(OrderPlaced, source="shop")
    async def pay(order: OrderPlaced, bank: Bank) -> Any:
        return Paid(by=bank.name)

    numbers = iter(range(10))
    assert await paid(payments, provide={Bank: lambda: FakeBank(str(next(numbers)))}) == ["0", "1"]


@pytest.mark.parametrize(
    "given, why",
    [
        (
            {Paid: Paid(by="x")},
            r"gives a Paid, and no function of 'payments' asks for one; they ask for: Bank, Session",
        ),
        ({Bank: FakeBank}, r"gives the class FakeBank for a Bank: give an instance, FakeBank\(\)"),
        ({"Bank": FakeBank()}, "maps the class of a resource"),
        ({Bank: lambda ctx: FakeBank()}, "takes the context of a message, and makes what outlives"),
        ({Bank: lambda some: FakeBank()}, "'some' that nothing can fill"),
    ],
)
async def test_what_is_refused(given: Any, why: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=why):
        await paid(paying_node(), provide=given)
