"""The command line as a user runs it: in a process of its own."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pytest
from typer.testing import CliRunner

from faregate.cli import app
from tests.child import Child

ROOT = Path(__file__).parents[2]
SHOP = "examples.shop.app:bus"
ORDER = '{"order_id": "17", "customer": "ann", "total": 40}'


def faregate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faregate", *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_the_version_is_shown() -> None:
    assert faregate("--version").stdout.startswith("faregate 0.")


@pytest.mark.parametrize("command", ["demo", "run", "publish"])
def test_every_command_explains_itself(command: str) -> None:
    shown = faregate(command, "--help")
    assert shown.returncode == 0
    assert "--json" in shown.stdout


def test_an_event_is_published_and_followed_to_its_end() -> None:
    result = json.loads(faregate("publish", SHOP, "OrderPlaced", ORDER, "--json").stdout)
    assert result["outcomes"] == {
        "handled": 3,
        "skipped": 0,
        "filtered": 0,
        "duplicate": 0,
        "redelivered": 0,
        "dead": 0,
    }
    assert result["dead_letters"] == []


def test_a_command_is_sent_from_standard_input() -> None:
    shown = faregate("publish", SHOP, "charge-card", "-", stdin='{"order_id": "18", "amount": 5}')
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("published charge-card ")
    assert "2 handled" in shown.stdout


def test_the_same_idempotency_key_gives_the_same_publication() -> None:
    ids = {
        json.loads(faregate("publish", SHOP, "OrderPlaced", ORDER, "--idempotency-key", "o-17", "--json").stdout)[
            "publication_id"
        ]
        for _ in range(2)
    }
    assert len(ids) == 1


def test_a_dead_letter_makes_the_status_one_and_says_why() -> None:
    shown = faregate("publish", SHOP, "OrderPlaced", ORDER.replace("40", "-1"))
    assert shown.returncode == 1
    assert "dead letter at billing (permanent): Permanent: order 17 has the impossible total -1" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "nowhere:bus"], "there is no module 'nowhere'"),
        (["run", "examples.shop.app"], "write module:attribute"),
        (["run", "examples.shop.app:missing"], "it has: bus"),
        (["run", "examples.shop.app:bank"], "is a Bank, not an fg.Bus"),
        (["publish", SHOP, "Nonsense", "{}"], "the messages are: CardCharged, OrderPlaced, charge-card"),
        (["publish", SHOP, "OrderPlaced", "{"], "the body is not a OrderPlaced"),
        (["publish", SHOP, "OrderPlaced", '{"order_id": 17}'], "Expected `str`, got `int` - at `$.order_id`"),
        (["publish", SHOP, "OrderPlaced", ORDER, "--header", "x"], "--header takes name=value; got 'x'"),
        (["publish", SHOP, "OrderPlaced", ORDER, "--node", "nobody"], "its nodes are: shop, billing, payments"),
        (["publish", SHOP, "OrderPlaced", ORDER, "--delay", "-1"], "delay must be seconds >= 0"),
    ],
)
def test_a_mistake_is_one_clear_sentence(arguments: list[str], told: str) -> None:
    shown = faregate(*arguments)
    assert shown.returncode == 1
    assert told in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_mistake_is_json_when_json_is_asked_for() -> None:
    shown = faregate("publish", SHOP, "Nonsense", "{}", "--json")
    assert json.loads(shown.stdout)["error"] == "ConfigurationError"


# --- running until told to stop ---------------------------------------------------------------------------

APP = """
import asyncio, sys
import faregate as fg

class Tick(fg.Event):
    number: int

clock = fg.Node("clock")

