"""What the tests of the way through a handler share."""

from typing import Any

import pytest

from faregate.core.handling import Handling
from faregate.core.pace import BATCH_LIMIT
from faregate.core.unit import UnitOfWork
from faregate.stores.postgres import PostgresStore
from faregate.stores.sqlite import SqliteStore


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are published together share a transaction, however slow the machine is."""
    monkeypatch.setattr(Handling, "batch", BATCH_LIMIT)


@pytest.fixture
def url(store_url: str, one_batch: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """SQLite's savepoints are said to be dear, too, so that batches begin without them on either."""
    monkeypatch.setattr(SqliteStore, "dear_savepoints", True)
    return store_url


@pytest.fixture(params=[True, False], ids=["without savepoints", "with savepoints"])
def either_way(request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for store in (SqliteStore, PostgresStore):
        monkeypatch.setattr(store, "dear_savepoints", request.param)
    return url


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every transaction: how many messages, and whether with savepoints."""
    made: list[tuple[int, bool]] = []
    plain = UnitOfWork.__init__

    def noted(self: UnitOfWork, home: Any, works: Any, savepoints: bool) -> None:
        made.append((len(works), savepoints))
        plain(self, home, works, savepoints)

    monkeypatch.setattr(UnitOfWork, "__init__", noted)
    return made
