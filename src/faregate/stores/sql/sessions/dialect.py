"""What a dialect of SQLAlchemy leaves to the unit of work, whichever database it is for. A store's own dialect is this
in front of SQLAlchemy's, for the same driver."""

from typing import Any, NoReturn

from sqlalchemy.engine.default import DefaultDialect

from faregate.errors import TransactionMisused


class UnitDialect(DefaultDialect):
    is_async = True  # in threads, too: what waits is the connection's business
    supports_statement_cache = True
    supports_server_side_cursors = False

    def set_isolation_level(self, dbapi_connection: Any, level: Any) -> NoReturn:
        raise TransactionMisused("the isolation level is that of the unit of work; a handler cannot change it")

    def do_savepoint(self, connection: Any, name: str) -> None:
        connection.connection.nest(f"savepoint {name}")

    def do_rollback_to_savepoint(self, connection: Any, name: str) -> None:
        connection.connection.nest(f"rollback to savepoint {name}")

    def do_release_savepoint(self, connection: Any, name: str) -> None:
        connection.connection.nest(f"release savepoint {name}")

    def do_begin_twophase(self, connection: Any, xid: Any) -> NoReturn:
        raise TransactionMisused("a handler's transaction is the unit of work's, and is not prepared in two phases")
