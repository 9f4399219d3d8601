"""The files that operating.md and the guides show can be used as they stand, and every command line is one of ours.

Versions and kinds that pages list are those of the code.
"""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from faregate.cli import app
from faregate.core.alarms import AlarmKind
from faregate.stores.sqlite.migrate import MIGRATIONS
from tests.child import Child
from tests.docs.pages import DOCS, PAGES, blocks, name

OPERATING = DOCS / "operating.md"


def file(title: str) -> str:
    [found] = [block.text for block in blocks(OPERATING, "ini", "yaml", "dockerfile") if block.title == title]
    return found


def objects(title: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(file(title))}


def check_command(words: list[str]) -> None:
    """Parses the words as the command line does, and runs nothing. Raises for a command or option that there is not."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("faregate", [], resilient_parsing=True)
    while hasattr(command, "commands"):
        if words and words[0].startswith("-") and command.invoke_without_command:
            break  # a group that is a command, too
        assert words and words[0] in command.commands, f"there is no command {' '.join(words)!r}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, [*words], parent=context)


def commands_of_pages() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(page, "console"):
            for line in block.text.splitlines():
                found = re.match(r"\$ (?:\w+=\S+ )*(faregate .*)", line)
                if found:
                    yield pytest.param(found[1], id=f"{name(page)}: {found[1]}")


@pytest.mark.parametrize("line", list(commands_of_pages()))
def test_commands_of_the_pages_are_commands(line: str) -> None:
    words = shlex.split(re.sub(r"[|;<>].*|&$", "", line))
    check_command(words[1:])


@pytest.mark.parametrize("line", ["run app:bus --htp 80", "serve app:bus", "store migrat sqlite:x", "run a:b c"])
def test_a_wrong_command_would_be_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no command|no such option|unexpected"):
        check_command(line.split())


@pytest.mark.parametrize(
    ("title", "kind", "replicas"), [("shop-journal.yaml", "StatefulSet", 1), ("shop-rabbitmq.yaml", "Deployment", 3)]
)
def test_kubernetes_objects_fit_together(title: str, kind: str, replicas: int) -> None:
    found = objects(title)[kind]
    spec, pod = found["spec"], found["spec"]["template"]["spec"]
    assert spec["replicas"] == replicas
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["terminationGracePeriodSeconds"] > 30, "more than drain_seconds="
    [container] = pod["containers"]
    port = container["ports"][0]
    assert container["command"][-1] == f"0.0.0.0:{port['containerPort']}"
    for probe, path in (("livenessProbe", "/live"), ("readinessProbe", "/ready"), ("startupProbe", "/live")):
        assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
    volumes = {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])}
    for each in (container, *pod.get("initContainers", [])):
        assert {mount["name"] for mount in each.get("volumeMounts", [])} == volumes


def test_commands_of_the_files_are_commands() -> None:
    lines = []
    for title in ("shop-journal.yaml", "shop-rabbitmq.yaml"):
        for found in objects(title).values():
            pod = found["spec"]["template"]["spec"]
            lines += [each["command"] for each in (*pod["containers"], *pod.get("initContainers", []))]
    lines.append(yaml.safe_load(re.search(r"^CMD (.*)$", file("Containerfile"), re.MULTILINE)[1]))
    lines.append(shlex.split(unit()["Service"]["ExecStart"]))
    assert len(lines) == 6
    for line in lines:
        words = shlex.split(line[2]) if line[0] == "sh" else line
        assert Path(words[0]).name == "faregate"
        check_command(words[1:])


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(file("/etc/systemd/system/shop.service"))
    return parser


def test_the_unit_gives_more_time_than_draining_takes() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > 30
    assert f"/run/{service['RuntimeDirectory']}" in service["Environment"]
    assert f"/var/lib/{service['StateDirectory']}" in service["Environment"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = file("/etc/systemd/system/shop.service")
    text = text.replace("/srv/shop/.venv/bin/faregate", f"{Path(sys.executable).parent}/faregate")
    (tmp_path / "shop.service").write_text(text.replace("User=shop", "User=root"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "shop.service"], capture_output=True, text=True
    )
    complaints = [line for line in verified.stderr.splitlines() if "shop.service" in line]
    assert complaints == []


def test_the_logging_of_the_program_replaces_that_of_the_command(tmp_path: Path) -> None:
    [block] = [block for block in blocks(OPERATING, "python") if block.title == "shop/app.py"]
    bus = 'import faregate as fg\nbus = fg.Bus("memory:", nodes=[fg.Node("shop")])\n'
    (tmp_path / "logged.py").write_text(block.text + bus)
    arguments = [sys.executable, "-m", "faregate", "run", "logged:bus"]
    with Child(arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        line = next(line for line in child.stderr if "faregate.bus" in line)
        child.terminate()
        child.communicate()
    assert re.match(r"\d{4}-\d\d-\d\d \S+ INFO faregate\.bus - - ", line), line


def test_alerts_name_metrics_that_there_are() -> None:
    known = set(re.findall(r"`(faregate_\w+)`", (DOCS / "observability.md").read_text()))
    rules = yaml.safe_load(file("faregate-alerts.yaml"))["groups"][0]["rules"]
    assert len(rules) == 4
    for rule in rules:
        assert set(re.findall(r"faregate_\w+", rule["expr"])) <= known, rule["alert"]


def test_the_version_of_the_tables_is_the_current_one() -> None:
    shown = {found for page in PAGES for found in re.findall(r"schema version (\d+)", page.read_text())}
    assert shown == {f"{len(MIGRATIONS)}"}


@pytest.mark.parametrize("page", ["guarantees.md", "operating.md"])
def test_the_tables_of_alarms_have_each_kind_once(page: str) -> None:
    _, _, table = (DOCS / page).read_text().partition("\n| alarm |")
    rows = re.findall(r"^\| `([\w-]+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    assert sorted(rows) == sorted(get_args(AlarmKind))
