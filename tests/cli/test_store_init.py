"""`faregate store init`: the tables before the first start; `faregate cancel` beside a running bus and on a store."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

import faregate as fg
from faregate.stores.sqlite.migrate import MIGRATIONS
from tests.cli.test_status import faregate

NEWEST = len(MIGRATIONS)


class Due(fg.Command):
    order: str


class Placed(fg.Event):
    order: str


@pytest.fixture(autouse=True)
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAREGATE_CONTROL_DIR", str(tmp_path / "c"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("bus_under_test")
    monkeypatch.setitem(sys.modules, "bus_under_test", module)
    return module


def make_bus(url: str, store: str | None, **options: object) -> fg.Bus:
    shop = fg.Node("shop", schema=None if store is None else "create table if not exists orders (id text)")

    @shop.on(Due)
    async def due(late: Due) -> None: ...

    return fg.Bus(url, nodes=[shop], store=store, **options)  # type: ignore[arg-type]


async def test_the_tables_of_a_bus_are_made_before_it_runs_and_again_does_nothing(
    tmp_path: Path, module: ModuleType
) -> None:
    url = f"sqlite:{tmp_path}/s.db"
    for was, said in ((0, "its tables are made"), (NEWEST, "its tables are up to date")):
        module.bus = make_bus("memory:", url)  # type: ignore[attr-defined]
        code, text = await faregate("store", "init", "bus_under_test:bus", "--json")
        assert code == 0
        assert json.loads(text) == [{"url": url, "was": was, "version": NEWEST, "nodes": ["shop"]}]
        if was == 0:
            (tmp_path / "s.db").unlink()
        module.bus = make_bus("memory:", url)  # type: ignore[attr-defined]
        code, text = await faregate("store", "init", "bus_under_test:bus")
        assert code == 0 and said in text and "its nodes: shop" in text
    with closing(sqlite3.connect(tmp_path / "s.db")) as connection, connection:
        connection.execute("insert into orders values ('17')")
        fg.outbox(connection, node="shop").publish(Placed(order="17"))
        with pytest.raises(fg.ConfigurationError, match="did you mean 'shop'"):
            fg.outbox(connection, node="shpo").publish(Placed(order="17"))


async def test_the_tables_of_a_url_are_made(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/s.db"
    code, text = await faregate("store", "init", url)
    assert code == 0 and text == f"{url}: its tables are made, schema version {NEWEST}\n"


async def test_a_bus_without_a_store_and_a_store_in_memory_are_refused(module: ModuleType) -> None:
    module.bus = make_bus("memory:", None)  # type: ignore[attr-defined]
    code, text = await faregate("store", "init", "bus_under_test:bus")
    assert code and "has no store=" in text
    code, text = await faregate("store", "init", "memory:")
    assert code and "ends with it" in text


@pytest.mark.parametrize("with_store", [True, False])
async def test_a_message_is_cancelled_beside_a_running_bus(tmp_path: Path, with_store: bool) -> None:
    store = f"sqlite:{tmp_path}/s.db" if with_store else None
    async with make_bus(f"journal:{tmp_path}/data", store, control=True) as bus:
        first = await bus.send(Due(order="1"), to="shop", delay=600)
        await bus.send(Due(order="2"), to="shop", delay=600, idempotency_key="two")
        code, text = await faregate("cancel", first)
        assert (code, text) == (0, f"{first} is cancelled\n")
        code, text = await faregate("cancel", first, f"journal:{tmp_path}/data", "--json")
        assert code == 1 and json.loads(text) == {"id": first, "key": None, "node": None, "cancelled": False}
        code, text = await faregate("cancel", "two", "--key", "--node", "nobody")
        assert code == 1 and "there is no node 'nobody'" in text
        code, text = await faregate("cancel", "two", "--key", "--node", "shop")
        assert code == 0
        assert not await bus.cancel(key="two")


async def test_looking_for_dead_letters_makes_no_tables(postgres_url: str) -> None:
    for command in ("list", "export"):
        code, told = await faregate("dead", command, postgres_url, *(["letters.jsonl"] if command == "export" else []))
        assert (code, "has no tables of Faregate" in told) == (1, True)
    code, told = await faregate("store", "info", postgres_url)
    assert (code, "has no tables of Faregate" in told) == (0, True)
