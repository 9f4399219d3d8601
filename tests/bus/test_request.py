"""Requests: a command whose sender waits for the answer of its handler, on the embedded broker."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.message import REPLY_TO
from faregate.ports import faults
from faregate.testing import FakeClock, crash_at
from faregate.transports.memory import MemoryTransport
from tests.bus.core_only import CoreOnly

LONG = 30.0
ROOT = Path(__file__).parents[2]
PLACES = ["memory", "memory-with-store", "journal", "journal-with-store"]


class AskPrice(fg.Command):
    sku: str


class PriceFound(fg.Event):
    sku: str
    cents: int = 0


class PriceUnknown(fg.Event, wire="price-unknown"):
    sku: str


class Looked(fg.Event):
    sku: str


@dataclass
class Stock:
    sku: str
    left: int


class Shop:
    """A shop that asks and prices that answer."""

    def __init__(self, suffix: str = "", **policy: Any) -> None:
        self.shop, self.prices = fg.Node(f"shop{suffix}"), fg.Node(f"prices{suffix}")
        self.calls: Counter[str] = Counter()
        self.contexts: list[fg.Context] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.begun = asyncio.Event()
        policy = {"retry": fg.Retry(0), "redeliver": fg.Redeliver(), "order": fg.Parallel(100), **policy}

        @self.prices.on(AskPrice, **policy)
        async def find(asked: AskPrice, ctx: fg.Context) -> Any:
            self.calls[asked.sku] += 1
            self.contexts.append(ctx)
            self.begun.set()
            await self.may_answer.wait()
            if asked.sku == "broken":
                raise ValueError("no such shelf")
            if asked.sku == "silent":
                return None
            if asked.sku == "gone":
                return fg.reply(PriceUnknown(sku=asked.sku))
            return fg.reply(PriceFound(sku=asked.sku, cents=100))

    @property
    def nodes(self) -> list[fg.Node]:
        return [self.shop, self.prices]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Where a bus runs: the embedded broker, with a store and without."""
    url = "memory:" if request.param.startswith("memory") else f"journal:{tmp_path}/journal"
    store = f"sqlite:{tmp_path}/shop.db" if request.param.endswith("store") else None
    return {"transport": url, "store": store}


def ask(bus: fg.Bus, sku: str, **more: Any) -> Any:
    return bus.request(AskPrice(sku=sku), **{"to": "prices", "node": "shop", "timeout": LONG, **more})


async def outbox_of(bus: fg.Bus) -> int:
    store = bus.store_of("prices")
    return 0 if store is None else len(await store.undispatched(10, None))


# --- answers ----------------------------------------------------------------------------------------------


