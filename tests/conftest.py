"""What holds for every test: the signals of its children, its time limit, the stores and the Spark session to use."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import tiers
from tests.presence import address, require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


BRISK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss4m"
"""Sessions of the tests, and of the programs they run, live for seconds: a compiler that thinks long gains nothing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="K/N", help="of the long tier only the Kth of N slices")


def pytest_configure() -> None:
    """What runs in the background of a script ignores Ctrl-C, and so would the children that tests send it to.

    A signal with a handler has its default in a child, and one that is ignored stays so: hence a handler that does
    nothing. SIGHUP stays as it is: after `nohup` nobody wants the children to end with the terminal.
    """
    os.environ.setdefault("SPARK_SUBMIT_OPTS", BRISK_JAVA)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if tiers.is_long(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(tiers.SECONDS))
    chosen = config.getoption("--slice")
    if chosen:
        long = [item for item in items if tiers.is_long(item)]
        dropped = set(long) - set(tiers.one_of(long, chosen))
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


@pytest.fixture
async def postgres_url() -> AsyncIterator[str]:
    """A store on PostgreSQL: a schema of its own, empty, dropped afterwards."""
    from faregate.testing.store_subjects import postgres_schema

    async with postgres_schema(address("FAREGATE_TEST_POSTGRES")) as inside:
        yield inside


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.services)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store on SQLite, then one on PostgreSQL."""
    return f"sqlite:{tmp_path}/store.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """Starting one takes seconds, and a process can have only one."""
    require_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # or Spark's workers are whatever python3 is on the PATH
    from pyspark.sql import SparkSession  # loading it takes a second, which most runs need not spend

    session = (
        # Plain local[2] never tries a failed task again; a cluster does, four times.
        SparkSession.builder.master("local[2,4]")
        .appName("faregate-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.codegen.wholeStage", "false")  # compiling a query takes longer than its few rows
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()
