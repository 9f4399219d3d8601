"""The backend example: a package of its own, installed, is found by its entry points alone and keeps every promise."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend"
BUS = """
import asyncio, sys
import faregate as fg

class Placed(fg.Event):
    order_id: str

class Billed(fg.Event):
    order_id: str

shop = fg.Node("shop")
billing = fg.Node("billing", schema="create table if not exists invoices(id text primary key)")
ledger = fg.Node("ledger")

@billing.on(Placed, source="shop", dedup=sys.argv[1])
async def bill(order: Placed, ctx: fg.Context):
    await ctx.db.execute("insert into invoices(id) values (?)", (order.order_id,))
    return Billed(order_id=order.order_id)

@ledger.on(Billed, source="billing", dedup=sys.argv[1], retry=fg.Retry(0), redeliver=fg.Redeliver(0, 1))
def note(billed: Billed, ctx: fg.Context):
    [(count,)] = ctx.db.fetchall("select count(*) from invoices where id = ?", (billed.order_id,))
    print(billed.order_id, "has", count, "invoice")
    if billed.order_id == "18":
        raise fg.Permanent("nobody pays this")

async def main():
    async with fg.Bus("toy-queue:", nodes=[shop, billing, ledger], store="toy-store:./toy.db") as bus:
        for order in ["17", "17", "18"]:
            await bus.publish(Placed(order_id=order), node="shop", idempotency_key=order)
        await bus.idle(timeout=30)
        print(*bus.stores, bus.outcomes()["handled"], bus.outcomes()["dead"])

asyncio.run(main())
"""


def python(packages: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that has these packages, and stands in this folder."""
    paths = [str(packages), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed into; its source is nowhere on the way to it."""
    source, target = tmp_path_factory.mktemp("source") / "backend", tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source)
    offline = ["--quiet", "--no-index", "--no-build-isolation", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("dedup", ["ledger", "tokens"])
def test_a_bus_runs_on_urls_of_an_installed_package(installed: Path, tmp_path: Path, dedup: str) -> None:
    done = python(installed, tmp_path, "-c", BUS, dedup)
    assert done.returncode == 0, done.stderr
    *noted, last = done.stdout.splitlines()
    assert sorted(noted) == ["17 has 1 invoice", "18 has 1 invoice"]
    assert last == "toy-store:./toy.db 3 1"
    listed = python(installed, tmp_path, "-m", "faregate", "dead", "list", "toy-store:./toy.db", "--json")
    assert "nobody pays this" in listed.stdout, listed.stderr


def test_the_suites_hold_for_an_installed_package(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, str(EXAMPLE / "conformance.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("cases hold\n")


FAULTS = {
    "a_message_is_recorded_once_per_node": ("store.py", "_behind.commit()", "_behind.roll_back()"),
    "a_token_comes_back_as_it_was": ("store.py", "SqliteTokenStore(_path(url)", "SqliteTokenStore(f'{url}{id(self)}'"),
    "messages_come_in_the_order_they_were_published": (
        "transport.py",
        "publish(envelopes)",
        "publish(envelopes[::-1])",
    ),
}


@pytest.mark.parametrize("caught", FAULTS)
def test_the_suites_catch_a_broken_package(installed: Path, tmp_path: Path, caught: str) -> None:
    file, right, wrong = FAULTS[caught]
    broken = tmp_path / "broken"
    shutil.copytree(installed, broken, ignore=shutil.ignore_patterns("__pycache__"))
    module = broken / "faregate_toy" / file
    assert module.read_text().count(right) == 1
    module.write_text(module.read_text().replace(right, wrong))
    done = python(broken, tmp_path, str(EXAMPLE / "conformance.py"))
    assert done.returncode == 1, done.stderr
    assert f"{caught}: " in done.stdout


def test_the_error_about_an_unknown_scheme_lists_what_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "import faregate as fg; fg.Bus('toy-line:', nodes=[fg.Node('shop')])"
    told = python(installed, tmp_path, "-c", code).stderr
    assert "names no transport; known: amqp:" in told
    assert "journal:PATH, memory:, toy-queue:" in told and "faregate-toy-line" in told


def test_a_store_that_cannot_be_described_says_so(installed: Path, tmp_path: Path) -> None:
    told = python(installed, tmp_path, "-m", "faregate", "store", "info", "toy-store:a.db").stderr
    assert "ToyStore has no reader()" in " ".join(told.split()) and "Traceback" not in told
