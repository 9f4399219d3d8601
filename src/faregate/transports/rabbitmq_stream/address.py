"""What the URL of a stream says.

    rabbitmq-stream://USER:PASSWORD@HOST:PORT/VHOST?stream=NAME
    rabbitmq-stream+tls://USER:PASSWORD@HOST:PORT/VHOST?stream=NAME&cafile=ca.pem

`amqp_port` is where the broker's queues are (default 5672): a broker that answers there and not here lacks the plugin.
For TLS there are `cafile`, `certfile` and `keyfile`.
"""

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from faregate.errors import ConfigurationError
from faregate.ports.schemes import hide_password

_FORM = "rabbitmq-stream://USER:PASSWORD@HOST:5552/VHOST?stream=NAME"
_TLS = ("cafile", "certfile", "keyfile")
PORTS = {False: 5552, True: 5551}
"""Of the streams, by whether they are spoken to over TLS."""
_AMQP_PORTS = {False: 5672, True: 5671}


@dataclass(frozen=True, slots=True)
class Tls:
    cafile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    """Without a password."""
    host: str
    port: int
    amqp_port: int
    user: str
    password: str
    vhost: str
    stream: str
    tls: Tls | None = None
    others: tuple[tuple[str, int], ...] = ()
    """Further hosts of the cluster, with their ports, which are tried where this one does not answer."""


def parse_address(url: str) -> Address:
    """Raises `ConfigurationError`."""
    shown = hide_password(url)
    parts = urlsplit(url)
    is_secure = parts.scheme.endswith("+tls")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    stream, amqp_port = options.pop("stream", ""), options.pop("amqp_port", str(_AMQP_PORTS[is_secure]))
    tls = tls_of(options) if is_secure else None
    known = ("stream", "amqp_port", *(_TLS if is_secure else ()))
    if options.keys() - set(known):
        unknown = ", ".join(sorted(options.keys() - set(known)))
        raise ConfigurationError(f"{parts.scheme}: knows the options {', '.join(known)}, not {unknown}")
    if not parts.hostname or not stream:
        raise ConfigurationError(f"{shown!r} is no address of a stream: {_FORM}")
    if not stream.isascii() or len(stream) > 200:
        raise ConfigurationError(f"the stream {stream!r} cannot be named so: use up to 200 characters of ASCII")
    if parts.path.count("/") > 1:
        raise ConfigurationError(f"{shown!r} names a virtual host with a slash in it: write that as %2F")
    try:
        port, behind = parts.port or PORTS[is_secure], int(amqp_port)
    except ValueError as exc:
        raise ConfigurationError(f"{shown!r} has a port that is none: {exc}") from exc
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    vhost = unquote(parts.path[1:]) or "/"
    return Address(shown, parts.hostname, port, behind, user, password, vhost, stream, tls)


def tls_of(options: dict[str, str]) -> Tls:
    return Tls(*(options.get(name) for name in _TLS))
