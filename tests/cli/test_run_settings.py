"""`faregate run` as a container is set up: every option from the environment, and logs as lines of JSON."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import typer
from typer.testing import CliRunner

from faregate.cli import app, reload
from faregate.cli.run import run
from tests.child import Child

FIELDS = ("node", "message_id", "correlation_id", "key", "lane")
APP = """
import logging
import faregate as fg

class Tick(fg.Event):
    number: int

clock = fg.Node("clock", publishes=[Tick])

@clock.on(Tick, key="number", retry=fg.Retry(0), redeliver=fg.Redeliver())
async def work(tick: Tick):
    logging.getLogger("ticking").info("tick\\n%s", tick.number, extra={"colour": "red", "key": "mine"})
    logging.getLogger("ticking").info("done")
    raise fg.Permanent("broken\\nclock")

class TickingBus(fg.Bus):
    async def start(self):
        await super().start()
        await self.publish(Tick(number=1))

bus = TickingBus("memory:", nodes=[clock], store="memory:")
"""


@contextmanager
def running(folder: Path, *arguments: str, **environment: str) -> Iterator[Child]:
    (folder / "ticking.py").write_text(APP)
    process = Child(
        [sys.executable, "-m", "faregate", "run", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80", **environment},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run_until(process: Child, text: str) -> tuple[str, str]:
    """What it says on standard output and on standard error, when it is told to stop after it has said this."""
    assert process.stderr is not None and process.stdout is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if text in line:
            break
    else:
        raise AssertionError(f"it ended without saying {text!r}: {said}")
    process.send_signal(signal.SIGTERM)
    rest, out = process.stderr.read(), process.stdout.read()
    assert process.wait(20) == 0
    return out, "".join(said) + rest


def test_every_parameter_has_a_variable() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    found = {each.name: each.envvar for each in command.params if each.name != "help"}
    assert found == {
        "target": "FAREGATE_BUS",
        "reload": "FAREGATE_RELOAD",
        "log_level": "FAREGATE_LOG_LEVEL",
        "log_format": "FAREGATE_LOG_FORMAT",
        "as_json": "FAREGATE_JSON",
        "http": "FAREGATE_HTTP",
    }


SETTINGS = {"FAREGATE_BUS": "ticking:bus", "FAREGATE_LOG_FORMAT": "json", "FAREGATE_HTTP": "0", "FAREGATE_JSON": "1"}


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    with running(tmp_path, **SETTINGS) as process:
        out, said = run_until(process, "dead letter")
    assert json.loads(out)["outcomes"]["dead"] == 1
    records = [json.loads(line) for line in said.splitlines()]
    assert said.isascii()
    assert any("/live and /ready are at http://127.0.0.1:" in each["message"] for each in records)
    assert any("draining" in each["message"] for each in records)
    assert all({"time", "level", "logger", "message", *FIELDS} <= each.keys() for each in records)


def test_a_line_of_json_names_its_message_and_has_what_the_program_adds(tmp_path: Path) -> None:
    with running(tmp_path, **SETTINGS) as process:
        _, said = run_until(process, "dead letter")
    [first, second] = [each for each in map(json.loads, said.splitlines()) if each["logger"] == "ticking"]
    assert (first["message"], first["colour"], first["key"], first["level"]) == ("tick\n1", "red", "mine", "info")
    assert first["time"].endswith("Z")
    assert (second["node"], second["key"]) == ("clock", "1")
    assert second["lane"].startswith("lane-")
    assert second["message_id"] and second["correlation_id"]
    alarm = next(each for each in map(json.loads, said.splitlines()) if "alarm dead-letter" in each["message"])
    assert [alarm[name] for name in FIELDS] == [second[name] for name in FIELDS]
    assert alarm["message"].endswith("Permanent: broken")  # the first line of the error
    outside = next(each for each in map(json.loads, said.splitlines()) if "draining" in each["message"])
    assert [outside[name] for name in FIELDS] == [None] * 5


def test_an_option_goes_before_its_variable(tmp_path: Path) -> None:
    with running(tmp_path, "ticking:bus", "--log-format", "text", **SETTINGS) as process:
        _, said = run_until(process, "dead letter")
    assert "[clock lane-0 message " in said
    assert "draining; press Ctrl-C again to stop at once\n" in said


def test_the_level_comes_from_the_environment(tmp_path: Path) -> None:
    with running(tmp_path, "ticking:bus", FAREGATE_LOG_LEVEL="error") as process:
        _, said = run_until(process, "running 1 subscription of 1 node on memory:; Ctrl-C drains")
    assert "ticking" not in said


def test_a_child_that_is_reloaded_is_not_asked_to_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own this would, when broken, start children of children without an end."""
    child = mock.Mock(**{"poll.return_value": None, "wait.return_value": 0})
    popen = mock.Mock(return_value=child)
    monkeypatch.setattr(reload.subprocess, "Popen", popen)
    monkeypatch.setattr(reload.time, "sleep", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(reload.signal, "signal", mock.Mock())
    monkeypatch.setitem(run.__globals__, "Log", mock.Mock())  # the log of this process is pytest's
    given = {"FAREGATE_BUS": "ticking:bus", "FAREGATE_RELOAD": "true", "FAREGATE_HTTP": "9464"}
    assert CliRunner().invoke(app, ["run"], env=given).exit_code == 0
    command, environment = popen.call_args.args[0], popen.call_args.kwargs["env"]
    assert command[4:] == ["ticking:bus", "--log-level", "info", "--log-format", "text", "--http", "9464"]
    assert "FAREGATE_RELOAD" not in environment
    assert environment["FAREGATE_BUS"] == "ticking:bus"


@pytest.mark.parametrize(("form", "asked"), [("json", "0"), ("json", "1"), ("text", "1")])
def test_what_it_ends_with_comes_in_the_format_that_was_asked_for(tmp_path: Path, form: str, asked: str) -> None:
    given = {"FAREGATE_BUS": "nowhere:bus", "FAREGATE_LOG_FORMAT": form, "FAREGATE_JSON": asked}
    with running(tmp_path, **given) as process:
        out, said = process.communicate(timeout=60)
    assert process.returncode == 1
    told = json.loads(out if asked == "1" else said)["message"]
    assert "there is no module 'nowhere'" in told


@pytest.mark.parametrize(
    ("name", "meant"),
    [("FAREGATE_LOGLEVEL", "FAREGATE_LOG_LEVEL"), ("FAREGATE_HTPP", "FAREGATE_HTTP"), ("FAREGATE_PORT", None)],
)
def test_a_variable_that_looks_like_a_setting_is_told_with_the_one_that_is_meant(
    tmp_path: Path, name: str, meant: str | None
) -> None:
    with running(tmp_path, "ticking:bus", **{name: "1"}) as process:  # Kubernetes sets FAREGATE_PORT for a service
        _, said = run_until(process, "dead letter")
    told = [line for line in said.splitlines() if f"{name} is no setting" in line]
    assert len(told) == (0 if meant is None else 1)
    assert all("WARNING" in line and f"did you mean {meant!r}" in line for line in told)


def test_an_error_of_the_module_is_shown_without_the_frames_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("total = 1 / 0\n")
    with running(tmp_path, "broken:bus") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    shown = [line.strip() for line in said.splitlines() if line.startswith("  File")]
    assert shown == [f'File "{tmp_path}/{name}.py", line 1, in <module>' for name in ("broken", "deeper")]
    assert said.endswith("ZeroDivisionError: division by zero\n")


def test_a_setting_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    with running(tmp_path, "ticking:bus", FAREGATE_LOG_FORMAT="xml") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "FAREGATE_LOG_FORMAT" in said or "--log-format" in said
