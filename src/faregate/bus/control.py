"""Obeys what people ask of a running bus: over its control socket, and through the transport where that brings it.

Rules kept here:
- One line of JSON in (`Instruction`), one out (`Answer`); then the connection ends. It knows `status`, `pause`,
  `resume` and `cancel` alone; the last is not heeded through a transport, which brings no answer.
- Only the user of this process and root are answered.
- Lines, connections and times are bounded. A client that sends too much, nothing, or never reads costs one connection
  for some seconds. Whatever happens here is answered or logged, and never reaches the bus.
- What has begun to pause is never cancelled: what it has taken back must return to its place.
"""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from faregate.bus.control_place import ControlPlace, Listening, listen
from faregate.errors import ConfigurationError, FaregateError
from faregate.plain import plain
from faregate.ports.cancellation import end
from faregate.ports.presence import BusStatus, Heeding, Instruction

log = logging.getLogger("faregate.bus")

MOST_BYTES = 64 * 1024
"""Of an instruction."""
_MOST_CONNECTIONS = 8
_READ_SECONDS = _WRITE_SECONDS = 5.0
_OBEY_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_UNREADABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
_read = msgspec.json.Decoder(Instruction).decode


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    status: BusStatus | None = None
    """How the bus is after that."""
    error: str | None = None
    """The name of the error; None: it is done."""
    message: str = ""
    cancelled: bool | None = None
    """Whether what is cancelled was still waiting."""


class Controlled(Protocol):
    """What is asked of a bus."""

    def status(self) -> BusStatus: ...
    async def pause(self, node: str | None, message: str | None, seconds: float | None) -> None: ...
    async def resume(self, node: str | None, message: str | None) -> None: ...
    async def cancel(
        self, publication_id: str | None = None, *, key: str | None = None, node: str | None = None
    ) -> bool: ...


async def obey(bus: Controlled, instruction: Instruction) -> BusStatus:
    """Raises `ConfigurationError`."""
    if instruction.seconds is not None and instruction.command != "pause":
        raise ConfigurationError(f"seconds are for pause, and this is {plain(instruction.command[:40])!r}")
    if instruction.command in ("pause", "resume") and bus.status().state != "running":
        raise ConfigurationError(f"the bus is {bus.status().state}: nothing of it can be paused or resumed any more")
    if instruction.command == "pause":
        await bus.pause(instruction.node, instruction.type, instruction.seconds)
        log.warning("%s is paused%s, as requested from outside", _what(instruction), _for(instruction.seconds))
    elif instruction.command == "resume":
        await bus.resume(instruction.node, instruction.type)
        log.warning("%s is resumed, as requested from outside", _what(instruction))
    elif instruction.command != "status":
        given = plain(instruction.command[:40])
        raise ConfigurationError(f"there is no command {given!r}; there are status, pause, resume and cancel")
    return bus.status()


def _what(instruction: Instruction) -> str:
    return f"{instruction.type or 'every type'} at {instruction.node or 'every node'}"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {seconds:g} s"


async def answer(bus: Controlled, line: bytes) -> Answer:
    """Never raises an `Exception`."""
    try:
        instruction = _read(line)
        if instruction.command != "cancel":
            return Answer(status=await obey(bus, instruction))
        cancelled = await bus.cancel(instruction.id, key=instruction.key, node=instruction.node)
        return Answer(status=bus.status(), cancelled=cancelled)
    except _UNREADABLE as exc:
        text = f'an instruction is a line of JSON such as {{"command": "status"}}: {exc}'
        return Answer(error="ConfigurationError", message=plain(text[:1000]))
    except FaregateError as exc:
        return Answer(error=type(exc).__name__, message=str(exc))
    except Exception as exc:
        log.exception("an instruction at the control socket failed")
        return Answer(error=type(exc).__name__, message=plain(str(exc)))


