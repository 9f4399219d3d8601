"""PostgreSQL crashes and comes back while messages flow: what became of a commit is unknown for a while, not wrong."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import faregate as fg
from faregate.bus import attempts, housekeeping
from faregate.ports import faults
from tests.crash.killing import check
from tests.crash.line import nodes, ordered
from tests.crash.places import NODES, Place
from tests.crash.server import PrivatePostgres
from tests.crash.worker import swept

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("impatient")]
NUMBERS = range(12)
BOTH = pytest.mark.parametrize("where", ["ledger", "tokens"], indirect=True)
LONG = 60


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attempts, "FENCE_SECONDS", 1.0)
    monkeypatch.setattr(housekeeping, "_LONGEST_PERIOD", 0.2)
    monkeypatch.setattr(housekeeping, "_SHORTEST_PERIOD", 0.2)
    monkeypatch.setattr(housekeeping, "CLAIM_AGE", 1.0)
    yield
    faults.hook = None


@pytest.fixture
def where(request: pytest.FixtureRequest, server: PrivatePostgres, tmp_path: Path) -> Place:
    """Databases of its own: one for the nodes, one for tokens."""
    names = [f"{part}_{uuid4().hex[:8]}" for part in ("nodes", "tokens")]
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for name in names:
            connection.execute(f"create database {name}")
    tokens = server.url(names[1]) if request.param == "tokens" else None
    return Place(tmp_path, request.param, dict.fromkeys(NODES, server.url(names[0])), tokens)


@asynccontextmanager
async def running(where: Place, made: list[fg.Node]) -> AsyncIterator[fg.Bus]:
    async with fg.Bus(f"journal:{where.journal}", nodes=made, store=where.stores, tokens=where.tokens) as bus:
        yield bus


async def publish_all(bus: fg.Bus) -> None:
    """As a publisher does that repeats what was not confirmed."""
    for number in NUMBERS:
        while True:
            try:
                await bus.publish(ordered(number), node="shop", idempotency_key=f"order-{number}")
                break
            except (fg.Transient, fg.OutcomeUnknown):
                await asyncio.sleep(0.05)


async def at_rest(bus: fg.Bus) -> None:
    """Idle, and swept: what was half done when the server went is removed a second later."""
    async with asyncio.timeout(LONG):
        await bus.idle()
        await swept(bus)


async def flow(where: Place, made: list[fg.Node]) -> None:
    async with asyncio.timeout(2 * LONG), running(where, made) as bus:
        await publish_all(bus)
        await at_rest(bus)
    check(where, NUMBERS)


@pytest.mark.full
@BOTH
@pytest.mark.parametrize("point", ["unit.before-commit", "unit.after-commit", "bus.before-handler"])
async def test_a_restart_at_a_point_doubles_and_kills_nothing(
    point: str, where: Place, server: PrivatePostgres
) -> None:
    """The one that reaches the point waits there until the server is back; the others meet it as they come."""
    reached = 0

    async def hook(name: str) -> None:
        nonlocal reached
        reached += name == point
        if name == point and reached == 5:
            await asyncio.to_thread(server.restart)

    faults.hook = hook
    await flow(where, nodes(where.dedup))
    assert reached > 5


@pytest.mark.parametrize("where", ["ledger", pytest.param("tokens", marks=pytest.mark.full)], indirect=True)
async def test_a_restart_in_the_middle_of_a_handler_uses_up_no_try(where: Place, server: PrivatePostgres) -> None:
    made = nodes(where.dedup)
    runs = 0

    async def interrupt(ctx: fg.Context, call_next: Any) -> None:
        nonlocal runs
        runs += 1
        await ctx.db.execute("select 1")  # the transaction is open
        if runs == 4:
            await asyncio.to_thread(server.restart)
        await call_next()

    made[1].use(interrupt)
    await flow(where, made)
    assert runs > 4


@pytest.mark.parametrize("where", [pytest.param("ledger", marks=pytest.mark.full), "tokens"], indirect=True)
async def test_a_restart_in_the_middle_of_a_commit_is_unknown_and_found_out(
    where: Place, server: PrivatePostgres
) -> None:
    """The commit itself takes long, by a deferred trigger, and the server crashes meanwhile."""
    made = nodes(where.dedup)
    linger = (
        "create table linger (once integer);"
        "create function linger() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(30) from linger; return null; end $$;"
        "create constraint trigger lingers after insert on first_effects deferrable initially deferred"
        " for each row when (new.number = 5) execute function linger();"
        "insert into linger values (1)"
    )
    url = where.stores["first"]

    async def crash() -> None:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as watching:
            asleep = "select 1 from pg_stat_activity where wait_event = 'PgSleep' and query ilike '%commit%'"
            while not await (await watching.execute(asleep)).fetchone():
                pass  # each look is a round trip, so the commit goes on meanwhile
            await watching.execute("delete from linger")
        await asyncio.to_thread(server.restart)

    async with asyncio.timeout(2 * LONG), running(where, made) as bus:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(linger)
        crashing = asyncio.ensure_future(crash())
        await publish_all(bus)
        await crashing
        await at_rest(bus)
    check(where, NUMBERS)


@pytest.mark.full
@BOTH
async def test_sessions_ended_again_and_again_double_and_kill_nothing(where: Place, server: PrivatePostgres) -> None:
    """pg_terminate_backend, as an administrator does it, at whatever moment; commits and claims are hit alike."""

    async def terminate() -> None:
        end = (
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = any(%s) and pid <> pg_backend_pid()"
        )
        names = [url.rpartition("/")[2] for url in {*where.stores.values(), where.tokens} if url]
        async with await psycopg.AsyncConnection.connect(server.url(), autocommit=True) as connection:
            pause = 0.15
            while True:
                await connection.execute(end, (names,))
                await asyncio.sleep(pause)
                pause *= 1.02  # on a machine that is too slow for that nothing would ever be done

    async with asyncio.timeout(2 * LONG), running(where, nodes(where.dedup)) as bus:
        ending = asyncio.ensure_future(terminate())
        await publish_all(bus)
        ending.cancel()
        with suppress(asyncio.CancelledError):
            await ending
        await at_rest(bus)
    check(where, NUMBERS)
