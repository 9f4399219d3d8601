"""`faregate journal tail` and `export`, and every command beside a bus that writes."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as parquet
import pytest

from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import seal_all
from faregate.broker.journal.verify import inspect
from tests.child import Child
from tests.cli.journal_rig import DISK, Shop, damage, envelope, journal, write

pytestmark = pytest.mark.usefixtures("quiet")


async def test_verify_beside_a_bus_that_writes(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    async with shop.bus:
        writing = asyncio.create_task(shop.place(*range(400)))
        verified = 0
        while not writing.done():
            shown = await asyncio.to_thread(_inspect, tmp_path / "j")
            assert shown == []
            verified += 1
        assert verified > 2
        shown = await asyncio.to_thread(journal, "verify", tmp_path / "j")
        assert shown.code == 0, shown.out
        assert f"as far as process {os.getpid()} has confirmed it" in shown.out


def _inspect(path: Path) -> list[str]:
    return [f"{problem.path} {problem.at_byte} {problem.what}" for problem in inspect(path).problems]


async def test_repair_refuses_beside_a_bus(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    async with shop.bus:
        for arguments in ((), ("--yes",)):
            shown = journal("repair", tmp_path / "j", *arguments)
            assert shown.code == 1
            assert f"is written by process {os.getpid()}: stop that process, then repair" in shown.error


async def test_damage_below_the_mark_is_found_beside_a_bus(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    async with shop.bus:
        await shop.place(*range(30))
        await shop.bus.idle()
        base = Layout(tmp_path / "j").segment_bases(DISK)[-1]
        damage(Layout(tmp_path / "j").segment(base), 200)
        assert journal("verify", tmp_path / "j").code == 1


WRITER = """
import asyncio, sys
import pytest

import faregate as fg
from faregate.transports.journal import JournalTransport

class Counted(fg.Event):
    number: int

class Never(fg.Event):
    pass

node = fg.Node("counter")

@node.on(Counted, source="counter", order=fg.Parallel(8))
async def count(message: Counted):
    if message.number % 3:
        await asyncio.sleep(3600)

async def main():
    bus = fg.Bus(JournalTransport(sys.argv[1], segment_size=32768), nodes=[node], drain_seconds=0.1)
    async with bus:
        for number in range(1_000_000):
            await bus.publish(Counted(number=number), node="counter")
            print(number, flush=True)

asyncio.run(main())
"""


class Writer:
    """Another process that publishes as fast as it can, and what it has said to be confirmed."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.confirmed = -1
        self._enough = threading.Condition()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._enough:
                self.confirmed = int(line)
                self._enough.notify_all()

    def wait_for(self, number: int) -> int:
        with self._enough:
            assert self._enough.wait_for(lambda: self.confirmed >= number, 30)
            return self.confirmed

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def writing(path: Path) -> Iterator[Writer]:
    writer = Writer(path)
    try:
        yield writer
    finally:
        writer.close()


def test_backups_under_load_have_everything_that_was_confirmed_before(tmp_path: Path) -> None:
    with writing(tmp_path / "j") as writer:
        for number in range(3):
            confirmed = writer.wait_for(writer.confirmed + 150)
            shown = journal("verify", tmp_path / "j", "--json")
            assert shown.code == 0, shown.out
            assert shown.json["writer"] == str(writer.process.pid)
            shown = journal("backup", tmp_path / "j", tmp_path / f"b{number}", "--json")
            assert shown.code == 0, shown.out + shown.error
            shown = journal("restore", tmp_path / f"b{number}", tmp_path / f"r{number}", "--json")
            assert shown.code == 0, shown.out + shown.error
            _check_numbers(tmp_path / f"r{number}", confirmed)
        assert writer.process.poll() is None, "the writer goes on"
    assert journal("verify", tmp_path / "j").code == 0, "after kill -9 it is sound, too"


def _check_numbers(path: Path, confirmed: int) -> None:
    """Everything is in the log, in order, and what was not handled still waits; the copy can be written to."""
    log = Log(Layout(path), DISK)
    log.close()
    assert log.truncated == 0
    bodies = [json.loads(message.body)["number"] for _, message in JournalReader(path).envelopes()]
    assert bodies == list(range(len(bodies)))
    assert len(bodies) > confirmed
    told = journal("info", path, "--json").json
    [waiting] = [queue["waiting"] for queue in told["queues"] if not queue["dead_letters"]]
    assert waiting >= sum(number % 3 > 0 for number in range(confirmed + 1))


