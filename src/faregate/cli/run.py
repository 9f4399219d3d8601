"""`faregate run`: run a bus until it is told to stop.

Every option, and the bus, can come from the environment, as containers are set up: `FAREGATE_` and the option's name.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from faregate.bus.bus import Bus
from faregate.cli.load import load_bus
from faregate.cli.logs import Format, Level, Log, to_people
from faregate.cli.loop import run_async
from faregate.cli.output import print_json
from faregate.cli.reload import RELOAD, run_reloading
from faregate.errors import ConfigurationError, FaregateError
from faregate.node.sources import did_you_mean
from faregate.observe import serve as endpoints_of
from faregate.units import counted

SETTINGS = ("BUS", "CONTROL_DIR", "HTTP", "JSON", "LOG_FORMAT", "LOG_LEVEL", "RELOAD")
"""What is set by variables, without `FAREGATE_`."""
_logger = logging.getLogger("faregate.run")
_HTTP_HELP = "Serve /metrics (Prometheus), /live and /ready there; on loopback unless a host is given."


def run(
    target: Annotated[
        str, typer.Argument(help="The bus, as module:attribute.", metavar="MODULE:BUS", envvar="FAREGATE_BUS")
    ],
    reload: Annotated[
        bool, typer.Option("--reload", help="Start again when a Python file changes.", envvar=RELOAD)
    ] = False,
    log_level: Annotated[Level, typer.Option(help="How much to log.", envvar="FAREGATE_LOG_LEVEL")] = "info",
    log_format: Annotated[
        Format, typer.Option(help="Lines for people, or a JSON object a line.", envvar="FAREGATE_LOG_FORMAT")
    ] = "text",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the counts at the end as JSON.", envvar="FAREGATE_JSON")
    ] = False,
    http: Annotated[
        str | None, typer.Option("--http", help=_HTTP_HELP, metavar="[HOST:]PORT", envvar="FAREGATE_HTTP")
    ] = None,
) -> None:
    """Run the nodes of a bus. Ctrl-C drains: what runs may finish; a second Ctrl-C stops at once.

    What a handler logs names its node, message, key and lane.
    """
    log = Log(log_level, log_format)
    _warn_of_settings()
    try:
        listen = None if http is None else parse_listen(http)
        if reload:
            more = [*(["--json"] if as_json else []), *(["--http", http] if http is not None else [])]
            raise typer.Exit(run_reloading([target, "--log-level", log_level, "--log-format", log_format, *more]))
        bus = load_bus(target)
        # What is loaded by now stays: the garbage collector need not look at it.
        gc.collect()
        gc.freeze()
        run_async(_serve_to_the_end(bus, as_json, listen, log.tell))
    except FaregateError as exc:
        raise typer.Exit(log.fail(exc, as_json=as_json)) from exc


def _warn_of_settings() -> None:
    """Of variables that look like a setting and are none. Others may be there: Kubernetes sets FAREGATE_PORT and the
    like for a service that is called so."""
    for name in sorted(os.environ):
        prefix, _, given = name.partition("_")
        if prefix == "FAREGATE" and given not in SETTINGS and (meant := did_you_mean(given, SETTINGS)):
            _logger.warning("the variable %s is no setting%s", name, meant.replace("'", "'FAREGATE_", 1))


def parse_listen(text: str) -> tuple[str, int]:
    """Where to listen: PORT, on loopback, or HOST:PORT. Raises `ConfigurationError`."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ConfigurationError(f"--http takes a port, or host:port, for example 127.0.0.1:9464; got {text!r}")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


async def _serve_to_the_end(
    bus: Bus, as_json: bool, listen: tuple[str, int] | None, tell: Callable[[str], None] = to_people
) -> None:
    async with AsyncExitStack() as stack:
        if listen is not None:
            endpoints = await stack.enter_async_context(endpoints_of(bus, host=listen[0], port=listen[1]))
            tell(f"/metrics, /live and /ready are at http://{endpoints.place}")
        await serve(bus, tell)
    if as_json:
        print_json({"outcomes": bus.outcomes(), "subscriptions": [count._asdict() for count in bus.counts()]})
    if bus.left_behind:  # closing the event loop would wait for these handlers
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def _interrupted(starting: "asyncio.Task[None]", asked: asyncio.Event) -> bool:
    """Wait for the start; whether it was cancelled because somebody asked for that. Raises what it failed with."""
    asking = asyncio.create_task(asked.wait())
    await asyncio.wait({starting, asking}, return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if starting.done():
        starting.result()
        return False
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled():
        starting.result()
    return starting.cancelled()


async def serve(bus: Bus, tell: Callable[[str], None] = to_people) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends the waiting. Nothing settled is lost.

    Raises what the transport failed with.
    """
    loop = asyncio.get_running_loop()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            insisted.set()
            tell("stopping at once; unfinished messages go back to their queues")
        else:
            asked.set()
            tell("draining; press Ctrl-C again to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        bus.allow_control()
        starting = asyncio.create_task(bus.start())
        if await _interrupted(starting, asked):
            return
        taken, nodes = counted(len(bus.counts()), "subscription"), counted(len(bus.nodes), "node")
        tell(f"running {taken} of {nodes} on {bus.url}; Ctrl-C drains")
        failing = asyncio.create_task(bus.failed())
        waiting = {asyncio.create_task(asked.wait()), failing}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        failure = failing.result() if failing.done() else None
        for task in waiting:
            task.cancel()
        draining = asyncio.create_task(bus.stop())
        insisting = asyncio.create_task(insisted.wait())
        await asyncio.wait({draining, insisting}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            await bus.stop(0)
        insisting.cancel()
        await draining
        if failure is not None:
            raise failure
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
