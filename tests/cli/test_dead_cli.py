"""`faregate dead` and `faregate store` in detail: prefixes, edits, confirmation, other targets, other bodies."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.cli.dead_view import as_whole_json
from faregate.ports.dead_letter import DeadLetter


class Job(fg.Command):
    name: str


APP = """
import faregate as fg

class Job(fg.Command):
    name: str

worker = fg.Node("worker")

@worker.on(Job, retry=None, redeliver=None)
async def work(job: Job):
    raise RuntimeError("broken")

bus = fg.Bus("journal:data", nodes=[worker], store="sqlite:store.db")
nothing = fg.Bus("memory:", nodes=[worker])
fleeting = fg.Bus("memory:", nodes=[worker], store="memory:")
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:{folder}/store.db"
        (folder / "jobs.py").write_text(APP)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "faregate", *arguments],
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "COLUMNS": "200"},
        )

    def ok(self, *arguments: str, stdin: str = "") -> Any:
        done = self.run(*arguments, "--json", stdin=stdin)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def refused(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    async def die(self, *names: str) -> list[str]:
        """Make dead letters of jobs; their message ids, which have nothing in common."""
        node = fg.Node("worker")

        @node.on(Job, retry=None, redeliver=None)
        async def work(job: Job) -> None:
            raise RuntimeError("broken")

        async with fg.Bus(f"journal:{self.folder}/data", nodes=[node], store=self.url) as bus:
            roots = [await bus.send(Job(name=name), to="worker", idempotency_key=name) for name in names]
            await bus.idle(timeout=30)
        return [fg.ids.message_id(root, "worker") for root in roots]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_the_beginning_of_an_id_will_do(place: Place) -> None:
    first, second = await place.die("a", "b")
    assert place.ok("dead", "show", place.url, first[:8])["id"] == first
    [replayed] = place.ok("dead", "replay", place.url, second[:10])
    assert (replayed["id"], replayed["status"], replayed["replays"]) == (second, "replayed", 1)
    assert "@" in replayed["changed_by"], "it says who: user@host"
    assert "too short" in place.refused("dead", "show", place.url, first[:5])


async def test_an_edited_message_is_sent_as_a_new_one(place: Place) -> None:
    [message_id] = await place.die("a")
    told = place.ok("dead", "edit", "jobs:bus", message_id, "-", stdin='{"name": "b"}')
    assert told["edited_from"] == message_id
    assert "Expected `str`, got `int`" in place.refused("dead", "edit", "jobs:bus", message_id, '{"name": 1}')
    assert "no JSON" in place.refused("dead", "edit", place.url, message_id, "{")
    info = place.ok("store", "info", place.url)
    assert info["tables"]["faregate_outbox"] == 1
    assert info["oldest_undispatched"]["publication_id"] == told["publication_id"]
    assert [letter["status"] for letter in place.ok("dead", "list", place.url)] == ["open"]


async def test_all_are_discarded_only_when_that_is_meant(place: Place) -> None:
    await place.die("a", "b")
    assert "--yes" in place.refused("dead", "discard", place.url, "--all")
    assert place.ok("dead", "discard", place.url, "--all", "--yes", "--type", "Other") == []
    assert len(place.ok("dead", "discard", place.url, "--all", "--yes")) == 2
    assert {letter["status"] for letter in place.ok("dead", "list", place.url)} == {"discarded"}
    assert place.ok("dead", "replay", place.url, "--all") == []


async def test_a_replay_can_be_slow(place: Place) -> None:
    await place.die("a", "b", "c")
    assert len(place.ok("dead", "replay", place.url, "--all", "--rate", "50")) == 3


async def test_filters_by_time_and_number(place: Place) -> None:
    await place.die("a", "b")
    assert len(place.ok("dead", "list", place.url, "--since", "1h")) == 2
    assert place.ok("dead", "list", place.url, "--since", "2999-01-01") == []
    assert len(place.ok("dead", "list", place.url, "--limit", "1")) == 1
    assert "1 open, and more" in place.run("dead", "list", place.url, "--limit", "1").stdout
    assert "--since takes" in place.refused("dead", "list", place.url, "--since", "yesterday")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("memory:", "nothing to look at"),
        ("jobs:fleeting", "nothing to look at"),
        ("jobs:nothing", "has no store="),
        ("sqlite:nowhere.db", "there is no file nowhere.db"),
        ("jobs:bus", "there is no file store.db"),
        ("jobs.py", "neither a bus"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_target_without_dead_letters_is_one_clear_sentence(place: Place, target: str, told: str) -> None:
    assert told in place.refused("dead", "list", target)
    assert not (place.folder / "nowhere.db").exists()


async def test_one_letter_for_people_has_everything(place: Place) -> None:
    [message_id] = await place.die("a")
    shown = place.run("dead", "show", place.url, message_id).stdout
    for part in (message_id, "1 try, 0 redeliveries", '"name": "a"', "Traceback", "RuntimeError: broken"):
        assert part in shown


def test_a_body_that_cannot_be_read_comes_as_base64() -> None:
    letter = DeadLetter(
        node="n",
        message_id="m",
        publication_id="p",
        type="T",
        source="s",
        correlation_id="c",
        queue="q",
        reason="undecodable",
        error="no",
        first_failed_at=1.0,
        last_failed_at=1.0,
        envelope=fg.Envelope(body=b"\xff\x00"),
    )
    told = as_whole_json(letter)
    assert (told["body"], told["body_base64"]) == (None, "/wA=")


# --- faregate store -----------------------------------------------------------------------------------------


def test_a_store_is_made_and_described(place: Place) -> None:
    assert "there is no file" in place.refused("store", "info", "sqlite:new.db")
    made = place.ok("store", "migrate", "sqlite:new.db")
    assert made["version"] == made["known"] >= 1
    assert "the outbox is empty" in place.run("store", "info", "sqlite:new.db").stdout


def test_a_store_of_a_newer_version_is_described_and_not_touched(place: Place) -> None:
    place.ok("store", "migrate", "sqlite:new.db")
    with closing(sqlite3.connect(place.folder / "new.db")) as connection, connection:
        connection.execute("insert into faregate_migrations values (999, 'later', 0)")
    assert place.ok("store", "info", "sqlite:new.db")["version"] == 999
    assert "knows versions up to" in place.run("store", "info", "sqlite:new.db").stdout
    assert "newer Faregate" in place.refused("store", "migrate", "sqlite:new.db")


def test_what_is_no_store_is_one_clear_sentence(place: Place) -> None:
    with closing(sqlite3.connect(place.folder / "mine.db")) as connection, connection:
        connection.execute("create table orders(id)")
    assert "has no tables of Faregate" in place.run("store", "info", "sqlite:mine.db").stdout
    assert "not a SQLite database" in place.refused("store", "info", "sqlite:jobs.py")
    assert "nothing to look at" in place.refused("store", "info", "memory:")
    assert "names no store" in place.refused("store", "info", "mysql:x")


async def test_dead_letters_are_exported_with_everything(place: Place) -> None:
    first, second = sorted(await place.die("a", "b"))
    told = place.ok("dead", "export", "jobs:bus", "letters.jsonl", "--type", "Job")
    assert told == {"exported": 2, "file": "letters.jsonl"}
    lines = (place.folder / "letters.jsonl").read_bytes().splitlines()
    letters = sorted((msgspec.json.decode(line, type=DeadLetter) for line in lines), key=lambda each: each.message_id)
    assert [each.message_id for each in letters] == [first, second]
    assert {each.envelope.body for each in letters} == {b'{"name":"a"}', b'{"name":"b"}'}
    assert "is there already" in place.refused("dead", "export", place.url, "letters.jsonl")
    assert place.ok("dead", "export", place.url, "none.jsonl", "--status", "resolved")["exported"] == 0


async def test_dead_letters_are_pruned_by_age_and_status_and_exported_first(place: Place) -> None:
    first, second = await place.die("a", "b")
    place.ok("dead", "discard", place.url, first, "--yes")
    prune = ("dead", "prune", place.url, "--export", "gone.jsonl", "--older-than")
    assert place.ok(*prune, "0s")["kept"] == 1, "a copy could still come and run"
    with closing(sqlite3.connect(place.folder / "store.db")) as connection, connection:
        connection.execute("insert into faregate_floor(node, floor) values ('worker', 1e11)")
    assert place.ok(*prune, "0s") == {"removed": 1, "kept": 0, "file": "gone.jsonl"}
    assert place.ok(*prune, "0s", "--status", "open", "--status", "replayed")["removed"] == 1
    lines = (place.folder / "gone.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=DeadLetter).message_id for line in lines] == [first, second]
    assert "--older-than takes" in place.refused(*prune, "soon")
    assert place.run("dead", "prune", place.url, "--older-than", "1d").returncode == 2, "there is no way without a file"


async def test_an_empty_list_says_that_filters_were_given(place: Place) -> None:
    await place.die("a")
    assert place.run("dead", "list", place.url, "--node", "nobody").stdout == "no dead letters that fit these filters\n"
