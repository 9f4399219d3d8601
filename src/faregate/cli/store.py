"""`faregate store`: what is in a store, and bringing its tables up to date."""

import time
from typing import Any

import typer

from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, say
from faregate.cli.table import Column, numbers, show_table
from faregate.cli.targets import StoreUrl, check_lasting, opened
from faregate.plain import plain
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import describe_store, open_store
from faregate.ports.store import StoreInfo
from faregate.units import age, iso

store = typer.Typer(no_args_is_help=True, help="Look at a store, and bring its tables up to date.")


@store.command()
def info(url: StoreUrl, as_json: AsJson = False) -> None:
    """Show the version of a store's schema, its tables, each node's floor, and what waits longest in the outbox.

    Changes nothing, and works beside a running bus.
    """
    check_lasting(url)
    found = run_async(describe_store(url))
    answer(_as_json(found), lambda: _show(found), as_json=as_json)


@store.command()
def migrate(url: StoreUrl, as_json: AsJson = False) -> None:
    """Bring Faregate's tables in a database up to date, or make them. A bus does so by itself when it starts."""
    check_lasting(url)
    run_async(_open(url))
    found = run_async(describe_store(url))
    told = {"url": found.url, "version": found.version, "known": found.known}
    answer(told, f"{found.url} is at schema version {found.version}", as_json=as_json)


async def _open(url: str) -> None:
    async with opened([open_store(url, SystemClock())]):
        pass


def _as_json(found: StoreInfo) -> dict[str, Any]:
    oldest = found.oldest
    return {
        "url": found.url,
        "version": found.version,
        "known": found.known,
        "tables": found.tables,
        "floors": {node: iso(floor) for node, floor in found.floors.items()},
        "oldest_undispatched": None
        if oldest is None
        else {
            "seq": oldest.seq,
            "node": oldest.node,
            "type": oldest.envelope.type,
            "destination": oldest.destination,
            "publication_id": oldest.envelope.publication_id,
            "sent_at": iso(oldest.envelope.sent_at),
        },
    }


def _show(found: StoreInfo) -> None:
    now = time.time()
    if not found.version:
        say(f"{found.url} has no tables of Faregate: `faregate store migrate` makes them")
        return
    is_newer = found.version > found.known
    known = f"this Faregate knows versions up to {found.known}" if is_newer else f"known here: {found.known}"
    say(f"{found.url}: schema version {found.version} ({known})")
    rows = [(plain(name), f"{count:,}") for name, count in found.tables.items()]
    show_table([Column("TABLE"), *numbers("ROWS")], rows)
    for node, floor in found.floors.items():
        say(f"the ledger of {plain(node)} remembers from {iso(floor)} on ({age(floor, now)})")
    if found.oldest is not None:
        envelope = found.oldest.envelope
        waits = (
            f"waits in the outbox of {found.oldest.node} since {iso(envelope.sent_at)} ({age(envelope.sent_at, now)})"
        )
        say(plain(f"{envelope} {waits}"))
    elif not is_newer:
        say("the outbox is empty")
