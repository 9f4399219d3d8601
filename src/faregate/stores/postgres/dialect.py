"""SQLAlchemy's dialect for `ctx.session` on PostgreSQL."""

from typing import Any, cast

from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from faregate.stores.sql.sessions import UnitDialect


class PostgresUnitDialect(UnitDialect, PGDialect_psycopg):
    supports_statement_cache = True

    def get_isolation_level(self, dbapi_connection: Any) -> Any:
        """Asked by a statement: psycopg's own way looks at its connection, too."""
        return cast(Any, PGDialect).get_isolation_level(self, dbapi_connection)


def unit_dialect() -> UnitDialect:
    # To have HSTORE loaded natively, the driver would be asked for its type on a connection of its own.
    dialect: Any = PostgresUnitDialect
    made: UnitDialect = dialect(dbapi=dialect.import_dbapi(), use_native_hstore=False)
    return made
