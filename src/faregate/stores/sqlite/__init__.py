"""SQLite as a store and a token store: `sqlite:PATH`, and `memory:` for one that ends with the process."""

from faregate.stores.sqlite.store import MemoryStore, SqliteStore
from faregate.stores.sqlite.tokens import MemoryTokenStore, SqliteTokenStore

__all__ = ["MemoryStore", "MemoryTokenStore", "SqliteStore", "SqliteTokenStore"]
