"""Ready-made probes for kill switches: `fg.KillSwitch(probe=fg.probes.http("https://…/health"))`.

Each asks in a thread of its own, one at a time. A thread cannot be cancelled: while one that nobody waits for any more
still hangs, all is not well, and no other begins. The threads that a program shares (`asyncio.to_thread`) stay free.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from faregate.errors import ConfigurationError
from faregate.node.kill_switch import Probe
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import hide_password, open_store
from faregate.ports.store import Readable

__all__ = ["http", "sql"]

_SECONDS = 5.0
"""For a thread that nobody waits for any more."""


def _asking(ask: Callable[[], bool | None]) -> Probe:
    busy = threading.Lock()

    async def probe() -> bool | None:
        if not busy.acquire(blocking=False):
            return False
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool | None] = loop.create_future()

        def tell(said: bool | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(said)
            else:
                answer.set_exception(error)

        def run() -> None:
            said, error = None, None
            try:
                said = ask()
            except Exception as exc:
                error = exc
            finally:
                busy.release()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, said, error)

        try:
            threading.Thread(target=run, name="faregate-probe", daemon=True).start()
        except BaseException:
            busy.release()
            raise
        return await answer

    return probe


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

    return _asking(ask)


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

    return _asking(ask)
