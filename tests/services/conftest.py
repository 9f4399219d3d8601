"""Fixtures for the tests that need a real service; see `tests/presence.py`."""

import pytest

from tests.presence import address


@pytest.fixture
def postgres_server() -> str:
    return address("FAREGATE_TEST_POSTGRES")


@pytest.fixture
def rabbitmq_url() -> str:
    return address("FAREGATE_TEST_RABBITMQ")


@pytest.fixture
def rabbitmq_stream_url() -> str:
    return address("FAREGATE_TEST_RABBITMQ_STREAM")
