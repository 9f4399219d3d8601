"""Every benchmark runs, and its last line is the JSON object that `./dev bench` promises. Speed is not judged here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = {"codec": ["orjson"], "memory": ["dramatiq", "faststream", "taskiq"]}


def run(name: str, *arguments: str) -> list[str]:
    for peer in PEERS.get(name, []):
        if importlib.util.find_spec(peer) is None:
            pytest.skip(f"{peer} is not installed; ./dev bench {name} does that")
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--rounds", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_result(line: str, name: str) -> None:
    found = json.loads(line)
    assert list(found) == ["bench", "ours", "peers", "ratios", "targets", "met"]
    assert found["bench"] == name.replace("_", "-")
    assert found["ours"] and found["peers"]
    assert found["ratios"].keys() == found["targets"].keys() != set()
    assert found["met"] is all(found["ratios"][goal] >= target for goal, target in found["targets"].items())


@pytest.mark.parametrize("name", ["codec", "memory", "pipeline"])
def test_the_last_line_is_the_result(name: str) -> None:
    lines = run(name, "--messages", "400")
    assert len(lines) > 5
    check_result(lines[-1], name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("exactly_once", ["--messages", "200"]),
        ("ledger_growth", ["--messages", "100", "--rows", "20000"]),
    ],
)
def test_the_benchmarks_of_stores_too(name: str, arguments: list[str]) -> None:
    check_result(run(name, *arguments)[-1], name)


def test_mode_tokens_leaves_nothing_behind() -> None:
    """The one figure of these that does not depend on the machine."""
    line = run("tokens_at_rest", "--messages", "200")[-1]
    check_result(line, "tokens_at_rest")
    assert json.loads(line)["met"], line


@pytest.mark.full
def test_the_queue_depth_benchmark_too() -> None:
    """Apart from the others because it fills a queue with a million messages."""
    check_result(run("queue_depth", "--messages", "256")[-1], "queue_depth")


def test_json_prints_the_result_alone() -> None:
    (line,) = run("pipeline", "--messages", "100", "--json")
    check_result(line, "pipeline")
