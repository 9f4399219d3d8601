"""The process that the demo kills: the shop, run as `faregate run` does.

    python -m faregate.examples.demo.worker FOLDER NAME PARENT             the shop on a journal and a SQLite file
    python -m faregate.examples.demo.worker FOLDER NAME PARENT SERVICE     one service, as the environment says

Rules kept here:
- It knows nothing of the demo's plan and takes no part in its verdict. Now and then it replaces NAME.json: how its
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
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from faregate.bus.bus import Bus
from faregate.cli.loop import run_async
from faregate.cli.run import serve
from faregate.errors import ConfigurationError, FaregateError
from faregate.node.node import Node

FORGET = "DEMO_FORGETS"
"""Set in the environment: run without a ledger, to see that the verdict finds it."""
_PERIOD, _SERVICE_PERIOD = 0.15, 0.7
"""Seconds between two reports. A service asks the broker for each, and there are several."""
_PARENT_DIED = 1
"""Linux: prctl(PR_SET_PDEATHSIG, …)."""


class Status(NamedTuple):
    """What the worker says of itself."""

    pid: int
    at: float
    """When it began to look whether it is at rest."""
    outcomes: dict[str, int]
    is_running: bool
    is_at_rest: bool
    timeouts: int
    """How often the bank did not answer this process."""


def read_status(folder: Path, name: str) -> Status | None:
    try:
        return Status(**json.loads((folder / f"{name}.json").read_bytes()))
    except FileNotFoundError:
        return None


def _write_status(folder: Path, name: str, status: Status) -> None:
    new = folder / f".{name}.json"
    new.write_text(json.dumps(status._asdict()))
    new.replace(folder / f"{name}.json")


async def _report(bus: Bus, folder: Path, name: str, period: float, bank: Any) -> None:
    while True:
        began, is_running, is_at_rest = time.time(), True, False
        try:
            await bus.idle(period)
            is_at_rest = True
        except ConfigurationError:  # it still starts, or it stops
            is_running = False
        except FaregateError:  # it works; or the broker is away
            pass
        status = Status(os.getpid(), began, bus.outcomes(), is_running, is_at_rest, bank.timeouts)
        _write_status(folder, name, status)
        await asyncio.sleep(period)


async def _run(folder: Path, name: str, service: str | None) -> None:
    from ..shop import app

    if service is None:
        bus, period = app.make_bus(folder), _PERIOD
    else:
        if os.environ.get(FORGET):
            _forget(app.services[service])
        bus, period = app.make_service(service), _SERVICE_PERIOD
    gc.collect()
    gc.freeze()
    reporting = asyncio.create_task(_report(bus, folder, name, period, app.bank))
    try:
        await serve(bus)
    finally:
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting


def _forget(node: Node) -> None:
    """Every copy is handled as if it were the first."""
    for address, subscription in node.subscriptions.items():
        node.subscriptions[address] = replace(subscription, dedup="off")


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the one that started it is gone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we could say so
        sys.exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    logging.basicConfig(level="ERROR", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    run_async(_run(Path(sys.argv[1]), sys.argv[2], sys.argv[4] if len(sys.argv) > 4 else None))
