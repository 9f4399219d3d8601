"""docs/journal.md is enough to read a journal: this reader uses none of our code, and is the proof. Journals of both
versions lie in `golden/` as they were written, and go on being read, opened and upgraded."""

import asyncio
import json
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.upgrade import upgrade
from faregate.broker.journal.verify import inspect
from faregate.cli.journal.info import describe
from faregate.columns import SCHEMA
from faregate.errors import JournalLocked, JournalTooNew
from faregate.message import Envelope
from faregate.ports.queue import Binding, Delivery
from faregate.transports.journal import JournalTransport

GOLDEN = Path(__file__).with_name("golden")
VERSIONS = ["version-1", "version-2"]


# --- a reader of fifty lines, from docs/journal.md alone ----------------------------------------------------------


def read_journal(root: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, fields) of every message."""
    magic, latest, _, hot, hot_end, _, crc, _ = struct.unpack("<8sQQQQqII", (root / "high-water").read_bytes())
    assert magic == b"FGHIGH\0\1" and zlib.crc32((root / "high-water").read_bytes()[:48]) == crc
    for path in sorted((root / "segments").glob("*.seg")):
        data = path.read_bytes()
        start, version, form, segment = struct.unpack_from("<8sIIQ", data)
        assert start == b"FGSEG\0\0\1" and version <= 2
        end = hot_end if int(path.stem) == hot and form != 2 else len(data)
        yield from read_segment(data, segment, end, latest)


def read_segment(data: bytes, segment: int, end: int, latest: int) -> Iterator[tuple[int, dict[str, Any]]]:
    at, previous = 64, 0
    while at < end:
        fields = struct.unpack_from("<4sHHIIIIQQqQ16sHHI", data, at)
        magic, _, kind, length, crc, before, rows, _, base, _, its_segment, *_ = fields
        body = data[at + 80 : at + 80 + length]
        assert (magic, its_segment, before) == (b"FGJ\1", segment, previous)
        assert zlib.crc32(body, zlib.crc32(data[at : at + 12] + bytes(4) + data[at + 16 : at + 80])) == crc
        if kind == 1:
            found = columns(body)
        elif kind == 4:
            found = [(base + number, row) for number, row in enumerate(msgspec.msgpack.decode(body)[1])]
        elif kind == 2:
            found = []
        else:
            return
        assert kind == 2 or len(found) == rows
        yield from (each for each in found if each[0] < latest)
        at, previous = at + 80 + (length + 7) // 8 * 8, crc


def columns(body: bytes) -> list[tuple[int, dict[str, Any]]]:
    batch = pa.ipc.read_record_batch(pa.py_buffer(body), TABLE)
    return [(row["offset"], {**row, "body": row["payload"]}) for row in batch.to_pylist()]


TEXT, BINARY, NUMBER, TIME = pa.string(), pa.binary(), pa.int32(), pa.timestamp("us", tz="UTC")
TABLE = pa.schema(
    [("offset", pa.int64()), ("time", TIME), ("topic", NUMBER)]
    + [(name, TEXT) for name in ("publication_id", "type", "kind", "source")]
    + [("payload", BINARY), ("recipients", pa.list_(TEXT))]
    + [(name, TEXT) for name in ("destination", "correlation_id", "causation_id")]
    + [("depth", NUMBER), ("key", TEXT), ("attempt_id", TEXT)]
    + [(name, TIME) for name in ("sent_at", "deliver_at", "expires_at")]
    + [("redeliveries", NUMBER), ("replay", NUMBER)]
    + [(n, TEXT) for n in ("content_type", "content_encoding", "key_id", "algorithm", "payload_ref")]
    + [("body_digest", BINARY), ("traceparent", TEXT), ("headers", pa.map_(TEXT, TEXT))]
)
# ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=VERSIONS)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copied(request.param, tmp_path)


def copied(version: str, tmp_path: Path) -> Path:
    target = tmp_path / version
    shutil.copytree(GOLDEN / version, target)
    for name in ("readers", "spool"):  # git keeps no empty folder
        (target / name).mkdir(exist_ok=True)
    return target


def test_the_documented_columns_are_those_that_are_written() -> None:
    assert [(field.name, field.type) for field in TABLE] == [(field.name, field.type) for field in SCHEMA]


def bodies(found: Iterator[tuple[int, dict[str, Any]]]) -> list[tuple[int, str, bytes]]:
    return [(offset, fields["publication_id"], fields["body"]) for offset, fields in found]


def test_another_reader_finds_the_same_messages(journal: Path) -> None:
    ours = [(offset, each.publication_id, each.body) for offset, each in JournalReader(journal).envelopes()]
    assert bodies(read_journal(journal)) == ours
    assert [json.loads(body)["number"] for _, _, body in ours] == list(range(24))


async def test_a_golden_journal_opens_and_what_waited_waits(journal: Path) -> None:
    for _ in range(2):
        transport = JournalTransport(f"{journal}?retain=forever", segment_size=16 * 1024)
        await transport.open()
        await transport.bind(Binding("reader", "Noted", "event", "author"))
        got: list[Delivery] = []
        consumer = await transport.consume("reader.Noted.author", got.append, prefetch=100)
        async with asyncio.timeout(30):
            while len(got) < 18:  # noqa: ASYNC110 (the spool is looked into now and then)
                await asyncio.sleep(0.01)
        letters = await transport.dead_letters("reader")
        later = [entry.envelope for entry in transport.broker.queue("reader.Noted.author").browse()]
        await consumer.close()
        await transport.close()
        assert [number_of(each.envelope) for each in got] == [*range(6, 20), *range(21, 25)], "with what was spooled"
        assert [number_of(each.envelope) for each in letters] == [4]
        [timed] = [each for each in later if each.deliver_at is not None]
        assert (timed.key, timed.depth, timed.causation_id, timed.attempt_id) == ("k", 2, "cause", "a")
        assert timed.traceparent is not None and got[0].envelope.headers == {"region": "north"}
        kept, told = describe(journal)["queues"]
        assert (kept["queue"], kept["dead_letters"], kept["waiting"]) == ("reader-dead-letters", True, 1)
        assert (told["queue"], told["dead_letters"]) == ("reader.Noted.author", False)
        assert (told["waiting"], told["later"]) == (20, 1), "the fifth waits for its next try"
    assert json.loads((journal / "journal.json").read_text())["version"] == 2
    assert inspect(journal).problems == []
    assert len(bodies(read_journal(journal))) == 25


def number_of(envelope: Envelope) -> int:
    return int(json.loads(envelope.body)["number"])


def test_a_golden_journal_is_upgraded_and_says_the_same(journal: Path) -> None:
    before = list(JournalReader(journal).envelopes())
    done = upgrade(journal)
    assert done.version == 2 and inspect(journal).problems == []
    assert list(JournalReader(journal).envelopes()) == before
    assert bodies(read_journal(journal)) == [(offset, each.publication_id, each.body) for offset, each in before]
    assert describe(journal)["segments"]["sealed"] == describe(journal)["segments"]["count"] - 1
    assert upgrade(journal).segments == 0, "there is nothing left to do"


def test_an_upgrade_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = copied("version-1", tmp_path)
    before = list(JournalReader(journal).envelopes())
    seen = 0

    def stop(done: int, total: int) -> None:
        nonlocal seen
        seen = done
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upgrade(journal, stop)
    assert seen == 1 and list(JournalReader(journal).envelopes()) == before
    assert upgrade(journal).segments == 2
    assert list(JournalReader(journal).envelopes()) == before and inspect(journal).problems == []


async def test_a_journal_in_use_is_not_upgraded(tmp_path: Path) -> None:
    journal = copied("version-1", tmp_path)
    transport = JournalTransport(f"{journal}?retain=forever")
    await transport.open()
    with pytest.raises(JournalLocked):
        upgrade(journal)
    await transport.close()


def test_an_older_program_is_told_before_it_takes_new_frames_for_damage(tmp_path: Path) -> None:
    """The version is raised, durably, before the first segment of it; what is newer than us we refuse alike."""
    journal = copied("version-2", tmp_path)
    meta = json.loads((journal / "journal.json").read_text())
    (journal / "journal.json").write_text(json.dumps({**meta, "version": 3}))
    with pytest.raises(JournalTooNew, match=r"version 3 .* reads up to 2: update Faregate"):
        JournalReader(journal)
