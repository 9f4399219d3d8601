"""`faregate store`: what is in a store, making its tables, and bringing them up to date."""

import time
from typing import Any

import typer

from faregate.cli.load import load_bus
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, say
from faregate.cli.table import Column, numbers, show_table
from faregate.cli.targets import StoreUrl, Target, check_lasting, opened
from faregate.errors import ConfigurationError
from faregate.plain import plain
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import STORES, describe_store, is_known, open_store
from faregate.ports.store import Readable, Store, StoreInfo
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


@store.command()
def init(target: Target, as_json: AsJson = False) -> None:
    """Make Faregate's tables in the store of a bus, or in a database, before anything runs. Repeating it is harmless.

    If TARGET is a bus, this also runs the schema= of its nodes, and tells the store their names: fg.outbox refuses
    others.
    """
    scheme = target.partition(":")[0]
    bus = None if is_known(STORES, scheme) else load_bus(target)
    stores = [open_store(target, SystemClock())] if bus is None else list(bus.stores.values())
    if not stores:
        raise ConfigurationError(f"{target} has no store=, so there are no tables to make")
    for each in stores:
        check_lasting(each.url)
    before = [_version(each) for each in stores]
    run_async(_open(target) if bus is None else bus.prepare_stores())
    made = []
    for each, was in zip(stores, before, strict=True):
        nodes = [] if bus is None else [name for name in bus.nodes if bus.store_of(name) is each]
        made.append({"url": each.url, "was": was, "version": _version(each), "nodes": nodes})
    answer(made, lambda: _tell(made), as_json=as_json)


def _version(each: Store) -> int:
    """Of the schema; 0 where there are no tables, or not even a database."""
    if not isinstance(each, Readable):
        return 0
    reader = each.reader()
    try:
        reader.check()
    except ConfigurationError:
        return 0
    return reader.version()


def _tell(made: list[dict[str, Any]]) -> None:
    for each in made:
        did = f"its tables are up to date, at schema version {each['version']}"
        if not each["was"]:
            did = f"its tables are made, schema version {each['version']}"
        elif each["was"] < each["version"]:
            did = f"its tables went from schema version {each['was']} to {each['version']}"
        nodes = f"; its nodes: {', '.join(each['nodes'])}" if each["nodes"] else ""
        say(plain(f"{each['url']}: {did}{nodes}"))


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
        say(f"{found.url} has no tables of Faregate: `faregate store init` makes them")
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
