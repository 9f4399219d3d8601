"""`faregate journal backup` and `restore`: a copy is whole and consistent, whatever happens meanwhile."""

import asyncio
import json
import stat
from pathlib import Path

import msgspec
import pytest

from faregate.broker.journal.backup import copy_journal
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.spool import spool
from tests.cli.journal_rig import DISK, Shop, damage, journal, reopen, run_shop, wait_until, write

pytestmark = pytest.mark.usefixtures("quiet")


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
        assert len(await again.bus.dead_letters("billing")) == 1
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
