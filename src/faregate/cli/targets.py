"""What a command line names when it means stores: a bus as `module:attribute`, or the URL of a store."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

import typer

from faregate.bus.bus import Bus
from faregate.cli.load import EXAMPLE, load_bus
from faregate.errors import ConfigurationError
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import STORES, is_known, known_schemes, open_store
from faregate.ports.store import Readable, Store

Target = Annotated[
    str,
    typer.Argument(
        help="The bus, as module:attribute, or its store, as sqlite:PATH or postgresql://….", metavar="TARGET"
    ),
]
StoreUrl = Annotated[str, typer.Argument(help="The store, as sqlite:PATH or postgresql://….", metavar="URL")]


def find_stores(target: str) -> tuple[list[Store], Bus | None]:
    """The stores that a target names, and the bus whose they are, when one was named; nothing is opened yet."""
    scheme, colon, _ = target.partition(":")
    if colon and is_known(STORES, scheme):
        check_lasting(target)
        return [_checked(open_store(target, SystemClock()))], None
    if not colon:
        raise ConfigurationError(
            f"{target!r} names neither a bus (module:attribute, {EXAMPLE}) nor a store ({known_schemes(STORES)})"
        )
    bus = load_bus(target)
    lasting = {url: store for url, store in bus.stores.items() if not _in_memory(url)}
    if not lasting:
        if bus.stores:
            check_lasting("memory:")
        raise ConfigurationError(f"{target} has no store=, so there are no dead letters in one")
    return [_checked(store) for store in lasting.values()], bus


def _in_memory(url: str) -> bool:
    return url.partition(":")[0] == "memory"


def check_lasting(url: str) -> None:
    if _in_memory(url):
        raise ConfigurationError(
            "a memory: store lives in the process that runs the bus and ends with it: there is nothing to look at from "
            "here. Within that process use bus.dead_letters(), bus.replay(…) and bus.discard(…)"
        )


def _checked(store: Store) -> Store:
    """Raises if it is not there: looking at a store must not make one."""
    if isinstance(store, Readable):
        reader = store.reader()
        reader.check()
        if not reader.version():
            raise ConfigurationError(f"{store.url} has no tables of Faregate: `faregate store init` makes them")
    return store


@asynccontextmanager
async def opened(stores: Iterable[Store]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for store in stores:
            await store.open()
            stack.push_async_callback(store.close)
        yield
