"""A worker that fails while its world is broken, a journal and a store on disk, and `faregate dead` on them.

The id that `faregate dead` shows and takes is the message id. Without `--status` it lists every letter, whatever became
of it.
"""

import asyncio
import contextlib
import io
import json
import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import faregate as fg
from faregate.cli import main, output

LONG = 30  # seconds until a test that hangs is failed


NOTES = "create table if not exists notes(number integer primary key, text text)"


class Job(fg.Command):
    name: str


class Errand(fg.Command):
    name: str


class Noted(fg.Event):
    text: str


class Reminder(fg.Event):
    text: str


class World:
    """What a handler finds outside: broken at first, repaired later."""

    def __init__(self) -> None:
        self.broken = True
        self.runs: list[tuple[str, str]] = []
        self.done = asyncio.Event()

    def names(self) -> list[str]:
        return [name for name, _ in self.runs]


def worker(world: World, error: type[Exception] = RuntimeError) -> fg.Node:
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> Any:
        world.runs.append((job.name, ctx.message_id))
        await ctx.db.execute("insert into notes(text) values (?)", (job.name,))
        if world.broken and job.name.startswith("bad"):
            raise error(f"{job.name} cannot be done")
        world.done.set()
        return Noted(text=job.name)

    @node.on(Errand, retry=None, redeliver=None)
    async def run_errand(errand: Errand, ctx: fg.Context) -> None:
        world.runs.append((errand.name, ctx.message_id))
        raise fg.Permanent("no errands today")

    return node


def raw(name: str, **changes: Any) -> fg.Envelope:
    fields: dict[str, Any] = {
        "publication_id": fg.ids.root_id(),
        "type": "Job",
        "kind": "command",
        "source": "abroad",
        "destination": "worker",
        "body": msgspec.json.encode({"name": name}),
    }
    return fg.Envelope(**{**fields, **changes})


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def dead(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line: a process of its own in a folder that matters, else, which is quicker, a thread of its own."""
    if cwd is None:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(dead_here, arguments).result()
    return subprocess.run(
        [sys.executable, "-m", "faregate", "dead", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "300"},
    )


def dead_here(arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    out, error, status = io.StringIO(), io.StringIO(), 0
    given, width = sys.argv, output.console.width
    sys.argv, output.console.width = ["faregate", "dead", *arguments], 300
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            main()
    except SystemExit as exc:
        status = int(exc.code or 0)
    finally:
        sys.argv, output.console.width = given, width
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), error.getvalue())


def ok(*arguments: str, cwd: Path | None = None) -> str:
    done = dead(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listing(target: str, *filters: str, cwd: Path | None = None) -> list[dict[str, Any]]:
    found = json.loads(ok("list", target, *filters, "--json", cwd=cwd))
    assert isinstance(found, list)
    return found


def status_of(target: str, message_id: str) -> str:
    """Reading: without `--status` the listing has every dead letter, whatever became of it."""
    [status] = [entry["status"] for entry in listing(target) if entry["id"] == message_id]
    return str(status)


class Place:
    """A journal and a store on disk, and the bus on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "store.db"
        self.store = f"sqlite:{self.path}"

    def bus(self, world: World, journal: str = "data", **options: Any) -> fg.Bus:
        nodes = [fg.Node("boss"), worker(world)]
        return fg.Bus(f"journal:{self.folder}/{journal}", nodes=nodes, store=self.store, **options)

    def notes(self) -> list[str]:
        return [text for (text,) in rows(self.path, "select text from notes order by number")]


async def die(place: Place, world: World, *names: str, key: str | None = None) -> list[str]:
    """Runs a bus until these jobs are done or dead; gives their message ids."""
    async with place.bus(world) as bus:
        roots = [await bus.send(Job(name=name), to="worker", node="boss", idempotency_key=key) for name in names]
        await bus.idle(timeout=LONG)
    return [fg.ids.message_id(root, "worker") for root in roots]
