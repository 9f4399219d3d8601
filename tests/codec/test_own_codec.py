"""Codecs of one's own: written with, and found by content type when reading, on both engines."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.codec import Decode, Encode, JsonCodec
from faregate.codec.registry import CODECS
from tests.codec.mirror import Answered, Asked, MirrorCodec, answering, asking, plain_answering

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIRROR = MirrorCodec.content_type
LONG = 30  # seconds until a test that hangs is failed


async def ask(transport: str, nodes: list[fg.Node], count: int, **options: Any) -> None:
    async with fg.Bus(transport, nodes=nodes, **options) as bus:
        for number in range(count):
            await bus.publish(Asked(who=f"w{number % 2}", number=number), node="asking")
        await bus.idle(timeout=LONG)


def log(journal: Path, wire: str) -> list[fg.Envelope]:
    return [envelope for _, envelope in JournalReader(journal).envelopes() if envelope.type == wire]


def asked(db: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(db)) as connection:
        return connection.execute("select who, number from asked order by number").fetchall()


@pytest.mark.parametrize("codec", [MirrorCodec(), MIRROR], ids=["object", "content type"])
async def test_a_bus_writes_with_a_codec_of_ones_own_and_reads_it(tmp_path: Path, codec: Any) -> None:
    store = f"sqlite:{tmp_path / 'a.db'}"
    await ask(f"journal:{tmp_path / 'journal'}", [asking, answering], 4, store=store, codec=codec)
    assert asked(tmp_path / "a.db") == [("w0", 0), ("w1", 1), ("w0", 2), ("w1", 3)], "its keys are read, too"
    found = [*log(tmp_path / "journal", "Asked"), *log(tmp_path / "journal", "Answered")]
    assert len(found) == 8
    assert {(each.content_type, each.body[-1:]) for each in found} == {(MIRROR, b"{")}


async def test_a_bus_that_writes_json_reads_what_another_wrote(tmp_path: Path) -> None:
    where, store = f"journal:{tmp_path / 'journal'}", f"sqlite:{tmp_path / 'a.db'}"
    await fg.Bus(where, nodes=[answering], store=store).prepare()
    await ask(where, [asking], 2, codec=MirrorCodec())
    await ask(where, [asking, answering], 2, store=store)
    assert asked(tmp_path / "a.db") == [("w0", 0), ("w0", 0), ("w1", 1), ("w1", 1)]
    assert {each.content_type for each in log(tmp_path / "journal", "Answered")} == {"application/json"}


async def test_the_outbox_writes_with_a_codec_of_ones_own(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'a.db'}"
    await fg.Bus("memory:", nodes=[asking, answering], store=store).prepare()
    with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
        fg.outbox(connection, "asking", codec=MirrorCodec()).publish(Asked(who="w", number=7))
        fg.outbox(connection, "asking", codec="msgpack").publish(Asked(who="w", number=8))
    await ask(f"journal:{tmp_path / 'journal'}", [asking, answering], 0, store=store)
    assert asked(tmp_path / "a.db") == [("w", 7), ("w", 8)]
    assert [each.content_type for each in log(tmp_path / "journal", "Asked")] == [MIRROR, "application/msgpack"]


@pytest.mark.parametrize(
    ("content_type", "body", "says"),
    [
        ("application/avro", b"?", "the content type 'application/avro' is not known; known are application/json"),
        (MIRROR, b"garbage", "the body is not a Asked: this is no mirror image"),
    ],
)
async def test_what_no_codec_reads_is_a_dead_letter_that_says_so(content_type: str, body: bytes, says: str) -> None:
    async with fg.testing.bench(answering) as bench:
        envelope = fg.Envelope(
            publication_id="0", type="Asked", source="asking", body=body, content_type=content_type, sent_at=1.0
        )
        await bench.deliver(envelope)
        await bench.publish(Asked(who="w", number=1), node="asking")
        await bench.settle()
        [letter] = bench.dead_letters()
        assert letter.reason == "undecodable" and says in letter.error
        assert bench.sent(Answered) == [Answered(who="w", number=1)]


def test_a_class_that_a_codec_does_not_know_is_undecodable() -> None:
    from faregate.codec import BodyReader

    class Stranger(fg.Event):
        a: int

    with pytest.raises(fg.Undecodable, match="cannot be read as a Stranger: Stranger has no mirror"):
        BodyReader(Stranger, limit=9).read(fg.Envelope(body=b"{}", content_type=MIRROR))


class Other:
    content_type = MIRROR

    def encoder(self, cls: type) -> Encode:
        return JsonCodec().encoder(cls)

    def decoder(self, cls: type) -> Decode:
        return JsonCodec().decoder(cls)


class MyJson(Other):
    content_type = "application/json"


class Nameless(Other):
    content_type = ""


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (Other(), "read by MirrorCodec already"),
        (MyJson(), "read by JsonCodec already: give MyJson a content type of its own"),
        (Nameless(), "a codec has a content_type"),
        (object(), "a codec has a content_type"),
        (Other, "an object with encoder"),
        ("avro", "there is no codec 'avro'; choose one of json, msgpack, application/vnd.mirror"),
    ],
)
def test_what_is_no_codec_of_its_own_is_refused(codec: Any, says: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=says):
        fg.Bus("memory:", nodes=[asking], codec=codec)
    assert set(CODECS) == {"json", "msgpack"}


@pytest.mark.services
def test_a_node_on_spark_reads_and_writes_with_the_codec_of_its_module(spark: "SparkSession", tmp_path: Path) -> None:
    journal, store = tmp_path / "journal", f"sqlite:{tmp_path / 'a.db'}"
    asyncio.run(ask(f"journal:{journal}", [asking], 4, codec=MirrorCodec()))
    options: dict[str, Any] = {"source": f"journal:{journal}", "codec": MirrorCodec()}
    fg.spark.run(answering, spark, store=store, checkpoint=tmp_path / "c1", **options).await_termination()
    assert asked(tmp_path / "a.db") == [("w0", 0), ("w1", 1), ("w0", 2), ("w1", 3)]
    assert {(each.content_type, each.body[-1:]) for each in log(journal, "Answered")} == {(MIRROR, b"{")}
    assert len(log(journal, "Answered")) == 4


@pytest.mark.services
def test_the_fast_path_on_spark_reads_and_writes_with_the_codec_of_the_nodes_module(
    spark: "SparkSession", tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    asyncio.run(ask(f"journal:{journal}", [asking], 4, codec=MirrorCodec()))
    run = fg.spark.run(plain_answering, spark, source=f"journal:{journal}", checkpoint=tmp_path / "c", codec=MIRROR)
    run.await_termination()
    assert sorted(each.body for each in log(journal, "Answered")) == sorted(
        MirrorCodec().encoder(Answered)(Answered(who=f"w{number % 2}", number=number)) for number in range(4)
    )


@pytest.mark.services
def test_a_codec_that_the_workers_could_not_find_is_refused_before_anything_runs(
    spark: "SparkSession", tmp_path: Path
) -> None:
    class Unregistered(Other):
        content_type = "application/vnd.unregistered"

    with pytest.raises(fg.ConfigurationError, match=r"no codec 'application/vnd.unreg.* in the module of the node"):
        fg.spark.run(answering, spark, source=tmp_path, checkpoint=tmp_path / "c", codec=Unregistered())
