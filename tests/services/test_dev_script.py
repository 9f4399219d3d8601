"""The `./dev` script: what it says and how it ends.

Installing and starting are covered by running the suite with it.
"""

import hashlib
import os
import re
import subprocess
import tempfile
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
    for command in ("demo", "test", "check", "docs", "bench", "services", "run", "lock", "clean"):
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


def test_a_current_set_up_runs_no_package_manager(project: Path) -> None:
    pretend_environment(project)
    (project / ".venv/bin/faregate").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (project / ".venv/bin/faregate").chmod(0o755)
    result = run_copy(project, "run", "--help")
    assert (result.returncode, result.stdout, result.stderr) == (0, "--help\n", "")


@pytest.mark.services
def test_the_demo_on_rabbitmq_wants_all_drivers_and_both_servers(project: Path) -> None:
    """They are installed where the tests of services run."""
    pretend_environment(project)
    (project / ".venv/bin/faregate").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (project / ".venv/bin/faregate").chmod(0o755)
    result = run_copy(project, "demo", "--rabbitmq", "--no-spark")
    assert (result.returncode, result.stdout, result.stderr) == (0, "demo --rabbitmq --no-spark\n", "")


def test_the_script_and_its_parts_are_valid_bash() -> None:
    for script in (DEV, ROOT / ".ci/run", *(ROOT / "tools/dev").glob("*.bash")):
        result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


PIP = """
Ignoring colorama: markers 'sys_platform == "win32"' don't match your environment
Collecting alpha==1.0
  Downloading alpha-1.0.whl (12.5 MB)
Collecting beta==2.0
  Downloading beta-2.0.tar.gz (1.2 MB)
Building wheels for collected packages: beta
Installing collected packages: alpha, beta
"""
APT = """
0 upgraded, 2 newly installed, 0 to remove and 5 not upgraded.
Need to get 12.3 MB of archives.
Unpacking alpha (1.0) ...
Unpacking beta (2.0) ...
Setting up alpha (1.0) ...
Setting up beta (2.0) ...
"""


def show_progress(output: str, packages: int, status: int = 0) -> tuple[int, list[str]]:
    """What is shown, without a terminal and after every line, while a program prints this."""
    script = (
        "set -euo pipefail; say() { printf 'dev: %s\\n' \"$*\" >&2; }; source tools/dev/progress.bash; "
        'PROGRESS_SECONDS=0; print() { printf \'%s\' "$1"; return "$2"; }; '
        'with_progress things "$1" /dev/null print "$2" "$3"'
    )
    command = ["bash", "-c", script, "-", str(packages), output, str(status)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    return done.returncode, [re.sub(r"\d+ s", "0 s", line) for line in done.stderr.splitlines()]


def test_an_installation_by_pip_says_what_it_does_how_much_and_how_long() -> None:
    status, shown = show_progress(PIP, 3)
    assert status == 0
    assert "dev: things: fetching 1 of 2 packages, 12 MB, 0 s" in shown
    assert "dev: things: fetching 2 of 2 packages, 13 MB, 0 s" in shown
    assert "dev: things: building beta, 13 MB, 0 s" in shown
    assert shown[-1] == "dev: things: unpacking 2 packages, 13 MB, 0 s."


def test_an_installation_by_apt_says_so_too() -> None:
    _, shown = show_progress(APT, 0)
    assert "dev: things: unpacking 1 of 2 packages, 12 MB, 0 s" in shown
    assert shown[-1] == "dev: things: setting up 2 of 2 packages, 12 MB, 0 s."


def test_an_installation_that_is_silent_is_still_reported() -> None:
    script = (
        "say() { printf 'dev: %s\\n' \"$*\" >&2; }; source tools/dev/progress.bash; PROGRESS_SECONDS=1; "
        'mkfifo "$1/quiet"; (exec 3<>"$1/quiet"; read -r -t 3 -u 3) | show_progress things 1'
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["bash", "-c", script, "-", folder], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert len(re.findall("dev: things: starting, [1-3] s$", done.stderr, re.MULTILINE)) >= 2, done.stderr


def test_an_installation_that_fails_shows_what_the_program_said(tmp_path: Path) -> None:
    script = (
        "set -euo pipefail; say() { :; }; source tools/dev/progress.bash; fail() { echo 'ERROR: no room'; return 3; }; "
        'with_progress things 1 "$1" fail'
    )
    command = ["bash", "-c", script, "-", str(tmp_path / "log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "ERROR: no room\n" == (tmp_path / "log").read_text()


FAKE_PYTEST = """#!/usr/bin/env bash
shift 2
printf '%s|' "$@"
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["-n", "3", "--dist", "worksteal"]),
        (["--full"], ["-m", "", "-n", "3", "--dist", "worksteal"]),
        (["--long"], ["-m", "full", "-n", "3", "--dist", "worksteal"]),
        (["--long", "--slice", "2/4"], ["-m", "full", "--slice", "2/4", "-n", "3", "--dist", "worksteal"]),
        (["--long", "tests/crash", "-x"], ["-m", "full", "tests/crash", "-x"]),
        (["-k", "one thing"], ["-k", "one thing"]),
    ],
)
def test_the_arguments_choose_the_tier_and_the_rest_goes_to_pytest(
    project: Path, given: list[str], expected: list[str]
) -> None:
    """A whole tier runs in three processes."""
    pretend_environment(project)
    (project / ".venv/bin/python").write_text(FAKE_PYTEST)
    result = run_copy(project, "test", "--no-services", *given)
    assert result.stdout.split("|")[:-1] == expected, result.stderr


def pretend_environment(project: Path) -> None:
    """Stamps as of a current environment, so that nothing is installed."""
    (project / ".venv/bin").mkdir(parents=True)
    (project / ".venv/bin/python").touch(mode=0o755)
    (project / "requirements").mkdir()
    (project / "requirements/dev.lock").write_text("")
    (project / "pyproject.toml").write_text("")
    empty = f"{hashlib.sha256(b'').hexdigest()}  -\n"
    (project / ".venv/.packages-stamp").write_text(f"dev\n{project}\n{empty}")
    (project / ".venv/.project-stamp").write_text(empty)


def test_ci_runs_the_commands_of_the_readme_on_a_machine_that_knows_nothing(project: Path, tmp_path: Path) -> None:
    """In a copy without what was installed, with an empty home, without a cache; and a slice of the long tier."""
    (project / ".ci").mkdir()
    (project / ".ci/run").write_bytes((ROOT / ".ci/run").read_bytes())
    (project / ".venv").mkdir()
    (project / "dev").write_text(
        '#!/usr/bin/env bash\nset -eu\n[ ! -e .venv ] && [ -z "$(ls -A "$HOME")" ] && [ -z "${JAVA_HOME:-}" ]\n'
        '[ "$(readlink /proc/$$/fd/0)" = /dev/null ]\necho "$PIP_NO_CACHE_DIR $CI $PIP_INDEX_URL: $*"\n'
    )
    environment = {
        **os.environ,
        "CI": "true",
        "PIP_INDEX_URL": "https://index",
        "JAVA_HOME": "/java",
        "TMPDIR": str(tmp_path),
    }
    before = set(tmp_path.iterdir())
    done = subprocess.run(
        ["bash", project / ".ci/run"], env=environment, capture_output=True, text=True, timeout=60, input="n\n"
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.replace("1 true https://index: ", "").splitlines()
    assert told[:3] == ["demo --orders 500", "check", "test"]
    assert re.fullmatch(r"test --long --slice [1-6]/6", told[3])
    assert set(tmp_path.iterdir()) == before, "it leaves nothing behind"


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
