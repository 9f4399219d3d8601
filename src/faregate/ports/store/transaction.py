"""One transaction on a node's database: beginning and ending it, savepoints, and the user's own statements."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self


class TransactionBlock(Protocol):
    """`async with store.transaction() as transaction:` begins it; the end of the block commits it.

    An error rolls back, and so does a cancellation; nothing is left open. An adapter inherits this.
    """

    async def begin(self) -> None:
        """Open it; waits for the writer's turn (SQLite) or a free connection (PostgreSQL)."""

    async def commit(self) -> None:
        """Durable when it returns. Raises `CommitUnknown` when it may or may not have happened."""

    async def roll_back(self) -> None:
        """As if it had never been. Never raises for a connection that is gone."""

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.commit()
        finally:
            await self.roll_back()


class DatabaseTransaction(TransactionBlock, Protocol):
    """One transaction on one connection. Made by `Store.transaction`; nothing happens before `begin`.

    `begin`, then anything, then `commit` or `roll_back`; both may be called once more without effect. A driver's error
    inside leaves it to be rolled back to the savepoint, or as a whole.
    """

    @property
    def is_open(self) -> bool:
        """Whether the database still has this transaction open; false also when a handler ended it through `raw`."""

    @property
    def was_closed(self) -> bool:
        """Whether somebody closed the connection; false when it was lost."""

    @property
    def is_broken(self) -> bool:
        """Whether a statement failed and the database refuses everything but rolling back (PostgreSQL)."""

    def retire(self) -> None:
        """Close the connection when this transaction ends: a task of the handler may still hold it."""

    # --- savepoints: one level, remade after `release_savepoint` ---

    async def savepoint(self) -> None: ...
    async def release_savepoint(self) -> None: ...
    async def roll_back_to_savepoint(self) -> None:
        """Undo everything since; the savepoint itself stays."""

    # --- the user's statements: `?` stands for a parameter, `??` for a question mark ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run it; how many rows it changed."""

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int: ...
    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Run it without waiting for it. It goes out, in order, before the next statement or the commit; whatever sends
        it raises its error. The parameters must not be changed afterwards."""

    async def flush(self) -> None:
        """Send what `write` took. Raises the error of the first that fails; that and all behind it did not happen."""

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None: ...
    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    @property
    def raw(self) -> Any:
        """The driver's connection."""
