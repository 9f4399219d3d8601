"""Dead letters are exported before they are removed, and none is removed whose message could still run."""

import os
import stat
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.bus import dead_letter_retention as dead_retention
from faregate.bus.dead_letter_retention import append, export, pages, prune
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.ports.store import DeadFilter, Store
from faregate.testing import FakeClock
from faregate.testing.store_suite.rows import ids, ledger, letter

HOUR = 3_600.0


def read(file: Path) -> list[fg.DeadLetter]:
    return [msgspec.json.decode(line, type=fg.DeadLetter) for line in file.read_bytes().splitlines()]


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    opened = open_store(store_url, SystemClock())
    await opened.open()
    yield opened
    await opened.close()


async def add_dead(store: Store, count: int, **more: Any) -> list[fg.DeadLetter]:
    async with store.transaction() as tx:
        return [await tx.add_dead(letter("billing", message_id, **more)) for message_id in ids(count)]


async def raise_floor(store: Store, at: float) -> None:
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(ids(1)[0], at=at - 1)])
    await store.evict("billing", at, 10)
    assert await store.floor("billing") == at


async def test_an_export_has_every_letter_whole_and_is_its_owners(store: Store, tmp_path: Path) -> None:
    envelope = fg.Envelope(publication_id="p", body=b"\xff\x00", headers={"a": "\x1b"}, key="k", body_digest=b"d")
    added = await add_dead(store, 3, envelope=envelope, error="Boom\nin line 1", key="k")
    file = tmp_path / "new" / "letters.jsonl"
    assert await export([store], DeadFilter(), file) == 3
    assert sorted(read(file), key=lambda each: each.message_id) == added
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(fg.ConfigurationError, match="is there already: name a new file"):
        await export([store], DeadFilter(), file)
    assert len(await store.dead(DeadFilter())) == 3, "exporting removes nothing"


@pytest.mark.parametrize("moments", [[5.0] * 11, [float(n) for n in range(11)], [1.0] * 4 + [2.0] * 4 + [3.0] * 3])
async def test_all_letters_are_found_page_by_page(
    store: Store, moments: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_retention, "_AT_ONCE", 3)
    for moment in moments:
        await add_dead(store, 1, last_failed_at=moment)
    found = [each.message_id async for page in pages(store, DeadFilter()) for each in page]
    assert len(found) == len(set(found)) == 11


async def test_what_was_not_handled_stays_while_a_copy_of_it_could_run(store: Store, tmp_path: Path) -> None:
    [young] = await add_dead(store, 1, envelope=fg.Envelope(publication_id="y", sent_at=200.0))
    [old] = await add_dead(store, 1, envelope=fg.Envelope(publication_id="o", sent_at=99.0))
    [late] = await add_dead(store, 1, envelope=fg.Envelope(publication_id="l", sent_at=99.0, deliver_at=150.0))
    [handled] = await add_dead(store, 1, envelope=fg.Envelope(publication_id="h", sent_at=200.0))
    async with store.transaction() as tx:
        await tx.resolve("billing", [handled.message_id], 20.0)
        for each in (young, old, late):
            await tx.set_dead_status("billing", each.message_id, "discarded", by="ann", at=20.0)
    file = tmp_path / "gone.jsonl"
    assert await prune(store, DeadFilter(status="discarded", before=50.0), file) == (0, 3), "there is no floor yet"
    assert not file.exists()
    await raise_floor(store, 100.0)
    assert await prune(store, DeadFilter(status="discarded", before=50.0), file) == (1, 2)
    assert await prune(store, DeadFilter(status="resolved", before=50.0), file) == (1, 0)
    assert [each.message_id for each in read(file)] == [old.message_id, handled.message_id]
    left = {each.message_id for each in await store.dead(DeadFilter())}
    assert left == {young.message_id, late.message_id}


