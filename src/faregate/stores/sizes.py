"""What a store takes on disk, for measuring: `faregate capacity measure`."""

from typing import Any

from faregate.ports.store import Store


async def sizes_of(store: Store | None) -> dict[str, float]:
    """Of a store: bytes of the ledger (of the whole file, of SQLite) and of the write-ahead log, and commits."""
    if store is None:
        return {}
    if store.url.startswith("sqlite"):
        [pages] = await _row(store, "select page_count * page_size from pragma_page_count, pragma_page_size")
        return {"ledger": float(pages)}
    [ledger] = await _row(store, "select pg_total_relation_size('faregate_ledger')")
    [wal] = await _row(store, "select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
    [commits] = await _row(store, "select count(distinct xmin::text) from faregate_ledger")
    return {"ledger": float(ledger), "wal": float(wal), "commits": float(commits)}


async def _row(store: Store, sql: str) -> Any:
    transaction = store.transaction()
    await transaction.begin()
    try:
        return await transaction.fetchone(sql)
    finally:
        await transaction.roll_back()
