"""`faregate journal verify` and `repair`: damage is found and told, and nothing sound is lost."""

import os
import random
import shutil
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled
from faregate.broker.journal.disk import RealFile
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.journal.spool import spool
from faregate.codec.compression import compress
from faregate.ports.log import HANDLED
from tests.cli.journal_rig import DISK, SMALL, Shop, damage, envelope, journal, reopen, run_shop, write

pytestmark = pytest.mark.usefixtures("quiet")


async def test_a_journal_that_was_used_is_sound(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    shown = journal("verify", tmp_path / "j")
    assert shown.code == 0, shown.out
    assert "The journal is sound." in shown.out
    told = journal("verify", tmp_path / "j", "--json").json
    assert told["sound"] is True
    assert told["problems"] == told["notes"] == told["lost"] == []
    assert told["checked"]["messages"] == 61
    assert told["checked"]["dead_letters"] == 1
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
    sound, packed = (
        msgspec.structs.replace(each, body_digest=sha256(each.body).digest()[:16])
        for each in (envelope(3), envelope(4, size=500))
    )
    packed = msgspec.structs.replace(packed, body=compress(packed.body), content_encoding="gzip")
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
    layout.settled_log(30).write_bytes(settled.pack(settled.Record(77, 0, HANDLED, 1, 0, 0.0)))


def _bad_settlement(layout: Layout) -> None:
    layout.topology.write_bytes(b'{"version":1,"queues":[{"number":0,"name":"q","node":"n","type":"T"}]}')
    record = settled.pack(settled.Record(1, 0, HANDLED, 1, 0, 0.0))
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
    read = dict(JournalReader(layout.root).envelopes())
    kept = reopen(layout)
    assert read == {offset: each for offset, each in kept.items() if each.publication_id != "publication-9999"}
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


@pytest.mark.parametrize("place", ["in the middle", "at the end"])
def test_a_frame_that_a_later_version_wrote_is_no_damage_and_is_not_taken_out(place: str, tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    log = Log(layout, DISK, segment_size=SMALL)
    log._current().write(b"new", {}, kind=9, rows=1, base=log.next_offset, time=log.time, commit=log.commit + 1)
    log.next_offset, log.commit = log.next_offset + 1, log.commit + 1
    if place == "in the middle":
        log.append([envelope(9999)], [-1])
    log.sync()
    log.close()
    before = _contents(layout.root)
    for command in (["verify"], ["repair", "--yes"]):
        found = journal(*command, layout.root)
        assert found.code == 1
        assert "holds a frame of kind 9, version 2, which this Faregate does not know: update Faregate" in found.error
    assert {**_contents(layout.root), "lock": b""} == {**before, "lock": b""}


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
            log.roll()
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
