"""Every token store keeps every promise of the token store port."""

from functools import partial
from pathlib import Path

import pytest

from faregate.testing import (
    TOKEN_CASES,
    memory_token_subject,
    postgres_token_subject,
    run_token_case,
    sqlite_token_subject,
)
from tests.presence import address


@pytest.mark.parametrize("name", TOKEN_CASES)
async def test_tokens_in_memory(name: str) -> None:
    await run_token_case(name, memory_token_subject)


@pytest.mark.parametrize("name", TOKEN_CASES)
async def test_tokens_in_a_sqlite_file(name: str, tmp_path: Path) -> None:
    await run_token_case(name, partial(sqlite_token_subject, tmp_path / "tokens.db"))


@pytest.mark.services
@pytest.mark.parametrize("name", TOKEN_CASES)
async def test_tokens_in_postgresql(name: str) -> None:
    await run_token_case(name, partial(postgres_token_subject, address("FAREGATE_TEST_POSTGRES")))


def test_there_are_cases() -> None:
    assert len(TOKEN_CASES) >= 12
