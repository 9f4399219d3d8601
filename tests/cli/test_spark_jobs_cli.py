"""`faregate spark audit|rates|drain|replay`: what they print, and with which status they leave."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from faregate.broker.journal.reader import JournalReader
from faregate.cli import app
from faregate.cli.spark import jobs as spark_jobs
from faregate.cli.spark.session import session
from faregate.errors import ConfigurationError
from faregate.ids import message_id
from tests.spark.jobs_rig import World, order
from tests.spark.rig import spooled


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Thirty orders: billing skips 7 and makes dead letters of 3."""
    world = World(tmp_path_factory.mktemp("shop"))
    world.run(*(order(n) for n in range(30)))
    return world


@pytest.fixture
def faregate(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line in this process, with the session of the tests: starting one for each takes seconds."""

    @contextmanager
    def shared(master: str, name: str) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr(spark_jobs, "session", shared)
    monkeypatch.setattr(spark_jobs.console, "width", 200)

    def run(*arguments: object) -> Result:
        result: Result = CliRunner().invoke(app, ["spark", *map(str, arguments)], env={"COLUMNS": "200"})
        return result

    return run


def program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faregate", "spark", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_spark_connect_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="sc://somewhere is Spark Connect"), session("sc://somewhere", "rates"):
        pass


@pytest.mark.services
def test_an_audit_that_holds_leaves_with_0(faregate: Any, shop: World) -> None:
    effects = [part for each in shop.effects for part in ("--effects", each)]
    done = faregate("audit", shop.journal, "--store", f"billing={shop.store}", "--at-rest", *effects[:2])
    assert done.exit_code == 0, done.output
    assert "it holds for 60 messages, offsets 0 to" in done.output
    assert "note: without a store, judged by settlements alone, and not for order: stock" in done.output


@pytest.mark.services
def test_planted_faults_are_listed_by_id_and_leave_with_1(faregate: Any, shop: World, tmp_path: Path) -> None:
    shutil.copytree(shop.journal.parent, tmp_path, dirs_exist_ok=True)
    world = World(tmp_path)
    envelopes = dict(JournalReader(world.journal).envelopes())
    ids = {n: message_id(envelopes[n].publication_id, "billing") for n in (10, 11, 12, 15, 19)}
    lost, twice, late, other, early = ids.values()  # the last follows `late` with the same key
    world.sql("delete from faregate_ledger where message_id = ?", bytes.fromhex(lost.replace("-", "")))
    world.sql("insert into invoices values (?, 'again')", twice)
    changed = bytes.fromhex(other.replace("-", ""))
    world.sql("update faregate_ledger set digest = ?, sent = 2 where message_id = ?", bytes(16), changed)
    behind = bytes.fromhex(late.replace("-", ""))
    world.sql(
        "update faregate_ledger set seq = (select max(seq) + 1 from faregate_ledger) where message_id = ?", behind
    )
    given = ("--store", world.store, "--effects", world.effects[0])
    done = faregate("audit", world.journal, *given, "--json")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"], told["summary"]["findings"]) == (1, False, 5)
    assert {(each["kind"], each["message_id"]) for each in told["findings"]} == {
        ("missing", lost),
        ("double", twice),
        ("altered", other),
        ("not sent", other),
        ("out of order", early),
    }
    done = faregate("audit", world.journal, *given, "--limit", "1")
    assert done.exit_code == 1
    assert "it does not hold: 5 findings" in done.output
    assert sum(each in done.output for each in (lost, twice, other, early)) == 1


def test_what_cannot_be_audited_leaves_with_2_before_spark_starts(shop: World, tmp_path: Path) -> None:
    started = time.monotonic()
    # No Java is found there: it is not looked for.
    away = {"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path)}
    done = program("audit", tmp_path / "nowhere", "--json", **away)
    assert (done.returncode, json.loads(done.stdout)["error"]) == (2, "JournalNotFound")
    done = program("audit", shop.journal, "--store", "postgresql://u:SECRET%zz@h/db", "--store", "x=sqlite:y", **away)
    assert (done.returncode, "does not say whose it is" in done.stderr, "SECRET" in done.stderr) == (2, True, False)
    for command in ("rates", "replay"):
        done = program(command, tmp_path / "nowhere", "--json", **away)
        assert (done.returncode, json.loads(done.stdout)["error"]) == (1, "JournalNotFound")
    done = program("drain", tmp_path, "--store", "sqlite:/nowhere.db", **away)
    assert (done.returncode, "there is no file /nowhere.db" in done.stderr) == (1, True)
    assert time.monotonic() - started < 100


@pytest.mark.services
def test_errors_of_any_kind_are_no_findings(faregate: Any, shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise RuntimeError("the cluster is gone")

    monkeypatch.setattr("faregate.spark.jobs.audit.audit", broken)
    done = faregate("audit", shop.journal)
    assert done.exit_code == 2
    assert "RuntimeError: the cluster is gone" in done.stderr


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.services
@pytest.mark.usefixtures("in_new_york")
def test_rates_are_told_and_drawn_in_utc(faregate: Any, shop: World, tmp_path: Path) -> None:
    page = tmp_path / "rates.html"
    given = ("--window", "1d", "--chart", page, "--json")
    done = faregate("rates", shop.journal, "--store", f"billing={shop.store}", *given)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {(each["node"], each["handled"], each["dead"]) for each in rows} == {("billing", 28, 1), ("stock", 30, 0)}
    [(handled,)] = shop.sql("select min(handled_at) from faregate_ledger")
    day = datetime.fromtimestamp(handled, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert rows[0]["from"] == f"{day:%Y-%m-%d}T00:00:00Z"
    span = f"{day:%Y-%m-%d} 00:00:00 to {day + timedelta(days=1):%Y-%m-%d} 00:00:00"
    assert span in page.read_text()
    assert f"{span} UTC" in faregate("rates", shop.journal, "--window", "1d").output


@pytest.mark.services
def test_drain_and_replay_say_what_they_did(faregate: Any, shop: World, tmp_path: Path) -> None:
    done = faregate("drain", tmp_path / "letters", "--store", f"billing={shop.store}", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["new"] == 1
    again = faregate("drain", tmp_path / "letters", "--store", shop.store)
    assert "1 dead letter: 0 new, 0 changed since, 1 there already" in again.output
    chosen = (shop.journal, "--from", 5, "--to", 8, "--name", "again")
    assert (
        "would replay 3 messages from offset 5 on, same identity; --yes does it" in faregate("replay", *chosen).output
    )
    assert spooled(shop.journal) == []
    told = json.loads(faregate("replay", *chosen, "--yes", "--json").stdout)
    assert (told["messages"], told["batches"], told["done"]) == (3, 1, True)
    assert told["types"] == [{"type": "OrderPlaced", "source": "shop", "count": 3}]
    assert len(spooled(shop.journal)) == 1


@pytest.mark.parametrize("command", ["audit", "rates", "drain", "replay"])
def test_every_job_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, ["spark", command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 0
    assert "--json" in done.output and "--master" in done.output
    if command == "audit":
        assert "status 0 when it holds, 1 when it does not, and 2 when it could not be audited" in done.output
