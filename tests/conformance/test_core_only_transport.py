"""A transport with no capability at all keeps the core of the queue port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from faregate.ports.queue import EVERY_CAPABILITY
from faregate.testing import QUEUE_CASES, FakeClock, QueueSubject, memory_subject, queue_cases, run_queue_case
from faregate.testing.clock import rest
from tests.bus.core_only import CoreOnly


@asynccontextmanager
async def core_subject() -> AsyncIterator[QueueSubject]:
    clock = FakeClock()
    transport = CoreOnly(clock)
    await transport.open()
    try:
        yield QueueSubject(transport, clock.advance, rest, clock.time)
    finally:
        await transport.close()


@pytest.mark.parametrize("name", queue_cases(frozenset()))
async def test_the_core_asks_for_no_capability(name: str) -> None:
    await run_queue_case(name, core_subject)


def test_each_capability_has_cases_of_its_own() -> None:
    core = set(queue_cases(frozenset()))
    assert set(queue_cases(EVERY_CAPABILITY)) == set(QUEUE_CASES)
    for capability in EVERY_CAPABILITY:
        without = set(queue_cases(EVERY_CAPABILITY - {capability}))
        assert core <= without < set(QUEUE_CASES), f"no case asks for {capability}"


async def test_a_case_of_a_capability_that_a_transport_lacks_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"for transports with delay: see queue_cases"):
        await run_queue_case("a_scheduled_message_waits_for_its_time", core_subject)
    await run_queue_case("a_scheduled_message_waits_for_its_time", memory_subject)
