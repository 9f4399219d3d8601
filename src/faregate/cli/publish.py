"""`faregate publish`: publish one message from the command line."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from faregate.broker.journal.lock import lock_holder
from faregate.bus.bus import Bus
from faregate.cli.load import BusName, given_body, load_bus, parsed_body
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, say
from faregate.errors import ConfigurationError, JournalLocked, JournalNotFound, Unroutable
from faregate.node.outgoing import Options, Outgoing, send
from faregate.node.outgoing import publish as fg_publish
from faregate.node.subscription import Subscription
from faregate.plain import plain
from faregate.ports.queue import Logged, SpoolTransport

_MOMENT, _LOOK = 1.0, 0.03
"""Seconds in which a bus that starts has subscribed, and between two looks."""


def publish(
    target: BusName,
    message: Annotated[
        str, typer.Argument(help="The wire name of the message, for example OrderPlaced.", metavar="TYPE")
    ],
    body: Annotated[
        str, typer.Argument(help="The message as JSON, or - to read it from standard input.", metavar="BODY")
    ],
    node: Annotated[str | None, typer.Option(help="The node that publishes; needed if several could.")] = None,
    to: Annotated[str | None, typer.Option(help="The node that a command goes to; needed if several take it.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key is the same publication.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds from now until it is delivered.")] = None,
    expires: Annotated[float | None, typer.Option(help="Seconds that it may wait to be handled.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="A header as name=value; may be repeated.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is handled, on memory:.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Publish an event or send a command to the nodes of a bus.

    On a journal it goes into the spool, otherwise to the broker: durable at once, and delivered by the processes that
    run the nodes, now or when they start. A `memory:` bus runs within this process until everything is handled; a dead
    letter then makes the exit status 1.
    """
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    bus = load_bus(target)
    subscriptions = find(bus, message)
    parsed = parsed_body(given_body(body), subscriptions[0].message_type.cls)
    if subscriptions[0].message_type.kind == "event":
        to, sender = None, node or only({each.source for each in subscriptions}, "--node", "nodes publish it")
    else:
        to = to or only({each.node for each in subscriptions}, "--to", "nodes handle it")
        sender = node or to  # any node may be the sender
    options: Options = {
        "idempotency_key": idempotency_key,
        "delay": delay,
        "expires": expires,
        "headers": _headers(header or []),
    }
    out = fg_publish(parsed, **options) if to is None else send(parsed, to=to, **options)
    result = run_async(_spool(bus, out, sender) if bus.spools else _publish(bus, out, sender, timeout))
    answer(result, lambda: _show(result), as_json=as_json)
    if result["dead_letters"]:
        raise typer.Exit(1)


async def _spooled(bus: Bus, out: Outgoing, sender: str) -> str:
    """A journal that is not there yet, or that its nodes have not subscribed to yet, is prepared; where another process
    does that, it is waited for."""
    try:
        return await _routed(bus, out, sender)
    except (JournalNotFound, Unroutable) as exc:
        if not isinstance(bus.transport, SpoolTransport) or (isinstance(exc, Unroutable) and not _may_start(bus, out)):
            raise
    locked: JournalLocked | None = None
    try:
        await bus.prepare()
    except JournalLocked as exc:  # another process does it, or has done it meanwhile
        locked = exc
    try:
        return await _routed(bus, out, sender)
    except JournalNotFound as exc:
        raise locked or exc from None


async def _routed(bus: Bus, out: Outgoing, sender: str) -> str:
    """Beside a bus that starts, a command that it takes is routable a moment later."""
    until = time.monotonic() + _MOMENT
    while True:
        try:
            return await bus.spool(out, node=sender)
        except Unroutable:
            if time.monotonic() >= until or not _may_start(bus, out, beside=True):
                raise
        await asyncio.sleep(_LOOK)


def _may_start(bus: Bus, out: Outgoing, *, beside: bool = False) -> bool:
    """Whether a node of this bus takes the command once it has subscribed: here, or `beside` in another process."""
    node, place = bus.nodes.get(out.destination or ""), _place(bus)
    taken = node is not None and any(each.message_type == out.message_type for each in node.subscriptions.values())
    return taken and place is not None and (lock_holder(place) is not None) is beside


def _place(bus: Bus) -> Path | None:
    place = bus.transport.log_place if isinstance(bus.transport, Logged) else None
    return place if isinstance(place, Path) else None


async def _spool(bus: Bus, out: Outgoing, sender: str) -> dict[str, Any]:
    return {
        "publication_id": await _spooled(bus, out, sender),
        "type": out.message_type.wire,
        "spooled": isinstance(bus.transport, SpoolTransport),
        "outcomes": {},
        "dead_letters": [],
    }


async def _publish(bus: Bus, out: Outgoing, sender: str, timeout: float) -> dict[str, Any]:
    async with bus:
        published = await bus.publish(out, node=sender)
        await bus.idle(timeout)
        dead = [letter for letter in await bus.dead_letters() if letter.node in bus.nodes]
        return {
            "publication_id": published,
            "type": out.message_type.wire,
            "outcomes": bus.outcomes(),
            "dead_letters": [
                {
                    "node": record.node,
                    "type": record.envelope.type,
                    "publication_id": record.envelope.publication_id,
                    "correlation_id": record.envelope.correlation_id,
                    "reason": record.reason,
                    "error": record.error.partition("\n")[0],
                }
                for record in dead
            ],
        }


def find(bus: Bus, wire: str) -> list[Subscription]:
    """The subscriptions to a message. Raises `ConfigurationError`, which lists what there is."""
    every = [subscription for node in bus.nodes.values() for subscription in node.subscriptions.values()]
    found = [subscription for subscription in every if subscription.message_type.wire == wire]
    if not found:
        names = ", ".join(sorted({subscription.message_type.wire for subscription in every})) or "none"
        raise ConfigurationError(f"no node on this bus handles a message {wire!r}; the messages are: {names}")
    return found


def only(choices: set[Any], option: str, what: str) -> str:
    if len(choices) != 1:
        raise ConfigurationError(f"{len(choices)} {what}: say which with {option}, one of {', '.join(sorted(choices))}")
    return str(choices.pop())


def _headers(given: list[str]) -> dict[str, str]:
    headers = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--header takes name=value; got {text!r}")
        headers[name] = value
    return headers


def _show(result: dict[str, Any]) -> None:
    outcomes = ", ".join(f"{count} {name}" for name, count in result["outcomes"].items() if count)
    durable = {True: "it is durable in the spool", False: "it is durable"}
    what = durable[result["spooled"]] if "spooled" in result else outcomes or "nothing to do yet"
    say(f"published {result['type']} {result['publication_id']}: {what}")
    for record in result["dead_letters"]:
        say(plain(f"  dead letter at {record['node']} ({record['reason']}): {record['error']}"))
