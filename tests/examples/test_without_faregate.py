"""The example without Faregate, as three processes on a real RabbitMQ: each order is billed once and shipped once."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pika
import pytest

from tests.child import Child
from tests.presence import address

ROOT = Path(__file__).parents[2]
ORDERS = 25
INBOX = "billing.OrderPlaced.shop"

pytestmark = pytest.mark.services


@pytest.fixture
def broker() -> Iterator[str]:
    url = address("FAREGATE_TEST_RABBITMQ") + os.environ.get("PYTEST_XDIST_WORKER", "main")
    remove_queues(url)  # a run that was stopped leaves them
    yield url
    remove_queues(url)


def remove_queues(broker: str) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(broker))) as connection:
        for queue in (INBOX, "billing-dead", "warehouse"):
            connection.channel().queue_delete(queue)


def waiting(broker: str) -> int:
    with closing(pika.BlockingConnection(pika.URLParameters(broker))) as connection:
        count: int = connection.channel().queue_declare(INBOX, passive=True).method.message_count
        return count


def command(name: str, broker: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"examples.without_faregate.{name}", "--broker", broker, *arguments]


def shop(broker: str, times: int = 1) -> subprocess.CompletedProcess[str]:
    line = command("shop", broker, "--orders", str(ORDERS), "--times", str(times))
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def warehouse(broker: str, database: Path) -> Iterator[Child]:
    with Child(
        command("warehouse", broker, "--database", str(database)), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith("the warehouse is closed\n")
    assert process.returncode == 0


@contextmanager
def billing(broker: str, store: str, counts: Counter[str]) -> Iterator[None]:
    """Ends it once its queue hands out no more, and adds up what it says it did."""
    with Child(command("billing", broker, "--store", store), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        yield
        while waiting(broker):
            time.sleep(0.05)  # the broker has no signal for it
        process.send_signal(signal.SIGTERM)
        billed, copies = map(int, re.findall(r"\d+", process.stdout.readline()))
        counts.update(billed=billed, copies=copies)
    assert process.returncode == 0


def orders_in(database: Path, table: str) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return [order for (order,) in connection.execute(f"select order_id from {table}")]


@pytest.mark.parametrize("times", [1, 2])
def test_each_order_is_billed_once_and_shipped_once(broker: str, tmp_path: Path, times: int) -> None:
    store, counts = f"sqlite:{tmp_path}/billing.db", Counter[str]()
    with warehouse(broker, tmp_path / "warehouse.db") as shipping:
        with billing(broker, store, counts):
            published = shop(broker, times)
            assert published.returncode == 0, published.stderr
            assert shipping.stdout is not None
            for _ in range(ORDERS):
                assert shipping.stdout.readline().startswith("shipped order")
        while counts["copies"] < ORDERS * (times - 1):  # what was fetched and not begun when it ended
            with billing(broker, store, counts):
                pass
    expected = Counter(str(number) for number in range(ORDERS))
    assert Counter(orders_in(tmp_path / "billing.db", "invoices")) == expected
    assert Counter(orders_in(tmp_path / "warehouse.db", "parcels")) == expected
    assert counts == {"billed": ORDERS, "copies": ORDERS * (times - 1)}


def test_a_shop_that_finds_no_queue_is_told_so(broker: str, tmp_path: Path) -> None:
    with warehouse(broker, tmp_path / "warehouse.db"):  # it declares the exchange
        published = shop(broker)
    assert published.returncode == 1 and "UnroutableError" in published.stderr
