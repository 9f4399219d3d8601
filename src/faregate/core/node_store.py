"""A node's store, with what everything that works on it for this node shares."""

from collections.abc import Awaitable, Callable, Sequence

from faregate.bus.dispatcher import Dispatcher
from faregate.core.alarms import Alarms
from faregate.core.claims import TokenGate
from faregate.ports.store import OutboxRow, Store, Transaction
from faregate.ports.tokens import TokenStore


class NodeStore:
    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        alarms: Alarms,
        tokens: TokenStore | None = None,
        gate: TokenGate | None = None,
    ) -> None:
        self.store = store
        self.dispatcher = dispatcher
        self.alarms = alarms
        self.tokens = tokens
        """Where signals with an attempt id have their tokens."""
        self.gate = gate
        """How they are claimed there; None where tokens and business data are one database."""
        self.young_seconds = 0.0
        """What was sent less than this ago is above the floor in any case."""

    async def commit(self, do: Callable[[Transaction], Awaitable[object]]) -> None:
        """One thing as a commit of its own."""
        transaction = self.store.transaction()
        try:
            await transaction.begin()
            await do(transaction)
            await transaction.commit()
        finally:
            await transaction.roll_back()

    async def publish(self, rows: Sequence[OutboxRow]) -> None:
        """Put publications from outside of handlers into the outbox, all or none."""
        await self.dispatcher.room()
        transaction = self.store.transaction()
        try:
            await transaction.begin()
            recorded = await self.dispatcher.record(transaction, rows)
            try:
                await transaction.commit()
            except BaseException:
                self.dispatcher.rolled_back(recorded)
                raise
        finally:
            await transaction.roll_back()
        self.dispatcher.committed(recorded)
