"""What a test does when a service that it needs is not there."""

import os
import shutil
from pathlib import Path
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


def require_java() -> None:
    java_home = os.environ.get("JAVA_HOME")
    if not (java_home and Path(java_home, "bin/java").exists()) and shutil.which("java") is None:
        missing("there is no Java for Spark: run the tests with ./dev test, which installs it")