class ControlSocket:
    def __init__(self, place: ControlPlace, instance: str, bus: Controlled) -> None:
        self.place = place
        self._instance = instance
        self._bus = bus
        self._listening: Listening | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._free = asyncio.Semaphore(_MOST_CONNECTIONS)
        self._tasks: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Raises `ConfigurationError`."""
        try:
            self._listening = listen(self.place, self._instance)
        except OSError as exc:
            raise ConfigurationError(
                f"no control socket can be opened: {exc}. Name a place for it with fg.Bus(…, control=PATH), or do "
                "without one, control=False"
            ) from exc
        self._accepting = asyncio.create_task(self._accept(self._listening.socket), name="faregate-control")
        log.info("the control socket is %s", self._listening.path)

    async def close(self) -> None:
        if self._listening is None or self._accepting is None:
            return
        self._accepting.cancel()
        await asyncio.wait({self._accepting})
        self._listening.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as exc:  # for example no descriptor is left
                self._free.release()
                log.warning("the control socket takes no connection now: %s", exc)
                await asyncio.sleep(_FIRST_PAUSE)
                continue
            except BaseException:
                self._free.release()
                raise
            self._start(self._serve(connection)).add_done_callback(lambda _: self._free.release())

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError, TimeoutError):
            line = await self._line(connection)
            if not line:
                return
            told = await self._told(connection, line)
            async with asyncio.timeout(_WRITE_SECONDS):
                await loop.sock_sendall(connection, msgspec.json.encode(told) + b"\n")

    async def _line(self, connection: socket.socket) -> bytes:
        """The first line; longer than what is allowed when that is so."""
        loop = asyncio.get_running_loop()
        data = bytearray()
        async with asyncio.timeout(_READ_SECONDS):
            while b"\n" not in data and len(data) <= MOST_BYTES:
                chunk = await loop.sock_recv(connection, MOST_BYTES)
                if not chunk:
                    break
                data += chunk
        return bytes(data.partition(b"\n")[0])

    async def _told(self, connection: socket.socket, line: bytes) -> Answer:
        user = peer(connection)
        if user not in (None, 0, os.geteuid()):
            return Answer(error="ConfigurationError", message=f"this bus is not user {user}'s, and does not obey it")
        if len(line) > MOST_BYTES:
            return Answer(error="ConfigurationError", message=f"an instruction has at most {MOST_BYTES:,} bytes")
        obeying: asyncio.Task[Answer] = self._start(answer(self._bus, line))
        await asyncio.wait({obeying}, timeout=_OBEY_SECONDS)
        if obeying.done():
            return obeying.result()
        return Answer(error="Transient", message=f"it is not done after {_OBEY_SECONDS:g} s, and goes on")


def peer(connection: socket.socket) -> int | None:
    """The user at the other end; None where the system does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, 12))[1])


class InstructionListener:
    """Obeys what comes through the transport. Nobody is answered: the next heartbeat tells, and it comes at once."""

    def __init__(
        self, transport: Heeding, nodes: Sequence[str], bus: Controlled, beat: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self._transport = transport
        self._nodes = nodes
        self._bus = bus
        self._beat = beat
        self._task: asyncio.Task[None] | None = None
        self._obeying: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="faregate-instructions")

    async def stop(self) -> None:
        if self._task is None:
            return
        await end(self._task)
        if self._obeying:
            await asyncio.wait(self._obeying, timeout=_CLOSE_SECONDS)

    async def _run(self) -> None:
        pause, told = _FIRST_PAUSE, False
        while True:
            try:
                await self._transport.heed(self._nodes, self._asked)
            except ConfigurationError as exc:
                if not told:
                    log.warning("`faregate pause` and `resume` do not reach this instance: %s", exc)
                pause, told = _LONGEST_PAUSE, True
            except FaregateError as exc:
                log.debug("instructions cannot be heard now: %s", exc)
            except Exception:
                log.exception("instructions cannot be heard now")
                pause = _LONGEST_PAUSE
            await asyncio.sleep(pause)

    def _asked(self, instruction: Instruction) -> None:
        if instruction.node in self._nodes and len(self._obeying) < _MOST_CONNECTIONS:
            task = asyncio.create_task(self._obey(instruction))
            self._obeying.add(task)
            task.add_done_callback(self._obeying.discard)

    async def _obey(self, instruction: Instruction) -> None:
        try:
            await obey(self._bus, instruction)
            await self._beat()
        except FaregateError as exc:
            log.warning("what somebody asked through the broker is not done: %s", exc)
        except Exception:
            log.exception("what somebody asked through the broker is not done")
