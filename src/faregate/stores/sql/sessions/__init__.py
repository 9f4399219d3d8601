"""SQLAlchemy on the connection of a unit of work, for every SQL store: `ctx.session`. Imported at its first use."""

from faregate.stores.sql.sessions.dialect import UnitDialect
from faregate.stores.sql.sessions.session import Sessions

__all__ = ["Sessions", "UnitDialect"]