async def test_a_request_returns_what_the_handler_answers(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        assert await ask(bus, "17") == PriceFound(sku="17", cents=100)
        assert await ask(bus, "gone", reply=(PriceFound, PriceUnknown)) == PriceUnknown(sku="gone")
        await bus.idle(LONG)
        assert await outbox_of(bus) == 0
        assert bus.request_counts() == fg.RequestCounts(0, 2, 0, 0, 0, 0, 0)


async def test_a_thousand_requests_at_once_each_have_their_own_answer(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        answers = await asyncio.gather(*(ask(bus, str(number)) for number in range(1000)))
        assert [answer.sku for answer in answers] == [str(number) for number in range(1000)]
        assert bus.request_counts() == fg.RequestCounts(0, 1000, 0, 0, 0, 0, 0)
    assert set(shop.calls.values()) == {1}


async def test_one_request_does_not_wait_for_another() -> None:
    shop = Shop()
    fast = fg.Node("fast")

    @fast.on(AskPrice)
    async def find(asked: AskPrice) -> fg.Outgoing:
        return fg.reply(PriceFound(sku=asked.sku))

    shop.may_answer.clear()
    async with fg.Bus("memory:", nodes=[*shop.nodes, fast]) as bus:
        slow = asyncio.ensure_future(ask(bus, "slow"))
        await shop.begun.wait()
        assert await ask(bus, "quick", to=fast) == PriceFound(sku="quick")
        assert not slow.done()
        shop.may_answer.set()
        assert (await slow).sku == "slow"


@pytest.mark.parametrize("way", ["return", "yield", "list", "ctx", "def"])
async def test_a_handler_answers_in_every_way_in_which_it_sends(way: str, place: dict[str, Any]) -> None:
    shop, prices, log, seen = fg.Node("shop"), fg.Node("prices"), fg.Node("log"), []
    answer = PriceFound(sku="17", cents=5)
    if way == "yield":

        @prices.on(AskPrice)
        async def find_yielding(asked: AskPrice) -> Any:
            yield Looked(sku=asked.sku)
            yield fg.reply(answer)

    elif way == "def":

        @prices.on(AskPrice)
        def find_blocking(asked: AskPrice) -> Any:
            return [fg.reply(answer), Looked(sku=asked.sku)]

    else:

        @prices.on(AskPrice)
        async def find(asked: AskPrice, ctx: fg.Context) -> Any:
            if way == "ctx":
                await ctx.reply(answer, headers={"shelf": "3"})
                await ctx.publish(Looked(sku=asked.sku))
                return None
            return fg.reply(answer) if way == "return" else [Looked(sku=asked.sku), fg.reply(answer)]

    @log.on(Looked, source="prices")
    async def note(looked: Looked) -> None:
        seen.append(looked.sku)

    async with fg.Bus(**place, nodes=[shop, prices, log]) as bus:
        assert await ask(bus, "17") == answer
        await bus.idle(LONG)
    assert seen == ([] if way == "return" else ["17"])


async def test_outgoing_middlewares_see_replies_and_may_keep_them_back(place: dict[str, Any]) -> None:
    shop, kinds = Shop(), []

    async def look(out: Any, call_next: Any) -> None:
        kinds.append((out.kind, out.message.sku))
        if out.message.sku != "kept":
            await call_next()

    shop.prices.use_outgoing(look)
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        assert (await ask(bus, "17")).sku == "17"
        shop.begun.clear()
        kept = asyncio.ensure_future(ask(bus, "kept"))
        await shop.begun.wait()
        await bus.idle(LONG)
        assert bus.request_counts() == fg.RequestCounts(1, 1, 0, 0, late=0, unasked=0, unreached=0)
        kept.cancel()
    assert kinds == [("reply", "17"), ("reply", "kept")]


async def test_an_outgoing_middleware_cannot_take_the_address_of_a_request_away() -> None:
    shop, seen = Shop(), []

    async def plain(out: Any, call_next: Any) -> None:
        seen.append(dict(out.headers))
        out.headers = {"only": "this"}
        await call_next()

    shop.shop.use_outgoing(plain)
    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        assert (await ask(bus, "17", headers={"trace": "abc"})).sku == "17"
    assert seen == [{"trace": "abc"}]
    assert shop.contexts[0].headers == {"only": "this"}


@pytest.mark.parametrize("separate", [False, True], ids=["tokens-in-the-store", "tokens-elsewhere"])
async def test_a_node_that_deduplicates_by_tokens_answers_as_well(separate: bool, tmp_path: Path) -> None:
    shop = Shop(dedup="tokens")
    tokens = f"sqlite:{tmp_path}/tokens.db" if separate else None
    async with fg.Bus("memory:", nodes=shop.nodes, store=f"sqlite:{tmp_path}/a.db", tokens=tokens) as bus:
        answers = await asyncio.gather(*(ask(bus, str(number)) for number in range(20)))
        assert [answer.sku for answer in answers] == [str(number) for number in range(20)]
        with pytest.raises(fg.RequestFailed):
            await ask(bus, "broken")
        await bus.idle(LONG)
        assert await outbox_of(bus) == 0
    assert shop.calls == {**{str(number): 1 for number in range(20)}, "broken": 1}


async def test_every_store_brings_replies_to_whoever_asked(store_url: str) -> None:
    shop = Shop()
    async with fg.Bus("memory:", nodes=shop.nodes, store=store_url) as bus:
        answers = await asyncio.gather(*(ask(bus, str(number)) for number in range(50)))
        assert [answer.sku for answer in answers] == [str(number) for number in range(50)]
        with pytest.raises(fg.RequestFailed):
            await ask(bus, "broken")
        await bus.idle(LONG)
        assert await outbox_of(bus) == 0


async def test_the_ledger_does_not_count_replies_among_what_a_handler_sent(tmp_path: Path) -> None:
    """The audit looks for what it counts in the log, and no log has a reply."""
    shop, prices = fg.Node("shop"), fg.Node("prices")

    @prices.on(AskPrice)
    async def find(asked: AskPrice) -> Any:
        return [Looked(sku=asked.sku), fg.reply(PriceFound(sku=asked.sku))]

    async with fg.Bus("memory:", nodes=[shop, prices], store=f"sqlite:{tmp_path}/a.db") as bus:
        await ask(bus, "17")
        await bus.send(AskPrice(sku="18"), to=prices, node="shop")
        await bus.idle(LONG)
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection:
        assert connection.execute("select sent from faregate_ledger").fetchall() == [(1,), (1,)]


async def test_a_request_has_headers_and_its_handler_does_not_see_the_address() -> None:
    shop = Shop()
    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        await ask(bus, "17", headers={"trace": "abc"})
    [ctx] = shop.contexts
    assert ctx.headers == {"trace": "abc"}, "who copies headers would ask in the name of another"
    assert REPLY_TO in ctx.envelope.headers


async def test_a_dataclass_and_a_command_may_be_an_answer() -> None:
    shop, store = fg.Node("shop"), fg.Node("store")

    class Next(fg.Command):
        sku: str

    @store.on(AskPrice)
    async def find(asked: AskPrice) -> fg.Outgoing:
        return fg.reply(Stock(asked.sku, 3) if asked.sku == "17" else Next(sku=asked.sku))

    async with fg.Bus("memory:", nodes=[shop, store]) as bus:
        assert await ask(bus, "17", to=store) == Stock("17", 3)
        assert await ask(bus, "18", to=store, reply=Next) == Next(sku="18")


async def test_a_reply_is_not_in_the_journal(tmp_path: Path) -> None:
    shop = Shop()
    async with fg.Bus(f"journal:{tmp_path}/journal", nodes=shop.nodes, store=f"sqlite:{tmp_path}/a.db") as bus:
        await asyncio.gather(*(ask(bus, str(number)) for number in range(5)))
        await bus.idle(LONG)
    reader = JournalReader(tmp_path / "journal")
    types = [envelope.type for envelope in reader.load(list(range(5)))]
    assert types == ["AskPrice"] * 5
    assert reader.high_water().offset == 5, "something else was appended"


# --- nobody waits -----------------------------------------------------------------------------------------


async def test_a_reply_to_nobody_is_dropped_and_counted(place: dict[str, Any]) -> None:
    shop = Shop()

    @shop.prices.on(Looked, source="shop")
    async def looked(event: Looked) -> fg.Outgoing:
        return fg.reply(PriceFound(sku=event.sku))

    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        await bus.send(AskPrice(sku="17"), to="prices", node="shop")
        await bus.publish(Looked(sku="17"), node="shop")
        await bus.idle(LONG)
        assert bus.request_counts().unasked == 2
        assert bus.outcomes() == {**dict.fromkeys(bus.outcomes(), 0), "handled": 2}
        assert not await bus.dead_letters()
        assert await outbox_of(bus) == 0
        assert (await ask(bus, "18")).sku == "18", "the same handler serves both"


async def test_a_late_reply_is_dropped_and_counted(place: dict[str, Any]) -> None:
    shop = Shop()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        asked = asyncio.ensure_future(ask(bus, "17", timeout=0.05))
        await shop.begun.wait()
        with pytest.raises(fg.RequestTimeout):
            await asked
        assert bus.request_counts().waiting == 0
        shop.may_answer.set()
        await bus.idle(LONG)
        assert bus.request_counts() == fg.RequestCounts(0, 0, 0, timed_out=1, late=1, unasked=0, unreached=0)
        assert not await bus.dead_letters()


async def test_the_first_of_two_replies_counts_and_the_second_is_late(place: dict[str, Any]) -> None:
    shop, prices = fg.Node("shop"), fg.Node("prices")

    @prices.on(AskPrice)
    async def find(asked: AskPrice) -> Any:
        yield fg.reply(PriceFound(sku=asked.sku, cents=1))
        yield fg.reply(PriceFound(sku=asked.sku, cents=2))

    async with fg.Bus(**place, nodes=[shop, prices]) as bus:
        assert (await ask(bus, "17")).cents == 1
        await bus.idle(LONG)
        assert bus.request_counts().late == 1


async def test_a_cancelled_caller_leaves_nothing_behind(place: dict[str, Any]) -> None:
    shop = Shop()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        asked = asyncio.ensure_future(ask(bus, "17"))
        await shop.begun.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert bus.request_counts().waiting == 0
        shop.may_answer.set()
        await bus.idle(LONG)
        assert bus.request_counts().late == 1
        assert (await ask(bus, "18")).sku == "18"


async def test_a_timeout_says_what_was_asked_of_whom() -> None:
    shop, clock = Shop(), FakeClock()
    async with fg.Bus("memory:", nodes=shop.nodes, clock=clock) as bus:
        asked = asyncio.ensure_future(ask(bus, "silent", timeout=5))
        await clock.advance(4.9)
        assert not asked.done()
        await clock.advance(0.2)
        with pytest.raises(fg.RequestTimeout, match=r"AskPrice [0-9a-f-]{36} to 'prices' within 5 s") as told:
            await asked
    assert isinstance(told.value, fg.Transient) and isinstance(told.value, TimeoutError)
    assert shop.contexts[0].publication_id in str(told.value)


async def test_stopping_the_bus_ends_what_waits_with_an_error(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        asked = asyncio.ensure_future(ask(bus, "silent"))
        await shop.begun.wait()
    with pytest.raises(fg.OutcomeUnknown, match="the bus stopped"):
        await asked


async def test_what_is_answered_while_the_bus_stops_is_answered(place: dict[str, Any]) -> None:
    shop = Shop()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        asked = asyncio.ensure_future(ask(bus, "17"))
        await shop.begun.wait()
        asyncio.get_running_loop().call_soon(shop.may_answer.set)
    assert (await asked).sku == "17"


# --- failures ---------------------------------------------------------------------------------------------


async def test_whoever_asked_learns_that_the_request_is_a_dead_letter(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        with pytest.raises(fg.RequestFailed, match=r"AskPrice .* ValueError: no such shelf") as told:
            await ask(bus, "broken")
        assert told.value.reason == "failed"
        await bus.idle(LONG)
        assert len(await bus.dead_letters("prices")) == 1
        assert await outbox_of(bus) == 0
        assert bus.request_counts().failed == 1


async def test_a_request_that_nobody_asked_fails_as_any_command(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        await bus.send(AskPrice(sku="broken"), to="prices", node="shop", headers={"trace": "abc"})
        await bus.idle(LONG)
        assert len(await bus.dead_letters("prices")) == 1
        assert bus.request_counts() == fg.RequestCounts(0, 0, 0, 0, 0, 0, 0)


async def test_a_request_that_a_filter_leaves_out_is_told_of_at_once(place: dict[str, Any]) -> None:
    shop = Shop(where="sku = '17'")
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        for dropped in await asyncio.gather(*(ask(bus, sku) for sku in ("18", "19")), return_exceptions=True):
            assert isinstance(dropped, fg.RequestFailed) and dropped.reason == "filtered"
            assert "was handled by nobody: Permanent: the filter (where=)" in str(dropped)
        assert (await ask(bus, "17")).sku == "17"
        await bus.send(AskPrice(sku="20"), to="prices", node="shop")
        await bus.idle(LONG)
        assert bus.outcomes()["filtered"] == 3
        assert bus.request_counts() == fg.RequestCounts(0, 1, 2, 0, 0, 0, 0)
        assert await outbox_of(bus) == 0 and not await bus.dead_letters()
    assert shop.calls == {"17": 1}


async def test_a_request_that_expires_is_told_of(place: dict[str, Any]) -> None:
    shop, clock = Shop(order=fg.Serial()), FakeClock()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes, clock=clock, stall_seconds=None) as bus:
        await bus.pause("prices", AskPrice)
        asked = asyncio.ensure_future(ask(bus, "17", expires=5))
        await clock.advance(6)
        await bus.resume("prices", AskPrice)
        with pytest.raises(fg.RequestFailed) as told:
            await asked
        assert told.value.reason == "expired"
    assert not shop.calls


async def test_a_request_is_answered_by_a_later_try(place: dict[str, Any]) -> None:
    shop, prices, tries = fg.Node("shop"), fg.Node("prices"), []

    @prices.on(AskPrice, retry=fg.Retry(0), redeliver=fg.Redeliver(0.01))
    async def find(asked: AskPrice, ctx: fg.Context) -> fg.Outgoing:
        tries.append(ctx.redeliveries)
        if len(tries) == 1:
            raise ValueError("not yet")
        return fg.reply(PriceFound(sku=asked.sku))

    async with fg.Bus(**place, nodes=[shop, prices]) as bus:
        assert (await ask(bus, "17")).sku == "17"
    assert tries == [0, 1]


@pytest.mark.parametrize(
    "point",
    ["bus.after-handler", "unit.before-commit", "unit.after-commit", "bus.before-publish", "bus.after-publish"],
)
async def test_a_handler_that_crashed_and_ran_again_gives_one_answer_under_one_id(point: str, tmp_path: Path) -> None:
    """Whatever is lost in between: whoever asked has it once, and a second copy is late."""
    shop, ids = Shop(), []

    async def look(out: Any, call_next: Any) -> None:
        ids.append(out.publication_id)
        await call_next()

    shop.prices.use_outgoing(look)
    async with fg.Bus("memory:", nodes=shop.nodes, store=f"sqlite:{tmp_path}/a.db") as bus:
        await ask(bus, "before")
        ids.clear()
        shop.begun.clear()
        shop.may_answer.clear()
        asked = asyncio.ensure_future(ask(bus, "17"))
        await shop.begun.wait()
        with crash_at(point) as reached:
            shop.may_answer.set()
            answer = await asked
            await bus.idle(LONG)
        assert answer == PriceFound(sku="17", cents=100)
        assert reached[point]
        assert len(set(ids)) == 1
        counts = bus.request_counts()
        assert (counts.answered, counts.waiting, counts.unreached) == (2, 0, 0)
        assert counts.late == (point == "bus.after-publish")
        assert await outbox_of(bus) == 0


# --- identity ---------------------------------------------------------------------------------------------


async def test_two_who_ask_under_one_idempotency_key_share_the_answer(place: dict[str, Any]) -> None:
    shop = Shop()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        asked = [asyncio.ensure_future(ask(bus, "17", idempotency_key="order-17")) for _ in range(3)]
        await shop.begun.wait()
        asked.append(asyncio.ensure_future(ask(bus, "17", idempotency_key="order-17", timeout=0.05)))
        with pytest.raises(fg.RequestTimeout):
            await asked[3]
        shop.may_answer.set()
        assert await asyncio.gather(*asked[:3]) == [PriceFound(sku="17", cents=100)] * 3
    assert shop.calls == {"17": 1}


async def test_one_who_asks_again_after_a_timeout_has_the_answer_of_the_first(place: dict[str, Any]) -> None:
    shop = Shop()
    shop.may_answer.clear()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        with pytest.raises(fg.RequestTimeout):
            await ask(bus, "17", idempotency_key="order-17", timeout=0.05)
        await shop.begun.wait()
        again = asyncio.ensure_future(ask(bus, "17", idempotency_key="order-17"))
        await asyncio.sleep(0)
        shop.may_answer.set()
        assert (await again).sku == "17"
    assert shop.calls == {"17": 1}


# --- bad input --------------------------------------------------------------------------------------------


async def test_a_request_to_a_node_that_nobody_runs_is_refused_at_once(place: dict[str, Any]) -> None:
    shop = Shop()
    async with fg.Bus(**place, nodes=shop.nodes) as bus:
        with pytest.raises(fg.Unroutable, match="'nobody'"):
            await ask(bus, "17", to="nobody")
        assert bus.request_counts().waiting == 0


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"timeout": 0}, fg.ConfigurationError, "more than 0"),
        ({"timeout": -1}, fg.ConfigurationError, "timeout must be seconds"),
        ({"timeout": None}, fg.ConfigurationError, "timeout must be seconds"),
        ({"timeout": float("inf")}, fg.ConfigurationError, "timeout must be seconds"),
        ({"reply": int}, fg.UnknownMessage, "int is not a message class"),
        ({"reply": 5}, fg.UnknownMessage, "reply takes the class of the answer, or several in a list; got 5"),
        ({"idempotency_key": "\ud800"}, fg.ConfigurationError, "idempotency_key must be Unicode text"),
        ({"reply": "PriceFound"}, fg.UnknownMessage, "is not a message class"),
        ({"to": None}, fg.BareCommand, "needs a destination"),
        ({"to": "no node"}, fg.InvalidName, "destination"),
        ({"node": None}, fg.ConfigurationError, "say which node"),
        ({"headers": {"a": 1}}, fg.ConfigurationError, "headers are texts"),
        ({"expires": 0}, fg.ConfigurationError, "expires"),
    ],
)
async def test_bad_options_are_refused_before_anything_is_sent(
    wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    shop = Shop()
    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        with pytest.raises(error, match=text):
            await ask(bus, "17", **wrong)
        await bus.idle(LONG)
    assert not shop.calls


async def test_an_event_is_no_request_and_a_reply_is_sent_by_handlers_alone() -> None:
    shop = Shop()
    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        with pytest.raises(fg.UnknownMessage, match="an event, not a command"):
            await bus.request(Looked(sku="17"), to="prices", node="shop")
        for send in (bus.publish, lambda out, node: bus.publish_many([out], node=node)):
            with pytest.raises(fg.ConfigurationError, match="return it from a handler"):
                await send(fg.reply(PriceFound(sku="17")), node="shop")
    with pytest.raises(fg.ConfigurationError, match="the message itself"):
        fg.reply(fg.publish(Looked(sku="17")))
    with pytest.raises(fg.UnknownMessage):
        fg.reply(None)
    with pytest.raises(fg.ConfigurationError, match="headers are texts"):
        fg.reply(Looked(sku="17"), headers={"a": 1})  # type: ignore[dict-item]


async def test_an_answer_of_a_class_that_was_not_named_is_an_error_that_says_so() -> None:
    shop = Shop()
    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        with pytest.raises(fg.UnknownType, match="answered with a price-unknown, and reply= names only PriceFound"):
            await ask(bus, "gone", reply=PriceFound)


async def test_of_two_classes_of_one_name_the_one_beside_the_command_is_taken() -> None:
    shop = Shop()

    class Mine(fg.Event, wire="PriceFound"):
        sku: str

    async with fg.Bus("memory:", nodes=shop.nodes) as bus:
        assert await ask(bus, "17") == PriceFound(sku="17", cents=100)
        assert await ask(bus, "17", reply=Mine) == Mine(sku="17")
    forget(Mine)


async def test_two_classes_of_one_name_in_one_place_need_reply_to_choose() -> None:
    shop, other = fg.Node("shop"), fg.Node("other")

    class Ask(fg.Command):
        sku: str

    class One(fg.Event, wire="told"):
        sku: str

    class Two(fg.Event, wire="told"):
        sku: str

    @other.on(Ask)
    async def find(asked: Ask) -> fg.Outgoing:
        return fg.reply(One(sku=asked.sku))

    async with fg.Bus("memory:", nodes=[shop, other]) as bus:
        with pytest.raises(fg.UnknownType, match=r"several classes .*One.*Two.*reply="):
            await bus.request(Ask(sku="17"), to="other", node="shop", timeout=LONG)
        assert await bus.request(Ask(sku="17"), to="other", node="shop", reply=Two, timeout=LONG) == Two(sku="17")


async def test_an_answer_that_no_class_is_called_is_an_error_that_says_so() -> None:
    shop, other = fg.Node("shop"), fg.Node("other")

    class Foreign(fg.Event):
        sku: str

    @other.on(AskPrice)
    async def find(asked: AskPrice) -> fg.Outgoing:
        return fg.reply(Foreign(sku=asked.sku))

    forget(Foreign)  # as in a process that does not have it
    async with fg.Bus("memory:", nodes=[shop, other]) as bus:
        with pytest.raises(fg.UnknownType, match="a Foreign, which no message class here is called"):
            await ask(bus, "17", to=other)


def forget(cls: type) -> None:
    from faregate import message

    del message._named[message.known(cls).wire][cls.__module__, cls.__qualname__]  # type: ignore[union-attr]


async def test_a_request_on_a_transport_without_replies_is_refused(tmp_path: Path) -> None:
    """And its handler's answers are dropped and counted."""
    shop, clock = Shop(order=fg.Parallel(1)), FakeClock()
    async with fg.Bus(CoreOnly(clock), nodes=shop.nodes, store=f"sqlite:{tmp_path}/a.db", clock=clock) as bus:
        with pytest.raises(fg.ConfigurationError, match='lacks "reply"'):
            await ask(bus, "17")
        await bus.send(AskPrice(sku="17"), to="prices", node="shop", headers={REPLY_TO: "somebody"})
        while bus.outcomes()["handled"] < 1:
            await clock.advance(0.1)
        assert bus.request_counts().unreached == 1
        assert await outbox_of(bus) == 0


@pytest.mark.parametrize(
    "error", [OSError("refused"), asyncio.CancelledError(), fg.BrokerUnavailable("away")], ids=repr
)
async def test_an_address_that_cannot_be_opened_is_opened_by_the_next_who_asks(error: BaseException) -> None:
    class Refusing(MemoryTransport):
        refusals = 2

        async def open_replies(self, on_reply: Any) -> str:
            self.refusals -= 1
            if self.refusals >= 0:
                raise error
            return await super().open_replies(on_reply)

    shop = Shop()
    async with fg.Bus(Refusing(), nodes=shop.nodes) as bus:
        for _ in range(2):
            with pytest.raises(type(error)):
                await ask(bus, "17")
        assert await ask(bus, "17") == await ask(bus, "17")


async def test_a_process_that_does_not_run_the_nodes_cannot_ask(tmp_path: Path) -> None:
    url = f"journal:{tmp_path}/journal"
    async with fg.Bus(url, nodes=Shop().nodes):
        other = fg.Bus(url, nodes=Shop().nodes)
        with pytest.raises(fg.ConfigurationError, match="needs the process that runs the nodes"):
            await ask(other, "17")


# --- whoever asked dies -----------------------------------------------------------------------------------

DYING = """
import asyncio, os, signal, sys
import faregate as fg
from faregate.ports import faults
from tests.bus.test_request import Shop, ask

async def hook(point):
    if point == "bus.before-publish" and answering:
        os.kill(os.getpid(), signal.SIGKILL)

answering = []

async def main(journal, store):
    shop = Shop()
    async with fg.Bus(f"journal:{journal}", nodes=shop.nodes, store=f"sqlite:{store}") as bus:
        shop.may_answer.clear()
        asked = asyncio.ensure_future(ask(bus, "17"))
        await shop.begun.wait()
        answering.append(True)
        faults.hook = hook
        shop.may_answer.set()
        await asked

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_reply_that_a_killed_process_left_in_the_outbox_is_dropped_and_counted(tmp_path: Path) -> None:
    """On a journal whoever asked dies with those who answer."""
    journal, store = f"{tmp_path}/journal", f"{tmp_path}/shop.db"
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", DYING, journal, store], cwd=ROOT, env=dict(os.environ), check=False
    )
    assert ended.returncode == -signal.SIGKILL
    shop = Shop()
    async with fg.Bus(f"journal:{journal}", nodes=shop.nodes, store=f"sqlite:{store}") as bus:
        await bus.idle(LONG)
        assert bus.request_counts().unreached == 1, "it was committed, and never sent"
        assert await outbox_of(bus) == 0
        assert not await bus.dead_letters()
        assert (await ask(bus, "18")).sku == "18"
    assert shop.calls == {"18": 1}, "the request was handled once, before"
    assert faults.hook is None


# --- on the bench -----------------------------------------------------------------------------------------


async def test_a_bench_asks_and_has_the_answer_on_record() -> None:
    shop = Shop(redeliver=fg.Redeliver(600))
    async with fg.testing.bench(shop.prices) as bench:
        assert await bench.request(AskPrice(sku="17")) == PriceFound(sku="17", cents=100)
        assert bench.sent(PriceFound) == [PriceFound(sku="17", cents=100)]
        with pytest.raises(fg.RequestTimeout):
            await bench.request(AskPrice(sku="silent"))
        with pytest.raises(fg.RequestFailed):
            await bench.request(AskPrice(sku="broken"), timeout=1000)
        with pytest.raises(fg.RequestTimeout):
            await bench.request(AskPrice(sku="broken"), timeout=10)
