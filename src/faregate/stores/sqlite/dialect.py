"""SQLAlchemy's dialect for `ctx.session` on SQLite."""

from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from faregate.stores.sql.sessions import UnitDialect


class SqliteUnitDialect(UnitDialect, SQLiteDialect_pysqlite):
    supports_statement_cache = True


def unit_dialect() -> UnitDialect:
    return SqliteUnitDialect(dbapi=SqliteUnitDialect.import_dbapi())
