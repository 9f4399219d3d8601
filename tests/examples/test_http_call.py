"""The safe HTTP call: the bank is asked more often than it charges, whatever it answers and whoever crashes."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import faregate as fg
from examples.http_call.bank import Bank, create_app
from examples.http_call.payments import CardCharged, CardDeclined, ChargeCard, payments
from tests.examples.program import Program, count, faregate

ORDERS = 9


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.fixture
async def client(bank: Bank) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(bank)), base_url="http://bank") as client:
        yield client


async def send_orders(bench: fg.testing.Bench) -> None:
    for number in range(ORDERS):
        await bench.send(ChargeCard(order_id=f"{number}", amount=40))
    await bench.settle()


async def test_a_lost_answer_charges_nobody_twice(bank: Bank, client: httpx.AsyncClient) -> None:
    async with fg.testing.bench(payments, provide={httpx.AsyncClient: client}) as bench:
        await send_orders(bench)
        assert len(bench.sent(CardCharged)) == ORDERS
    assert bank.calls > ORDERS, "answers should have been lost, or this shows nothing"
    assert bank.charged == {f"{number}": 1 for number in range(ORDERS)}


async def test_a_crash_after_the_call_charges_nobody_twice(bank: Bank, client: httpx.AsyncClient) -> None:
    with fg.testing.crash_at("unit.before-commit"):
        async with fg.testing.bench(payments, provide={httpx.AsyncClient: client}) as bench:
            await send_orders(bench)
            assert len(bench.sent(CardCharged)) == ORDERS
    assert bank.calls > ORDERS
    assert set(bank.charged.values()) == {1}


async def test_a_key_of_its_own_for_each_try_would_charge_twice(
    bank: Bank, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: this is what it would see."""
    post, tries = client.post, iter(range(1_000))

    async def careless(url: str, *, json: object, headers: dict[str, str]) -> httpx.Response:
        return await post(url, json=json, headers={"Idempotency-Key": f"try-{next(tries)}"})

    monkeypatch.setattr(client, "post", careless)
    async with fg.testing.bench(payments, provide={httpx.AsyncClient: client}) as bench:
        await send_orders(bench)
    assert max(bank.charged.values()) > 1


async def test_what_the_bank_says_decides(bank: Bank, client: httpx.AsyncClient) -> None:
    bank.limited = 1
    async with fg.testing.bench(payments, provide={httpx.AsyncClient: client}) as bench:
        await bench.send(ChargeCard(order_id="17", amount=2_000))
        await bench.settle()
        assert bench.sent(CardDeclined) == [CardDeclined(order_id="17", why="the card has not that much")]
        assert bench.outcomes()["redelivered"] == 1, "after 429"
        await bench.send(ChargeCard(order_id="18", amount=0))
        await bench.settle()
        [letter] = bench.dead_letters()
        assert (letter.reason, letter.tries) == ("permanent", 1)
    assert not bank.charged


def test_the_bus_and_the_bank_run_as_the_readme_starts_them(tmp_path: Path) -> None:
    bus, place = "examples.http_call.payments:bus", {"PAYMENTS_DATA": str(tmp_path)}
    bank = ["-m", "uvicorn", "--factory", "examples.http_call.bank:create_app", "--port", "0"]
    with Program(tmp_path, *bank) as bank_program:
        place["BANK_URL"] = bank_program.line(r"running on (http://\S+)")[1]
        with Program(tmp_path, "-m", "faregate", "run", bus, **place) as running:
            running.line("running 1 subscription of 1 node")
            faregate(tmp_path, "publish", bus, "ChargeCard", '{"order_id": "17", "amount": 40}', **place)
            running.line("order 17 is charged")
            running.drain()
        bank_program.terminate()
        bank_program.communicate()
    assert "WARNING" not in "".join(running.said)
    assert count(tmp_path / "payments.db", "charges where order_id = '17'") == 1
