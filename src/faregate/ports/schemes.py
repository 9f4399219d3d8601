"""Which URL scheme is served by which adapter, ours and those of installed packages.

Rules kept here:
- A package registers a scheme as an entry point: the group says what it is (`faregate.stores`, …), the name is the
  scheme, the value a class or function that is called as `value(url, clock=clock)` and does no I/O. (A log, in
  `faregate.logs`, has no clock and no `open`: `value(url)` opens it.)
- Ours are registered in the same way (pyproject.toml). They stand here as well: a checkout, or a zip for Spark's
  workers, has no metadata; searching all installed packages takes time; and no package can replace them.
- Adapters are imported on first use, so that only their users need the driver.
- An object with the port's protocol goes wherever a URL goes.
"""

import inspect
import re
from asyncio import to_thread
from difflib import get_close_matches
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any, Protocol
from urllib.parse import unquote

from faregate.errors import ConfigurationError, FaregateError
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.log import LogTransport
from faregate.ports.queue import PROTOCOLS, QueueTransport
from faregate.ports.store import Insertion, Readable, Store, StoreInfo
from faregate.ports.tokens import TokenStore

STORES, TOKEN_STORES, TRANSPORTS = "faregate.stores", "faregate.token_stores", "faregate.transports"
LOGS = "faregate.logs"
OWN = {
    STORES: {
        "memory": "faregate.stores.sqlite:MemoryStore",
        "postgres": "faregate.stores.postgres:PostgresStore",
        "postgresql": "faregate.stores.postgres:PostgresStore",
        "sqlite": "faregate.stores.sqlite:SqliteStore",
    },
    TOKEN_STORES: {
        "memory": "faregate.stores.sqlite:MemoryTokenStore",
        "postgres": "faregate.stores.postgres:PostgresTokenStore",
        "postgresql": "faregate.stores.postgres:PostgresTokenStore",
        "sqlite": "faregate.stores.sqlite:SqliteTokenStore",
    },
    LOGS: {
        "amqp": "faregate.transports.rabbitmq_log:RabbitmqLog",
        "amqps": "faregate.transports.rabbitmq_log:RabbitmqLog",
        "journal": "faregate.transports.journal_log:JournalLog",
        "rabbitmq-stream": "faregate.transports.rabbitmq_stream:RabbitmqStreamLog",
        "rabbitmq-stream+tls": "faregate.transports.rabbitmq_stream:RabbitmqStreamLog",
    },
    TRANSPORTS: {
        "amqp": "faregate.transports.rabbitmq:RabbitmqQueue",
        "amqps": "faregate.transports.rabbitmq:RabbitmqQueue",
        "journal": "faregate.transports.journal:JournalTransport",
        "memory": "faregate.transports.memory:MemoryTransport",
    },
}
_FORMS = {
    "amqp": "//USER@HOST/VHOST",
    "amqps": "//USER@HOST/VHOST",
    "journal": "PATH",
    "postgresql": "//USER@HOST/DATABASE",
    "rabbitmq-stream": "//USER@HOST/VHOST?stream=NAME",
    "rabbitmq-stream+tls": "//USER@HOST/VHOST?stream=NAME",
    "sqlite": "PATH",
}
_WORDS = {LOGS: "log", STORES: "store", TOKEN_STORES: "token store", TRANSPORTS: "transport"}


def open_transport(given: str | QueueTransport, clock: Clock) -> QueueTransport:
    """The transport that a URL names, or the one given; nothing is opened yet. It has what its capabilities ask for."""
    transport: QueueTransport = _made(TRANSPORTS, QueueTransport, given, clock)
    for capability in sorted(transport.capabilities & PROTOCOLS.keys()):
        _fitting(TRANSPORTS, PROTOCOLS[capability], transport)
    return transport


def open_log(given: str | Path, port: Any = LogTransport) -> Any:
    """The log that a URL or a journal's folder names, open, with all members of `port`. Raises `ConfigurationError`,
    and what opening it raises."""
    log = _fitting(LOGS, LogTransport, _factory(LOGS, "journal:" if isinstance(given, Path) else given)(given))
    lacking = [name for name in members(port) if not hasattr(log, name)]
    if lacking:
        what = (port.__doc__ or "").partition("\n")[0]
        raise ConfigurationError(
            f"{log.name} cannot be used for this: it lacks {', '.join(lacking)}. Needed is "
            f"{what[:1].lower()}{what[1:]} ({port.__module__}.{port.__name__})"
        )
    return log


def open_store(given: str | Store, clock: Clock, *, blocking: bool = False) -> Store:
    """The store that a URL names, or the one given; nothing is opened yet. `blocking`: for a process that has nothing
    else to do while a server answers."""
    store: Store = _made(STORES, Store, given, clock, blocking=blocking)
    return store


def open_token_store(given: str | TokenStore, clock: Clock) -> TokenStore:
    """The token store that a URL names, or the one given; nothing is opened yet."""
    store: TokenStore = _made(TOKEN_STORES, TokenStore, given, clock)
    return store


def open_insertion(scheme: str) -> Insertion:
    """How a row gets into the outbox of a store of this scheme, on a connection that is not ours."""
    backend: Insertion = _factory(STORES, f"{scheme}:").insertion
    return backend


