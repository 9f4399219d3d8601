"""A proxy between a client and a server on this machine, which a test lets cut, stall, swallow or repeat."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ssl import SSLContext
from urllib.parse import urlsplit, urlunsplit


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connecting: set[asyncio.Future[object]] = set()
        self._stopped = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._answering = asyncio.Event()
        self._answering.set()
        self.connections = 0
        self._connected = asyncio.Event()
        self.refusing = False
        self._repeating: set[asyncio.Event] = set()
        self.repeated = 0

    def cut(self) -> None:
        """Every connection ends, in the middle of whatever it does."""
        for writer in self._writers:
            writer.transport.abort()

    def stall(self) -> None:
        """Nothing passes in either direction; connections stay."""
        self._flowing.clear()
        self._answering.clear()

    def swallow_answers(self) -> None:
        """What the server says does not arrive."""
        self._answering.clear()

    def repeat(self, *, answers: bool) -> None:
        """What comes next passes twice: what the server says, or what is said to it."""
        self._repeating.add(self._answering if answers else self._flowing)

    def flow(self) -> None:
        self._flowing.set()
        self._answering.set()

    async def until_connected(self, times: int) -> None:
        while self.connections < times:
            self._connected.clear()
            await self._connected.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._connected.set()
        if self.refusing:
            writer.transport.abort()
            return
        connecting = asyncio.ensure_future(asyncio.open_connection(self._host, self._port))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        behind, there = await connecting
        if self._stopped:
            there.transport.abort()
            writer.transport.abort()
            return
        self._writers |= {writer, there}
        for source, target, gate in ((reader, there, self._flowing), (behind, writer, self._answering)):
            task = asyncio.create_task(self._pass_on(source, target, gate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        try:
            while data := await source.read(65_536):
                await gate.wait()
                if gate in self._repeating:
                    self._repeating.discard(gate)
                    self.repeated += 1
                    target.write(data)
                target.write(data)
                await target.drain()
        except OSError:
            pass  # it was cut
        finally:
            target.close()
            self._writers.discard(target)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._connecting, return_exceptions=True)
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(url: str, tls: SSLContext | None = None) -> AsyncIterator[tuple[str, Proxy]]:
    """The URL of a server, by way of a proxy; with `tls` for who comes to it, not behind it."""
    parts = urlsplit(url)
    proxy = Proxy(parts.hostname or "", parts.port or 0)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    user = parts.netloc.rpartition("@")[0]
    try:
        yield urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}")), proxy
    finally:
        server.close()
        await proxy.stop()
