"""A password is in no text: no error and none that it was raised from, no log line, no name of a store, no output.

Each URL is tried on every way in which one reaches Faregate. Parts of the password are looked for, as it is written and
decoded: a URL whose password has a raw `@` or `/` is read otherwise than it was meant, and errors quote its pieces.
"""

import logging
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import describe_store, hide_password
from faregate.spark.jobs.stores import open_stores
from faregate.spark.runs.driver import Driver
from faregate.spark.runs.spec import RunSpec
from faregate.stores.postgres import PostgresStore

PIECES = ("SeK", "r3t")
URLS = [
    "postgresql://u:SeKr3t@127.0.0.1:1/db",
    "postgres://u:SeKr3t@127.0.0.1:1/db",
    "postgresql://u:SeKr3t@127.0.0.1:notaport/db",
    "postgresql://127.0.0.1:1/db?user=u&password=SeKr3t",
    "postgresql://u@127.0.0.1:1/db?passfile=SeKr3t&sslpassword=SeKr3t",
    "postgresql://u:SeKr3t@127.0.0.1:1/db?nonsense=1",
    "postgresql://u:SeK%r3t@127.0.0.1:1/db",
    "postgresql://u:SeK%40r3t@127.0.0.1:1/db",
    "postgresql://u:SeK%25r3t@127.0.0.1:1/db",
    "postgresql://u:SeK@r3t@127.0.0.1:1/db",
    "postgresql://u:x@SeKr3t@127.0.0.1:1/db",
    "postgresql://u:SeK/r3t@127.0.0.1:1/db",
    "postgresql://u:1/SeKr3t@127.0.0.1:1/db",
    "postgresql://u:x@SeK/r3t@127.0.0.1:1/db",
    "postgresql://u:SeKr3t/x?y@127.0.0.1:1/db",
    "postgresql://u:SeK?r3t@127.0.0.1:1/db",
    "postgresql://u:SeK:r3t@127.0.0.1:1/db",
    "postgresql:host=127.0.0.1 port=1 password=SeKr3t",
    "mysql://u:SeKr3t@h/db",
]


def check(text: str) -> None:
    assert not [piece for piece in PIECES if piece in text], text


def nodes() -> list[fg.Node]:
    class Told(fg.Event):
        n: int

    teller, listener = fg.Node("teller"), fg.Node("listener")

    @listener.on(Told, source="teller", dedup="tokens")
    async def listen(message: Told) -> None: ...

    return [teller, listener]


def made(bus: fg.Bus) -> None:
    check(repr(bus) + bus.url + repr(bus.stores) + str([*bus.stores]))
    for store in bus.stores.values():
        check(repr(store) + store.url + store.database_id)


async def as_store(url: str) -> None:
    made(fg.Bus("memory:", nodes=nodes(), store=url))


async def as_stores(url: str) -> None:
    made(fg.Bus("memory:", nodes=nodes(), store={"teller": "memory:", "listener": url}, tokens="memory:"))


async def as_store_of_another_node(url: str) -> None:
    made(fg.Bus("memory:", nodes=nodes(), store={"teller": url}))


async def as_tokens(url: str) -> None:
    made(fg.Bus("memory:", nodes=nodes(), store="memory:", tokens=url))


async def as_transport(url: str) -> None:
    made(fg.Bus(url, nodes=nodes(), store="memory:"))


async def opened(url: str) -> None:
    await PostgresStore(url, clock=SystemClock(), tries=2, delay=0.01).open()


async def described(url: str) -> None:
    await describe_store(url)


async def read_by_spark(url: str) -> None:
    open_stores(url)


async def run_on_spark(url: str) -> None:
    check(repr(RunSpec("1", "listener", "module:listener", None, url, "application/json", 1, tokens=url)))
    [_, listener] = nodes()
    Driver(listener, url, Path("journal"), 1.0, 1).close()


WAYS = (
    as_store,
    as_stores,
    as_store_of_another_node,
    as_tokens,
    as_transport,
    opened,
    described,
    read_by_spark,
    run_on_spark,
)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_a_password_is_in_no_text(
    way: Callable[[str], Awaitable[Any]], url: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(hide_password(url))
    with caplog.at_level(logging.DEBUG):
        try:
            await way(url)
        except fg.FaregateError as exc:
            check("".join(traceback.format_exception(exc)))
            check(repr(exc) + repr(exc.__context__))
    check(caplog.text)


@pytest.mark.parametrize("url", ["postgresql://u:x@SeKr3t@127.0.0.1:1/db", "postgresql://u:SeK/r3t@127.0.0.1:1/db"])
def test_a_raw_sign_in_a_password_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"write postgresql://.* with %40 for @"):
        PostgresStore(url, clock=SystemClock())


@pytest.mark.parametrize("command", ["store info", "store migrate", "dead list", "dead list --json"])
def test_the_command_line_shows_no_password(command: str) -> None:
    url = "postgresql://u:SeK@r3t%@127.0.0.1:1/db"
    first, second, *options = command.split()
    run = [sys.executable, "-m", "faregate", first, second, url, *options]
    shown = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 1
    assert "ConfigurationError" in shown.stdout + shown.stderr
    check(shown.stdout + shown.stderr)