async def describe_store(url: str) -> StoreInfo:
    """What is in a database; it is read as it is, and not brought up to date."""
    store = open_store(url, SystemClock())
    if not isinstance(store, Readable):
        raise ConfigurationError(f"{store.url} cannot be looked at: {type(store).__name__} has no reader()")
    return await to_thread(store.reader().describe)


def url_for_workers(given: object, what: str = "store=") -> str:
    """The URL of a store that other processes are to open, too. Raises `ConfigurationError` for an object."""
    if not isinstance(given, str):
        raise ConfigurationError(
            f"{what} got a {type(given).__name__}, an object, which cannot travel to Spark's workers: give a URL, such "
            "as sqlite:PATH or postgresql://…, which each of them opens for itself"
        )
    return given


def is_known(group: str, scheme: str) -> bool:
    return _value(group, scheme) is not None


def known_schemes(group: str) -> str:
    from importlib.metadata import entry_points  # slow to import, and needed only for schemes of other packages

    names = sorted({*OWN[group], *entry_points(group=group).names})
    return ", ".join(f"{name}:{_FORMS.get(name, '')}" for name in names)


def _made(group: str, port: Any, given: Any, clock: Clock, *, blocking: bool = False) -> Any:
    if isinstance(given, str):
        factory = _factory(group, given)
        options = {"blocking": True} if blocking and getattr(factory, "may_block", False) else {}
        given = factory(given, clock=clock, **options)
    return _fitting(group, port, given)


def _fitting(group: str, port: Any, given: Any) -> Any:
    """Raises `ConfigurationError` for an object that lacks something of a port."""
    lacking = [name for name in members(port) if isinstance(given, type) or not hasattr(given, name)]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigurationError(
            f"{type(given).__name__} is no {_WORDS[group]}: it lacks {', '.join(lacking[:3])}{more}. Give a URL "
            f"({known_schemes(group)}) or an object with the protocol {port.__module__}.{port.__name__}"
        )
    return given


def members(port: type) -> list[str]:
    """What an object must have to keep to a port."""
    parts = [part for part in port.__mro__ if part is not Protocol and getattr(part, "_is_protocol", False)]
    names = {name for part in parts for name in (*vars(part), *inspect.get_annotations(part))}
    return sorted(name for name in names if not name.startswith("_"))


def _factory(group: str, url: str) -> Any:
    """What makes the adapter for a URL. Raises `ConfigurationError`; `MissingExtra` for a driver that is not there."""
    scheme, colon, _ = url.partition(":")
    value = _value(group, scheme) if colon else None
    if value is None:
        named = colon and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme)
        hint = f"; no package that adds it, such as faregate-{scheme}, is installed" if named else ""
        if near := get_close_matches(scheme, OWN[group], 1):
            hint = f" (did you mean {near[0]!r}?)"
        if _value(group, plain := scheme.partition("+")[0]) is not None:
            hint = f"; {scheme}: is how SQLAlchemy writes it, here it is {plain}:"
        raise ConfigurationError(
            f"{hide_password(url)!r} names no {_WORDS[group]}; known: {known_schemes(group)}{hint}"
        )
    try:
        return resolve_name(value)
    except FaregateError:
        raise  # it says itself what is missing
    except Exception as exc:
        raise ConfigurationError(
            f"{scheme}: is registered as {value} (entry point {scheme!r} of {group!r}), which cannot be loaded: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


def _value(group: str, scheme: str) -> str | None:
    """module:name of what serves a scheme."""
    if scheme in OWN[group]:
        return OWN[group][scheme]
    from importlib.metadata import entry_points

    found = {f"{entry.module}:{entry.attr}" for entry in entry_points(group=group, name=scheme)}
    if len(found) > 1:
        raise ConfigurationError(
            f"{scheme}: is registered more than once in {group!r}, as {' and as '.join(sorted(found))}: keep one of "
            "these packages installed"
        )
    return found.pop() if found else None


def hide_password(url: str) -> str:
    """A URL as errors and logs may show it. Whatever may be a password is hidden, rather too much than too little: also
    one with an unquoted "@", "/" or "?", and `password=` and the like, however they are written."""
    shown = (_IN_URL if "//" in url else _IN_WORDS).sub(_without_password, url)
    start, slashes, rest = shown.partition("//")
    before, at, after = rest.rpartition("@")
    user, colon, _ = before.partition(":")
    return f"{start}//{user}:***@{after}" if slashes and at and colon else shown


def public_name(url: str) -> str:
    """Which store or broker it is, for whoever reads a page: no folder of this machine, and neither user nor options.
    What is no URL (the class of an object) stays."""
    scheme, colon, rest = url.partition(":")
    if rest.startswith("//"):
        return f"{scheme}://{rest[2:].rpartition('@')[2].partition('?')[0]}"
    return f"{scheme}{colon}{PurePath(rest).name}"


_IN_URL = re.compile(r"([^?&=]+)(=)[^&]*")
_SECRETS = ("pass", "secret", "token")
_IN_WORDS = re.compile(r"([^\s=]+)(\s*=\s*)(?:'(?:[^'\\]|\\.)*'|\S*)")


def _without_password(found: re.Match[str]) -> str:
    name, equals = found.groups()
    decoded = unquote(name).lower()
    return f"{name}{equals}***" if any(word in decoded for word in _SECRETS) else found[0]