def test_tail_follows_a_writer_in_another_process_until_ctrl_c(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 5)
    with Child(
        [sys.executable, "-m", "faregate", "journal", "tail", str(layout.root), "--follow", "-n", "2", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert [json.loads(process.stdout.readline())["offset"] for _ in range(2)] == [3, 4]
        write(layout.root, 30, start=5)
        assert [json.loads(process.stdout.readline())["offset"] for _ in range(30)] == list(range(5, 35))
        process.send_signal(signal.SIGSTOP)  # in the middle of a segment
        write(layout.root, 60, start=35)
        assert seal_all(layout, DISK) > 3, "the segment that it was in is not sealed"
        process.send_signal(signal.SIGCONT)
        write(layout.root, 10, start=95)
        assert [json.loads(process.stdout.readline())["offset"] for _ in range(70)] == list(range(35, 105))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


def test_tail_shows_the_last_messages(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    shown = journal("tail", layout.root, "-n", 3).out.splitlines()
    assert len(shown) == 3
    assert shown[0].startswith("37  20")
    assert "Noted  desk  key k1  publication-37  " in shown[0]
    assert '{"number":37,' in shown[0]
    assert len(journal("tail", layout.root).out.splitlines()) == 20
    assert len(journal("tail", layout.root, "-n", 1000).out.splitlines()) == 40
    assert journal("tail", layout.root, "-n", 0).out == ""


def test_tail_finds_rare_types_far_back(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    log = Log(layout, DISK)
    log.append([envelope(number, type="Rare" if number % 400 == 0 else "Noted") for number in range(2000)], [-1] * 2000)
    log.sync()
    log.close()
    shown = journal("tail", layout.root, "--type", "Rare", "-n", 3, "--json").out.splitlines()
    assert [json.loads(line)["offset"] for line in shown] == [800, 1200, 1600]


def test_tail_in_json_has_these_fields(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 1)
    told = journal("tail", layout.root, "--json").json
    moment = told.pop("time")
    assert moment.endswith("Z")
    assert told == {
        "offset": 0,
        "type": "Noted",
        "kind": "event",
        "source": "desk",
        "destination": None,
        "key": "k0",
        "publication_id": "publication-0",
        "correlation_id": envelope(0).correlation_id,
        "content_type": "application/json",
        "content_encoding": None,
        "payload_bytes": len(envelope(0).body),
        "payload": envelope(0).body.decode(),
        "payload_cut": False,
    }


def test_no_message_steers_the_terminal_or_fills_it(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    log = Log(layout, DISK)
    evil = msgspec.structs.replace(envelope(0), key="\x1b[2J", body=b'"\x1b]0;owned\x07[bold]' + b"y" * 100_000)
    binary = msgspec.structs.replace(envelope(1), body=b"\xff\x00\x81", content_type="application/msgpack")
    packed = msgspec.structs.replace(envelope(2), content_encoding="zstd")
    log.append([evil, binary, packed], [-1] * 3)
    log.sync()
    log.close()
    shown = journal("tail", layout.root).out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]" in shown
    assert "<3 bytes of application/msgpack>" in shown
    assert f"<{len(envelope(2).body)} bytes of zstd application/json>" in shown
    assert max(map(len, shown.splitlines())) < 400
    first = json.loads(journal("tail", layout.root, "--json").out.splitlines()[0])
    assert first["payload_cut"] is True
    assert len(first["payload"]) == 4096


def test_export_writes_every_message(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    told = journal("export", layout.root, tmp_path / "out.parquet", "--json").json
    assert (told["rows"], told["start"], told["end"]) == (40, 0, 40)
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("offset").to_pylist() == list(range(40))
    assert table.column("payload").to_pylist() == [envelope(number).body for number in range(40)]
    assert table.schema.metadata[b"faregate.journal"].decode() == JournalReader(layout.root).meta.id
    assert stat.S_IMODE((tmp_path / "out.parquet").stat().st_mode) == 0o600
    assert "wrote 40 messages to " in journal("export", layout.root, tmp_path / "again.parquet").out


def test_export_takes_a_stretch_and_types(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")

    def offsets(*options: object) -> list[int]:
        shown = journal("export", layout.root, tmp_path / "out.parquet", "--force", *options)
        assert shown.code == 0, shown.error
        found: list[int] = parquet.read_table(tmp_path / "out.parquet").column("offset").to_pylist()
        return found

    assert offsets("--start", 7, "--end", 20) == list(range(7, 20))
    assert offsets("--type", "Nothing") == []
    assert offsets("--type", "Noted", "--start", 38) == [38, 39]
    assert offsets("--start", "2020-01-01") == list(range(40))
    assert offsets("--end", "2020-01-01T12:00:00Z") == []
    assert offsets("--start", 40) == []


def test_export_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    out = tmp_path / "out.parquet"
    out.write_text("precious")
    assert "is there already: use --force" in journal("export", layout.root, out).error
    assert out.read_text() == "precious"
    assert "is a folder" in journal("export", layout.root, tmp_path, "--force").error
    assert "there is no folder" in journal("export", layout.root, tmp_path / "no" / "out.parquet").error
    assert "takes an offset or a time" in journal("export", layout.root, tmp_path / "x", "--start", "soon").error
    assert "is not in" in journal("export", layout.root, tmp_path / "x", "--start", 99).error
    damage(layout.segment(15), 400)
    assert "is damaged at byte 64" in journal("export", layout.root, out, "--force").error
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j", "out.parquet"]


def test_export_cuts_row_groups(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("faregate.broker.journal.export._ROWS", 10)
    layout = write(tmp_path / "j")
    told = journal("export", layout.root, tmp_path / "out.parquet", "--json").json
    assert told["row_groups"] == parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 5
