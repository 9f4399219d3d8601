"""Runs Faregate's suites on the toy, as it is installed: `python conformance.py`. Ends with 1 if a case fails.

This is all that a backend of your own needs, too: how to make one for a test, and how its time passes.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from faregate.ports.schemes import open_store, open_token_store, open_transport
from faregate.ports.store import Store
from faregate.ports.tokens import TokenStore
from faregate.testing import (
    STORE_CASES,
    TOKEN_CASES,
    FakeClock,
    QueueSubject,
    memory_token_subject,
    queue_cases,
    run_queue_case,
    run_store_case,
    run_token_case,
    sqlite_store_subject,
)
from faregate.testing.clock import rest


@asynccontextmanager
async def queue_subject() -> AsyncIterator[QueueSubject]:
    clock = FakeClock()
    transport = open_transport("toy-queue:", clock)
    await transport.open()
    try:
        yield QueueSubject(transport, clock.advance, rest, clock.time, clock.set_wall)
    finally:
        await transport.close()


def run_on_store(folder: Path, name: str) -> Awaitable[None]:
    def made(path: str, *, clock: FakeClock) -> Store:
        return open_store(f"toy-store:{path}", clock)

    return run_store_case(name, partial(sqlite_store_subject, folder / f"{name}.db", made))


def run_on_tokens(folder: Path, name: str) -> Awaitable[None]:
    def made(unique: str, *, clock: FakeClock) -> TokenStore:
        return open_token_store(f"toy-store:{folder / unique}.db", clock)

    return run_token_case(name, partial(memory_token_subject, made))


async def failures(cases: dict[str, Callable[[str], Awaitable[None]]]) -> list[str]:
    found = []
    for name, run in cases.items():
        try:
            await run(name)
        except Exception as exc:
            found.append(f"{name}: {type(exc).__name__}: {exc}".splitlines()[0])
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        transport = open_transport("toy-queue:", FakeClock())
        cases: dict[str, Callable[[str], Awaitable[None]]] = {
            **dict.fromkeys(queue_cases(transport.capabilities), lambda name: run_queue_case(name, queue_subject)),
            **dict.fromkeys(STORE_CASES, partial(run_on_store, place)),
            **dict.fromkeys(TOKEN_CASES, partial(run_on_tokens, place)),
        }
        found = asyncio.run(failures(cases))
    for line in found:
        print(line)
    print(f"{len(cases) - len(found)} of {len(cases)} cases hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
