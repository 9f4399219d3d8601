"""Fixtures for the tests that need a real service: its address from the environment that `./dev test` sets.

A service that is not there skips its tests with a reason on a developer's machine and fails them in CI.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from pyspark.sql import SparkSession


def missing(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def address(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        missing(f"{variable} is not set: run the tests with ./dev test, which starts the services")
    return value


@pytest.fixture
def postgres_url() -> str:
    return address("FAREGATE_TEST_POSTGRES")


@pytest.fixture
def rabbitmq_url() -> str:
    return address("FAREGATE_TEST_RABBITMQ")


@pytest.fixture
def rabbitmq_stream_url() -> str:
    return address("FAREGATE_TEST_RABBITMQ_STREAM")


# Starting Spark takes seconds, so one session serves all tests.
@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    java_home = os.environ.get("JAVA_HOME")
    if not (java_home and Path(java_home, "bin/java").exists()) and shutil.which("java") is None:
        missing("there is no Java for Spark: run the tests with ./dev test, which installs it")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("faregate-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()
