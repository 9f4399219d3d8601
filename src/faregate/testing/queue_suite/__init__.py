"""What every queue transport promises, as named cases. A backend is a factory and one line per test runner:

    @pytest.mark.parametrize("name", queue_cases(MyTransport.capabilities))
    async def test_mine(name):
        await run_queue_case(name, my_subject)

A case raises AssertionError when the promise is broken. `core` holds for every transport: atomicity, redelivery and
settlement are nobody's choice. The other parts have cases for one capability each, or for several that meet.
"""

from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from faregate.ports.queue import Capability, QueueTransport
from faregate.testing.cases import run_case
from faregate.testing.clock import FakeClock, rest
from faregate.testing.queue_suite import (
    cancel,
    consumers,
    core,
    dead_letters,
    delay,
    order,
    partitions,
    recognise,
    replies,
)
from faregate.testing.queue_suite.cases import NEEDS, QUEUE_CASES, MakeSubject, QueueSubject
from faregate.transports.journal import JournalTransport
from faregate.transports.memory import MemoryTransport

__all__ = ["QUEUE_CASES", "QueueSubject", "journal_subject", "memory_subject", "queue_cases", "run_queue_case"]

PARTS = (core, recognise, delay, cancel, order, partitions, dead_letters, consumers, replies)


def queue_cases(capabilities: Collection[Capability]) -> list[str]:
    """The names of the cases for a transport with these capabilities."""
    return [name for name, needs in NEEDS.items() if needs.issubset(capabilities)]


async def run_queue_case(name: str, make: MakeSubject) -> None:
    """Run one case against a fresh subject."""

    def checked(subject: QueueSubject) -> Awaitable[None] | None:
        missing = NEEDS[name] - subject.transport.capabilities
        assert not missing, f"{name} is for transports with {', '.join(sorted(missing))}: see queue_cases"
        return QUEUE_CASES[name](subject)

    await run_case(checked, make)


@asynccontextmanager
async def memory_subject(transport: QueueTransport | None = None) -> AsyncIterator[QueueSubject]:
    """The `memory:` transport on a fake clock."""
    clock = FakeClock()
    tested = transport if transport is not None else MemoryTransport(clock=clock)
    clock = getattr(tested, "_clock", clock)
    await tested.open()
    try:
        yield QueueSubject(tested, clock.advance, rest, clock.time, clock.set_wall)
    finally:
        await tested.close()


@asynccontextmanager
async def journal_subject(path: Path) -> AsyncIterator[QueueSubject]:
    """The `journal:` transport in an empty folder, on a fake clock."""
    clock = FakeClock()
    tested = JournalTransport(str(path), clock=clock)
    await tested.open()

    async def committed() -> None:
        """What was published is durable, and what that made deliverable is delivered."""
        for _ in range(3):
            await tested.journal.barrier()
            await rest()

    async def advance(seconds: float) -> None:
        await clock.advance(seconds, committed)

    try:
        yield QueueSubject(tested, advance, committed, clock.time, clock.set_wall)
    finally:
        await tested.close()
