"""A bus takes its transport, stores and token store as URLs, by schemes that packages register, or as objects."""

import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import OWN, open_store, open_transport
from faregate.spark.jobs.stores import open_stores
from faregate.stores.sqlite import MemoryStore, SqliteStore, SqliteTokenStore
from faregate.transports.memory import MemoryTransport

ROOT = Path(__file__).parents[1]
LONG = 30  # seconds until a test that hangs is failed


class Placed(fg.Event):
    order_id: str


def nodes(dedup: Any = "ledger") -> list[fg.Node]:
    shop, billing, audit = fg.Node("shop"), fg.Node("billing"), fg.Node("audit")

    @billing.on(Placed, source="shop", dedup=dedup)
    async def bill(order: Placed, ctx: fg.Context) -> None:
        await ctx.db.execute("create table if not exists bills(id text)")
        await ctx.db.execute("insert into bills(id) values (?)", (order.order_id,))

    @audit.on(Placed, source="shop")
    async def note(order: Placed, ctx: fg.Context) -> None:
        await ctx.db.fetchall("select 1")

    return [shop, billing, audit]


async def handled(bus: fg.Bus) -> int:
    """How many messages are handled, of one event with two recipients that is published twice."""
    async with asyncio.timeout(LONG), bus:
        for _ in range(2):
            await bus.publish(Placed(order_id="17"), node="shop", idempotency_key="17")
        await bus.idle()
        return bus.outcomes()["handled"]


class Watched(SqliteStore):
    opened = closed = 0

    async def open(self) -> None:
        self.opened += 1
        await super().open()

    async def close(self) -> None:
        self.closed += 1
        await super().close()


# --- objects -----------------------------------------------------------------------------------------------


async def test_one_store_object_for_all_nodes_is_one_store_that_the_bus_opens_and_closes(tmp_path: Path) -> None:
    store = Watched(f"sqlite:{tmp_path}/shop.db", busy_seconds=30)
    bus = fg.Bus(MemoryTransport(), nodes=nodes(), store=store)
    assert await handled(bus) == 2
    assert (store.opened, store.closed) == (1, 1)
    assert bus.store_of("shop") is bus.store_of("billing") is store


async def test_a_mapping_may_mix_objects_and_urls_and_one_database_is_one_store(tmp_path: Path) -> None:
    store, own = Watched(str(tmp_path / "shop.db")), MemoryStore()
    given = {"shop": store, "billing": f"sqlite:{tmp_path}/../{tmp_path.name}/shop.db", "audit": own}
    bus = fg.Bus("memory:", nodes=nodes(), store=given)
    assert await handled(bus) == 2
    assert bus.store_of("billing") is store and bus.store_of("audit") is own and len(bus.stores) == 2


async def test_tokens_may_be_an_object(tmp_path: Path) -> None:
    path = str(tmp_path / "shop.db")
    bus = fg.Bus("memory:", nodes=nodes("tokens"), store=SqliteStore(path), tokens=SqliteTokenStore(path))
    assert await handled(bus) == 2


def test_tokens_in_a_store_that_is_an_object_have_to_be_given_too(tmp_path: Path) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"was given as an object: say where tokens are kept"):
        fg.Bus("memory:", nodes=nodes("tokens"), store=SqliteStore(str(tmp_path / "shop.db")))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"transport": 17},
            r"int is no transport: it lacks bind, capabilities, close and \d+ more\. Give a URL \(.*journal:PATH, ",
        ),
        ({"store": Path("shop.db")}, r"PosixPath is no store: it lacks .* faregate\.ports\.store\.Store"),
        ({"store": {"shop": SqliteStore}}, r"is no store: it lacks"),
        (
            {"store": "memory:", "tokens": MemoryStore()},
            r"MemoryStore is no token store: it lacks claim, count, create",
        ),
    ],
    ids=["number", "path", "class", "other port"],
)
def test_an_object_without_the_protocol_is_refused_by_what_it_lacks(given: dict[str, Any], told: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=told):
        fg.Bus(**{"transport": "memory:", "nodes": nodes(), **given})


