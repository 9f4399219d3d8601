"""Endpoints of a process that runs a bus: `/metrics` for Prometheus, `/live` and `/ready` for whoever starts and stops
processes (Kubernetes, systemd, a load balancer).

    /live     200 as long as the event loop answers
    /ready    200 when the bus runs, its transport is connected, its stores answer and nothing stands still; else 503,
              with the reasons, one a line
    /metrics  the page that Prometheus reads; 501 without the extra [prometheus]

Rules kept here:
- Only GET and HEAD, one request a connection, and so many connections. A request has at most 8 KiB, and a few seconds,
  to come whole; who asked has as long to take the answer. Who does not read keeps no process from ending.
- Loopback unless told otherwise: there is no password, and metrics name nodes, types and stores.
- The event loop's own sockets; no library of others, and no thread.
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from faregate.errors import ConfigurationError, MissingExtra
from faregate.node.policy import check_count
from faregate.plain import plain
from faregate.ports.extras import needs_extra

if TYPE_CHECKING:
    from faregate.bus.bus import Bus
    from faregate.observe.prometheus import Prometheus

log = logging.getLogger("faregate.bus")

PORT = 9464
"""Where exporters of OpenTelemetry for Prometheus listen by convention."""
_MOST_BYTES = 8 * 1024
_MOST_CONNECTIONS = 64
_REQUEST_SECONDS = 5.0
_TEXT = "text/plain; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = _TEXT


def serve(bus: Bus, *, host: str = "127.0.0.1", port: int = PORT) -> Endpoints:
    """Serve the endpoints of a bus while inside: `async with fg.observe.serve(bus, port=9464) as endpoints`.

    The bus need not run yet: until it does, it is not ready. Port 0 is a free one, which `endpoints.port` tells.
    Entering raises `ConfigurationError` when nothing can listen there.
    """
    if not isinstance(host, str):
        raise ConfigurationError(f"host takes an address or a name, as text; got {host!r}")
    check_count(port, "port", 0, 65_535)
    return Endpoints(bus, host, port)


class Endpoints:
    """Made by `serve`: answers while its block lasts."""

    def __init__(self, bus: Bus, host: str, port: int) -> None:
        self._bus = bus
        self.host = host
        self.port = port
        """Where it listens."""
        self._server: asyncio.Server | None = None
        self._open = 0
        self._own: Prometheus | None = None
        """Reads the bus where it has no observer that does."""

    @property
    def place(self) -> str:
        """Where it listens, as it stands in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._answer, self.host, self.port, limit=_MOST_BYTES)
        except (OSError, ValueError) as exc:  # a ValueError: no name of a host is like that
            raise ConfigurationError(f"nothing can listen at {plain(self.place)}: {exc}. Choose another") from exc
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        if self._own is not None:
            self._own.unwatch(self._bus)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= _MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head, answer = await self._read(reader)
            if isinstance(answer, str):
                answer = await self._look_up(answer)  # each part of it has a limit of its own
            async with asyncio.timeout(_REQUEST_SECONDS):
                writer.write(_response(answer, body=not head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # whoever asked is gone, or takes nothing
        finally:
            self._open -= 1
            writer.transport.abort()  # closing would wait for ever for one that does not read

    async def _read(self, reader: asyncio.StreamReader) -> tuple[bool, Answer | str]:
        """Whether its head alone was asked for; and the path, or the answer to what is no request for one."""
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            return False, Answer(400, b"that is no request, or a longer one than is taken here\n")
        method, _, rest = request.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return False, Answer(405, b"GET and HEAD only\n")
        return method == "HEAD", path

    async def _look_up(self, path: str) -> Answer:
        try:
            if path == "/live":
                return Answer(200, b"alive\n")
            if path == "/ready":
                reasons = await self._bus.unready()
                text = "\n".join(reasons or ["ready"])
                return Answer(503 if reasons else 200, f"{text}\n".encode())
            if path == "/metrics":
                return await self._metrics()
        except MissingExtra as exc:
            return Answer(501, f"{exc}\n".encode())
        except Exception:
            log.exception("%s could not be answered", path)
            return Answer(500, b"that failed; the log says why\n")
        return Answer(404, b"there are /metrics, /live and /ready\n")

    async def _metrics(self) -> Answer:
        with needs_extra("prometheus", "/metrics"):
            from prometheus_client import CollectorRegistry

            from faregate.observe.prometheus import CONTENT_TYPE, Prometheus
        found = next((each for each in self._bus.observers if isinstance(each, Prometheus)), self._own)
        if found is None:
            found = self._own = Prometheus(CollectorRegistry())
            found.watch(self._bus, measured=False)
        return Answer(200, await found.page(), CONTENT_TYPE)


def _response(answer: Answer, *, body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\ncontent-type: {answer.content_type}\r\n"
        f"content-length: {len(answer.body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (answer.body if body else b"")
