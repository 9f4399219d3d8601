"""What a test does when a service that it needs is not there."""

import os
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip with the reason on a developer's machine; fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def address(variable: str) -> str:
    """Where a service is, from the environment that `./dev test` sets."""
    value = os.environ.get(variable)
    if not value:
        missing(f"{variable} is not set: run the tests with ./dev test, which starts the services")
    return value
