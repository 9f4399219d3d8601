"""Which URL scheme is served by which adapter. Adapters load on first use, so that a missing extra hurts nobody
who does not ask for it."""

import re
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from faregate.errors import ConfigurationError
from faregate.ports.clock import Clock
from faregate.ports.extras import needs_extra
from faregate.ports.queue import QueueTransport
from faregate.ports.store import Insertion, Store, StoreInfo
from faregate.ports.tokens import TokenStore

TRANSPORTS = {
    "journal": "faregate.transports.journal:JournalTransport",
    "memory": "faregate.transports.memory:MemoryTransport",
}

STORES = {
    "memory": "faregate.stores.sqlite:MemoryStore",
    "postgres": "faregate.stores.postgres:PostgresStore",
    "postgresql": "faregate.stores.postgres:PostgresStore",
    "sqlite": "faregate.stores.sqlite:SqliteStore",
}
STORE_URLS = "memory:, sqlite:PATH, postgresql://USER@HOST/DATABASE"


def open_transport(url: str, clock: Clock) -> QueueTransport:
    """The transport that a URL names; nothing is opened yet."""
    scheme, colon, rest = url.partition(":")
    target = TRANSPORTS.get(scheme) if colon else None
    if target is None:
        known = ", ".join(f"{name}:" for name in TRANSPORTS)
        raise ConfigurationError(f"{hide_password(url)!r} names no transport that this version has; known: {known}")
    module, _, name = target.partition(":")
    adapter: QueueTransport = getattr(_load(module, url, scheme), name)(rest, clock=clock)
    return adapter


def open_store(url: str, clock: Clock, *, blocking: bool = False) -> Store:
    """The store that a URL names; nothing is opened yet. `blocking`: for a process that has nothing else to do while a
    server answers."""
    options = {"blocking": True} if blocking and url.startswith("postgres") else {}
    store: Store = _store_class(url, "")(_store_address(url), clock=clock, **options)
    return store


def open_token_store(url: str, clock: Clock) -> TokenStore:
    """The token store that a URL names; nothing is opened yet."""
    store: TokenStore = _store_class(url, "Token")(_store_address(url), clock=clock)
    return store


def open_insertion(scheme: str) -> Insertion:
    """How a row gets into the outbox of a store of this scheme, on a connection that is not ours."""
    backend: Insertion = _load(STORES[scheme].partition(":")[0] + ".insertion", f"{scheme}:", scheme)
    return backend


async def describe_store(url: str) -> StoreInfo:
    """What is in a database; it is read as it is, and not brought up to date."""
    scheme = url.partition(":")[0]
    backend = _store_class(url, "").__module__.rpartition(".")[0]
    info: StoreInfo = await _load(f"{backend}.inspection", url, scheme).describe(_store_address(url))
    return info


def _store_class(url: str, kind: str) -> Any:
    """The class of a backend for a URL: `SqliteStore`, or with kind "Token" `SqliteTokenStore`."""
    scheme, colon, _ = url.partition(":")
    target = STORES.get(scheme) if colon else None
    if target is None:
        raise ConfigurationError(f"{hide_password(url)!r} names no store that this version has; known: {STORE_URLS}")
    module, _, name = target.partition(":")
    return getattr(_load(module, url, scheme), name.removesuffix("Store") + kind + "Store")


def _load(module: str, url: str, scheme: str) -> Any:
    """A module of a backend. Raises `MissingExtra`."""
    with needs_extra(_extra(scheme), repr(hide_password(url))):
        return import_module(module)


def _extra(scheme: str) -> str:
    """The extra that brings the driver for a scheme."""
    return "postgres" if scheme == "postgresql" else scheme


def _store_address(url: str) -> str:
    """What a store is made with: the whole URL of a server, else what comes after the scheme."""
    scheme, _, rest = url.partition(":")
    return url if scheme in ("postgres", "postgresql") else rest


def hide_password(url: str) -> str:
    """A URL as errors and logs may show it. What may be a password is hidden, rather too much of it than too little:
    one with an unquoted "@", "/" or "?" as well, and `password=` and the like, however they are written."""
    shown = (_IN_URL if "//" in url else _IN_WORDS).sub(_without_password, url)
    start, slashes, rest = shown.partition("//")
    before, at, after = rest.rpartition("@")
    user, colon, _ = before.partition(":")
    return f"{start}//{user}:***@{after}" if slashes and at and colon else shown


_IN_URL = re.compile(r"([^?&=]+)(=)[^&]*")
_SECRETS = ("pass", "secret", "token")
_IN_WORDS = re.compile(r"([^\s=]+)(\s*=\s*)(?:'(?:[^'\\]|\\.)*'|\S*)")


def _without_password(found: re.Match[str]) -> str:
    name, equals = found.groups()
    decoded = unquote(name).lower()
    return f"{name}{equals}***" if any(word in decoded for word in _SECRETS) else found[0]
