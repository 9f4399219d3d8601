"""SQLAlchemy on the transaction of a unit of work (`ctx.session`): what a store may offer beside its own statements.

A store without it is still a store; its handlers have `ctx.db`. No rule of the unit of work is left to a session: each
statement is handed to the unit of work, which runs it in its turn on the transaction at hand, as it runs those of
`ctx.db`.
"""

from collections.abc import Coroutine, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

Asked = Literal["ask", "ask_many", "nest"]
"""The method of a `SessionTransaction` that a session wants called."""


class Answer(NamedTuple):
    """What the driver says to a statement, all of it."""

    rows: list[tuple[Any, ...]]
    description: Sequence[Sequence[Any]] | None
    """The columns, as a cursor of the driver describes them (PEP 249); None for a statement without rows."""
    rowcount: int
    lastrowid: int | None = None


class SessionTransaction(Protocol):
    """A statement here is the driver's: its own placeholders, its own errors. One that begins or ends the transaction
    is refused with `TransactionMisused`."""

    async def ask(self, sql: str, parameters: Any) -> Answer: ...
    async def ask_many(self, sql: str, rows: Sequence[Any]) -> Answer:
        """Once for each row of parameters; only `rowcount` is of use."""

    async def nest(self, sql: str, parameters: Any) -> None:
        """Make, release or roll back to a savepoint of the session's own, within that of its message."""


class Statements(Protocol):
    """How a session reaches the transaction."""

    @property
    def on_loop(self) -> bool:
        """Whether the caller is on the event loop of the unit of work."""

    def refuse(self) -> NoReturn:
        """The session has ended: raises `TryEnded`."""

    def start(self, method: Asked, sql: str, parameters: Any) -> Coroutine[Any, Any, Any]:
        """On the event loop: to be awaited."""

    def wait(self, method: Asked, sql: str, parameters: Any) -> Any:
        """In another thread: waits for it."""


class OpenSession(Protocol):
    """The session of one try of a message."""

    @property
    def blocking(self) -> Any:
        """A `sqlalchemy.orm.Session`."""

    @property
    def awaited(self) -> Any:
        """The same as a `sqlalchemy.ext.asyncio.AsyncSession`."""

    async def flush(self) -> None:
        """Write what is pending. Raises `TransactionMisused` when the session believes something undone that is not."""

    def end(self) -> None:
        """Forget all objects; without I/O. Further statements are refused."""


@runtime_checkable
class SessionStore(Protocol):
    """A store that has sessions; its transactions are `SessionTransaction`s."""

    def session(self, statements: Statements) -> OpenSession:
        """Raises `MissingExtra` without SQLAlchemy."""
