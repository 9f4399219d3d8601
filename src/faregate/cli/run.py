"""`faregate run`: run a bus until it is told to stop."""

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import Annotated, Literal

import typer

from faregate.bus.bus import Bus
from faregate.cli.load import BusName, load_bus
from faregate.cli.loop import run_async
from faregate.cli.output import errors, print_json
from faregate.cli.reload import run_reloading

Level = Literal["debug", "info", "warning", "error"]


def run(
    target: BusName,
    reload: Annotated[bool, typer.Option("--reload", help="Start again when a Python file changes.")] = False,
    log_level: Annotated[Level, typer.Option(help="How much to log.")] = "info",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts at the end as JSON.")] = False,
) -> None:
    """Run the nodes of a bus. Ctrl-C drains: what runs may finish; a second Ctrl-C stops at once."""
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s %(message)s", datefmt="%H:%M:%S"
    )
    if reload:
        raise typer.Exit(run_reloading([target, "--log-level", log_level, *(["--json"] if as_json else [])]))
    bus = load_bus(target)
    # What is loaded by now stays: the garbage collector need not look at it.
    gc.collect()
    gc.freeze()
    run_async(_serve_to_the_end(bus, as_json))


async def _serve_to_the_end(bus: Bus, as_json: bool) -> None:
    await serve(bus)
    if as_json:
        print_json({"outcomes": bus.outcomes(), "subscriptions": [count._asdict() for count in bus.counts()]})
    if bus.left_behind:  # closing the event loop would wait for these handlers
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


async def serve(bus: Bus) -> None:
    """Run until SIGINT or SIGTERM, then drain; a second signal ends the waiting. Nothing settled is lost.

    Raises what the transport failed with.
    """
    loop = asyncio.get_running_loop()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            insisted.set()
            errors.print("stopping at once; unfinished messages go back to their queues")
        else:
            asked.set()
            errors.print("draining; press Ctrl-C again to stop at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        bus.allow_control()
        await bus.start()
        subscriptions = bus.counts()
        errors.print(f"{len(subscriptions)} subscriptions of {len(bus.nodes)} nodes run on {bus.url}; Ctrl-C drains")
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
