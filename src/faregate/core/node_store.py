"""A node's store, with what everything that works on it for this node shares."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from faregate.core.alarms import Alarms
from faregate.ports.store import OutboxRow, Store, Transaction
from faregate.ports.tokens import TokenStore

if TYPE_CHECKING:
    from faregate.core.dedup.claims import Claims
    from faregate.core.outlet import OutboxOutlet, Recorded

T = TypeVar("T")


class NodeStore:
    def __init__(
        self,
        store: Store,
        outbox: OutboxOutlet,
        alarms: Alarms,
        tokens: TokenStore | None = None,
        claims: Claims | None = None,
        *,
        young_seconds: float = 0.0,
    ) -> None:
        self.store = store
        self.outbox = outbox
        self.alarms = alarms
        self.tokens = tokens
        """Where signals with an attempt id have their tokens."""
        self.claims = claims
        """How they are claimed there; None where tokens and business data are one database."""
        self.young_seconds = young_seconds
        """What was sent less than this ago is above the floor in any case."""

    async def commit(self, do: Callable[[Transaction], Awaitable[T]]) -> T:
        """One thing as a commit of its own."""
        async with self.store.transaction() as transaction:
            return await do(transaction)

    async def publish(self, rows: Sequence[OutboxRow]) -> None:
        """Put publications from outside of handlers into the outbox, all or none. Return once those that are due are
        sent: what is published next goes to the transport, and would overtake them."""
        await self.outbox.room()
        _, recorded = await self._commit_recording(_nothing_else, rows)
        if recorded is not None:
            await self.outbox.sent(recorded)

    async def commit_sending(self, do: Callable[[Transaction], Awaitable[bool]], rows: Sequence[OutboxRow]) -> bool:
        """One thing as a commit of its own, and these rows in the outbox with it, if `do` says so; what it says."""
        done, _ = await self._commit_recording(do, rows)
        return done

    async def _commit_recording(
        self, do: Callable[[Transaction], Awaitable[bool]], rows: Sequence[OutboxRow]
    ) -> tuple[bool, Recorded | None]:
        recorded = None
        try:
            async with self.store.transaction() as transaction:
                done = await do(transaction)
                if done and rows:
                    recorded = await self.outbox.record_rows(transaction, rows)
        except BaseException:
            if recorded is not None:
                self.outbox.rolled_back(recorded)
            raise
        if recorded is not None:
            self.outbox.committed(recorded)
        return done, recorded


async def _nothing_else(transaction: Transaction) -> bool:
    return True
