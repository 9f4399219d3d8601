"""`faregate journal …` in this process, journals to look at, and a shop that runs on one."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.cli import app
from faregate.errors import FaregateError
from faregate.message import Envelope
from faregate.transports.journal import JournalTransport

ROOT = Path(__file__).parents[2]


DISK = RealDisk()


SMALL = 16 * 1024


class Ran:
    def __init__(self, code: int, out: str, error: str) -> None:
        self.code, self.out, self.error = code, out, error

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def journal(*arguments: object) -> Ran:
    """Run a command as `main` does, in a pipe: an error of ours becomes its sentence and status 1."""
    result = CliRunner(env={"COLUMNS": None}).invoke(app, ["journal", *map(str, arguments)])
    if isinstance(result.exception, FaregateError):
        return Ran(1, result.output, str(result.exception))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.output, "")


def envelope(number: int, size: int = 780, type: str = "Noted") -> Envelope:
    return Envelope(
        body=b'{"number":%d,"pad":"%s"}' % (number, b"x" * size),
        publication_id=f"publication-{number}",
        type=type,
        kind="event",
        source="desk",
        key=f"k{number % 3}",
        content_type="application/json",
    )


def write(path: Path, count: int = 40, *, rows: int = 3, start: int = 0) -> Layout:
    """A log of small segments, three messages to a frame; nobody has subscribed."""
    layout = Layout(path)
    prepare(layout, DISK)
    log = Log(layout, DISK, segment_size=SMALL)
    for first in range(start, start + count, rows):
        numbers = range(first, min(first + rows, start + count))
        log.append([envelope(number) for number in numbers], [-1] * len(numbers))
        log.sync()
    log.close()
    return layout


def reopen(layout: Layout) -> dict[int, Envelope]:
    """Open for writing, append one more, and read everything."""
    log = Log(layout, DISK, segment_size=SMALL)
    log.append([envelope(9999)], [-1])
    log.sync()
    log.close()
    reader = JournalReader(layout.root)
    return dict(reader.envelopes(reader.earliest()))


def damage(path: Path, position: int, data: bytes = b"\xff\xfe\xfd") -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str


class Shop:
    """A bus on a journal whose payments can be held up."""

    def __init__(self, path: Path, *, segment_size: int = SMALL) -> None:
        self.billed: list[str] = []
        self.one_more = asyncio.Event()
        self.charged: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        shop, billing, payments = fg.Node("shop"), fg.Node("billing"), fg.Node("payments")

        @billing.on(OrderPlaced, source="shop", key="order_id")
        async def bill(order: OrderPlaced) -> Any:
            if order.total < 0:
                raise fg.Permanent("an impossible total")
            self.billed.append(order.order_id)
            self.one_more.set()
            return fg.send(ChargeCard(order_id=order.order_id), to="payments")

        @payments.on(ChargeCard, order=fg.Serial(), prefetch=1)
        async def charge(command: ChargeCard) -> None:
            await self.open.wait()
            self.charged.append(command.order_id)

        self.transport = JournalTransport(str(path), segment_size=segment_size)
        self.bus = fg.Bus(self.transport, nodes=[shop, billing, payments], drain_seconds=0.1)

    async def until_billed(self, done: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(20):
            while not done(self.billed):
                self.one_more.clear()
                await self.one_more.wait()

    async def place(self, *numbers: int, total: int = 40) -> None:
        for number in numbers:
            await self.bus.publish(OrderPlaced(order_id=str(number), total=total), node="shop")


async def run_shop(path: Path, count: int = 30) -> None:
    shop = Shop(path)
    async with shop.bus:
        await shop.place(*range(count))
        await shop.place(count, total=-1)
        await shop.bus.idle()


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