def test_an_object_cannot_travel_to_sparks_workers(tmp_path: Path) -> None:
    store: Any = SqliteStore(str(tmp_path / "shop.db"))
    for given in (store, {"shop": store}):
        with pytest.raises(fg.ConfigurationError, match=r"a SqliteStore, an object, which cannot travel .* give a URL"):
            open_stores(given)
    with pytest.raises(fg.ConfigurationError, match=r"cannot travel to Spark's workers"):
        fg.spark.run("examples.shop.app:billing", None, source=tmp_path, store=store, checkpoint=tmp_path)


# --- schemes -----------------------------------------------------------------------------------------------


def test_our_own_schemes_are_registered_as_those_of_any_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {group: each for group, each in project["entry-points"].items() if group.startswith("faregate.")} == OWN


def test_our_own_schemes_need_no_metadata_of_a_package() -> None:
    code = (
        "import sys; sys.modules['importlib.metadata'] = None; import faregate as fg\n"
        "fg.Bus('memory:', nodes=[fg.Node('a')], store='sqlite:a.db', tokens='memory:'); print('made')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, check=False)
    assert done.stdout == "made\n", done.stderr


def register(folder: Path, package: str, text: str) -> None:
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(text)


@pytest.mark.parametrize(
    ("module", "why"), [("absent", "No module named 'absent'"), ("rough:Store", "RuntimeError: too rough")]
)
def test_an_entry_point_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, why: str
) -> None:
    (tmp_path / "rough.py").write_text("raise RuntimeError('too rough')")
    register(tmp_path, "rough", f"[faregate.stores]\nrough = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        fg.ConfigurationError, match=rf"entry point 'rough' of 'faregate\.stores'.* cannot be loaded: .*{why}"
    ):
        open_store("rough:x", SystemClock())


def test_a_scheme_that_two_packages_register_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one", "two"):
        register(tmp_path, package, f"[faregate.transports]\nline = {package}:Line\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(fg.ConfigurationError, match=r"registered more than once .* as one:Line and as two:Line"):
        open_transport("line:", SystemClock())


def test_no_package_takes_over_a_scheme_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "other", "[faregate.transports]\nmemory = other:Transport\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(open_transport("memory:", SystemClock()), MemoryTransport)


@pytest.mark.parametrize("url", ["mysql://shop:secret@db/shop", "shop.db", "MY SQL:x"])
def test_an_unknown_scheme_says_what_is_known_and_hides_the_password(url: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"names no store; known: memory:, .*sqlite:PATH") as raised:
        open_store(url, SystemClock())
    assert ("such as faregate-mysql" in str(raised.value)) == url.startswith("mysql:")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["postgresql+psycopg://me@host/shop", "sqlite+aiosqlite:///shop.db"])
def test_a_url_in_the_way_of_sqlalchemy_is_answered_with_ours(url: str) -> None:
    scheme = url.partition(":")[0]
    with pytest.raises(fg.ConfigurationError, match=re.escape(f"{scheme}: is how SQLAlchemy writes it, here it is ")):
        fg.Bus("memory:", nodes=[fg.Node("a")], store=url)


async def test_a_mapping_of_stores_names_nodes_or_has_them(tmp_path: Path) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")
    stores = {shop: f"sqlite:{tmp_path}/shop.db", "billing": f"sqlite:{tmp_path}/billing.db"}
    bus = fg.Bus("memory:", nodes=[shop, billing], store=stores)
    assert sorted(store.url for store in bus.stores.values()) == sorted(stores.values())
    with pytest.raises(fg.ConfigurationError, match="store= names 'other'; the nodes of this bus are: shop"):
        fg.Bus("memory:", nodes=[shop], store={fg.Node("other"): "memory:"})


def test_a_misspelled_scheme_is_told_with_the_one_that_is_meant() -> None:
    with pytest.raises(fg.ConfigurationError, match=r"known: .* \(did you mean 'journal'\?\)$"):
        fg.Bus("journl:./data", nodes=[fg.Node("shop")])
