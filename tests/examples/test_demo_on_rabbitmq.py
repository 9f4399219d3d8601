"""The demo with two processes of each service: it holds while processes and the broker are killed, it does not hold for
a shop that forgets or was tampered with, and it leaves nothing behind."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.demo import servers
from examples.demo.command import demo
from examples.demo.flow import Flow
from examples.demo.plan import Plan
from examples.demo.rabbitmq_site import rabbitmq_site
from examples.demo.verdict import audit, judge
from faregate.errors import ConfigurationError
from tests.child import Child
from tests.presence import missing, require_java

pytestmark = pytest.mark.services

LONG = 600.0
SEED_OF_PAYMENTS = 3
"""With it the first to be killed has no partitions, so that nobody waits for the end of its leases."""


@pytest.fixture(autouse=True)
def installed() -> None:
    if servers.find_rabbitmq() is None or servers.find_postgres() is None:
        missing("RabbitMQ or PostgreSQL is not installed: run the tests with ./dev test, which installs them")


def run_demo(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "faregate", "demo", "--rabbitmq", "--json", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def broken(result: dict[str, Any]) -> set[str]:
    return {check["what"] for check in result["checks"] if not check["held"]}


@pytest.mark.timeout(LONG)
def test_a_small_run_with_a_kill_holds_and_what_is_changed_afterwards_is_found(tmp_path: Path) -> None:
    plan = Plan(60, SEED_OF_PAYMENTS)
    with rabbitmq_site(tmp_path, forgets=False) as site:
        progress = Flow(plan, site, 1, lambda _: None).run()
        assert [name.partition("-")[0] for name in progress.killed] == ["payments"]
        checks, audited = judge(plan, site), audit(site)
        assert [check for check in checks if not check.held] == []
        assert (audited.ok, audited.findings) == (True, [])
        assert sum(row["published"] for row in audited.table) == plan.orders + 2 * len(plan.good)
        site.change("insert into charges select * from charges where order_id = (select min(order_id) from charges)")
        assert {check.what for check in judge(plan, site) if not check.held} == {
            "billed, charged or shipped twice",
            "money charged",
        }
        assert {found["what"] for found in audit(site).findings} == {"effect twice"}


@pytest.mark.full
@pytest.mark.timeout(LONG)
def test_with_the_defaults_and_the_audit_by_spark_from_the_stream() -> None:
    require_java()
    status, result = run_demo()
    assert (status, result["held"], broken(result)) == (0, True, set())
    assert (result["audit"]["by"], result["audit"]["ok"]) == ("Spark", True)
    assert result["killed"].count("RabbitMQ") == 1 and len(result["kills"]) == result["restarts"] == 5
    assert sum(row["published"] for row in result["audit"]["table"]) > 2 * result["orders"]


@pytest.mark.full
@pytest.mark.timeout(LONG)
def test_a_shop_that_forgets_what_it_handled_does_not_hold() -> None:
    status, result = run_demo("--no-spark", "--orders", "100", "--crashes", "0", "--plant", "forget")
    assert (status, result["held"]) == (1, False)
    assert "billed, charged or shipped twice" in broken(result)


def children_of(pid: int) -> Iterator[int]:
    with suppress(FileNotFoundError):  # it ended meanwhile
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield int(child)
            yield from children_of(int(child))


@pytest.mark.full
@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_demo_leaves_no_process(number: int, status: int) -> None:
    command = [sys.executable, "-m", "faregate", "demo", "--rabbitmq", "--no-spark", "--orders", "100000"]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        while "published 0" in (line := running.stdout.readline()) or "published" not in line:
            assert line, "it ended before it began"
        started = set(children_of(running.pid))
        assert len(started) > 10, "eight workers, a shell beside each server, the servers"
        running.send_signal(number)
        running.communicate(timeout=LONG)
    assert running.returncode == status
    for pid in started:
        wait_for_end(pid)
    left = list(Path("/var/tmp").glob(f"faregate-{running.pid}-*"))
    if number == signal.SIGKILL:
        subprocess.run(["rm", "-rf", *map(os.fspath, left)], check=True)
    else:
        assert left == []


def wait_for_end(pid: int) -> None:
    """A process that is not our child, if it is there still."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LONG)[0]
    finally:
        os.close(handle)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--keep"):
        demo(rabbitmq=True, keep=tmp_path)
    with pytest.raises(ConfigurationError, match="--rabbitmq"):
        demo(plant="forget")
