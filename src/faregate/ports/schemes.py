"""Which URL scheme is served by which adapter. Adapters load on first use, so that a missing extra hurts nobody
who does not ask for it."""

from importlib import import_module

from faregate.errors import ConfigurationError
from faregate.ports.clock import Clock
from faregate.ports.queue import QueueTransport

TRANSPORTS = {
    "journal": "faregate.transports.journal:JournalTransport",
    "memory": "faregate.transports.memory:MemoryTransport",
}


def open_transport(url: str, clock: Clock) -> QueueTransport:
    """The transport that a URL names; nothing is opened yet."""
    scheme, colon, rest = url.partition(":")
    target = TRANSPORTS.get(scheme) if colon else None
    if target is None:
        known = ", ".join(f"{name}:" for name in TRANSPORTS)
        raise ConfigurationError(f"{hide_password(url)!r} names no transport that this version has; known: {known}")
    module, _, name = target.partition(":")
    adapter: QueueTransport = getattr(import_module(module), name)(rest, clock=clock)
    return adapter


def hide_password(url: str) -> str:
    """A URL as errors and logs may show it."""
    before, at, after = url.rpartition("@")
    user, colon, _ = before.rpartition(":")
    return f"{user}:***@{after}" if at and colon and not user.endswith("/") and "//" in user else url
