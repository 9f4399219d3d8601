"""The proof matrix of Spark runs, a line each: what dies or is lost, and then every effect is there once, in order.

What needs no Spark to be told apart (a task that fails around its commit, a zombie) is in test_run_engine.py.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from tests.spark.rig import append, truncate
from tests.spark.run_rig import Shop, TokenShop, the_shop, token_shop
from tests.spark.test_run_engine import Rig

__all__ = ["the_shop", "token_shop"]
pytestmark = pytest.mark.services


def checkpoint_of(shop: Shop) -> Path:
    [folder] = (shop.folder / f"checkpoint-{shop.node}").iterdir()
    return folder


def test_a_worker_is_killed_mid_partition(the_shop: Shop) -> None:
    the_shop.place(12)
    the_shop.arm(6, "kill")
    the_shop.run_to_end()
    the_shop.check(12)


def test_the_driver_dies_after_the_handlers_commit_before_the_commit_log(the_shop: Shop) -> None:
    the_shop.place(8)
    the_shop.run_to_end(max_messages_per_trigger=4)
    (checkpoint_of(the_shop) / "commits" / "1").unlink()
    (checkpoint_of(the_shop) / "commits" / ".1.crc").unlink(missing_ok=True)
    the_shop.set_marks(4)
    run = the_shop.run_to_end()
    assert run.outcomes == {"duplicate": 4}
    the_shop.check(8)


def test_a_worker_is_killed_with_tokens_in_another_database(token_shop: TokenShop) -> None:
    """And before that the first message of the run fails, and is parked with its claim."""
    token_shop.place(12)
    token_shop.arm(0)
    token_shop.arm(0, more="-again")
    token_shop.arm(6, "kill")
    token_shop.run_to_end(max_messages_per_trigger=8)
    token_shop.make_due()
    token_shop.run_to_end()
    token_shop.check_all(12)


def test_a_batch_runs_again_after_its_tokens_are_gone(token_shop: TokenShop) -> None:
    token_shop.place(8)
    token_shop.run_to_end()
    assert token_shop.rows("select count(*) from faregate_ledger where node = 'stamping'") == [(0,)], "no tokens at all"
    for folder in ("commits", "offsets"):
        shutil.rmtree(checkpoint_of(token_shop) / folder)
    token_shop.set_marks(0)
    assert token_shop.run_to_end().outcomes == {"duplicate": 8}
    token_shop.check_all(8)


@pytest.mark.full
def test_an_older_checkpoint_restored_with_other_partitions(the_shop: Shop) -> None:
    the_shop.place(4)
    the_shop.run_to_end()
    older = the_shop.folder / "older"
    shutil.copytree(checkpoint_of(the_shop), older)
    the_shop.place(8)
    the_shop.run_to_end()
    current = checkpoint_of(the_shop)
    shutil.rmtree(current)
    shutil.copytree(older, current)
    the_shop.spark.conf.set("spark.sql.shuffle.partitions", "3")
    try:
        assert the_shop.run_to_end().outcomes == {}, "the store knows how far it is"
    finally:
        the_shop.spark.conf.set("spark.sql.shuffle.partitions", "2")
    the_shop.check(12)


def test_a_lost_checkpoint_and_a_restart_from_the_earliest(the_shop: Shop) -> None:
    the_shop.place(8)
    the_shop.run_to_end()
    shutil.rmtree(checkpoint_of(the_shop))
    assert the_shop.run_to_end().outcomes == {}, "the store knows how far it is"
    shutil.rmtree(checkpoint_of(the_shop))
    the_shop.set_marks(0)
    assert the_shop.run_to_end().outcomes == {"duplicate": 8}, "and if it did not, the ledger would"
    the_shop.check(8)


@pytest.mark.full
def test_a_lost_checkpoint_after_the_ledger_forgot_what_was_handled(the_shop: Shop) -> None:
    """Nothing below the low-water mark is read again, so nothing has to be recognised."""
    the_shop.place(6)
    the_shop.run_to_end(retain_ledger=0.0)
    shutil.rmtree(checkpoint_of(the_shop))
    the_shop.place(2)
    assert the_shop.run_to_end(retain_ledger=0.0).outcomes == {"handled": 2}
    the_shop.check(8)


def test_a_checkpoint_with_another_store_is_refused(the_shop: Shop) -> None:
    the_shop.place(3)
    the_shop.run_to_end()
    with pytest.raises(fg.ConfigurationError, match=r"read up to offset 3, and .*other.db knows of no such run"):
        the_shop.run(store=f"sqlite:{the_shop.folder / 'other.db'}")
    the_shop.set_marks(1)
    with pytest.raises(fg.ConfigurationError, match=r"knows of offsets up to 1: it is another store, or an older copy"):
        the_shop.run()


def test_batches_without_anything_for_the_node_count_as_read(the_shop: Shop) -> None:
    the_shop.place(2)
    the_shop.run_bus("payments")
    the_shop.run_to_end()
    the_shop.run_bus("payments")  # publishes CardCharged
    assert the_shop.run_to_end().outcomes == {}
    found = the_shop.rows("select distinct position from faregate_positions where handler = ''")
    assert found == [(JournalReader(the_shop.journal).latest(),)] == [(6,)]


def test_a_journal_truncated_below_the_start_fails(the_shop: Shop) -> None:
    the_shop.place(0)
    the_shop.run_to_end()  # takes the log view, from offset 0 on
    shutil.rmtree(the_shop.folder / "checkpoint-billing")
    for segment in Layout(the_shop.journal).segment_bases(RealDisk()):
        Layout(the_shop.journal).segment(segment).unlink()
    (the_shop.journal / "high-water").unlink()
    append(the_shop.journal, (_order(number) for number in range(400)))
    truncate(the_shop.journal)
    with pytest.raises(Exception, match="were removed"):
        the_shop.run_to_end()
    assert the_shop.effects() == []


def _order(number: int) -> fg.Envelope:
    body = f'{{"order_id":"a","number":{number},"total":1}}'.encode()
    return fg.Envelope(
        publication_id=fg.ids.root_id(), type="OrderPlaced", source="shop", body=body, recipients=("billing",)
    )


async def test_both_attempts_of_a_speculated_task_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def slow(noted: Any) -> None:
        await asyncio.sleep(0)

    rig.before = slow
    rows = rig.rows(range(40), keys=5)
    async with rig.engine() as one, rig.engine() as other:
        await asyncio.gather(one.run(rows), other.run(rows))
    rig.check(range(40))
