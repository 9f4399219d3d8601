"""What the URL of a RabbitMQ says.

    amqp://USER:PASSWORD@HOST:PORT/VHOST
    amqps://USER:PASSWORD@HOST,OTHER_HOST:5673/VHOST?cafile=ca.pem

Several hosts are those of one cluster: each is tried in turn. Options: `confirm=30s` (how long a publication waits for
its confirmation, and for a broker that is away), `connect=30s` (how long the first connection is tried),
`heartbeat=10s`, `stream=NAME` (a stream that everything goes into as well: the log view), `stream_port=5552` (where it
is read; 5551 for TLS); for TLS `cafile`, `certfile`, `keyfile`.
"""

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from faregate.errors import ConfigurationError
from faregate.message import check_name
from faregate.ports.schemes import hide_password
from faregate.units import parse_seconds

_TLS = ("cafile", "certfile", "keyfile")
_PORTS = {"amqp": 5672, "amqps": 5671}
_STREAM_PORTS = {"amqp": "5552", "amqps": "5551"}
_OPTIONS = ("confirm", "connect", "heartbeat", "stream", "stream_port", *_TLS)


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    """Without a password."""
    brokers: tuple[str, ...]
    """For aiormq: a URL for each host, with the password and the options that aiormq knows."""
    confirm_seconds: float
    connect_seconds: float
    stream: str | None
    stream_port: int


def parse_address(url: str) -> Address:
    parts = urlsplit(url)
    shown = hide_password(url)
    if parts.scheme not in _PORTS or not parts.netloc:
        raise ConfigurationError(f"{shown!r} is no address of a RabbitMQ: amqp://USER:PASSWORD@HOST:5672/VHOST")
    if parts.path.count("/") > 1:
        raise ConfigurationError(f"{shown!r} names a virtual host with a slash in it: write that as %2F")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = given.keys() - set(_OPTIONS)
    if unknown:
        raise ConfigurationError(
            f"{parts.scheme}: knows the options {', '.join(_OPTIONS)}, not {', '.join(sorted(unknown))}"
        )
    heartbeat = _seconds(given, "heartbeat", 10.0)
    query = urlencode({"heartbeat": round(heartbeat), **{name: given[name] for name in _TLS if name in given}})
    user, at, hosts = parts.netloc.rpartition("@")
    brokers = tuple(
        f"{parts.scheme}://{user}{at}{_with_port(host, _PORTS[parts.scheme], shown)}{parts.path or '/'}?{query}"
        for host in hosts.split(",")
    )
    stream = given.get("stream")
    if stream is not None:
        check_name(stream, "the stream")
    stream_port = given.get("stream_port", _STREAM_PORTS[parts.scheme])
    if not _is_port(stream_port):
        raise ConfigurationError(f"stream_port={stream_port} is no port")
    times = (_seconds(given, "confirm", 30.0), _seconds(given, "connect", 30.0))
    return Address(shown, brokers, *times, stream, int(stream_port))


def _seconds(given: dict[str, str], name: str, default: float) -> float:
    seconds = parse_seconds(given[name], name, bare=True) if name in given else default
    if seconds <= 0:
        raise ConfigurationError(f"{name} must be more than 0 seconds")
    return seconds


def _with_port(host: str, port: int, shown: str) -> str:
    name, colon, given = host.rpartition(":")
    if not colon or given.endswith("]"):
        name, given = host, str(port)
    if not name or not _is_port(given):
        raise ConfigurationError(f"{shown!r} has a host that cannot be reached: {host!r} is not HOST:PORT")
    return f"{name}:{given}"


def _is_port(text: str) -> bool:
    return text.isdigit() and 0 < int(text) < 65536
