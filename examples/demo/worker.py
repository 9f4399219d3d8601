"""The process that the demo kills: the shop on a journal and a SQLite file, run as `faregate run` does.

    python -m faregate.examples.demo.worker FOLDER PARENT

Rules kept here:
- It knows nothing of the demo's plan and takes no part in its verdict. Now and then it replaces status.json: how its
  messages ended so far, and whether nothing is left to do.
- It ends with the process that started it, however that one ends.
"""

import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from faregate.bus.bus import Bus
from faregate.cli.loop import run_async
from faregate.cli.run import serve
from faregate.errors import ConfigurationError, IdleTimeout

STATUS = "status.json"
_PERIOD = 0.15
_PARENT_DIED = 1
"""Linux: prctl(PR_SET_PDEATHSIG, …)."""


class Status(NamedTuple):
    """What the worker says of itself."""

    pid: int
    at: float
    outcomes: dict[str, int]
    is_running: bool
    is_at_rest: bool
    timeouts: int
    """How often the bank did not answer this process."""


def read_status(folder: Path) -> Status | None:
    try:
        return Status(**json.loads((folder / STATUS).read_bytes()))
    except FileNotFoundError:
        return None


def _write_status(folder: Path, status: Status) -> None:
    new = folder / f".{STATUS}"
    new.write_text(json.dumps(status._asdict()))
    new.replace(folder / STATUS)


async def _report(bus: Bus, folder: Path, bank: Any) -> None:
    while True:
        is_running, is_at_rest = True, False
        try:
            await bus.idle(_PERIOD)
            is_at_rest = True
        except IdleTimeout:
            pass
        except ConfigurationError:  # it still starts, or it stops
            is_running = False
        _write_status(folder, Status(os.getpid(), time.time(), bus.outcomes(), is_running, is_at_rest, bank.timeouts))
        await asyncio.sleep(_PERIOD)


async def _run(folder: Path) -> None:
    from ..shop import app

    bus = app.make_bus(folder)
    gc.collect()
    gc.freeze()
    reporting = asyncio.create_task(_report(bus, folder, app.bank))
    try:
        await serve(bus)
    finally:
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the one that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we could say so
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level="ERROR", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    run_async(_run(Path(sys.argv[1])))
