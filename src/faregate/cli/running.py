"""Which running bus a command means, and how it is asked: over control sockets here, or through RabbitMQ.

A target is the bus as `module:attribute`, its journal as `journal:PATH`, its RabbitMQ as `amqp://…`, or its control
socket as `unix:PATH`. Without one, all buses of this user on this machine are meant.
"""

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from faregate.bus.control import Answer, peer
from faregate.bus.control_place import ControlPlace, address, find, find_all, journal_place, key_of
from faregate.cli.load import EXAMPLE, load_bus
from faregate.errors import ConfigurationError, FaregateError, Transient
from faregate.ports.presence import BusStatus, Heartbeat, Instruction
from faregate.ports.schemes import hide_password

if TYPE_CHECKING:
    from faregate.transports.rabbitmq import RabbitmqQueue

Target = Annotated[
    str | None,
    typer.Argument(
        help="The bus, as module:attribute, or its journal:PATH, its RabbitMQ, amqp://…, or its control socket, "
        "unix:PATH. Without it: what this user runs on this machine.",
        metavar="TARGET",
    ),
]
_SECONDS = 10.0
_AT_ONCE = 16
_MOST_BYTES = 64 << 20
_answer = msgspec.json.Decoder(Answer).decode


class OnBroker(NamedTuple):
    url: str
    transport: "RabbitmqQueue"
    expected: list[str]
    """The nodes that somebody should run."""


class Running(NamedTuple):
    """A bus in a process of this machine."""

    key: str
    """The same for all processes of one bus."""
    path: Path
    status: BusStatus


class Here(NamedTuple):
    target: str | None
    paths: Callable[[], list[Path]]
    expected: list[str]

    def running(self) -> list[Running]:
        """Asks each of them, and all must answer. Raises `ConfigurationError` when none is there."""
        found, failed = self.look()
        if failed:
            raise failed[0]
        return found

    def look(self) -> tuple[list[Running], list[FaregateError]]:
        """Those that answer, and what is wrong with the others. Raises when none answers."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # each that does not takes all its time
            answers = list(pool.map(_status, self.paths()))
        found = [each for each in answers if isinstance(each, Running)]
        failed = [each for each in answers if isinstance(each, FaregateError)]
        if failed and not found:
            raise failed[0]
        if not found:
            of = "bus" if self.target is None else f"bus of {self.target}"
            raise ConfigurationError(
                f"no {of} runs here as this user, or its program opens no control socket: `faregate run` does, and "
                "fg.Bus(…, control=True) in a program of your own"
            )
        return found, failed


def locate(target: str | None) -> Here | OnBroker:
    """Nothing is asked yet."""
    if target is None:
        return Here(None, find_all, [])
    scheme, colon, rest = target.partition(":")
    if scheme in ("amqp", "amqps"):
        from faregate.transports.rabbitmq import RabbitmqQueue

        return OnBroker(hide_password(target), RabbitmqQueue(target), [])
    if scheme == "unix":
        return Here(target, lambda: find(ControlPlace("", path=Path(rest).absolute())), [])
    if scheme == "journal":
        root = Path(rest.partition("?")[0])
        if not (root / "journal.json").is_file():
            raise ConfigurationError(f"there is no journal in {root}: no journal.json there")
        return Here(target, lambda: find(journal_place(root)), [])
    if not colon:
        raise ConfigurationError(
            f"{target!r} names neither a bus (module:attribute, {EXAMPLE}) nor journal:PATH, amqp://… or unix:PATH"
        )
    bus = load_bus(target)
    if type(bus.transport).__name__ == "RabbitmqQueue":
        from faregate.transports.rabbitmq import RabbitmqQueue

        assert isinstance(bus.transport, RabbitmqQueue)
        return OnBroker(bus.url, bus.transport, list(bus.nodes))
    return Here(target, lambda: find(bus.control_place), list(bus.nodes))


def _status(path: Path) -> Running | FaregateError | None:
    try:
        status = ask(path, Instruction("status"))
    except FaregateError as exc:
        return exc
    return None if status is None else Running(key_of(path), path, status)


def ask(path: Path, instruction: Instruction) -> BusStatus | None:
    """How the bus is after that; the same for the rest."""
    answer = ask_answer(path, instruction)
    return None if answer is None else answer.status


def ask_answer(path: Path, instruction: Instruction) -> Answer | None:
    """None when nobody listens there. Raises what the bus says, and `Transient` when it says nothing."""
    try:
        told = _exchange(path, msgspec.json.encode(instruction) + b"\n")
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except (TimeoutError, BlockingIOError):  # or so many wait that it takes no more
        raise Transient(
            f"the process behind {path} does not answer within {_SECONDS:g} s: something holds its event loop, or it "
            "is stopped. Try again, and look at its log"
        ) from None
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be asked: {exc.strerror or exc}") from exc
    try:
        answer = _answer(told)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        raise Transient(f"what listens at {path} broke off, or is no bus of this version: {exc}") from exc
    if answer.error is not None:
        raise (ConfigurationError if answer.error == "ConfigurationError" else FaregateError)(answer.message)
    return answer


def _exchange(path: Path, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_SECONDS)
        with address(path) as short:
            sock.connect(short)
        if peer(sock) not in (None, 0, os.geteuid()) and os.geteuid() != 0:
            raise ConfigurationError(f"{path} is a socket of user {peer(sock)}, who is not you: it is not asked")
        told = bytearray()
        with suppress(BrokenPipeError, ConnectionResetError):  # what it said before it broke off counts
            sock.sendall(line)
        with suppress(ConnectionResetError):
            while not told.endswith(b"\n") and len(told) < _MOST_BYTES and (chunk := sock.recv(1 << 16)):
                told += chunk
        return bytes(told)


async def listen_on(
    broker: OnBroker, heard: Callable[[Heartbeat], None], seconds: float, asking: Sequence[Instruction] = ()
) -> None:
    from faregate.transports.rabbitmq.presence import listen

    await broker.transport.open()
    try:
        await broker.transport.on_channel(lambda channel: listen(channel, heard, seconds, asking))
    finally:
        await broker.transport.close()
