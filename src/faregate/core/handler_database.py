"""`ctx.db` as a type checker sees it: one type for both kinds of handlers.

What its methods take is checked. What they give is `Any`: it is awaited in `async def` (`Database`) and there at once
in `def` (`BlockingDatabase`), and which of the two a handler is, its `ctx` cannot tell.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class HandlerDatabase(Protocol):
    """`?` stands for a parameter on every store, `??` for a question mark."""

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """Run a statement; how many rows it changed."""

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> Any:
        """Run a statement once for each row of parameters; how many rows it changed in all."""

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement whose result nobody needs; never awaited. Many of them go out together, before the next
        statement of another kind or the commit."""

    def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """The first row of the result, or None."""

    def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """All rows, as a list of tuples."""

    @property
    def raw(self) -> Any:
        """The driver's connection, never awaited. A message whose handler takes it has its transaction for itself."""
