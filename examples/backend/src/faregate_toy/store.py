"""`toy-store:PATH`: a store and a token store; behind them is a SQLite file."""

from typing import Any

from faregate.ports.clock import Clock
from faregate.ports.store import Store, Transaction
from faregate.ports.store.transaction import TransactionBlock
from faregate.ports.tokens import TokenStore
from faregate.stores.sqlite import SqliteStore, SqliteTokenStore

from .through import Through


class ToyStore(Through):
    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """Made from its URL; nothing is opened before `open`."""
        super().__init__(Store, SqliteStore(_path(url), clock=clock))
        self.url = url

    def transaction(self) -> "ToyTransaction":
        return ToyTransaction(self._behind.transaction())


class ToyTransaction(Through, TransactionBlock):
    def __init__(self, behind: Any) -> None:
        super().__init__(Transaction, behind)

    async def begin(self) -> None:
        await self._behind.begin()

    async def commit(self) -> None:
        await self._behind.commit()

    async def roll_back(self) -> None:
        await self._behind.roll_back()


class ToyTokenStore(Through):
    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        super().__init__(TokenStore, SqliteTokenStore(_path(url), clock=clock))
        self.url = url


def _path(url: str) -> str:
    return url.removeprefix("toy-store:")