@clock.on(Tick, source="clock")
async def work(tick: Tick):
    print("started", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("finished", flush=True)

class TickingBus(fg.Bus):
    async def start(self):
        await super().start()
        await self.publish(Tick(number=1), node="clock")

bus = TickingBus("memory:", nodes=[clock])
"""


@contextmanager
def running(folder: Path, *arguments: str, app: str = APP) -> Iterator[Child]:
    (folder / "ticking.py").write_text(app)
    process = Child(
        [sys.executable, "-m", "faregate", "run", "ticking:bus", *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}")


def test_ctrl_c_lets_running_handlers_finish(tmp_path: Path) -> None:
    with running(tmp_path, "--json") as process:
        wait_for(process.stdout, "started")
        process.send_signal(signal.SIGINT)
        wait_for(process.stderr, "draining")
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        wait_for(process.stdout, "finished")
        counts = json.loads(wait_for(process.stdout, "outcomes"))
        assert counts["outcomes"]["handled"] == 1
        assert process.wait(20) == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    stuck = APP.replace(
        "await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)", "await asyncio.Event().wait()"
    )
    with running(tmp_path, app=stuck) as process:
        wait_for(process.stdout, "started")
        process.send_signal(signal.SIGTERM)
        wait_for(process.stderr, "draining")
        process.send_signal(signal.SIGTERM)
        wait_for(process.stderr, "stopping at once")
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert "finished" not in process.stdout.read()


STUCK = """
import sys, threading
import faregate as fg

class Tick(fg.Event):
    number: int

clock = fg.Node("clock", schema="create table if not exists ticks(number integer)")

@clock.on(Tick, source="clock")
def work(tick: Tick, ctx: fg.Context):
    ctx.db.execute("insert into ticks values (?)", (tick.number,))
    print("started", flush=True)
    if STUCK:
        threading.Event().wait()

class TickingBus(fg.Bus):
    async def start(self):
        await super().start()
        await self.publish(Tick(number=1), node="clock", idempotency_key="1")

bus = TickingBus("journal:./journal", nodes=[clock], store="sqlite:./clock.db", drain_seconds=0.2)
"""


def test_a_plain_function_that_never_returns_is_left_behind_by_name_when_draining_ends(tmp_path: Path) -> None:
    with running(tmp_path, app=STUCK.replace("STUCK", "True")) as process:
        wait_for(process.stdout, "started")
        process.send_signal(signal.SIGTERM)
        told = wait_for(process.stderr, "had not finished")
        assert "work at clock (Tick from clock) had not finished Tick " in told
        assert "its thread is left behind; nothing of it is committed, and it is delivered again" in told
        assert process.wait(20) == 0
    with running(tmp_path, "--json", app=STUCK.replace("STUCK", "False")) as process:
        wait_for(process.stdout, "started")
        process.send_signal(signal.SIGTERM)
        assert json.loads(wait_for(process.stdout, "outcomes"))["outcomes"]["handled"] == 1
        assert process.wait(20) == 0
    with closing(sqlite3.connect(tmp_path / "clock.db")) as connection:
        assert connection.execute("select number from ticks").fetchall() == [(1,)]


def test_a_program_ends_though_a_plain_function_of_its_bus_never_returns(tmp_path: Path) -> None:
    program = """
async def main():
    async with bus:
        await asyncio.to_thread(begun.wait)
import asyncio
begun = threading.Event()
asyncio.run(main())
"""
    handler = STUCK.replace("if STUCK:", "begun.set()\n    if True:")
    ended = subprocess.run(
        [sys.executable, "-c", handler + program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert "its thread is left behind" in ended.stderr
    with closing(sqlite3.connect(tmp_path / "clock.db")) as connection:
        assert connection.execute("select number from ticks").fetchall() == []


def test_reload_starts_again_when_a_file_changes(tmp_path: Path) -> None:
    quick = APP.replace("await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)", "pass")
    with running(tmp_path, "--reload", app=quick) as process:
        wait_for(process.stdout, "finished")
        (tmp_path / "ticking.py").write_text(quick.replace('"finished"', '"finished anew"'))
        wait_for(process.stderr, "ticking.py changed; starting again")
        wait_for(process.stdout, "finished anew")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_paragraphs_of_a_help_are_wrapped_to_the_terminal() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["status", "--help"]).stdout
    assert "process reports every five seconds, so the command listens for six. Exits with" in shown
