"""What `faregate store info` reads, on PostgreSQL."""

import pytest

from faregate.errors import StoreUnavailable
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import describe_store, open_store


@pytest.mark.services
async def test_a_postgres_store_is_described_before_and_after_it_is_set_up(postgres_url: str) -> None:
    before = await describe_store(postgres_url)
    assert (before.version, before.tables) == (0, {})
    assert ":***@" in before.url, "the password is shown"
    store = open_store(postgres_url, SystemClock())
    await store.open()
    await store.close()
    after = await describe_store(postgres_url)
    assert after.version == after.known >= 1
    assert after.tables["faregate_ledger"] == 0
    assert (after.floors, after.oldest) == ({}, None)


async def test_a_server_that_is_not_there_is_one_clear_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="cannot reach"):
        await describe_store("postgresql://nobody:secret@127.0.0.1:1/none")
