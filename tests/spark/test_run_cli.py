"""`faregate spark run` and `faregate spark handover`."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.child import Child

ROOT = Path(__file__).parents[2]

APP = """
import faregate as fg

class Noted(fg.Event):
    text: str

author = fg.Node("author")
reader = fg.Node("reader", schema="create table if not exists notes(text text, message_id text)")

@reader.on(Noted, source="author", key="text")
async def note(noted: Noted, ctx: fg.Context):
    await ctx.db.execute("insert into notes values (?, ?)", (noted.text, ctx.message_id))

bus = fg.Bus("journal:./data", nodes=[author, reader], store="sqlite:./notes.db")
publisher = fg.Bus("journal:./data", nodes=[author])
"""


def faregate(folder: Path, *arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "faregate", *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "notes_app.py").write_text(APP)
    publish(tmp_path, "bus", 0)
    return tmp_path


def publish(folder: Path, bus: str, count: int) -> None:
    code = f"""
import asyncio, notes_app
async def main():
    async with notes_app.{bus} as bus:
        for n in range({count}):
            await bus.publish(notes_app.Noted(text=str(n)), node="author")
        await bus.idle()
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


def test_handover_there_and_back(app: Path) -> None:
    [done] = json.loads(faregate(app, "spark", "handover", "notes_app:bus", "reader", "--to", "log", "--json"))[
        "subscriptions"
    ]
    assert (done["queue"], done["view"], done["epoch"], done["changed"]) == ("reader.Noted.author", "log", 1, True)
    publish(app, "publisher", 3)
    assert "reader.Noted.author: now read from the queue" in faregate(
        app, "spark", "handover", "notes_app:bus", "reader", "--to", "queue"
    )
    publish(app, "bus", 0)
    assert count(app) == 3
    said = faregate(app, "spark", "handover", "notes_app:bus", "nobody", "--to", "log", "--json", status=1)
    assert "there is no node 'nobody' on this bus" in said


def count(folder: Path) -> int:
    connection = sqlite3.connect(folder / "notes.db")
    try:
        return int(connection.execute("select count(*) from notes").fetchone()[0])
    finally:
        connection.close()


RUN = ("spark", "run", "notes_app:reader", "--journal", "data", "--store", "sqlite:notes.db", "--checkpoint", "ckpt")


@pytest.mark.services
@pytest.mark.full
def test_run_to_the_end_and_run_until_told_to_stop(app: Path) -> None:
    said = faregate(app, *RUN, "--json", status=1)
    assert json.loads(said)["error"] == "ViewTaken"
    faregate(app, "spark", "handover", "notes_app:bus", "reader", "--to", "log")
    publish(app, "publisher", 5)
    lines = [json.loads(line) for line in faregate(app, *RUN, "--json").splitlines()]
    assert lines[-1]["outcomes"] == {"handled": 5} and lines[0]["batch"] == 0
    with Child(
        [sys.executable, "-m", "faregate", *RUN, "--trigger", "500ms"],
        cwd=app,
        env={**os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        publish(app, "publisher", 4)
        until = time.monotonic() + 120
        while count(app) < 9 and time.monotonic() < until:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGTERM)  # as `timeout` and service managers do: Java gets it, too
        told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    assert "4 handled" in told and count(app) == 9
