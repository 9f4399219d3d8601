"""Ready-made probes for kill switches: `fg.KillSwitch(probe=fg.probes.http("https://…/health"))`."""

import asyncio
from urllib.parse import urlsplit

from faregate.errors import ConfigurationError
from faregate.node.kill_switch import Probe
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import hide_password, open_store
from faregate.ports.store import Readable

__all__ = ["http", "sql"]

_SECONDS = 5.0
"""For a thread that nobody waits for any more."""


def http(url: str, *, method: str = "GET", seconds: float = _SECONDS) -> Probe:
    """All is well while the URL answers below 400, redirects included, within that many seconds."""
    from urllib.error import HTTPError  # it takes long to import, and few need it
    from urllib.request import Request, urlopen

    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigurationError(f"fg.probes.http takes an http:// or https:// URL; got {hide_password(url)!r}")

    def ask() -> bool:
        try:
            with urlopen(Request(url, method=method), timeout=seconds) as answer:
                return int(answer.status) < 400
        except HTTPError as exc:
            exc.close()
            raise

    async def probe() -> bool:
        return await asyncio.to_thread(ask)

    return probe


def sql(url: str, query: str = "select 1") -> Probe:
    """All is well while that database answers the query, which is read-only. `url` is that of any database that a store
    can be on; nothing is set up there."""
    store = open_store(url, SystemClock())
    if not isinstance(store, Readable):
        raise ConfigurationError(f"{store.url} cannot be asked: {type(store).__name__} has no reader()")
    reader = store.reader()

    def ask() -> None:
        for _ in reader.query(query):
            return

    async def probe() -> None:
        await asyncio.to_thread(ask)

    return probe
