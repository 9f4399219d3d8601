"""`faregate journal …` on real journals: sound ones, damaged ones, and ones that a bus writes to meanwhile."""

import asyncio
import json
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

import faregate as fg
from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled
from faregate.broker.journal.backup import copy_journal
from faregate.broker.journal.disk import RealDisk, RealFile
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.journal.spool import spool
from faregate.broker.journal.verify import inspect
from faregate.cli import app
from faregate.codec.compression import compress
from faregate.errors import FaregateError
from faregate.message import Envelope
from faregate.transports.journal import JournalTransport
from tests.child import Child

ROOT = Path(__file__).parents[2]
DISK = RealDisk()
SMALL = 16 * 1024


class Ran:
    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def journal(*arguments: object) -> Ran:
    """Run a command as `main` does: an error of ours becomes its sentence and status 1."""
    result = CliRunner().invoke(app, ["journal", *map(str, arguments)])
    if isinstance(result.exception, FaregateError):
        return Ran(1, result.output, str(result.exception))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.output, "")


# --- journals to look at ------------------------------------------------------------------------------------------


def envelope(number: int, size: int = 50, type: str = "Noted") -> Envelope:
    return Envelope(
        body=b'{"number":%d,"pad":"%s"}' % (number, b"x" * size),
        publication_id=f"publication-{number}",
        type=type,
        kind="event",
        source="desk",
        key=f"k{number % 3}",
        content_type="application/json",
    )


def write(path: Path, count: int = 40, *, rows: int = 3, start: int = 0) -> Layout:
    """A log of small segments, three messages to a frame; nobody has subscribed."""
    layout = Layout(path)
    prepare(layout, DISK)
    log = Log(layout, DISK, segment_size=SMALL)
    for first in range(start, start + count, rows):
        numbers = range(first, min(first + rows, start + count))
        log.append([envelope(number) for number in numbers], [-1] * len(numbers))
        log.sync()
    log.close()
    return layout


def reopen(layout: Layout) -> dict[int, Envelope]:
    """Open for writing, append one more, and read everything."""
    log = Log(layout, DISK, segment_size=SMALL)
    log.append([envelope(9999)], [-1])
    log.sync()
    log.close()
    reader = JournalReader(layout.root)
    return dict(reader.envelopes(reader.earliest()))


def damage(path: Path, position: int, data: bytes = b"\xff\xfe\xfd") -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str


