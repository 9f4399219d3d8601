"""The guide to FastAPI is followed as it stands: its files are written, its commands run, and a client posts twice."""

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, Block, blocks

PAGE = DOCS / "how-to" / "fastapi.md"
FILES = [block for block in blocks(PAGE, "python") if block.title]
SERVICES = [block for block in FILES if block.title == "shop/web.py"]
CLIENT = """
import asyncio, httpx
from shop.web import app

async def post(client, key):
    answer = await client.post("/orders", json={"total": 40}, headers={"Idempotency-Key": key})
    assert answer.status_code == 201, answer.text
    return answer.json()["order_id"]

async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        first, again, other = [await post(client, key) for key in ("a", "a", "b")]
        assert first == again != other
        assert len(set(await asyncio.gather(*(post(client, "c") for _ in range(4))))) == 1

asyncio.run(main())
"""
WORKER = """
import asyncio
from shop.worker import bus

async def main():
    async with bus:
        await bus.idle(timeout=30)
        assert not +bus.alarms, bus.alarms

asyncio.run(main())
"""


def init() -> list[str]:
    [block] = blocks(PAGE, "console")
    return re.findall(r"^\$ faregate (store .*)$", block.text, re.MULTILINE)[0].split()


def run(arguments: list[str], folder: Path) -> None:
    """To its end, which is good; else the failure has all that the program said."""
    program = [sys.executable, *arguments]
    done = subprocess.run(program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{arguments[:2]} ended with {done.returncode}:\n{done.stdout}"


def rows(database: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("service", SERVICES, ids=["sqlite3", "Session", "AsyncSession"])
def test_an_order_that_is_posted_twice_is_taken_and_billed_once(service: Block, tmp_path: Path) -> None:
    [worker] = [block for block in FILES if block.title == "shop/worker.py"]
    (tmp_path / "shop").mkdir()
    for block in (service, worker):
        (tmp_path / block.title).write_text(block.text)
    for arguments in (["-m", "faregate", *init()], ["-c", CLIENT], ["-c", WORKER]):
        run(arguments, tmp_path)
    orders = rows(tmp_path / "shop.db", "select id from orders order by id")
    assert len(orders) == 3
    assert rows(tmp_path / "shop.db", "select order_id from invoices order by order_id") == orders
