"""PostgreSQL as a store and a token store: `postgresql://…`. Needs the extra `faregate[postgres]`."""

from faregate.ports.extras import needs_extra

with needs_extra("postgres", "PostgreSQL"):
    from faregate.stores.postgres.store import PostgresStore
    from faregate.stores.postgres.tokens import PostgresTokenStore

__all__ = ["PostgresStore", "PostgresTokenStore"]
