"""What `faregate store info` reads, on PostgreSQL."""

import pytest

from faregate.errors import StoreUnavailable
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import describe_store, open_store
from faregate.testing.store_subjects import postgres_schema
from tests.presence import address


@pytest.mark.services
async def test_a_postgres_store_is_described_before_and_after_it_is_set_up() -> None:
    async with postgres_schema(address("FAREGATE_TEST_POSTGRES")) as url:
        before = await describe_store(url)
        assert (before.version, before.tables) == (0, {})
        assert ":***@" in before.url, "the password is shown"
        store = open_store(url, SystemClock())
        await store.open()
        await store.close()
        after = await describe_store(url)
        assert after.version == after.known >= 1
        assert after.tables["faregate_ledger"] == 0
        assert (after.floors, after.oldest) == ({}, None)


async def test_a_server_that_is_not_there_is_one_clear_sentence() -> None:
    with pytest.raises(StoreUnavailable, match="cannot reach"):
        await describe_store("postgresql://nobody:secret@127.0.0.1:1/none")
