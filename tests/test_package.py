"""The package as somebody installs it: what is in it, what it says of itself, and that the wheel alone is enough.

The wheel is built from the source distribution, as `python -m build` does it, and installed into an empty environment
with an empty home and without pip's cache. Its dependencies come from requirements/dev.lock, by their hashes, and pip
refuses a wheel that needs another one.
"""

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import requires
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs import first_screen
from tests.presence import missing

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?==(?:[^\n]*\\\n)(?: +--hash=[^\n]*\n)+", re.MULTILINE)


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**outside(), **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )


def outside() -> dict[str, str]:
    """The environment of somebody who has never seen this folder: how to reach the package index stays."""
    kept = re.compile(r"PATH|LANG|LC_ALL|TMPDIR|.*_proxy|PIP_.*|SSL_CERT_.*|REQUESTS_CA_BUNDLE", re.IGNORECASE)
    return {name: value for name, value in os.environ.items() if kept.fullmatch(name)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(folder.iterdir())
    version = PROJECT["version"]
    assert [each.name for each in found] == [f"faregate-{version}-py3-none-any.whl", f"faregate-{version}.tar.gz"]
    return found


@pytest.fixture(scope="module")
def wheel(built: list[Path]) -> Path:
    return built[0]


def test_the_version_is_one_and_the_changelog_knows_it() -> None:
    from faregate import __version__

    headings = re.findall(r"^## (\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0][0] == __version__ == PROJECT["version"]
    assert [state for _, state in headings[1:] if state == "unreleased"] == []


def test_the_index_would_take_it(built: list[Path]) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=built[0].parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        head, _, readme = archive.read(name).decode().partition("\n\n")
    told = head.splitlines()
    for line in (
        f"Version: {PROJECT['version']}",
        f"Summary: {PROJECT['description']}",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.11",
        "Description-Content-Type: text/markdown",
        "Classifier: Typing :: Typed",
        "Classifier: Operating System :: POSIX :: Linux",
    ):
        assert line in told
    assert readme.strip() == (ROOT / "README.md").read_text().strip()
    assert {f"Provides-Extra: {each}" for each in PROJECT["optional-dependencies"]} <= set(told)
    in_table = set(
        re.findall(r"`([\w-]+)`", (ROOT / "README.md").read_text().partition("## Extras")[2].split("## ")[0])
    )
    assert set(PROJECT["optional-dependencies"]) <= in_table, "an extra that the README does not name"


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    places = ((ROOT / "src", ""), (ROOT / "examples", "faregate/examples/"))
    wanted = set()
    for folder, inside in places:
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            belongs = not inside or name.startswith(("demo/", "shop/"))
            if belongs and path.is_file() and "__pycache__" not in name and ".egg-info" not in name:
                wanted.add(inside + name)
    assert {"faregate/py.typed", "faregate/stores/sqlite/schema.sql", "pyspark_faregate/__init__.py"} <= wanted
    assert wanted <= names
    assert {name for name in names - wanted if ".dist-info/" not in name} == set(), "what nobody asked for"


# --- the wheel alone ------------------------------------------------------------------------------------------


class Installed(NamedTuple):
    folder: Path
    home: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    @property
    def faregate(self) -> Path:
        return self.folder / "bin/faregate"


@pytest.fixture(scope="module")
def alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("alone")
    found = Installed(place / "venv", place / "home")
    found.home.mkdir()
    venv.create(found.folder, with_pip=False)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (place / "wanted.txt").write_text(f"faregate @ {wheel.as_uri()} --hash=sha256:{digest}\n{locked()}")
    pip = (sys.executable, "-m", "pip", "--python", found.python, "install", "--disable-pip-version-check")
    settings = {"HOME": str(found.home), "PIP_NO_CACHE_DIR": "1"}
    done = run(*pip, "--require-hashes", "-r", place / "wanted.txt", cwd=place, **settings)
    if "Failed to establish a new connection" in done.stderr or "No matching distribution" in done.stderr:
        missing(f"the package index cannot be reached: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return found


def locked() -> str:
    """The lines of the lock for what the wheel needs without any extra, and for what that needs."""
    names: set[str] = set()
    left = [Requirement(each) for each in PROJECT["dependencies"]]
    while left:
        needed = left.pop()
        name = canonicalize_name(needed.name)
        if name not in names and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            names.add(name)
            left += map(Requirement, requires(name) or [])
    found = {each[1]: each[0] for each in LOCKED.finditer((ROOT / "requirements/dev.lock").read_text())}
    return "".join(found[name] for name in sorted(names))


@pytest.mark.timeout(600)
def test_the_first_screen_of_the_readme_runs_with_the_wheel_alone(alone: Installed, tmp_path: Path) -> None:
    environment = {**outside(), "HOME": str(alone.home), "PYTHONUNBUFFERED": "1"}
    assert first_screen.follow(tmp_path, [str(alone.faregate)], environment) == ["17"]
    where = run(alone.python, "-c", "import faregate; print(faregate.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(alone.folder))


@pytest.mark.timeout(600)
def test_it_brings_along_what_it_declares_and_nothing_else(alone: Installed, tmp_path: Path) -> None:
    code = "from importlib.metadata import distributions; print(*(each.name for each in distributions()))"
    there = {canonicalize_name(name) for name in run(alone.python, "-c", code, cwd=tmp_path).stdout.split()}
    assert {"faregate", *(Requirement(each).name for each in PROJECT["dependencies"])} <= there
    extras = {Requirement(each).name for extra in PROJECT["optional-dependencies"].values() for each in extra}
    assert there & extras == set()


@pytest.mark.timeout(600)
def test_its_command_line_explains_itself_and_has_the_demo(alone: Installed, tmp_path: Path) -> None:
    for command in ([], ["run"], ["demo"], ["spark", "audit"]):
        done = run(alone.faregate, *command, "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Usage: faregate" in done.stdout
    assert "--orders" in run(alone.faregate, "demo", "--help", cwd=tmp_path).stdout


SESSION = """
import asyncio, sys
class Bill(fg.Command): pass
node = fg.Node('a')
@node.on(Bill)
async def bill(command: Bill, ctx: fg.AsyncContext): ctx.session.add(command)
async def main():
    async with fg.testing.bench(node) as bench:
        await bench.send(Bill())
        await bench.settle()
        sys.exit(bench.dead_letters()[0].error.partition('\\n')[0])
asyncio.run(main())
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("postgres", "fg.Bus('memory:', nodes=[fg.Node('a')], store='postgresql://db/shop')"),
        ("rabbitmq", "fg.Bus('amqp://localhost/', nodes=[fg.Node('a')])"),
        ("spark", "fg.spark.audit"),
        ("prometheus", "fg.observe.Prometheus()"),
        ("otel", "fg.observe.OpenTelemetry()"),
        ("sqlalchemy", SESSION),
    ],
)
def test_what_needs_an_extra_says_which_one(alone: Installed, tmp_path: Path, extra: str, code: str) -> None:
    done = run(alone.python, "-c", f"import faregate as fg; {code}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"which is not installed: pip install 'faregate[{extra}]'" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(600)
def test_a_command_that_needs_an_extra_is_one_sentence(alone: Installed, tmp_path: Path) -> None:
    done = run(alone.faregate, "spark", "audit", "data", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'faregate[spark]'" in done.stderr
    assert "Traceback" not in done.stderr
