"""The `./dev` script: what it says and how it ends.

Installing and starting are covered by running the suite with it.
"""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEV = ROOT / "dev"


def dev(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([DEV, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the script alone, in a project with two benchmarks."""
    copy = tmp_path / "project"
    (copy / "tools/dev").mkdir(parents=True)
    (copy / "dev").write_bytes(DEV.read_bytes())
    (copy / "dev").chmod(0o755)
    for source in (ROOT / "tools/dev").glob("*.bash"):
        (copy / "tools/dev" / source.name).write_bytes(source.read_bytes())
    (copy / "benchmarks").mkdir()
    (copy / "benchmarks/queue_depth.py").write_text('"""How depth costs.\n\nMore.\n"""\n')
    (copy / "benchmarks/codec.py").write_text('"""One line."""\n')
    (copy / "benchmarks/_harness.py").write_text('"""Not a benchmark."""\n')
    return copy


def run_copy(project: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **extra}
    return subprocess.run(
        [project / "dev", *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("arguments", [(), ("help",), ("--help",)])
def test_help_names_every_command_with_one_line(arguments: tuple[str, ...]) -> None:
    result = dev(*arguments)
    assert result.returncode == 0
    for command in ("demo", "test", "check", "bench", "services", "run", "lock", "clean"):
        assert re.search(rf"^  {command}\b.* {{2}}\w", result.stdout, re.MULTILINE), command


def test_an_unknown_command_shows_the_help_and_fails() -> None:
    result = dev("tset")
    assert result.returncode == 2
    assert "there is no command 'tset'" in result.stderr
    assert "usage: ./dev COMMAND" in result.stderr
    assert result.stdout == ""


def test_an_unknown_services_command_fails() -> None:
    result = dev("services", "sideways")
    assert result.returncode == 2
    assert "up|down|status" in result.stderr


def test_it_works_from_any_folder(tmp_path: Path) -> None:
    assert dev("help", cwd=tmp_path).returncode == 0


def test_it_works_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "dev"
    link.symlink_to(DEV)
    assert subprocess.run([link, "help"], capture_output=True, timeout=60).returncode == 0


def test_bench_without_a_name_lists_benchmarks_by_their_first_line(project: Path) -> None:
    result = run_copy(project, "bench")
    assert result.returncode == 0
    listed = [line.split(maxsplit=1) for line in result.stdout.splitlines()[1:]]
    assert listed == [["codec", "One line."], ["queue-depth", "How depth costs."]]


def test_an_unknown_benchmark_lists_those_there_are(project: Path) -> None:
    result = run_copy(project, "bench", "codek")
    assert result.returncode == 2
    assert "there is no benchmark 'codek'" in result.stderr
    assert "queue-depth" in result.stderr


def test_services_that_were_never_started_are_down(project: Path) -> None:
    result = run_copy(project, "services", "status")
    assert result.returncode == 1
    assert result.stdout.count(" down ") == 3
    assert run_copy(project, "services", "down").returncode == 0


def test_a_missing_python_is_named_in_one_sentence(project: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "flock", "grep", "readlink", "rm", "sha256sum"):
        (tools / tool).symlink_to(next(path for path in (Path("/usr/bin", tool), Path("/bin", tool)) if path.exists()))
    result = run_copy(project, "demo", PATH=str(tools))
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "Python 3.11 or newer is missing" in result.stderr


def test_a_current_set_up_costs_less_than_two_seconds() -> None:
    command = [ROOT / ".venv/bin/faregate", "--help"]
    if not command[0].exists():
        pytest.skip("the tests do not run in the environment that ./dev makes")
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, timeout=60)
    direct = time.perf_counter() - started
    started = time.perf_counter()
    dev("run", "--help")
    assert time.perf_counter() - started - direct < 2


def test_the_script_and_its_parts_are_valid_bash() -> None:
    for script in (DEV, ROOT / ".ci/run", *(ROOT / "tools/dev").glob("*.bash")):
        result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_lock_files_pin_every_package_by_hash_and_name_no_registry() -> None:
    for lock in (ROOT / "requirements").glob("*.lock"):
        text = lock.read_text()
        assert "://" not in text and "--index" not in text and "--find-links" not in text, lock.name
        blocks = re.split(r"\n(?=[a-z0-9])", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
        for block in filter(None, blocks):
            assert re.match(r"[a-z0-9.-]+==\S+", block), block
            assert "--hash=sha256:" in block, block


def test_a_wider_lock_holds_the_narrower_at_the_same_versions() -> None:
    pins = {
        name: set(re.findall(r"^[a-z0-9.-]+==\S+", (ROOT / f"requirements/{name}.lock").read_text(), re.MULTILINE))
        for name in ("demo", "dev", "bench")
    }
    assert pins["demo"] < pins["dev"] < pins["bench"]
