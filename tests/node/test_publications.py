"""Options of a publication are said in one way: `fg.publish(…)` and `fg.send(…)` are taken wherever messages are."""

import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.message import Envelope
from faregate.node.outgoing import _CHECKS
from faregate.ports.store import SCHEDULE_KEY


class Placed(fg.Event):
    order_id: str


class Charge(fg.Command):
    order_id: str


PLACED, CHARGE = Placed(order_id="17"), Charge(order_id="17")
OPTIONS: fg.Options = {"delay": 5.0, "headers": {"team": "shop"}, "expires": 60.0}


class Till:
    """A node that takes both messages and keeps what it saw of their envelopes."""

    def __init__(self) -> None:
        self.node = fg.Node("till")
        self.seen: list[Envelope] = []

        @self.node.on(Placed, source="shop")
        async def place(placed: Placed, ctx: fg.Context) -> None:
            self.seen.append(ctx.envelope)

        @self.node.on(Charge)
        async def charge(command: Charge, ctx: fg.Context) -> None:
            self.seen.append(ctx.envelope)


@pytest.fixture
def till() -> Till:
    return Till()


@pytest.fixture
async def bench(till: Till) -> AsyncIterator[fg.testing.Bench]:
    async with fg.testing.bench(till.node) as bench:
        yield bench


def said(envelope: Envelope) -> tuple[str, float, dict[str, str], float]:
    assert envelope.deliver_at is not None and envelope.expires_at is not None
    after = envelope.deliver_at - envelope.sent_at
    return envelope.type, round(after, 3), envelope.headers, round(envelope.expires_at - envelope.deliver_at, 3)


async def test_a_value_is_taken_as_its_message_with_options_is(bench: fg.testing.Bench, till: Till) -> None:
    await bench.publish(PLACED, **OPTIONS)
    await bench.publish(fg.publish(PLACED, **OPTIONS))
    await bench.send(CHARGE, **OPTIONS)
    await bench.send(fg.send(CHARGE, to="till", **OPTIONS))
    await bench.bus.publish(PLACED, node="shop", **OPTIONS)
    await bench.bus.publish(fg.publish(PLACED, **OPTIONS), node="shop")
    await bench.bus.publish(fg.send(CHARGE, to=till.node, **OPTIONS), node="shop")
    await bench.bus.send(CHARGE, to="till", node="shop", **OPTIONS)
    await bench.bus.send(fg.send(CHARGE, to="till", **OPTIONS), node="shop")
    await bench.bus.publish_many([fg.publish(PLACED, **OPTIONS), fg.send(CHARGE, to="till", **OPTIONS)], node="shop")
    await bench.advance(5)
    await bench.settle()
    assert sorted(said(each)[0] for each in till.seen) == ["Charge"] * 6 + ["Placed"] * 5
    assert {said(each)[1:] for each in map(_frozen, till.seen)} == {(5.0, (("team", "shop"),), 60.0)}


def _frozen(envelope: Envelope) -> Any:
    return msgspec.structs.replace(envelope, headers=tuple(envelope.headers.items()))  # type: ignore[arg-type]


async def test_handlers_record_values_as_they_record_messages() -> None:
    node = fg.Node("desk")

    @node.on(Charge)
    async def both(command: Charge, ctx: fg.Context) -> fg.Outgoing:
        ctx.publish(PLACED, id_key="one", **OPTIONS)
        ctx.publish(fg.publish(PLACED, id_key="two", **OPTIONS))
        ctx.send(CHARGE, to=fg.Node("bank"), **OPTIONS)
        ctx.send(fg.send(CHARGE, to="bank", **OPTIONS))
        return fg.publish(PLACED, id_key="three", **OPTIONS)

    async with fg.testing.bench(node) as bench:
        await bench.send(CHARGE)
        await bench.settle()
        sent = bench.envelopes()
    assert [each.type for each in sent] == ["Placed", "Placed", "Charge", "Charge", "Placed"]
    assert [each.destination for each in sent] == [None, None, "bank", "bank", None]
    keys = [each.headers.pop(SCHEDULE_KEY, None) for each in sent]
    assert keys == ["one", "two", None, None, "three"], "what is due later has its key with it"
    assert all(said(each)[1:] == (5.0, {"team": "shop"}, 60.0) for each in sent)


async def test_an_outbox_takes_values(tmp_path: Path, till: Till) -> None:
    shop, path = fg.Node("shop"), tmp_path / "shop.db"
    async with fg.Bus("memory:", nodes=[shop, till.node], store=f"sqlite:{path}") as bus:
        outbox = fg.outbox(_committing(path), node=shop)
        first = outbox.publish(fg.publish(PLACED, idempotency_key="17"))
        again = outbox.publish(PLACED, idempotency_key="17")
        command = outbox.send(fg.send(CHARGE, to=till.node, headers={"a": "b"}))
        await bus.idle(60)
    assert first == again
    assert sorted(each.publication_id for each in till.seen) == sorted([first, command])


