"""A virtual host of the private RabbitMQ for each process of the tests; see `tests/presence.py`."""

import os

import pytest

from tests.presence import address


@pytest.fixture
def broker() -> str:
    return address("FAREGATE_TEST_RABBITMQ") + os.environ.get("PYTEST_XDIST_WORKER", "main")
