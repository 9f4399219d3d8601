"""`key=` and `identity=` by a field, by several fields, by a function: the same text everywhere."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.codec import CODECS
from faregate.message import describe
from faregate.node.key import read_key
from faregate.ports.keys import keys_of
from tests.node.bank import Booked, Transferred, bank, day_of, later, pair_of, two_of, world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
LONG = 30  # seconds until a test that hangs is failed


def booked(number: int, account: int = 7, bank: str | None = "b", at: datetime = NOON) -> Booked:
    return Booked(timestamp=at, account_id=account, number=number, bank=bank)


def text(source: Any, message: Any) -> str | None:
    return read_key(source, describe(type(message), "event"), "key").of(message)


# --- the text ----------------------------------------------------------------------------------------------


def test_several_fields_are_one_text_that_no_other_values_have() -> None:
    class Two(fg.Event):
        a: object
        b: object

    assert text(("a", "b"), Two(a="x", b=17)) == '["x","17"]'
    pairs = [
        ("x", "y,z"),
        ("x,y", "z"),
        ('x","y', "z"),
        ("x", '","yz'),
        ("x", None),
        ("x", "None"),
        (None, "x"),
        ("", ""),
    ]
    assert len({text(("a", "b"), Two(a=a, b=b)) for a, b in pairs}) == len(pairs)
    assert text(("a", "b"), Two(a=None, b=None)) is None
    assert text("a", Two(a=None, b=1)) is None
    assert text("a", Two(a="x\0", b=1)) == '"x\\u0000"', "PostgreSQL keeps no zero characters"


def test_what_a_function_returns_is_a_text_in_the_same_way() -> None:
    assert text(pair_of, Transferred(accounts=["b", "a"], number=1)) == '["a","b"]'
    assert text(day_of, booked(1)) == "b 2026-11-16"
    assert text(day_of, booked(1, bank=None)) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("source", ["timestamp", ("timestamp", "account_id"), ("bank", "number"), day_of])
def test_the_key_of_an_encoded_message_is_the_key_of_the_message(source: Any, codec: str) -> None:
    message = booked(3)
    key = read_key(source, describe(Booked, "event"), "key")
    written = CODECS[codec].encoder(Booked)(message)
    envelope = fg.Envelope(body=written, content_type=CODECS[codec].content_type)
    assert key.reader(Booked, 1000)(envelope) == key.of(message) is not None
    assert key.reader(Booked, 1000)(fg.Envelope(body=b"{")) is None


def test_a_default_and_another_name_on_the_wire_count_in_the_key_of_an_encoded_message() -> None:
    class Renamed(fg.Event, rename="camel"):
        account_id: str = "nobody"

    class Row(fg.Event, array_like=True):
        first: int
        second: int

    renamed = read_key("account_id", describe(Renamed, "event"), "key").reader(Renamed, 100)
    assert renamed(fg.Envelope(body=b'{"accountId": "7"}')) == "7"
    assert renamed(fg.Envelope(body=b"{}")) == "nobody"
    assert read_key("second", describe(Row, "event"), "key").reader(Row, 100)(fg.Envelope(body=b"[1,2]")) == "2"


# --- declarations ------------------------------------------------------------------------------------------


def local(message: Booked) -> str:
    return ""


def _wrong() -> list[Any]:
    def within(message: Booked) -> str:
        return ""

    return [
        pytest.param(lambda message: "", "top level of a module", id="lambda"),
        pytest.param(within, "top level of a module", id="within another"),
        pytest.param(partial(local), "top level of a module", id="object"),
        pytest.param(later, "a plain 'def' function", id="async"),
        pytest.param(two_of, "takes the message, and nothing else", id="two parameters"),
        pytest.param(Booked, "a plain 'def' function", id="class"),
        pytest.param("acount_id", "'acount_id' is not a field of Booked; its fields are: account_id", id="field"),
        pytest.param(
            ("timestamp", "acount_id"), "'acount_id' is not a field of Booked; its fields are: account_id", id="typo"
        ),
        pytest.param((), "a field, a tuple of fields, or a function", id="no field"),
        pytest.param(["timestamp"], "a field, a tuple of fields, or a function", id="list"),
        pytest.param(("timestamp", 3), "a field, a tuple of fields, or a function", id="number"),
    ]


@pytest.mark.parametrize("option", ["key", "identity"])
@pytest.mark.parametrize(("source", "says"), _wrong())
def test_a_key_that_nobody_could_read_is_refused_where_it_is_declared(source: Any, says: str, option: str) -> None:
    with pytest.raises(fg.UnknownKey, match=says) as caught:
        fg.Node("node").on(Booked, source="world", **{option: source})
    assert str(caught.value).startswith(f"{option}=")


# --- on the bus --------------------------------------------------------------------------------------------


async def book_of(bus: fg.Bus) -> list[tuple[Any, ...]]:
    opened = bus.store_of("bank")
    assert opened is not None
    transaction = opened.transaction()
    try:
        await transaction.begin()
        return await transaction.fetchall("select kind, key, number from book order by number")
    finally:
        await transaction.roll_back()


async def test_a_fact_is_handled_once_per_combination_of_its_fields(store_url: str) -> None:
    async with fg.Bus("memory:", nodes=[world, bank], store=store_url) as bus:
        facts = [booked(1), booked(2, account=8), booked(3), booked(4, bank="c"), booked(5), booked(6, bank=None)]
        for fact in facts:
            await bus.publish(fact, node="world")
            await bus.idle(timeout=LONG)
        assert [number for _, _, number in await book_of(bus)] == [1, 2, 4, 6]
        assert {key for _, key, _ in await book_of(bus)} == {
            '["2026-11-16 12:00:00+00:00","7"]',
            '["2026-11-16 12:00:00+00:00","8"]',
        }
        assert bus.outcomes()["duplicate"] == 2


async def test_a_message_without_a_business_key_is_no_repetition_of_another() -> None:
    class Fact(fg.Event):
        order_no: str | None

    node, runs = fg.Node("node"), []
    for source, claim in (("x", "transaction"), ("y", "eager"), ("z", "lazy")):

        @node.on(Fact, source=source, identity="order_no", claim=claim, name=f"take-{source}")  # type: ignore[arg-type]
        async def take(message: Fact) -> None:
            runs.append(message.order_no)

    async with fg.testing.bench(node) as bench:
        for source in "xyz":
            for order_no in (None, "1", None, "1"):
                await bench.publish(Fact(order_no=order_no), node=source)
                await bench.settle()
    assert runs == [None, "1", None] * 3


async def test_messages_are_in_order_by_what_a_function_says() -> None:
    node, begun, ended = fg.Node("node"), [], []

    @node.on(Transferred, source="world", key=pair_of, retry=None, redeliver=fg.Redeliver(10))
    async def take(message: Transferred, ctx: fg.Context) -> None:
        begun.append(message.number)
        if message.number == 1 and not ctx.redeliveries:
            raise RuntimeError("later")
        ended.append((message.number, ctx.key))

    async with fg.testing.bench(node) as bench:
        for number, accounts in enumerate((["a", "b"], ["b", "a"], ["c", "a"], ["a", "b"]), start=1):
            await bench.publish(Transferred(accounts=accounts, number=number), node="world")
        await bench.settle()
    assert ended == [(3, '["a","c"]'), (1, '["a","b"]'), (2, '["a","b"]'), (4, '["a","b"]')]


async def test_a_message_that_the_function_fails_at_is_a_dead_letter_and_holds_nobody_up(store_url: str) -> None:
    async with fg.Bus("memory:", nodes=[world, bank], store=store_url) as bus:
        for number, other in enumerate(("b", "nobody", "b")):
            await bus.publish(Transferred(accounts=["a", other], number=number), node="world")
        await bus.idle(timeout=LONG)
        assert [number for _, _, number in await book_of(bus)] == [0, 2]
        [letter] = await bus.dead_letters()
    assert letter.reason == "unreadable-key"
    assert "tests.node.bank.pair_of cannot tell the key of this Transferred: ValueError: there is no" in letter.error


# --- on Spark ----------------------------------------------------------------------------------------------


@pytest.mark.services
def test_both_engines_read_the_same_keys(spark: "SparkSession", tmp_path: Path) -> None:
    books = {}
    for engine in ("bus", "spark"):
        journal, db = tmp_path / engine / "journal", tmp_path / engine / "bank.db"
        db.parent.mkdir()
        asyncio.run(publish_all(f"journal:{journal}", f"sqlite:{db}", runs=engine == "bus"))
        if engine == "spark":
            options = {"source": f"journal:{journal}", "store": f"sqlite:{db}", "checkpoint": tmp_path / "checkpoint"}
            fg.spark.run(bank, spark, **options).await_termination()
        with closing(sqlite3.connect(db)) as connection:
            books[engine] = connection.execute(
                "select kind, key, number from book order by kind, key, number"
            ).fetchall()
            assert connection.execute("select reason from faregate_dead").fetchall() == [("unreadable-key",)]
        # What a publisher says of the key, for whoever reads the journal, is what is ordered by.
        told = {each.key for _, each in JournalReader(journal).envelopes()}
        assert told - {None} == ({key for _, key, _ in books["bus"]} if engine == "bus" else set())
    assert len(books["bus"]) == 7
    assert books["spark"] == books["bus"]


async def publish_all(transport: str, store_url: str, *, runs: bool) -> None:
    async with fg.Bus(transport, nodes=[world, *([bank] if runs else [])], store=store_url) as bus:
        for fact in (booked(1), booked(2, account=8), booked(3), booked(4, bank="c"), booked(5, bank=None)):
            await bus.publish(fact, node="world")
        for number, accounts in enumerate((["a", "b"], ["b", "a"], ["a", "nobody"], ["c", "a"])):
            await bus.publish(Transferred(accounts=accounts, number=number), node="world")
        await bus.idle(timeout=LONG)


# --- several keys -------------------------------------------------------------------------------------------


class Moved(fg.Event):
    debit: int | None
    credit: int | None
    bank: str = "b"
    others: list[str] = []  # noqa: RUF012


def all_of(message: Moved) -> "set[str]":
    return {f"{message.debit}", f"{message.credit}"}


def keys(source: Any, message: Any) -> tuple[str, ...]:
    return keys_of(text(source, message))


def test_each_field_is_a_key_of_its_own() -> None:
    both = fg.Each("debit", "credit")
    assert keys(both, Moved(debit=18, credit=17)) == ("17", "18") == keys(both, Moved(debit=17, credit=18))
    assert text(both, Moved(debit=18, credit=17)) == '{"17","18"}'
    assert text(both, Moved(debit=17, credit=17)) == "17" == text(both, Moved(debit=None, credit=17))
    assert text(both, Moved(debit=None, credit=None)) is None
    assert keys(fg.Each(("bank", "debit"), "credit"), Moved(debit=1, credit=2)) == ("2", '["b","1"]')
    assert keys(fg.Each("others", "debit"), Moved(debit=1, credit=2, others=["x", "y", "x"])) == ("1", "x", "y")
    assert text(fg.Each("others"), Moved(debit=1, credit=2)) is None
    assert keys(fg.Each(all_of), Moved(debit=1, credit=2)) == ("1", "2")
    assert keys(fg.Each(all_of, "bank"), Moved(debit=1, credit=2)) == ("1", "2", "b")


def test_no_two_sets_of_keys_have_the_same_text() -> None:
    sets = [
        ["a", "b"],
        ["a,b"],
        ['a","b'],
        ['{"a","b"}'],
        ["a"],
        ["{a"],
        ['["a","b"]'],
        ["a", "b", ""],
        ["", "a"],
        [""],
    ]
    texts = [text(fg.Each("others"), Moved(debit=1, credit=2, others=others)) for others in sets]
    assert len(set(texts)) == len(sets)
    assert [keys_of(each) for each in texts] == [tuple(sorted(others)) for others in sets]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("source", [fg.Each("debit", ("bank", "credit")), fg.Each("others"), fg.Each(all_of)])
def test_the_keys_of_an_encoded_message_are_those_of_the_message(source: Any, codec: str) -> None:
    message = Moved(debit=1, credit=2, others=["x", "y"])
    key = read_key(source, describe(Moved, "event"), "key")
    written = CODECS[codec].encoder(Moved)(message)
    envelope = fg.Envelope(body=written, content_type=CODECS[codec].content_type)
    assert keys_of(key.reader(Moved, 1000)(envelope)) == keys_of(key.of(message))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": fg.Each()}, "takes 1 to 16"),
        ({"key": fg.Each(*["debit"] * 17)}, "takes 1 to 16"),
        ({"key": fg.Each("debit", "nowhere")}, "nowhere"),
        ({"key": fg.Each(fg.Each("debit"))}, "key"),
        ({"key": fg.Each(lambda message: "a")}, "top level"),
        ({"key": all_of}, r"write key=fg.Each\(all_of\)"),
        ({"identity": fg.Each("debit")}, "one identity"),
        ({"key": fg.Each("debit"), "partitions": 4}, "partitions="),
    ],
)
def test_several_keys_that_cannot_be_are_refused_where_they_are_declared(options: Any, words: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=words):
        fg.Node("bank").on(Moved, source="world", **options)


def test_a_type_has_one_key() -> None:
    with pytest.raises(fg.ConfigurationError):

        class Wrong(fg.Event, key=fg.Each("a", "b")):  # type: ignore[call-arg]
            a: str
            b: str
