"""`faregate capacity measure` measures what it can reach, and calls the rest assumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faregate.cli import app
from faregate.cli.capacity.costs import Costs, load_costs
from faregate.cli.capacity.processor import processor_of, server_at
from tests.presence import address

SMALL = ["--messages", "2000", "--rounds", "1"]
JOURNAL = {
    "publish", "handle_none", "handle_sqlite", "send_sqlite", "key_sqlite", "ledger_sqlite", "journal_bytes",
    "stream_bytes",
}  # fmt: skip


def measure(file: Path, *options: str) -> Costs:
    done = CliRunner().invoke(app, ["capacity", "measure", str(file), *SMALL, *options])
    assert done.exit_code == 0, done.exception
    return load_costs(file)


def measured(costs: Costs) -> set[str]:
    return {name for name, each in costs.figures.items() if each.origin == "measured"}


def test_without_a_server_the_journal_is_measured_and_the_rest_assumed(tmp_path: Path) -> None:
    costs = measure(tmp_path / "costs.json")
    # A difference of two runs may come out below zero on a busy machine, and is then not taken.
    assert measured(costs) <= JOURNAL and measured(costs) >= JOURNAL - {"send_sqlite"}
    assert {each.origin for name, each in costs.figures.items() if name not in JOURNAL} == {"assumed"}
    assert 100 < costs["journal_bytes"] < 1_000 and 50 < costs["ledger_sqlite"] < 1_000


@pytest.mark.full
def test_spark_is_measured_in_a_session_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    command = [sys.executable, "-m", "faregate", "capacity", "measure", str(file), *SMALL, "--part", "spark"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    costs = load_costs(file)
    assert costs.command == "faregate capacity measure --part spark --messages 2000 --rounds 1"
    # So few say little, and a difference of two runs may come out below zero.
    assert measured(costs) <= {"spark_none"} and "spark_none" in done.stdout


@pytest.mark.services
def test_a_postgresql_is_measured_and_its_address_is_not_written(tmp_path: Path) -> None:
    url = address("FAREGATE_TEST_POSTGRES")
    costs = measure(tmp_path / "costs.json", "--part", "postgresql", "--store", url, "--yes")
    assert measured(costs) >= {"handle_postgresql", "key_postgresql", "ledger_postgresql", "wal", "commits", "database"}
    assert "@" not in (tmp_path / "costs.json").read_text(), "no address is in the file"


def test_processor_time_grows_with_work() -> None:
    before = processor_of(os.getpid())
    while processor_of(os.getpid()) < before + 0.05:
        sum(range(100_000))


def test_a_server_elsewhere_is_not_looked_for() -> None:
    assert server_at("db.example", 5432) is None