def _committing(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


@pytest.mark.parametrize("transport", ["memory:", "journal:{}"])
async def test_many_with_one_idempotency_key_are_one_publication(transport: str, tmp_path: Path, till: Till) -> None:
    shop = fg.Node("shop")
    async with fg.Bus(transport.format(tmp_path / "journal"), nodes=[shop, till.node]) as bus:
        value = fg.publish(PLACED, idempotency_key="17")
        ids = await bus.publish_many([value, value, PLACED], node=shop)
        ids += [await bus.publish(PLACED, node=shop, idempotency_key="17")]
        await bus.idle(60)
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert sorted(each.publication_id for each in till.seen) == sorted(set(ids))


async def test_an_unknown_option_is_named_beside_those_there_are(bench: fg.testing.Bench) -> None:
    wrong: Any = {"dely": 3}
    for call in (fg.publish, bench.publish, bench.bus.publish):
        with pytest.raises(fg.ConfigurationError, match=r"no option dely=.*idempotency_key, delay, at, headers"):
            found = call(PLACED, **wrong)
            await found  # type: ignore[misc]
    with pytest.raises(fg.ConfigurationError, match="no option dely="):
        await bench.bus.send(CHARGE, to="till", **wrong)


async def test_an_id_key_outside_of_a_handler_is_refused(bench: fg.testing.Bench) -> None:
    for message in (fg.publish(PLACED, id_key="1"), fg.send(CHARGE, to="till", id_key="1")):
        with pytest.raises(fg.ConfigurationError, match="outside of handlers give idempotency_key="):
            await bench.bus.publish(message, node="shop")
        with pytest.raises(fg.ConfigurationError, match="id_key='1'"):
            await bench.bus.publish_many([PLACED, message], node="shop")


async def test_an_idempotency_key_in_a_handler_is_refused() -> None:
    node = fg.Node("desk")

    @node.on(Charge, retry=None, redeliver=None)
    async def answer(command: Charge) -> fg.Outgoing:
        return fg.publish(PLACED, idempotency_key="17")

    async with fg.testing.bench(node) as bench:
        await bench.send(CHARGE)
        await bench.settle()
        [dead] = bench.dead_letters()
        assert "'answer' sends <outgoing event Placed> with idempotency_key='17'" in dead.error
        assert bench.sent() == []


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 1, "at": 2.0},
        {"delay": -1},
        {"at": datetime(2030, 1, 1)},
        {"id_key": ""},
        {"idempotency_key": ""},
        {"idempotency_key": 17},
        {"idempotency_key": "\ud800"},
        {"id_key": "\ud800"},
        {"headers": {"a": 1}},
        {"expires": 0},
    ],
)
def test_an_option_that_cannot_be_is_refused_where_it_is_said(options: Any) -> None:
    with pytest.raises(fg.ConfigurationError):
        fg.publish(PLACED, **options)
    with pytest.raises(fg.ConfigurationError):
        fg.send(CHARGE, to="till", **options)


def test_an_option_of_none_is_as_if_it_were_left_out() -> None:
    none: Any = dict.fromkeys(fg.Options.__annotations__)
    for made in (fg.publish(PLACED, **none), fg.publish(PLACED)):
        assert [getattr(made, option) for option in none] == [None] * len(none)


async def test_a_value_has_its_options_already(bench: fg.testing.Bench) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"give delay to fg\.publish"):
        await bench.publish(fg.publish(PLACED), delay=3)
    with pytest.raises(fg.ConfigurationError, match=r"give to to fg\.publish"):
        await bench.bus.send(fg.send(CHARGE, to="till"), to="shop", node="shop")


async def test_a_command_without_a_destination_and_an_event_with_one_are_refused(bench: fg.testing.Bench) -> None:
    with pytest.raises(fg.BareCommand):
        await bench.bus.send(CHARGE, node="shop")
    with pytest.raises(fg.UnknownMessage, match="no command"):
        await bench.bus.send(fg.publish(PLACED), node="shop")
    with pytest.raises(fg.UnknownMessage, match="is a command"):
        await bench.bus.publish(CHARGE, node="shop")


def test_a_value_does_not_change() -> None:
    made = fg.publish(PLACED, at=datetime(2030, 1, 1, tzinfo=UTC))
    with pytest.raises(AttributeError):
        made.delay = 3  # type: ignore[misc]


def test_every_option_is_checked_and_is_a_field_of_what_goes_out() -> None:
    assert list(_CHECKS) == list(fg.Options.__annotations__)
    assert set(_CHECKS) <= set(fg.Outgoing.__struct_fields__)
