"""`faregate journal …`: what holds for every command, `info`, and progress."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.spool import spool
from faregate.broker.journal.verify import inspect
from tests.cli.journal_rig import DISK, OrderPlaced, Shop, damage, envelope, journal, run_shop, wait_until, write

pytestmark = pytest.mark.usefixtures("quiet")

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


async def test_info_counts_messages_queues_and_dead_letters(tmp_path: Path) -> None:
    await run_shop(tmp_path / "j")
    told = journal("info", tmp_path / "j", "--json").json
    assert told["types"] == {"OrderPlaced": 31, "charge-card": 30}
    assert (told["earliest"], told["latest"], told["writer"]) == (0, 62, None)
    assert told["segments"]["count"] == told["segments"]["sealed"] + told["segments"]["rolled"] + 1 > 1
    assert told["first_time"] < told["last_time"]
    waiting = {queue["queue"]: queue["waiting"] for queue in told["queues"]}
    assert waiting == {
        "billing-dead-letters": 1,
        "billing.OrderPlaced.shop": 0,
        "payments-dead-letters": 0,
        "payments.charge-card": 0,
    }
    shown = journal("info", tmp_path / "j").out
    assert "0 to 61" in shown
    assert "OrderPlaced" in shown
    assert "DEAD LETTERS AT" in shown


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
            return [(queue["waiting"], queue["later"]) for queue in queues if not queue["dead_letters"]]

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


# --- progress -----------------------------------------------------------------------------------------------------


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    told: list[tuple[int, int]] = []
    inspect(layout.root, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