async def test_a_letter_that_changes_while_it_is_exported_stays(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [added] = await add_dead(store, 1)
    await raise_floor(store, 100.0)
    remove = dead_retention._remove

    async def after_a_decision(store: Store, letters: Any) -> int:
        async with store.transaction() as tx:
            await tx.set_dead_status("billing", added.message_id, "replayed", by="ann", at=30.0)
        return await remove(store, letters)

    monkeypatch.setattr(dead_retention, "_remove", after_a_decision)
    assert await prune(store, DeadFilter(status="open"), tmp_path / "gone.jsonl") == (0, 1)
    assert [each.status for each in await store.dead(DeadFilter())] == ["replayed"]


async def test_nothing_is_removed_that_could_not_be_exported(store: Store, tmp_path: Path) -> None:
    await add_dead(store, 2)
    await raise_floor(store, 100.0)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        await prune(store, DeadFilter(), tmp_path / "file" / "gone.jsonl")
    assert len(await store.dead(DeadFilter())) == 2


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    file = tmp_path / "gone.jsonl"
    append(file, [letter("billing", "1")])
    with file.open("ab") as opened:
        opened.write(b'{"node":"bil')
    append(file, [letter("billing", "2")])
    first, cut, second = file.read_bytes().splitlines()
    assert cut == b'{"node":"bil'
    assert [msgspec.json.decode(each, type=fg.DeadLetter).message_id for each in (first, second)] == ["1", "2"]


async def test_a_bus_exports_and_removes_what_is_old_and_decided(tmp_path: Path) -> None:
    class Job(fg.Command):
        name: str

    worker, broken, runs = fg.Node("worker"), [True], []

    @worker.on(Job, retry=None, redeliver=None)
    async def work(job: Job) -> None:
        runs.append(job.name)
        if broken:
            raise RuntimeError("broken")

    clock = FakeClock()
    retain = fg.RetainDead(timedelta(hours=1), export=tmp_path / "dead")
    bus = fg.Bus(
        "memory:",
        nodes=[worker],
        store="memory:",
        clock=clock,
        retain_dead=retain,
        retain_ledger=HOUR / 2,
        drain_seconds=1,
    )
    async with bus:
        for name in ("handled", "discarded", "open"):
            await bus.send(Job(name=name), to="worker")
            await bus.idle()
        handled, discarded, waiting = await bus.dead_letters()
        broken.clear()
        await bus.replay(handled.message_id)
        await bus.discard(discarded.message_id)
        await bus.idle()
        await clock.advance(0.9 * HOUR)
        await bus.idle()
        assert len(await bus.dead_letters(status=None)) == 3, "it is not time yet"
        await clock.advance(0.3 * HOUR)
        await bus.idle()
        left = await bus.dead_letters(status=None)
        assert [(each.message_id, each.status) for each in left] == [(waiting.message_id, "open")]
        [file] = (tmp_path / "dead").iterdir()
        assert file.name.startswith("worker-") and stat.S_IMODE(file.stat().st_mode) == 0o600
        assert {(each.message_id, each.status) for each in read(file)} == {
            (handled.message_id, "resolved"),
            (discarded.message_id, "discarded"),
        }


async def test_a_copy_of_a_removed_letters_message_does_not_run(tmp_path: Path) -> None:
    class Job(fg.Command):
        name: str

    worker, runs = fg.Node("worker"), []

    @worker.on(Job, retry=None, redeliver=None)
    async def work(job: Job) -> None:
        runs.append(job.name)
        if job.name == "bad":
            raise RuntimeError("broken")

    clock = FakeClock()
    retain = fg.RetainDead(HOUR, export=tmp_path / "dead")
    async with fg.Bus(
        "memory:", nodes=[worker], store="memory:", clock=clock, retain_dead=retain, retain_ledger=HOUR / 2
    ) as bus:
        await bus.send(Job(name="bad"), to="worker")
        await bus.send(Job(name="good"), to="worker")
        await bus.idle()
        [bad] = await bus.dead_letters()
        await bus.discard(bad.message_id)
        await clock.advance(1.2 * HOUR)
        await bus.idle()
        assert await bus.dead_letters(status=None) == []
        await bus.transport.publish([msgspec.structs.replace(bad.envelope, replay=1, recipients=())])
        await bus.idle()
        assert runs == ["bad", "good"]
        [again] = await bus.dead_letters()
        assert again.reason == "below-floor"


def bus(**options: Any) -> fg.Bus:
    return fg.Bus("memory:", nodes=[fg.Node("a")], **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fg.RetainDead(-1, export="x"), "RetainDead"),
        (lambda: fg.RetainDead(1, export="x", status=("gone",)), "some of open, replayed, resolved, discarded"),
        (lambda: fg.RetainDead(1, export="x", status="open"), "some of open"),
        (lambda: fg.Bus("memory:", nodes=[fg.Node("a")], store="memory:", retain_dead=90), "takes an fg.RetainDead"),
        (
            lambda: fg.Bus("memory:", nodes=[fg.Node("a")], retain_dead=fg.RetainDead(1, export="x")),
            "this bus has none",
        ),
    ],
)
def test_a_retention_that_means_nothing_is_refused(make: Any, says: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=says):
        make()


def test_an_export_is_on_the_disk_with_every_folder_that_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    file = tmp_path / "a" / "b" / "letters.jsonl"
    append(file, ())
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", file} == set(synced)
