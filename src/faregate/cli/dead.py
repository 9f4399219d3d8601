"""`faregate dead`: look at dead letters and decide about them, beside a running bus or without one.

Every decision is a commit in the store; the process that runs the bus carries a replay out, now or when it starts.
"""

import asyncio
import getpass
import socket
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from faregate.bus.bus import Bus
from faregate.bus.dead_letter_retention import DECIDED, Pruned, check_statuses, export, prune
from faregate.bus.dead_letters import MOST, DeadLetters, Found
from faregate.cli import dead_view
from faregate.cli.load import given_body, parsed_body
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, errors
from faregate.cli.targets import Target, find_stores, opened
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store import DeadFilter
from faregate.units import counted, parse_seconds

dead = typer.Typer(no_args_is_help=True, help="Look at dead letters, and replay, edit, discard, export or prune them.")

Id = Annotated[str, typer.Argument(help="The id, or the beginning of it: 8 or more characters.", metavar="ID")]
Ids = Annotated[list[str] | None, typer.Argument(help="The ids, or the beginnings of them.", metavar="ID")]
ByNode = Annotated[str | None, typer.Option("--node", help="Only those of this node.")]
ByType = Annotated[str | None, typer.Option("--type", help="Only messages of this type, by its wire name.")]
ByReason = Annotated[str | None, typer.Option("--reason", help="Only those with this reason.")]
ByStatus = Annotated[DeadStatus | None, typer.Option("--status", help="Only those with this status.")]
Since = Annotated[
    str | None, typer.Option(help="Only those that failed since then: 30m, 12h, 7d, or a date and time (local).")
]
All = Annotated[bool, typer.Option("--all", help="All that are open and fit the filters.")]


