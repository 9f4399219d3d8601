"""The demo: it holds and says so in every form; it does not hold where something was doubled, lost or disordered."""

import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.command import _ending_on_terminate
from examples.demo.flow import Progress, Sample
from examples.demo.plan import Envelopes, Plan
from examples.demo.site import JournalSite
from examples.demo.verdict import Audit, audit, judge
from examples.demo.view import DemoView
from tests.child import Child
from tests.presence import require_java

ROOT = Path(__file__).parents[2]
LONG = 180.0
ORDERS, CRASHES, SEED = 300, 2, 7


def run_demo(
    *arguments: str, with_spark: bool = False, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "faregate", "demo", *([] if with_spark else ["--no-spark"]), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LONG, check=False, cwd=cwd, env={**os.environ, **environment}
    )


@pytest.fixture
def java() -> None:
    require_java()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run, what it left and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    sizes = ("--orders", str(ORDERS), "--crashes", str(CRASHES), "--seed", str(SEED))
    ended = run_demo(*sizes, "--json", "--keep", str(folder / "kept"), "--report", str(folder / "report.html"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder, json.loads(ended.stdout)


def test_a_small_run_holds_and_says_so_as_json(finished: tuple[Path, dict[str, Any]]) -> None:
    _, result = finished
    plan = Plan(ORDERS, SEED)
    assert (result["held"], result["audit"]["ok"], result["audit"]["by"]) == (True, True, "plain SQL")
    assert (result["orders"], len(result["kills"]), result["restarts"]) == (ORDERS, CRASHES, CRASHES)
    assert len(result["pauses"]) == CRASHES and min(result["pauses"]) > 0
    found = {check["what"]: check["found"] for check in result["checks"]}
    assert found["orders on the bus"] == ORDERS
    assert found["orders billed"] == found["orders charged"] == found["orders shipped"] == len(plan.good)
    assert found["money charged"] == plan.money
    assert sum(result["dead_letters"].values()) == plan.dead > 0
    assert result["messages"] == ORDERS + 3 * len(plan.good)


def test_what_is_kept_is_for_its_owner_alone(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    assert (folder / "kept").stat().st_mode & 0o777 == 0o700


def test_the_report_is_one_file_that_fetches_nothing(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = finished
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 3 and "prefers-color-scheme: dark" in page
    assert page.count('class="kill"') == 2 * CRASHES
    assert re.search(r"(https?:)?//|<script|<link|<img|@import|url\(", page) is None
    assert "exactly once" in page


def copy_of(finished: tuple[Path, dict[str, Any]], to: Path, *statements: str) -> Path:
    """The finished run with its database changed behind everybody's back."""
    source, target = finished[0] / "kept", to / "tampered"
    target.mkdir()
    (target / "journal").symlink_to(source / "journal")
    with closing(sqlite3.connect(source / "shop.db")) as old, closing(sqlite3.connect(target / "shop.db")) as new:
        old.backup(new)
        for statement in statements:
            new.execute(statement)
        new.commit()
    return target


def broken(folder: Path) -> tuple[set[str], Audit]:
    checks = judge(Plan(ORDERS, SEED), JournalSite(folder))
    return {check.what for check in checks if not check.held}, audit(JournalSite(folder))


def test_an_untouched_copy_holds(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    checks, audited = broken(copy_of(finished, tmp_path))
    assert (checks, audited.ok, audited.findings) == (set(), True, [])


@pytest.mark.parametrize(
    ("change", "check", "finding"),
    [
        (
            "insert into charges select * from charges where rowid = 3",
            "billed, charged or shipped twice",
            "effect twice",
        ),
        ("delete from parcels where rowid = 3", "orders shipped", "effect missing"),
        ("delete from faregate_ledger where rowid = 3", None, "lost"),
        ("delete from faregate_dead where rowid = 1", "impossible orders dead", "lost"),
        ("update charges set message_id = '0' where rowid = 3", None, "effect of nothing handled"),
        ("update charges set amount = amount + 1 where rowid = 3", "money charged", None),
        ("update faregate_ledger set sent = sent + 1 where node = 'payments' and rowid % 7 = 0", None, "sent and lost"),
        ("update faregate_ledger set digest = x'00' where rowid = 3", None, "another body handled"),
    ],
)
def test_what_is_not_as_it_should_be_is_found(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, change: str, check: str | None, finding: str | None
) -> None:
    checks, audited = broken(copy_of(finished, tmp_path, change))
    assert check is None or check in checks
    assert audited.ok == (finding is None)
    assert finding is None or finding in {found["what"] for found in audited.findings}


@pytest.mark.parametrize("plant", ["double", "loss", "order"])
def test_a_planted_error_makes_the_exit_status_1(plant: str) -> None:
    ended = run_demo("--orders", "60", "--crashes", "0", "--plant", plant)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "It did not hold." in ended.stdout and "BROKEN" in ended.stdout


def test_without_java_it_says_so_and_plain_sql_makes_the_audit(tmp_path: Path) -> None:
    ended = run_demo("--orders", "60", "--crashes", "0", with_spark=True, PATH=str(tmp_path), JAVA_HOME="")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "without Spark: there is no Java" in ended.stderr
    assert "the audit, by plain SQL" in ended.stdout


@pytest.mark.full
@pytest.mark.services
@pytest.mark.usefixtures("java")
def test_spark_makes_the_audit_and_finds_a_planted_double() -> None:
    ended = run_demo("--orders", "60", "--crashes", "1", "--plant", "double", "--json", with_spark=True)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    audited = json.loads(ended.stdout)["audit"]
    assert (audited["by"], audited["ok"]) == ("Spark", False)
    assert {(found["kind"], found["node"]) for found in audited["findings"]} == {("double", "payments")}


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    ended = run_demo("--keep", str(tmp_path))
    assert ended.returncode == 1
    assert "--keep" in ended.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path, number: int, status: int) -> None:
    command = [sys.executable, "-m", "faregate", "demo", "--no-spark", "--orders", "100000"]
    with Child(
        command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        try:
            assert demo.stdout is not None
            while "invoices" not in (line := demo.stdout.readline()):
                assert line, "it ended before it began"
            children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
            deadline = time.monotonic() + LONG
            while not (workers := children.read_text().split()):
                assert time.monotonic() < deadline
            demo.send_signal(number)
            demo.communicate(timeout=LONG)
        finally:
            demo.kill()
    assert demo.returncode == status
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_under_nohup_does_not_end_with_the_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _ending_on_terminate():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# --- where it is found -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation has: the wheel, unpacked, and no checkout beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=LONG)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_an_installed_wheel_has_the_demo_and_its_shop(wheel: Path, tmp_path: Path) -> None:
    sizes = ("--orders", "60", "--crashes", "1")
    ended = run_demo(*sizes, "--json", cwd=tmp_path, PYTHONPATH=str(wheel))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["held"]
    code = "import faregate.examples.demo.worker as worker; print(worker.__file__)"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(wheel)})
    assert Path(os.fsdecode(found).strip()) == wheel / "faregate/examples/demo/worker.py"


def test_a_copy_without_the_examples_says_so_and_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    ended = run_demo("--orders", "60", cwd=tmp_path, PYTHONPATH=str(tmp_path / "src"))
    assert ended.returncode == 1
    assert "has no examples" in ended.stderr and "pip install faregate" in ended.stderr


# --- the plan ----------------------------------------------------------------------------------------------------


def test_the_plan_follows_from_the_seed_alone() -> None:
    assert Plan(500, 3).placements == Plan(500, 3).placements != Plan(500, 4).placements


def test_a_plan_publishes_every_order_and_every_copy() -> None:
    plan = Plan(2000, SEED)
    published = [placement for batch in plan.batches() for placement in batch]
    assert len(published) == plan.orders + plan.copies
    assert {placement.number for placement in published} == set(range(plan.orders))
    assert plan.impossible and plan.garbled and plan.copies


def test_a_copy_is_the_same_publication_and_a_garbled_one_cannot_be_read() -> None:
    seal, plan = Envelopes().seal, Plan(2000, SEED)
    first, again = seal(plan.placements[0], 1.0), seal(plan.placements[0], 2.0)
    assert (first.publication_id, first.body_digest) == (again.publication_id, again.body_digest)
    garbled = next(placement for placement in plan.placements if placement.is_garbled)
    with pytest.raises(ValueError):
        json.loads(seal(garbled, 1.0).body)


# --- the view ----------------------------------------------------------------------------------------------------


def test_the_live_view_fits_80_columns_and_marks_the_kills() -> None:
    progress = Progress(0.0, crashes=3, kills=[2.0, 9.0], killed=["worker"] * 2, restarts=2)
    for second in range(60):
        progress.samples.append(Sample(float(second), *[min(2000, 100 * second)] * 4, 7, 20))
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    console.print(DemoView(console, Plan(2000, SEED), 3, quiet=True).picture(progress))
    shown = console.export_text()
    assert len(shown.splitlines()) == 13
    assert shown.count("✕") == 2 and "kills 2 of 3" in shown and "restarts 2" in shown