class Shop:
    """A bus on a journal whose payments can be held up."""

    def __init__(self, path: Path, *, segment_size: int = SMALL) -> None:
        self.billed: list[str] = []
        self.one_more = asyncio.Event()
        self.charged: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        shop, billing, payments = fg.Node("shop"), fg.Node("billing"), fg.Node("payments")

        @billing.on(OrderPlaced, source="shop", key="order_id")
        async def bill(order: OrderPlaced) -> Any:
            if order.total < 0:
                raise fg.Permanent("an impossible total")
            self.billed.append(order.order_id)
            self.one_more.set()
            return fg.send(ChargeCard(order_id=order.order_id), to="payments")

        @payments.on(ChargeCard, order=fg.Serial(), prefetch=1)
        async def charge(command: ChargeCard) -> None:
            await self.open.wait()
            self.charged.append(command.order_id)

        self.transport = JournalTransport(str(path), segment_size=segment_size)
        self.bus = fg.Bus(self.transport, nodes=[shop, billing, payments], drain_seconds=0.1)

    async def until_billed(self, done: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(20):
            while not done(self.billed):
                self.one_more.clear()
                await self.one_more.wait()

    async def place(self, *numbers: int, total: int = 40) -> None:
        for number in numbers:
            await self.bus.publish(OrderPlaced(order_id=str(number), total=total), node="shop")


async def run_shop(path: Path, count: int = 30) -> None:
    shop = Shop(path)
    async with shop.bus:
        await shop.place(*range(count))
        await shop.place(count, total=-1)
        await shop.bus.idle()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- every command ------------------------------------------------------------------------------------------------

COMMANDS = ["info", "verify", "repair", "tail", "export", "backup", "restore"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = journal(command, "--help")
    assert shown.code == 0
    assert "--json" in shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_no_journal_is_one_clear_sentence(command: str, tmp_path: Path) -> None:
    other = [tmp_path / "out.parquet"] if command in ("export", "backup", "restore") else []
    shown = journal(command, tmp_path / "nothing", *other)
    assert shown.code == 1
    assert "there is no journal in" in shown.error
    assert not (tmp_path / "nothing").exists()


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    layout.meta.write_bytes(b'{"format":"faregate-journal","version":99,"id":"x"}')
    for command in ("info", "verify", "repair", "tail"):
        assert "update Faregate" in journal(command, layout.root).error


def test_the_path_may_be_written_as_in_a_bus(tmp_path: Path) -> None:
    write(tmp_path / "j")
    assert journal("verify", f"journal:{tmp_path / 'j'}?retain=7d").code == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_one_clear_sentence(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    layout.segments.chmod(0)
    try:
        assert "Permission denied" in journal("verify", layout.root).error
    finally:
        layout.segments.chmod(0o700)


def test_a_mistake_is_told_by_the_real_command(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "faregate", "journal", "info", str(tmp_path), "--json"], capture_output=True, text=True
    )
    assert shown.returncode == 1
    assert json.loads(shown.stdout)["error"] == "JournalNotFound"


# --- info ---------------------------------------------------------------------------------------------------------


async def test_info_counts_messages_queues_and_what_was_given_up(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    told = journal("info", tmp_path / "j", "--json").json
    assert told["types"] == {"OrderPlaced": 31, "charge-card": 30}
    assert (told["earliest"], told["latest"], told["writer"]) == (0, 62, None)
    assert told["segments"]["count"] == told["segments"]["sealed"] + 1 > 2
    assert told["first_time"] < told["last_time"]
    waiting = {queue["queue"]: queue["waiting"] for queue in told["queues"]}
    assert waiting == {
        "billing-poison": 1,
        "billing.OrderPlaced.shop": 0,
        "payments-poison": 0,
        "payments.charge-card": 0,
    }
    shown = journal("info", tmp_path / "j").out
    assert "0 to 61" in shown
    assert "OrderPlaced" in shown
    assert "given up at" in shown


async def test_info_beside_a_running_bus_says_who_writes_and_what_waits(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    shop.open.clear()
    async with shop.bus:
        await shop.place(*range(12))
        await shop.until_billed(lambda billed: len(billed) == 12)
        await shop.transport.journal.barrier()
        told = journal("info", tmp_path / "j", "--json").json
        assert told["writer"] == os.getpid()
        assert {q["queue"]: q["waiting"] for q in told["queues"]}["payments.charge-card"] == 12
        assert f"process {os.getpid()}" in journal("info", tmp_path / "j").out
        shop.open.set()


async def test_info_tells_what_waits_for_a_later_time(tmp_path: Path) -> None:
    node = fg.Node("n")
    tried: list[str] = []

    @node.on(OrderPlaced, source="n", retry=fg.Retry(0), redeliver=fg.Redeliver(600))
    async def fail(order: OrderPlaced) -> None:
        tried.append(order.order_id)
        raise RuntimeError("not now")

    async with fg.Bus(f"journal:{tmp_path / 'j'}", nodes=[node], drain_seconds=0.1) as bus:
        await bus.publish(OrderPlaced(order_id="1", total=1), node="n")

        def later() -> list[tuple[int, int]]:
            queues = journal("info", tmp_path / "j", "--json").json["queues"]
            return [(queue["waiting"], queue["later"]) for queue in queues if not queue["poison"]]

        await wait_until(lambda: bool(tried) and later() == [(1, 1)])


def test_info_shows_readers_spool_and_foreign_files(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    JournalReader(layout.root).save_reader_offset("spark", 30)
    spool(layout, DISK, [envelope(1)])
    (layout.segments / "notes.txt").write_text("mine")
    told = journal("info", layout.root, "--json").json
    assert told["readers"] == [{"name": "spark", "offset": 30, "lag": 10}]
    assert told["spool"] == 1
    assert told["foreign"] == ["segments/notes.txt"]
    shown = journal("info", layout.root).out
    assert "1 batch waiting" in shown
    assert "notes.txt does not belong" in shown


def test_info_of_a_damaged_journal_says_what_it_can(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    damage(layout.segment(30), 200)
    told = journal("info", layout.root, "--json").json
    assert told["latest"] == 40
    assert "is damaged at byte 64" in told["trouble"][0]


def test_info_of_an_empty_journal(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 0)
    assert journal("info", layout.root, "--json").json["latest"] == 0
    assert "none yet" in journal("info", layout.root).out


# --- verify -------------------------------------------------------------------------------------------------------


async def test_a_journal_that_was_used_is_sound(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    shown = journal("verify", tmp_path / "j")
    assert shown.code == 0, shown.out
    assert "The journal is sound." in shown.out
    told = journal("verify", tmp_path / "j", "--json").json
    assert told["sound"] is True
    assert told["problems"] == told["notes"] == told["lost"] == []
    assert told["checked"]["messages"] == 61
    assert told["checked"]["poison"] == 1
    assert told["checked"]["settlements"] >= 61


def test_a_damaged_frame_is_found_with_file_position_and_offsets(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    second = next(frame for frame in _frames(layout, 15) if frame.base == 18)
    damage(layout.segment(15), second.body + 20)
    told = journal("verify", layout.root, "--json")
    assert told.code == 1
    [problem] = told.json["problems"]
    assert problem["file"] == "segments/00000000000000000015.seg"
    assert problem["position"] == second.at_byte
    assert problem["lost"] == [18, 20]
    assert told.json["lost"] == [[18, 20]]
    shown = journal("verify", layout.root)
    assert shown.code == 1
    assert "segments/00000000000000000015.seg at " in shown.out
    assert "Lost: 3 offsets (18 to 20)." in shown.out


def test_a_body_that_is_not_the_one_of_its_digest_is_found_by_its_offset(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 3)
    sound, packed = envelope(3), envelope(4, size=500)
    sound.body_digest = sha256(sound.body).digest()[:16]
    packed.body_digest = sha256(packed.body).digest()[:16]
    packed.body, packed.content_encoding = compress(packed.body), "gzip"
    strangers = [
        msgspec.structs.replace(packed, content_encoding="br"),  # nobody here can tell
        msgspec.structs.replace(sound, body=b"", payload_ref="elsewhere"),
    ]
    altered = [
        msgspec.structs.replace(sound, body=sound.body.replace(b"3", b"8")),
        msgspec.structs.replace(packed, body=packed.body[:-9]),
    ]
    log = Log(layout, DISK, segment_size=SMALL)
    log.append([sound, packed, *strangers], [-1] * 4)
    log.sync()
    assert journal("verify", layout.root).code == 0
    log.append(altered, [-1, -1])
    log.sync()
    log.close()
    told = journal("verify", layout.root, "--json")
    assert told.code == 1 and told.json["lost"] == []
    wanted = [f"has another body at offset {n} than the one that its digest was made of" for n in (7, 8)]
    assert [problem["what"] for problem in told.json["problems"]] == wanted
    assert "This cannot be repaired: restore a backup." in journal("repair", layout.root, "--yes").out
    assert journal("backup", layout.root, tmp_path / "copy").code == 0  # it is as good as the original


def _frames(layout: Layout, base: int) -> list[frames.Frame]:
    data = layout.segment(base).read_bytes()
    header = frames.read_segment_header(data)
    assert header is not None
    return [frame for frame in frames.scan(data, header) if frame.kind != frames.FOOTER]


def _cut_footer(layout: Layout) -> None:
    path = layout.segment(15)
    os.truncate(path, path.stat().st_size - 10)


def _lie_in_footer(layout: Layout) -> None:
    """A sound footer that says something else than the frames."""
    path = layout.segment(0)
    data = path.read_bytes()
    header = frames.read_segment_header(data)
    assert header is not None
    footer = frames.read_footer(data, header)
    assert footer is not None
    position, last = footer.bytes, _frames(layout, 0)[-1]
    footer.messages += 1
    body = msgspec.json.encode(footer)
    packed, padding, _ = frames.pack_frame(
        body,
        kind=frames.FOOTER,
        previous=last.crc,
        rows=0,
        commit=footer.last_commit,
        base=footer.end,
        time=footer.last_time,
        segment_id=header.segment_id,
    )
    path.write_bytes(data[:position] + packed + body + padding + frames.pack_trailer(position))


def _damage_confirmed_tail(layout: Layout) -> None:
    damage(layout.segment(30), _frames(layout, 30)[-1].body + 9)


def _unknown_settlement(layout: Layout) -> None:
    layout.settled_log(30).write_bytes(settled.pack(settled.Record(77, 0, settled.HANDLED, 1, 0, 0.0)))


def _bad_settlement(layout: Layout) -> None:
    layout.topology.write_bytes(b'{"version":1,"queues":[{"number":0,"name":"q","node":"n","type":"T"}]}')
    record = settled.pack(settled.Record(1, 0, settled.HANDLED, 1, 0, 0.0))
    layout.settled_log(0).write_bytes(record + b"?" * len(record) + record)


def _spool_half(layout: Layout) -> None:
    path = spool(layout, DISK, [envelope(1)])
    path.write_bytes(path.read_bytes()[:300])


DAMAGES: dict[str, tuple[Callable[[Layout], object], str]] = {
    "segment header": (lambda j: damage(j.segment(15), 10), "has a header that cannot be read"),
    "first header": (lambda j: damage(j.segment(0), 0, bytes(64)), "has a header that cannot be read"),
    "frame": (lambda j: damage(j.segment(0), 400), "is damaged up to byte"),
    "footer cut": (_cut_footer, "has no footer that can be read"),
    "footer lies": (_lie_in_footer, "its footer says messages 16, and it is 15"),
    "confirmed tail": (_damage_confirmed_tail, "messages up to offset 39 were confirmed"),
    "tail cut": (lambda j: os.truncate(j.segment(30), 3000), "messages up to offset 39 were confirmed"),
    "missing segment": (lambda j: j.segment(15).unlink(), "is missing"),
    "missing last segment": (lambda j: j.segment(30).unlink(), "is missing"),
    "everything missing": (lambda j: [j.segment(base).unlink() for base in (0, 15, 30)], "is missing"),
    "double segment": (lambda j: shutil.copy(j.segment(0), j.segment(5)), "starts within the segment before it"),
    "wrong name": (lambda j: shutil.copy(j.segment(0), j.segment(15)), "is another segment"),
    "empty segment": (lambda j: j.segment(15).write_bytes(b""), "has a header that cannot be read"),
    "high-water": (lambda j: damage(j.high_water, 20), "cannot be read, so nobody knows"),
    "no high-water": (lambda j: j.high_water.unlink(), "is missing, so nobody knows"),
    "snapshot": (lambda j: j.snapshot.write_bytes(b'{"offset":'), "cannot be read"),
    "snapshot ahead": (lambda j: j.snapshot.write_bytes(b'{"offset":400}'), "speaks of offset 400"),
    "unknown settlement": (_unknown_settlement, "settles more than the log has"),
    "damaged settlement": (_bad_settlement, "has 1 damaged record"),
    "half a batch": (_spool_half, "is not a whole batch"),
    "reader": (lambda j: (j.readers / "spark.json").write_bytes(b"{"), "cannot be read"),
    "reader ahead": (lambda j: JournalReader(j.root).save_reader_offset("spark", 50), "the offset of a reader"),
    "journal.json": (lambda j: j.meta.write_bytes(b"{"), "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_repaired_and_nothing_sound_is_lost(name: str, tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    do, told = DAMAGES[name]
    do(layout)
    before = _contents(layout.root)

    found = journal("verify", layout.root)
    assert found.code == 1
    assert told in found.out, found.out

    planned = journal("repair", layout.root)
    assert planned.code == 1
    assert "Nothing was changed" in planned.out
    assert {**_contents(layout.root), "lock": b""} == {**before, "lock": b""}, "without --yes nothing changes"

    done = journal("repair", layout.root, "--yes", "--json")
    if name != "unknown settlement":  # its queue is unknown, too, and that no repair can know
        assert done.code == 0, done.out
        assert journal("verify", layout.root).code == 0
    lost = {offset for first, last in done.json["lost"] for offset in range(first, last + 1)}
    kept = reopen(layout)
    assert {offset for offset in range(40) if offset not in kept} == lost & set(range(40))
    assert all(kept[offset] == envelope(offset) for offset in kept if offset < 40)
    [(added, _)] = [item for item in kept.items() if item[1].publication_id == "publication-9999"]
    assert added >= 40, "an offset is never given twice"
    assert added not in lost
    _check_nothing_was_deleted(before, _contents(layout.root))


def _contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _check_nothing_was_deleted(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    """Every file that is gone or changed lies in quarantine as it was, but for what opening writes to."""
    set_aside = [data for name, data in after.items() if name.startswith("quarantine/")]
    for name, data in before.items():
        same = name in after and after[name].startswith(data.rstrip(b"\0"))
        if not same and name not in ("lock", "high-water"):
            assert data in set_aside, f"{name} was deleted"


def test_what_a_repair_makes_is_private(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    damage(layout.segment(15), 400)
    journal("repair", layout.root, "--yes")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in layout.root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE(layout.quarantine.stat().st_mode) == 0o700


def test_random_damage_never_loses_more_than_is_told(tmp_path: Path) -> None:
    original = write(tmp_path / "original")
    chance = random.Random(17)
    for round_number in range(60):
        layout = Layout(tmp_path / f"j{round_number}")
        shutil.copytree(original.root, layout.root)
        for _ in range(chance.choice([1, 1, 3])):
            path = layout.segment(chance.choice([0, 15, 30]))
            data = bytearray(path.read_bytes())
            at = chance.randrange(len(data))
            match chance.choice(["flip", "flip", "zeros", "cut", "junk"]):
                case "flip":
                    data[at] ^= 1 << chance.randrange(8)
                case "zeros":
                    data[at : at + 2000] = bytes(len(data[at : at + 2000]))
                case "cut":
                    del data[at:]
                    data = data or bytearray(1)
                case "junk":
                    data[at : at + 50] = chance.randbytes(len(data[at : at + 50]))
            path.write_bytes(data)
        done = journal("repair", layout.root, "--yes", "--json")
        assert done.code == 0, done.out
        lost = {offset for first, last in done.json["lost"] for offset in range(first, last + 1)}
        kept = reopen(layout)
        assert {offset for offset in range(40) if offset not in kept} == lost
        assert all(kept[offset] == envelope(offset) for offset in kept if offset < 40)
        shutil.rmtree(layout.root)


def test_a_torn_tail_is_a_note_and_repair_keeps_its_bytes(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    end = _frames(layout, 30)[-1].end
    torn = frames.FRAME_MAGIC + b"half a frame"
    damage(layout.segment(30), end, torn)
    told = journal("verify", layout.root, "--json")
    assert told.code == 0
    assert "torn commit, never confirmed" in told.json["notes"][0]["what"]
    done = journal("repair", layout.root, "--yes", "--json")
    assert done.code == 0
    assert done.json["lost"] == []
    assert (layout.quarantine / f"{layout.segment(30).name}.tail-{end}").read_bytes() == torn
    assert journal("verify", layout.root, "--json").json["notes"] == []
    assert set(range(40)) <= set(reopen(layout))


def test_a_batch_whose_last_part_never_came_is_a_torn_tail(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 3)
    log = Log(layout, DISK, segment_size=1 << 20)
    mark = layout.high_water.read_bytes()
    log.append([envelope(number, size=10) for number in range(3, 10_010)], [-1] * 10_007, batch=b"b" * 16)
    log.close()
    layout.high_water.write_bytes(mark)
    [base] = [base for base in layout.segment_bases(DISK) if _frames(layout, base)[-1].parts > 1]
    damage(layout.segment(base), _frames(layout, base)[-1].at_byte, bytes(100_000))
    told = journal("verify", layout.root, "--json")
    assert told.code == 0, told.out
    assert "torn commit" in told.json["notes"][0]["what"]
    assert told.json["end"] == 3


def test_a_seal_that_was_interrupted_hides_nothing_after_a_repair(tmp_path: Path, monkeypatch: Any) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    log = Log(layout, DISK)
    log.append([envelope(0)], [-1])
    log.sync()

    def killed(self: RealFile, size: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RealFile, "truncate", killed)
        with pytest.raises(KeyboardInterrupt):
            log.seal()
    assert journal("verify", layout.root).code == 0
    assert journal("repair", layout.root, "--yes").code == 0
    assert list(reopen(layout)) == [0, 1]


def test_a_repaired_journal_says_what_it_lost_and_can_be_repaired_again(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    for base, number in ((15, 0), (0, 1)):
        damage(layout.segment(base), _frames(layout, base)[number].body)
        assert journal("repair", layout.root, "--yes").code == 0
    notes = journal("verify", layout.root, "--json").json["notes"]
    assert [note["what"] for note in notes] == [
        "lost offsets 3 to 5, and was repaired",
        "lost offsets 15 to 17, and was repaired",
    ]
    damage(layout.segment(15), _frames(layout, 15)[0].body)
    assert journal("repair", layout.root, "--yes").code == 0
    assert len(list(layout.quarantine.iterdir())) == 3
    assert set(range(40)) - set(reopen(layout)) == {3, 4, 5, *range(15, 21)}


def test_a_broken_topology_cannot_be_made_again_and_repair_says_so(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    layout.topology.write_bytes(b"{")
    shown = journal("repair", layout.root, "--yes")
    assert shown.code == 1
    assert "This cannot be repaired: restore a backup." in shown.out


async def test_a_missing_topology_is_a_problem(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    (tmp_path / "j" / "topology.json").unlink()
    shown = journal("verify", tmp_path / "j")
    assert shown.code == 1
    assert "topology.json is missing, so nothing in the log has a queue" in shown.out


async def test_a_missing_first_segment_is_noticed_while_something_in_it_waits(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    shop.open.clear()
    async with shop.bus:
        await shop.place(*range(30))
        await shop.until_billed(lambda billed: len(billed) == 30)
    layout = Layout(tmp_path / "j")
    assert journal("verify", layout.root).code == 0
    layout.segment(0).unlink()
    told = journal("verify", layout.root, "--json")
    assert told.code == 1
    assert "although messages in it waited" in told.json["problems"][0]["what"]
    assert journal("repair", layout.root, "--yes").code == 0


async def test_dropping_a_broken_snapshot_changes_nothing_that_waits(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    shop.open.clear()
    async with shop.bus:
        await shop.place(*range(20))
        await shop.until_billed(lambda billed: len(billed) == 20)
    waiting = journal("info", tmp_path / "j", "--json").json["queues"]
    (tmp_path / "j" / "snapshot.json").write_bytes(b"broken")
    assert journal("repair", tmp_path / "j", "--yes").code == 0
    assert (tmp_path / "j" / "quarantine" / "snapshot.json").read_bytes() == b"broken"
    assert journal("info", tmp_path / "j", "--json").json["queues"] == waiting
    again = Shop(tmp_path / "j")
    async with again.bus:
        await again.bus.idle()
    assert sorted(again.charged, key=int) == [str(number) for number in range(20)]


async def test_repair_of_a_side_log_keeps_what_the_snapshot_knows(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    layout = Layout(tmp_path / "j")
    damage(layout.settled_log(0), 40)
    assert journal("repair", layout.root, "--yes").code == 0
    again = Shop(tmp_path / "j")
    async with again.bus:
        await again.bus.idle()
    assert again.billed == again.charged == []


def test_compacted_segments_are_sound(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    reader = JournalReader(layout.root)
    apply_retention(layout, DISK, reader, Retention(seconds=0.0), [(2, 3), (8, 8), (20, 20)], 1 << 60)
    told = journal("verify", layout.root, "--json")
    assert told.code == 0, told.out
    assert told.json["checked"]["messages"] == 4 + 10
    assert journal("info", layout.root, "--json").json["segments"]["compacted"] == 2
    damage(layout.segment(0), 300)
    assert journal("repair", layout.root, "--yes").code == 0
    assert journal("info", layout.root, "--json").json["segments"]["compacted"] == 2


# --- beside a writer ----------------------------------------------------------------------------------------------


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
    [waiting] = [queue["waiting"] for queue in told["queues"] if not queue["poison"]]
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
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""


# --- tail ---------------------------------------------------------------------------------------------------------


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


# --- export -------------------------------------------------------------------------------------------------------


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


# --- backup and restore -------------------------------------------------------------------------------------------


async def test_a_restored_journal_goes_on_where_the_backup_was_made(tmp_path: Path) -> None:
    shop = Shop(tmp_path / "j")
    shop.open.clear()
    async with shop.bus:
        await shop.place(*range(20))
        await shop.place(20, total=-1)
        await shop.until_billed(lambda billed: len(billed) == 20)
        await shop.transport.journal.barrier()
        shown = await asyncio.to_thread(journal, "backup", tmp_path / "j", tmp_path / "b")
        assert shown.code == 0, shown.error
        assert "the copy was read again and is sound" in shown.out
        shop.open.set()
        await shop.bus.idle()
        assert len(shop.charged) == 20
    assert journal("restore", tmp_path / "b", tmp_path / "r").code == 0
    again = Shop(tmp_path / "r")
    async with again.bus:
        await again.place(21)
        await again.bus.idle()
        assert len(await again.bus.poisoned("billing")) == 1
    assert sorted(again.charged, key=int) == [*map(str, range(20)), "21"]
    assert again.billed == ["21"]


async def test_whatever_happens_during_a_backup_it_is_consistent(tmp_path: Path) -> None:
    """Between any two stages messages come and are handled, queues appear, segments roll, a batch is taken in."""
    shop = Shop(tmp_path / "j")
    shop.open.clear()
    confirmed: list[int] = []

    async def use(number: int) -> None:
        shop.open.set()
        await shop.place(*range(number, number + 20))
        confirmed.extend(range(number, number + 20))
        await shop.bus.idle()
        shop.open.clear()
        await shop.transport.broker._keep()

    async with shop.bus:
        await use(0)
        await shop.place(*range(20, 30))
        confirmed.extend(range(20, 30))
        before = list(confirmed)
        loop = asyncio.get_running_loop()
        numbers = iter(range(100, 1000, 100))

        def between(stage: str) -> None:
            asyncio.run_coroutine_threadsafe(use(next(numbers)), loop).result(30)

        await asyncio.to_thread(copy_journal, tmp_path / "j", tmp_path / "b", between=between)
        shop.open.set()
    assert journal("verify", tmp_path / "b").code == 0
    bodies = [json.loads(message.body) for _, message in JournalReader(tmp_path / "b").envelopes()]
    orders = [int(body["order_id"]) for body in bodies if "total" in body]
    assert set(before) <= set(orders)
    assert len(orders) == len(set(orders))
    again = Shop(tmp_path / "b")
    async with again.bus:
        await again.bus.idle()
    handled = {*again.charged, *shop.charged}
    assert {str(number) for number in orders} <= handled, "what the copy has was handled before or is handled now"


async def test_a_batch_in_the_spool_is_in_the_backup_once(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j", 5)
    layout = Layout(tmp_path / "j")
    order = next(message for _, message in JournalReader(layout.root).envelopes() if message.type == "OrderPlaced")
    new = msgspec.structs.replace(order, publication_id="from-outside", body=b'{"order_id":"77","total":1}', key="77")
    spool(layout, DISK, [new])

    taken: list[str] = []

    def between(stage: str) -> None:
        """The writer takes the batch in after the copy has it: it is in the spool of the copy and in its log."""
        if stage == "readers" and not taken:
            taken.append(stage)
            asyncio.run(_take_in(tmp_path / "j"))

    await asyncio.to_thread(copy_journal, layout.root, tmp_path / "b", between=between)
    assert taken
    assert len(list((tmp_path / "b" / "spool").iterdir())) == 1
    again = Shop(tmp_path / "b")
    async with again.bus:
        await again.bus.idle()
        await wait_until(lambda: not list((tmp_path / "b" / "spool").iterdir()))
    ids = [message.publication_id for _, message in JournalReader(tmp_path / "b").envelopes()]
    assert ids.count("from-outside") == 1


async def _take_in(path: Path) -> None:
    shop = Shop(path)
    async with shop.bus:
        await shop.until_billed(lambda billed: "77" in billed)
        await shop.bus.idle()


def test_a_backup_goes_by_the_frames_when_the_mark_is_old(tmp_path: Path) -> None:
    """The mark is not synced: after a power cut it may be older than the messages that were."""
    layout = write(tmp_path / "j", 3)
    mark = layout.high_water.read_bytes()
    write(layout.root, 37, start=3)
    layout.high_water.write_bytes(mark)
    assert journal("backup", layout.root, tmp_path / "b", "--json").json["end"] == 40
    assert set(range(40)) <= set(reopen(Layout(tmp_path / "b")))


def test_retention_during_a_backup_leaves_no_hole(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 100)
    bases = layout.segment_bases(DISK)
    copied: list[int] = []

    def copying(done: int, total: int) -> None:
        if not copied and done > 20_000:  # the first segment is copied, the second is not
            copied.append(done)
            for base in bases[:3]:
                layout.segment(base).unlink()

    copy_journal(layout.root, tmp_path / "b", copying=copying)
    assert copied
    assert Layout(tmp_path / "b").segment_bases(DISK) == bases[3:]
    assert sorted(reopen(Layout(tmp_path / "b")))[0] == bases[3]


def test_a_backup_is_private_and_has_readers(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    JournalReader(layout.root).save_reader_offset("spark", 12)
    told = journal("backup", layout.root, tmp_path / "b", "--json").json
    assert told["sound"] is True
    assert told["id"] == JournalReader(layout.root).meta.id
    assert told["target"] == str(tmp_path / "b")
    assert [each.offset for each in JournalReader(tmp_path / "b").reader_offsets()] == [12]
    for path in (tmp_path / "b").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_copy_goes_only_into_an_empty_or_new_folder(command: str, tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    (tmp_path / "empty").mkdir()
    assert journal(command, layout.root, tmp_path / "empty").code == 0
    assert "is not empty" in journal(command, layout.root, tmp_path / "empty").error
    (tmp_path / "file").write_text("x")
    assert "is a file" in journal(command, layout.root, tmp_path / "file").error
    assert "lies within the journal" in journal(command, layout.root, layout.root / "backup").error


def test_a_damaged_journal_makes_no_backup(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    damage(layout.segment(15), 400)
    shown = journal("backup", layout.root, tmp_path / "b")
    assert shown.code == 1
    assert "segments/00000000000000000015.seg at 64 is damaged up to byte" in shown.error
    assert not (tmp_path / "b").exists()


def test_a_backup_that_was_cut_short_is_no_journal(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    journal("backup", layout.root, tmp_path / "b")
    (tmp_path / "b" / "journal.json").unlink()  # it is written last
    assert "there is no journal in" in journal("restore", tmp_path / "b", tmp_path / "r").error
    assert not (tmp_path / "r").exists()


# --- progress -----------------------------------------------------------------------------------------------------


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    told: list[tuple[int, int]] = []
    inspect(layout.root, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
