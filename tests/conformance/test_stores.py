"""Every store keeps every promise of the store port."""

from functools import partial
from pathlib import Path

import pytest

from faregate.testing import (
    READER_CASES,
    STORE_CASES,
    memory_store_subject,
    postgres_store_subject,
    run_store_case,
    sqlite_store_subject,
)
from tests.presence import address

CASES = [*STORE_CASES, *READER_CASES]


@pytest.mark.parametrize("name", STORE_CASES)
async def test_a_store_in_memory(name: str) -> None:
    await run_store_case(name, memory_store_subject)


@pytest.mark.parametrize("name", CASES)
async def test_a_sqlite_file(name: str, tmp_path: Path) -> None:
    await run_store_case(name, partial(sqlite_store_subject, tmp_path / "store.db"))


@pytest.mark.services
@pytest.mark.parametrize("name", CASES)
async def test_postgresql(name: str) -> None:
    await run_store_case(name, partial(postgres_store_subject, address("FAREGATE_TEST_POSTGRES")))


@pytest.mark.services
@pytest.mark.parametrize("name", STORE_CASES)
async def test_postgresql_with_a_polling_connection(name: str) -> None:
    """As Spark's workers use it."""
    await run_store_case(name, partial(postgres_store_subject, address("FAREGATE_TEST_POSTGRES"), blocking=True))


def test_there_are_cases() -> None:
    assert len(STORE_CASES) >= 40
