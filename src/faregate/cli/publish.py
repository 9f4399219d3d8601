"""`faregate publish`: publish one message from the command line."""

import logging
import sys
from typing import Annotated, Any

import typer

from faregate.broker.journal.errors import JournalNotFound
from faregate.bus.bus import Bus
from faregate.cli.load import load_bus
from faregate.cli.loop import run_async
from faregate.cli.output import console, print_json
from faregate.codec import BodyReader
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.plain import plain

_LONGEST_BODY = 64 * 1024 * 1024


def publish(
    target: Annotated[str, typer.Argument(help="The bus, as module:attribute.", metavar="MODULE:BUS")],
    message: Annotated[str, typer.Argument(help="The wire name of the message, for example OrderPlaced.")],
    body: Annotated[str, typer.Argument(help="The message as JSON, or - to read it from standard input.")],
    node: Annotated[str | None, typer.Option(help="The node that publishes; found out where it is clear.")] = None,
    to: Annotated[str | None, typer.Option(help="The node that a command goes to; found out likewise.")] = None,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key is the same publication.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds from now until it is delivered.")] = None,
    expires: Annotated[float | None, typer.Option(help="Seconds that it may wait to be handled.")] = None,
    header: Annotated[list[str] | None, typer.Option(help="A header as name=value; may be repeated.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is handled, on memory:.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Publish an event or send a command to the nodes of a bus.

    On a journal it goes into the spool: durable at once, and delivered by the process that runs the nodes, now or when
    it starts. A `memory:` bus runs within this process until everything is handled; a message that was given up on
    then makes the exit status 1.
    """
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    bus = load_bus(target)
    subscriptions = _find(bus, message)
    text = sys.stdin.read(_LONGEST_BODY) if body == "-" else body
    cls = subscriptions[0].message_type.cls
    parsed = BodyReader(cls, limit=_LONGEST_BODY).read(Envelope(body=text.encode(errors="surrogateescape")))
    options = {
        "idempotency_key": idempotency_key,
        "delay": delay,
        "expires": expires,
        "headers": _headers(header or []),
    }
    if bus.spools:
        result = run_async(_spool(bus, parsed, subscriptions, node, to, options))
    else:
        result = run_async(_publish(bus, parsed, subscriptions, node, to, options, timeout))
    if as_json:
        print_json(result)
    else:
        _show(result)
    if result["dead"]:
        raise typer.Exit(1)


async def _spool(
    bus: Bus,
    message: Any,
    subscriptions: list[Subscription],
    node: str | None,
    to: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    sender = _sender(subscriptions, node, to)
    destination = sender if subscriptions[0].message_type.kind == "command" else None
    try:
        published = await bus.spool(message, to=destination, node=node or sender, **options)
    except JournalNotFound:
        await bus.prepare()
        published = await bus.spool(message, to=destination, node=node or sender, **options)
    return {
        "publication_id": published,
        "type": subscriptions[0].message_type.wire,
        "spooled": True,
        "outcomes": {},
        "dead": [],
    }


def _sender(subscriptions: list[Subscription], node: str | None, to: str | None) -> str:
    """The node that publishes an event; for a command the one it goes to, which may as well have sent it."""
    if subscriptions[0].message_type.kind == "event":
        return node or _only({s.source for s in subscriptions}, "--node", "nodes publish it")
    return to or _only({s.node for s in subscriptions}, "--to", "nodes handle it")


async def _publish(
    bus: Bus,
    message: Any,
    subscriptions: list[Subscription],
    node: str | None,
    to: str | None,
    options: dict[str, Any],
    timeout: float,
) -> dict[str, Any]:
    first = subscriptions[0]
    async with bus:
        sender = _sender(subscriptions, node, to)
        if first.message_type.kind == "event":
            published = await bus.publish(message, node=sender, **options)
        else:
            published = await bus.send(message, to=sender, node=node or sender, **options)
        await bus.idle(timeout)
        dead = await bus.poisoned()
        return {
            "publication_id": published,
            "type": first.message_type.wire,
            "outcomes": bus.outcomes(),
            "dead": [
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


def _find(bus: Bus, wire: str) -> list[Subscription]:
    every = [subscription for node in bus.nodes.values() for subscription in node.subscriptions.values()]
    found = [subscription for subscription in every if subscription.message_type.wire == wire]
    if not found:
        names = ", ".join(sorted({subscription.message_type.wire for subscription in every})) or "none"
        raise ConfigurationError(f"no node on this bus handles a message {wire!r}; the messages are: {names}")
    return found


def _only(choices: set[Any], option: str, what: str) -> str:
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
    what = "it is durable in the spool" if result.get("spooled") else outcomes or "nothing to do yet"
    console.print(f"published {result['type']} {result['publication_id']}: {what}")
    for record in result["dead"]:
        console.print(plain(f"  given up at {record['node']} ({record['reason']}): {record['error']}"), markup=False)
