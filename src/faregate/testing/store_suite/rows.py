"""What the cases of the store suite are written with: their list, ids, rows, and transactions that end."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from faregate.ids import root_id
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import LedgerRow, OutboxRow, Store, Transaction
from faregate.testing.cases import Cases, refused
from faregate.testing.store_subjects import StoreSubject

STORE_CASES = Cases[StoreSubject]()
case = STORE_CASES.add


def ids(count: int) -> list[str]:
    """Fresh ids in ascending order."""
    return sorted(root_id() for _ in range(count))


def ledger(message_id: str, digest: bytes | None = None, at: float = 100.0) -> LedgerRow:
    return LedgerRow(message_id, digest, "key", 7, at)


def outgoing(node: str, message_id: str | None = None, text: str = "x", **more: Any) -> OutboxRow:
    envelope = Envelope(publication_id=root_id(), type="Noted", source=node, body=text.encode(), headers={"a": "b"})
    return OutboxRow(0, node, message_id, more.pop("ordinal", 0), "author.Noted", "key", envelope, **more)


def letter(node: str, message_id: str, **more: Any) -> DeadLetter:
    envelope = Envelope(publication_id="p", type="Noted", source="author", correlation_id="c", body=b"x")
    queue = "billing.author.Noted"
    made = DeadLetter.of(node, envelope, "failed", "ValueError: no", 10.0, queue=queue, message_id=message_id)
    return msgspec.structs.replace(made, **more)


@asynccontextmanager
async def aborted(store: Store) -> AsyncIterator[Transaction]:
    """A transaction that is rolled back at the end."""
    async with store.transaction() as tx:
        yield tx
        await tx.roll_back()


async def expect(error: type[Exception], doing: Awaitable[Any], what: str) -> None:
    with refused(error, f"{what} was accepted"):
        await doing
