"""Every benchmark runs, with sizes that take seconds and with the peers that are installed, and its last line is the
JSON object that `./dev bench` promises. Speed is not judged here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.presence import address, require_java

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {
    "ledger_growth": ["--messages", "100", "--rows", "2000"],
    "journal_write": ["--messages", "1000"],
    "rabbitmq_thesis": ["--messages", "200", "--nodes", "0"],
}
POSTGRES = {"exactly_once", "ledger_growth", "rabbitmq_consume", "spark_effects"}
RABBITMQ = {"rabbitmq_consume", "rabbitmq_memory", "rabbitmq_publish", "rabbitmq_stream", "rabbitmq_thesis"}
NAMES = sorted(path.stem for path in BENCHMARKS.glob("[!_]*.py"))
SPARK = [name for name in NAMES if name.startswith("spark_")]

RUN_ALL = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--rounds", "0", "--messages", "200"]
    runpy.run_path(name, run_name="__main__")
"""


def run(*command: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=540, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def check_result(line: str, name: str) -> None:
    found = json.loads(line)
    assert list(found) == ["bench", "ours", "peers", "ratios", "targets", "met"]
    assert found["bench"] == name.replace("_", "-")
    assert found["ours"]
    assert found["ratios"].keys() == found["targets"].keys()
    assert found["met"] is all(found["ratios"][goal] >= target for goal, target in found["targets"].items())


@pytest.mark.services
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SPARK])
def test_the_last_line_is_the_result(name: str, tmp_path: Path) -> None:
    if name in POSTGRES:
        address("FAREGATE_TEST_POSTGRES")
    if name in RABBITMQ:
        address("FAREGATE_TEST_RABBITMQ")
    size = TINY.get(name, ["--messages", "200"])
    page = ["--report", f"{tmp_path}/report.html"] if name == "rabbitmq_thesis" else []
    lines = run(str(BENCHMARKS / f"{name}.py"), "--rounds", "0", *size, *page)
    assert len(lines) > 5
    check_result(lines[-1], name)
    if page:
        assert (tmp_path / "report.html").read_text().count("<svg") == 3
    if name == "tokens_at_rest":  # the one figure that does not depend on the machine
        assert json.loads(lines[-1])["met"], "mode tokens left something behind"


@pytest.mark.services
@pytest.mark.timeout(600)
def test_the_benchmarks_on_spark_too() -> None:
    """In one process, so that they share the virtual machine of Java, whose start takes longest."""
    require_java()
    address("FAREGATE_TEST_POSTGRES")
    results = [
        line for line in run("-c", RUN_ALL, *(str(BENCHMARKS / f"{name}.py") for name in SPARK)) if line[:1] == "{"
    ]
    assert len(results) == len(SPARK)
    for name, line in zip(SPARK, results, strict=True):
        check_result(line, name)


def test_json_prints_the_result_alone() -> None:
    (line,) = run(str(BENCHMARKS / "pipeline.py"), "--rounds", "0", "--messages", "100", "--json")
    check_result(line, "pipeline")


def test_benchmarks_use_what_has_a_public_name() -> None:
    """Or they break when the inside changes, and nobody changes the inside because of them."""
    private = re.compile(r"(?<!self)\._(?!asdict|replace)[a-z]\w*")
    found = {path.name: private.findall(path.read_text()) for path in BENCHMARKS.glob("*.py")}
    assert {name: uses for name, uses in found.items() if uses} == {}
