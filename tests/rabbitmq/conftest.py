"""A virtual host of the private RabbitMQ for each process of the tests; see `tests/presence.py`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.presence import address

if TYPE_CHECKING:
    from tests.rabbitmq.site import Site


@pytest.fixture
def broker() -> str:
    return address("FAREGATE_TEST_RABBITMQ") + os.environ.get("PYTEST_XDIST_WORKER", "main")


@pytest.fixture
async def site(broker: str, tmp_path: Path) -> "AsyncIterator[Site]":
    """With a store on SQLite."""
    async with _site(broker, f"sqlite:{tmp_path}/site.db") as site:
        yield site


@pytest.fixture
async def postgres_site(broker: str, postgres_url: str) -> "AsyncIterator[Site]":
    async with _site(broker, postgres_url) as site:
        yield site


@pytest.fixture
async def any_site(broker: str, store_url: str) -> "AsyncIterator[Site]":
    async with _site(broker, store_url) as site:
        yield site


@asynccontextmanager
async def _site(broker: str, store: str) -> "AsyncIterator[Site]":
    from tests.rabbitmq.site import Site  # where the driver is missing, tests are skipped before

    site = Site(broker, store)
    yield site
    await site.remove()
