"""What the URL of a stream says.

    rabbitmq-stream://USER:PASSWORD@HOST:PORT/VHOST?stream=NAME

`amqp_port` is where the broker's queues are (default 5672): a broker that answers there and not here lacks the plugin.
"""

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from faregate.errors import ConfigurationError
from faregate.ports.schemes import hide_password

_FORM = "rabbitmq-stream://USER:PASSWORD@HOST:5552/VHOST?stream=NAME"
_STREAM_PORT, _AMQP_PORT = 5552, 5672


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


def parse_address(url: str) -> Address:
    """Raises `ConfigurationError`."""
    shown = hide_password(url)
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    stream, amqp_port = options.pop("stream", ""), options.pop("amqp_port", str(_AMQP_PORT))
    if options:
        raise ConfigurationError(f"rabbitmq-stream: knows the options stream, amqp_port, not {', '.join(options)}")
    if not parts.hostname or not stream:
        raise ConfigurationError(f"{shown!r} is no address of a stream: {_FORM}")
    if not stream.isascii() or len(stream) > 200:
        raise ConfigurationError(f"the stream {stream!r} cannot be named so: use up to 200 characters of ASCII")
    if parts.path.count("/") > 1:
        raise ConfigurationError(f"{shown!r} names a virtual host with a slash in it: write that as %2F")
    try:
        port, behind = parts.port or _STREAM_PORT, int(amqp_port)
    except ValueError as exc:
        raise ConfigurationError(f"{shown!r} has a port that is none: {exc}") from exc
    user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
    vhost = unquote(parts.path[1:]) or "/"
    return Address(shown, parts.hostname, port, behind, user, password, vhost, stream)
