"""The `memory:` transport keeps every promise of the queue suite."""

import pytest

from faregate.testing import QUEUE_CASES, memory_subject, queue_cases, run_queue_case
from faregate.transports.memory import MemoryTransport


@pytest.mark.parametrize("name", queue_cases(MemoryTransport.capabilities))
async def test_the_memory_transport_keeps_the_promise(name: str) -> None:
    await run_queue_case(name, memory_subject)


def test_there_are_cases() -> None:
    assert len(QUEUE_CASES) >= 35
