"""What every store promises, as named cases; used like `queue_suite`:

    @pytest.mark.parametrize("name", STORE_CASES)
    async def test_memory(name):
        await run_store_case(name, memory_store_subject)

A case raises AssertionError when the promise is broken. There are no capability flags: a store keeps all of them. A
store with a `reader()` keeps `READER_CASES` as well. The cases are grouped as the protocols of `faregate.ports.store`.
"""

from faregate.testing.cases import run_case
from faregate.testing.store_subjects import MakeStore
from faregate.testing.store_suite import (
    dead_letters,
    leases,
    ledger,
    outbox,
    parked,
    reading,
    scheduled,
    tokens,
    transaction,
)
from faregate.testing.store_suite.reading import READER_CASES
from faregate.testing.store_suite.rows import STORE_CASES

__all__ = ["READER_CASES", "STORE_CASES", "run_store_case"]

PARTS = (transaction, ledger, outbox, scheduled, dead_letters, parked, leases, tokens, reading)


async def run_store_case(name: str, make: MakeStore) -> None:
    """Run one case against a fresh subject."""
    await run_case((STORE_CASES | READER_CASES)[name], make)