@dead.command("list")
def list_letters(
    target: Target,
    node: ByNode = None,
    type_: ByType = None,
    reason: ByReason = None,
    status: ByStatus = None,
    since: Since = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MOST, help="How many at most: those whose last failure is the oldest.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """List dead letters, with any status, in the order of their last failure. Works beside a running bus."""
    which = _filter(node, type_, reason, status, since)
    letters = _run(target, lambda letters, _: letters.letters(which, limit + 1))
    listed, more = letters[:limit], len(letters) > limit
    told = [dead_view.as_json(letter) for letter in listed]
    answer(told, lambda: dead_view.show_list(listed, more=more, filtered=which != DeadFilter()), as_json=as_json)


@dead.command()
def show(target: Target, message_id: Id, node: ByNode = None, as_json: AsJson = False) -> None:
    """Show one dead letter: headers, body, and the error with its traceback."""
    letter, _ = _run(target, lambda letters, _: letters.one(message_id, node))
    answer(dead_view.as_whole_json(letter), lambda: dead_view.show_letter(letter), as_json=as_json)


@dead.command()
def replay(
    target: Target,
    message_ids: Ids = None,
    everything: All = False,
    node: ByNode = None,
    type_: ByType = None,
    reason: ByReason = None,
    status: ByStatus = None,
    since: Since = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="How many per second at most.")] = None,
    as_json: AsJson = False,
) -> None:
    """Have dead letters handled again, by the node where they failed, with the identity they had.

    A running bus finds them within a fraction of a second; otherwise they are sent when it starts. What was handled or
    discarded meanwhile is left alone.
    """
    _check_choice(message_ids, everything)
    which = _filter(node, type_, reason, status or "open", since)

    async def decide(letters: DeadLetters, _: Bus | None) -> list[DeadLetter]:
        if not everything and rate is None:
            return await letters.decide(message_ids or [], "replayed", _me(), node)
        return await _paced(letters, await _chosen(letters, message_ids, which, node), rate)

    _tell("replayed", _run(target, decide), as_json)


@dead.command()
def discard(
    target: Target,
    message_ids: Ids = None,
    everything: All = False,
    node: ByNode = None,
    type_: ByType = None,
    reason: ByReason = None,
    status: ByStatus = None,
    since: Since = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Decide that messages are never handled, nor any copy of them that still comes. There is no way back."""
    _check_choice(message_ids, everything)
    which = _filter(node, type_, reason, status or "open", since)
    if everything and not yes and not _can_ask():
        raise ConfigurationError("--all discards without asking only with --yes: there is no terminal to ask on")

    async def decide(letters: DeadLetters, _: Bus | None) -> list[DeadLetter]:
        if everything:
            return await letters.decide_all(await letters.find(which), "discarded", _me())
        return await letters.decide(message_ids or [], "discarded", _me(), node)

    if not yes and _can_ask():
        found = _run(target, lambda letters, _: _chosen(letters, message_ids, which, node))
        for each in found[:10]:
            errors.print(f"  {each.letter}", markup=False)
        many = f"these {len(found):,} messages" if len(found) != 1 else "this message"
        if not found or not typer.confirm(f"Discard {many} for ever?", err=True):
            raise typer.Exit(1 if found else 0)
    _tell("discarded", _run(target, decide), as_json)


@dead.command()
def edit(
    target: Target,
    message_id: Id,
    body: Annotated[
        str, typer.Argument(help="The new body as JSON, or - to read it from standard input.", metavar="BODY")
    ],
    node: ByNode = None,
    as_json: AsJson = False,
) -> None:
    """Send a dead letter's message with another body, as a new message that names the original.

    The original stays as it is: discard it when the new one has done its work. Where the target is a bus, the body is
    checked against the message's class first.
    """
    text = given_body(body)

    async def decide(letters: DeadLetters, bus: Bus | None) -> tuple[DeadLetter, Envelope]:
        letter, _ = await letters.one(message_id, node)
        _check_body(bus, letter, text)
        return letter, await letters.edit(letter.message_id, text, _me(), letter.node)

    letter, sent = _run(target, decide)
    names = {"edited_from": letter.message_id, "node": letter.node, "type": letter.type}
    told = f"sent as {sent.publication_id} to {letter.node}, edited from {letter.message_id}"
    answer({"publication_id": sent.publication_id, **names}, told, as_json=as_json)


@dead.command("export")
def export_letters(
    target: Target,
    file: Annotated[Path, typer.Argument(help="A new file: a line of JSON for each letter.", metavar="FILE")],
    node: ByNode = None,
    type_: ByType = None,
    reason: ByReason = None,
    status: ByStatus = None,
    since: Since = None,
    as_json: AsJson = False,
) -> None:
    """Write dead letters to a file, with their envelopes and bodies. Nothing is removed.

    The file can be read by its owner alone.
    """
    which = _filter(node, type_, reason, status, since)
    count = _run(target, lambda letters, _: export(letters.stores, which, file))
    answer({"exported": count, "file": str(file)}, f"{counted(count, 'dead letter')} in {file}", as_json=as_json)


@dead.command("prune")
def prune_letters(
    target: Target,
    older_than: Annotated[
        str, typer.Option(help="Those with no failure and no decision since: 90d, 52w, or a date and time (local).")
    ],
    file: Annotated[
        Path, typer.Option("--export", help="The file that they are written to, at its end, before they are removed.")
    ],
    status: Annotated[
        list[str] | None,
        typer.Option(help="Letters with this status; may be given more than once. [default: resolved, discarded]"),
    ] = None,
    node: ByNode = None,
    type_: ByType = None,
    reason: ByReason = None,
    as_json: AsJson = False,
) -> None:
    """Remove old dead letters, exported first: those that were handled after all or discarded, unless told otherwise.

    A letter whose message was not handled stays while a copy of the message could still come and run.
    """
    statuses, before = check_statuses(status or DECIDED), _moment(older_than, "--older-than")

    async def work(letters: DeadLetters, _: Bus | None) -> Pruned:
        removed = kept = 0
        for store in letters.stores:
            for each in statuses:
                which = DeadFilter(node=node, type=type_, reason=reason, status=each, before=before)
                pruned = await prune(store, which, file)
                removed, kept = removed + pruned.removed, kept + pruned.kept
        return Pruned(removed, kept)

    pruned: Pruned = _run(target, work)
    told = f"{counted(pruned.removed, 'dead letter')} removed; they are in {file}" if pruned.removed else "none removed"
    more = f"; {pruned.kept:,} stay: a copy could still come, or they changed meanwhile" if pruned.kept else ""
    answer({**pruned._asdict(), "file": str(file)}, told + more, as_json=as_json)


def _run(target: str, work: Any) -> Any:
    """Do something with the dead letters of a target's stores."""
    stores, bus = find_stores(target)

    async def main() -> Any:
        async with opened(stores):
            return await work(DeadLetters(stores, SystemClock()), bus)

    return run_async(main())


async def _chosen(
    letters: DeadLetters, message_ids: Sequence[str] | None, which: DeadFilter, node: str | None
) -> list[Found]:
    """Those with these ids, or, without ids, all that fit the filters."""
    if not message_ids:
        return await letters.find(which)
    return [await letters.one(each, node) for each in message_ids]


async def _paced(letters: DeadLetters, found: Sequence[Found], rate: float | None) -> list[DeadLetter]:
    if rate is None:
        return await letters.decide_all(found, "replayed", _me())
    decided: list[DeadLetter] = []
    for number, each in enumerate(found):
        if number:
            await asyncio.sleep(1 / rate)
        decided += await letters.decide_all([each], "replayed", _me())
    return decided


def _tell(what: str, letters: Sequence[DeadLetter], as_json: bool) -> None:
    lines = [f"{what} {letter}" for letter in letters[:10]]
    if len(letters) != 1:
        lines.append(f"{what} {len(letters):,} messages")
    answer([dead_view.as_json(letter) for letter in letters], "\n".join(lines), as_json=as_json)


def _filter(
    node: str | None, type_: str | None, reason: str | None, status: DeadStatus | None, since: str | None
) -> DeadFilter:
    return DeadFilter(
        node=node, type=type_, reason=reason, status=status, since=None if since is None else _moment(since)
    )


def _moment(text: str, option: str = "--since") -> float:
    """A span before now, or a date and time."""
    try:
        return time.time() - parse_seconds(text, option)
    except ConfigurationError:
        pass
    try:
        return datetime.fromisoformat(text.strip()).astimezone().timestamp()
    except (ValueError, OverflowError, OSError) as exc:
        raise ConfigurationError(
            f"{option} takes 30m, 12h, 7d, or a date such as 2026-11-15T20:00; got {text!r}"
        ) from exc


def _check_choice(message_ids: Sequence[str] | None, everything: bool) -> None:
    if bool(message_ids) == everything:
        raise ConfigurationError("name the messages by their ids, or say --all (with filters, if you like)")


def _check_body(bus: Bus | None, letter: DeadLetter, text: str) -> None:
    node = None if bus is None else bus.nodes.get(letter.node)
    source = letter.source if letter.envelope.kind == "event" else None
    subscription = None if node is None else node.subscriptions.get((letter.type, source))
    if subscription is not None:
        parsed_body(text, subscription.message_type.cls)


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _me() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
