"""`faregate run` with what lives as long as the bus: made before, released at the end, also of a start."""

import signal
from pathlib import Path

from tests.cli.test_cli import running, wait_for

APP = """
import asyncio
from collections.abc import AsyncIterator
import faregate as fg

class Client: ...

clock = fg.Node("clock")

@clock.provides(scope="bus")
async def client() -> AsyncIterator[Client]:
    async with asyncio.timeout(3600):   # has to be left by the task that entered it
        print("made", flush=True)
        yield Client()
    print("released", flush=True)

@clock.on_start
async def start(client: Client):
    print("starting", flush=True)

bus = fg.Bus("memory:", nodes=[clock])
"""


def test_a_reload_releases_before_it_makes_anew(tmp_path: Path) -> None:
    with running(tmp_path, "--reload", app=APP) as process:
        wait_for(process.stdout, "starting")
        wait_for(process.stderr, "Ctrl-C drains")
        (tmp_path / "ticking.py").write_text(APP.replace('"made"', '"made anew"'))
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["released\n", "made anew\n", "starting\n"]
        wait_for(process.stderr, "Ctrl-C drains")
        process.send_signal(signal.SIGINT)
        wait_for(process.stdout, "released")
        assert process.wait(20) == 0


def test_ctrl_c_gives_up_a_start_that_hangs(tmp_path: Path) -> None:
    with running(
        tmp_path, app=APP.replace("flush=True)\n\nbus", "flush=True)\n    await asyncio.Event().wait()\n\nbus")
    ) as process:
        wait_for(process.stdout, "starting")
        process.send_signal(signal.SIGINT)
        wait_for(process.stdout, "released")
        assert process.wait(20) == 0


def test_a_start_that_fails_is_one_clear_sentence(tmp_path: Path) -> None:
    app = APP.replace('print("starting", flush=True)', 'raise ConnectionError("nobody listens")')
    with running(tmp_path, app=app) as process:
        wait_for(process.stdout, "released")
        said = wait_for(process.stderr, "the function 'start' that node 'clock' starts with failed: ConnectionError")
        assert "nobody listens" in said
        assert process.wait(20) == 1
