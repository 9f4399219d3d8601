"""Stores and token stores to run the suites on, each in an empty database of its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from faregate.ports.clock import Clock, SystemClock
from faregate.ports.extras import needs_extra
from faregate.ports.store import Store
from faregate.ports.tokens import TokenStore
from faregate.stores.sqlite import MemoryStore, MemoryTokenStore, SqliteStore, SqliteTokenStore
from faregate.testing.clock import FakeClock

_numbers = count(1)


@dataclass
class StoreSubject:
    """A store under test."""

    store: Store
    reopen: Callable[[], Awaitable[Store]] | None
    """Close it and open the same database again; None for one that ends with its last user."""
    now: Callable[[], float]
    """About what the database's own clock says."""


@dataclass
class TokenSubject:
    """A token store under test, and a second user of the same one."""

    store: TokenStore
    other: TokenStore


MakeStore = Callable[[], AbstractAsyncContextManager[StoreSubject]]
MakeTokens = Callable[[], AbstractAsyncContextManager[TokenSubject]]


@asynccontextmanager
async def _tested(make: Callable[[], Store], clock: Clock, *, lasting: bool) -> AsyncIterator[StoreSubject]:
    store = make()
    await store.open()

    async def reopen() -> Store:
        await subject.store.close()
        subject.store = make()
        await subject.store.open()
        return subject.store

    subject = StoreSubject(store, reopen if lasting else None, clock.time)
    try:
        yield subject
    finally:
        await subject.store.close()


@asynccontextmanager
async def _tested_tokens(make: Callable[[], TokenStore]) -> AsyncIterator[TokenSubject]:
    stores = make(), make()
    async with AsyncExitStack() as stack:
        for store in stores:
            await store.open()
            stack.push_async_callback(store.close)
        yield TokenSubject(*stores)


def memory_store_subject(store: Callable[..., Store] = MemoryStore) -> AbstractAsyncContextManager[StoreSubject]:
    """`memory:` on a fake clock."""
    clock = FakeClock()
    return _tested(lambda: store("", clock=clock), clock, lasting=False)


def sqlite_store_subject(path: Path, store: Callable[..., Store] = SqliteStore) -> Any:
    """`sqlite:PATH` on a fake clock."""
    clock = FakeClock()
    return _tested(lambda: store(str(path), clock=clock), clock, lasting=True)


@asynccontextmanager
async def postgres_store_subject(url: str, *, blocking: bool = False) -> AsyncIterator[StoreSubject]:
    """`postgresql://…`, in a schema of its own that is dropped afterwards."""
    from faregate.stores.postgres import PostgresStore

    clock = SystemClock()
    async with (
        postgres_schema(url) as inside,
        _tested(lambda: PostgresStore(inside, clock=clock, blocking=blocking), clock, lasting=True) as subject,
    ):
        yield subject


def memory_token_subject(store: Callable[..., TokenStore] = MemoryTokenStore) -> Any:
    """`memory:` with a name, on a fake clock."""
    clock, name = FakeClock(), f"tokens-{next(_numbers)}"
    return _tested_tokens(lambda: store(name, clock=clock))


def sqlite_token_subject(path: Path) -> Any:
    """A SQLite file as a token store under test: an async context manager of a `TokenSubject`."""
    clock = FakeClock()
    return _tested_tokens(lambda: SqliteTokenStore(str(path), clock=clock))


@asynccontextmanager
async def postgres_token_subject(url: str) -> AsyncIterator[TokenSubject]:
    """A schema of its own in this database as a token store under test."""
    from faregate.stores.postgres import PostgresTokenStore

    clock = SystemClock()
    async with (
        postgres_schema(url) as inside,
        _tested_tokens(lambda: PostgresTokenStore(inside, clock=clock)) as subject,
    ):
        yield subject


def postgres_schema(url: str) -> AbstractAsyncContextManager[str]:
    """The URL of an empty schema in the same database; it is dropped afterwards."""
    with needs_extra("postgres", "a schema for tests"):
        from faregate.stores.postgres.scratch import empty_schema
    return empty_schema(url)
