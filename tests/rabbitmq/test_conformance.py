"""RabbitMQ keeps the promises of the queue port: the core, and what it has beyond."""

from functools import partial

import pytest

from faregate.testing import queue_cases, run_queue_case
from faregate.testing.queue_suite.cases import NEEDS
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.rig import rabbitmq_subject

WALL_CLOCK = "a_message_does_not_expire_because_the_wall_clock_is_set"
"""Nobody sets the clock of a test on a real broker."""
CASES = [name for name in queue_cases(RabbitmqQueue.capabilities) if name != WALL_CLOCK]
LASTING = [name for name in CASES if NEEDS[name] & {"delay", "expire"}]
"""They are about the broker's own time, which passes as it does."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in LASTING])
async def test_rabbitmq(name: str, broker: str) -> None:
    await run_queue_case(name, partial(rabbitmq_subject, broker))


@pytest.mark.full
@pytest.mark.parametrize("name", LASTING)
async def test_rabbitmq_in_real_time(name: str, broker: str) -> None:
    await run_queue_case(name, partial(rabbitmq_subject, broker, real_time=True))
