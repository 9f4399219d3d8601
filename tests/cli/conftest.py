"""What the tests of the command line share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def quiet() -> Iterator[None]:
    """What is logged would stand between the lines that a command prints."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
