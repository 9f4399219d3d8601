"""A transport's URL as an AsyncAPI server: where it is, and nothing that is secret or says more than others need."""

from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
_EMBEDDED = {
    "journal": "An embedded broker, in a folder of the machine that runs the nodes",
    "memory": "An embedded broker, within the process that runs the nodes",
}


def server_of(url: str) -> tuple[Json, Json]:
    """The server, and the security schemes that it refers to."""
    scheme, colon, _ = url.partition(":")
    if not colon:
        return {"host": "localhost", "protocol": url, "description": f"A transport of one's own, {url}"}, {}
    parts = urlsplit(url)
    if not parts.netloc:
        return {"host": "localhost", "protocol": scheme, "description": _EMBEDDED.get(scheme, scheme)}, {}
    user, at, hosts = parts.netloc.rpartition("@")
    server: Json = {"host": hosts, "protocol": scheme}
    if parts.path.strip("/"):
        server["pathname"] = parts.path
    if scheme in ("amqp", "amqps"):
        server |= {"description": "RabbitMQ", "protocolVersion": "0.9.1"}
    if not (user and at):
        return server, {}
    server["security"] = [{"$ref": "#/components/securitySchemes/user"}]
    return server, {"user": {"type": "userPassword", "description": "A user of the broker, with a password"}}
