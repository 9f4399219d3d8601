"""The analysis examples, on a journal that the shop wrote: the answers are what the shop did."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.shop import app
from examples.shop.bank import Bank
from examples.shop.messages import OrderPlaced
from faregate.broker.journal import JournalReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.services

NOTEBOOK = Path(__file__).parents[2] / "examples/analysis/rates.ipynb"

GOOD, IMPOSSIBLE = 40, 2


async def place(folder: Path, numbers: range) -> None:
    """Orders of three customers; the first ones of all are impossible."""
    async with app.make_bus(folder) as bus:
        for number in numbers:
            total = -1 if number < IMPOSSIBLE else 10 * (number % 3 + 1)
            order = OrderPlaced(order_id=f"{number}", customer=f"customer-{number % 3}", total=total)
            await bus.publish(order, node="shop", idempotency_key=f"{number}")
        await bus.idle(timeout=60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(app, "bank", Bank(latency=0, failing_percent=0))
    asyncio.run(place(tmp_path, range(GOOD + IMPOSSIBLE)))
    return tmp_path


def test_spark_sql_on_the_journal_answers_as_the_shop_would(spark: "SparkSession", folder: Path) -> None:
    from examples.analysis.orders import analyse

    answers = analyse(spark, folder / "journal")
    spent = {row["customer"]: (row["orders"], row["spent"]) for row in answers["best customers"].collect()}
    numbers = range(IMPOSSIBLE, GOOD + IMPOSSIBLE)
    for rest in range(3):
        own = [number for number in numbers if number % 3 == rest]
        assert spent[f"customer-{rest}"] == (len(own), 10 * (rest + 1) * len(own))
    [durations] = answers["from placed to shipped"].collect()
    assert durations["shipped"] == GOOD and 0 <= durations["p50_seconds"] <= durations["p99_seconds"]
    assert [row["order_id"] for row in answers["never shipped"].collect()] == ["0", "1"]


@pytest.mark.full
def test_the_notebook_draws_rates_and_what_waits(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("jupyter-execute"), "--output", tmp_path / "done.ipynb", NOTEBOOK],
        env={**os.environ, "SHOP_DATA": str(folder), "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        output["data"]
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", ())
        if "data" in output
    ]
    assert [sorted(each) for each in outputs] == [
        ["text/html", "text/plain"],
        ["image/png", "text/plain"],
        ["image/png", "text/plain"],
        ["text/plain"],
    ]
    best = "".join(outputs[0]["text/plain"])
    own = [number for number in range(GOOD + IMPOSSIBLE) if number % 3 == 2]
    assert re.search(rf"customer-2 +{len(own)} +{30 * len(own)}", best), best
    assert "".join(outputs[-1]["text/plain"]) == "{'billing': 0, 'payments': 0, 'shipping': 0}"


def test_the_notebook_is_kept_without_its_outputs() -> None:
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code and not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.full
def test_the_streaming_join_has_every_charge_once_across_restarts(
    spark: "SparkSession", folder: Path, tmp_path: Path
) -> None:
    from examples.analysis.payments import write_waits

    write_waits(spark, folder / "journal", tmp_path / "out")
    asyncio.run(place(folder, range(GOOD + IMPOSSIBLE, GOOD + IMPOSSIBLE + 10)))
    for _ in range(2):  # the second time there is nothing new
        write_waits(spark, folder / "journal", tmp_path / "out")
    rows = spark.read.parquet(str(tmp_path / "out/waits")).collect()
    assert sorted(int(row["order_id"]) for row in rows) == list(range(IMPOSSIBLE, GOOD + IMPOSSIBLE + 10))
    assert all(row["seconds"] >= 0 and row["amount"] in (10, 20, 30) for row in rows)
    log = JournalReader(folder / "journal").envelopes()
    charged = [json.loads(envelope.body)["order_id"] for _, envelope in log if envelope.type == "CardCharged"]
    assert sorted(charged) == sorted(row["order_id"] for row in rows)
