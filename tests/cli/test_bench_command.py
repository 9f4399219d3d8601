"""`faregate bench`: what it measures, what it must never touch, and what it says of mistakes.

How fast something is depends on the machine: figures are checked against each other, not against a time.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from faregate.cli import app
from faregate.cli.bench.load import Load, Plan, SteadyClock
from faregate.cli.bench.meter import Durations, merged, percentile, windows
from faregate.errors import FaregateError
from faregate.transports.rabbitmq.survey import look_at
from tests.child import Child
from tests.presence import address

ROOT = Path(__file__).parents[2]
BUS, PLACED, CHECK = "tests.cli.loads:bus", "tests.cli.loads:Placed", "tests.cli.loads:Check"
SHORT = ("--count", "50", "--warm-up", "0s")


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "faregate", "bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "COLUMNS": "200"},
    )


def measured(*arguments: str, status: int = 0, **env: str) -> dict[str, Any]:
    """What it finds; within this process, as to start one for each test takes long."""
    shown = CliRunner().invoke(app, ["bench", *arguments, "--json"], env=env, catch_exceptions=False)
    assert shown.exit_code == status, shown.output
    found: dict[str, Any] = json.loads(shown.stdout)
    return found


def refused(*arguments: str) -> str:
    """What the command says of a mistake, likewise."""
    with pytest.raises(FaregateError) as caught:
        app(["bench", *arguments], standalone_mode=False)
    return str(caught.value)


# --- what it measures ---------------------------------------------------------------------------------------


def test_a_transport_is_measured_without_an_application() -> None:
    shown = process("memory:", PLACED, *SHORT, "--json")
    assert shown.returncode == 0, shown.stderr
    result = json.loads(shown.stdout)
    assert result["published"] == result["publish"]["count"] == result["end_to_end"]["count"] == 50
    assert result["outcomes"] == {"handled": 51}, "the first one goes alone, and does not count"
    assert (result["errors"], result["waiting"], result["stores"]) == ({}, 0, [])
    for figures in (result["publish"], result["end_to_end"]):
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p99"] <= figures["p999"] <= figures["max"]
    assert [percent for percent, _ in result["curves"]["publish"]][-1] == 100


def test_a_command_is_sent_to_the_private_consumer(tmp_path: Path) -> None:
    result = measured(f"journal:{tmp_path}/new", CHECK, *SHORT, "--store", f"sqlite:{tmp_path}/new.db", "--burst", "20")
    assert result["message"] == "check"
    assert result["outcomes"] == {"handled": 51}
    assert (tmp_path / "new").is_dir() and (tmp_path / "new.db").exists(), "on the disk that was asked for"


def test_the_nodes_of_a_bus_run_with_what_they_send(tmp_path: Path) -> None:
    result = measured(BUS, "Placed", *SHORT, "--generate", "tests.cli.loads:as_fields")
    assert [(each["node"], each["type"]) for each in result["subscriptions"]] == [
        ("billing", "Placed"),
        ("stock", "check"),
    ]
    assert result["outcomes"] == {"handled": 51}
    assert len(result["stores"]) == 1 and "faregate-bench-" in result["stores"][0]
    assert "temporary journal" in result["where"]


def test_with_a_rate_it_is_told_how_late_messages_were_sent() -> None:
    result = measured("memory:", PLACED, "--rate", "200", "--producers", "3", *SHORT)
    assert result["rate"] == 200
    assert 50 - 3 <= result["late"]["count"] <= 50


def test_what_is_sent_during_the_warm_up_does_not_count() -> None:
    result = measured("memory:", PLACED, "--count", "50", "--warm-up", "500ms", "--producers", "3")
    assert 50 <= result["published"] <= 53, "each producer may have one on its way when the warm-up ends"
    assert result["outcomes"]["handled"] > 54


def test_a_run_ends_at_its_time_whatever_the_rate_is() -> None:
    result = measured("memory:", PLACED, "--rate", "0.01", "--duration", "300ms", "--warm-up", "0s")
    assert result["seconds"] < 60


async def test_the_last_ones_are_waited_for_though_all_seemed_handled_while_producers_finished() -> None:
    load = Load(Plan(1, None, 1, None, 1.0, 0.0, 1000, 100.0), SteadyClock())
    load.stop()
    load._done.set()  # an earlier message ended before the last one was counted as sent
    load.sent = 1
    draining = asyncio.create_task(load._drain())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not draining.done()
    load._done.set()
    await draining


def test_messages_of_a_file_are_sent_again_and_again(tmp_path: Path) -> None:
    lines = tmp_path / "placed.jsonl"
    lines.write_text('{"number": 1, "text": "one"}\n\n{"number": 2, "text": "two", "unknown": 3}\n')
    trace = tmp_path / "trace"
    measured(BUS, "Placed", "--count", "9", "--warm-up", "0s", "--payload", str(lines), BENCH_TRACE=str(trace))
    assert sorted(set(trace.read_text().split("\n"))) == ["", "1 one", "2 two"]
    assert len(trace.read_text().splitlines()) == 10


def test_a_function_is_told_the_number_of_the_message(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    options = ("--count", "4", "--warm-up", "0s", "--generate", "tests.cli.loads:by_number")
    measured(BUS, "Placed", *options, BENCH_TRACE=str(trace))
    assert sorted(trace.read_text().splitlines()) == [f"{number} number {number}" for number in range(5)]


def test_a_message_that_nobody_here_has_a_class_for_is_any_json(tmp_path: Path) -> None:
    path = tmp_path / "any.json"
    path.write_text('[{"a": [1, 2]}, {}]')
    assert measured("memory:", "Whatever", *SHORT, "--payload", str(path))["outcomes"] == {"handled": 51}


def test_dead_letters_are_counted_and_make_the_status_one() -> None:
    options = ("--generate", "tests.cli.loads:unlucky", "--count", "5", "--warm-up", "0s")
    result = measured("tests.cli.loads:alone", "check", *options, status=1)
    assert result["outcomes"] == {"dead": 6}
    assert result["end_to_end"]["count"] == 0


def test_an_interrupted_run_shows_what_it_measured(tmp_path: Path) -> None:
    """The handlers say through a pipe that the run is under way; it ends with the process."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [
        sys.executable,
        "-m",
        "faregate",
        "bench",
        BUS,
        "Placed",
        "--duration",
        "10m",
        "--warm-up",
        "0s",
        "--json",
    ]
    env = {**os.environ, "BENCH_TRACE": str(pipe)}
    with Child(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        lines = os.fdopen(os.open(pipe, os.O_RDWR))  # so that it never ends while handlers open and close it
        for _ in range(20):
            lines.readline()
        child.send_signal(signal.SIGINT)
        draining = Thread(target=lambda: [None for _ in lines], daemon=True)
        draining.start()
        shown, _ = child.communicate(timeout=60)
    result = json.loads(shown)
    assert result["published"] >= 10 and result["waiting"] == 0


# --- what it must not touch ---------------------------------------------------------------------------------


def test_the_transport_and_the_store_of_the_bus_are_not_opened() -> None:
    """They are where nobody can open them."""
    assert measured(BUS, "Placed", *SHORT)["outcomes"] == {"handled": 51}


def test_a_store_that_is_named_is_used_by_a_bus_that_has_none(tmp_path: Path) -> None:
    arguments = ("tests.cli.loads:alone", "check", *SHORT, "--store", f"sqlite:{tmp_path}/bench.db")
    result = measured(*arguments)
    assert (result["outcomes"], result["stores"]) == ({"handled": 51}, [f"sqlite:{tmp_path}/bench.db"])
    assert "has something in it" in refused(*arguments)


def test_with_empty_handlers_nothing_of_the_application_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    result = measured(BUS, "Placed", *SHORT, "--empty", BENCH_TRACE=str(trace))
    assert not trace.exists()
    assert [each["node"] for each in result["subscriptions"]] == ["billing"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["amqp://ann:secret@localhost:1/", PLACED], "amqp://ann:***@localhost:1/ is a server that others may use"),
        ([BUS, "Placed", "--on", "amqp://localhost:1/"], "under the names of your nodes, to whoever handles it"),
        ([BUS, "Placed", "--store", "postgresql://localhost:1/x"], "have your handlers write there"),
        (["memory:", PLACED, "--store", "postgresql://localhost:1/x"], "keep a ledger and an outbox there"),
    ],
)
def test_a_server_is_left_alone_until_somebody_says_yes(arguments: list[str], told: str) -> None:
    said = refused(*arguments, *SHORT)
    assert told in said and "--yes" in said and "secret" not in said


def test_a_journal_or_database_that_is_there_is_left_alone_until_somebody_says_yes(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious").write_text("mine")
    (tmp_path / "shop.db").write_text("mine")
    for options in (["--on", f"journal:{tmp_path}/data"], ["--store", f"sqlite:{tmp_path}/shop.db"]):
        assert "has something in it" in refused(BUS, "Placed", *SHORT, *options)
    assert (tmp_path / "data/precious").read_text() == (tmp_path / "shop.db").read_text() == "mine"
    measured(f"journal:{tmp_path}/bench", PLACED, *SHORT)
    assert "has something in it" in refused(f"journal:{tmp_path}/bench", PLACED, *SHORT)
    assert measured(f"journal:{tmp_path}/bench", PLACED, *SHORT, "--yes")["outcomes"] == {"handled": 51}


@pytest.mark.services
def test_private_queues_are_removed_from_a_broker() -> None:
    from faregate.transports.rabbitmq import RabbitmqQueue

    url = address("FAREGATE_TEST_RABBITMQ")
    result = measured(url, PLACED, *SHORT, "--yes")
    assert result["outcomes"] == {"handled": 51}
    (subscription,) = result["subscriptions"]
    node = subscription["node"]
    assert node.startswith("bench-")
    queues = (f"{node}.Placed.{node.removesuffix('-consumer')}", f"{node}-dead")
    assert asyncio.run(_existing(RabbitmqQueue(url), queues)) == []


async def _existing(transport: Any, queues: Sequence[str]) -> list[str]:
    await transport.open()
    try:
        return [queue for queue in queues if (await look_at(transport, queue, "")).exists]
    finally:
        await transport.close()


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([BUS, "Nonsense"], "no node on this bus handles a message 'Nonsense'; the messages are: Placed, check"),
        ([BUS, "Placed", "--node", "nobody"], "nobody on this bus handles a Placed of nobody"),
        ([BUS, "check", "--to", "shop"], "nobody on this bus handles a check of shop"),
        ([BUS, "Placed", "--consumers", "3"], "each subscription of a bus says itself"),
        (["nowhere:bus", "Placed"], "there is no module 'nowhere'"),
        (["kafka:", "Placed"], "write module:attribute"),
        (["memory:", "Nonsense"], "nothing is known here: name its class, module:Class, or give --payload FILE"),
        (["memory:", "tests.cli.loads:Nonsense"], "has no 'Nonsense'"),
        (["memory:", "tests.cli.loads:by_number"], "is not a message class"),
        (["memory:", "no such name"], "is not a valid name"),
        (["memory:", PLACED, "--on", "memory:"], "--on is for the nodes of a bus"),
        (["memory:", PLACED, "--rate", "0"], "--rate must be more than 0 messages a second; got 0"),
        (["memory:", PLACED, "--rate", "-3"], "--rate must be more than 0"),
        (["memory:", PLACED, "--rate", "nan"], "--rate must be more than 0"),
        (["memory:", PLACED, "--duration", "0s"], "--duration must be more than 0 seconds"),
        (["memory:", PLACED, "--duration", "soon"], "--duration 'soon' is no length of time"),
        (["memory:", PLACED, "--report", "report.pdf"], "a report is called .html or .md"),
        (["memory:", PLACED, "--report", "/nowhere/report.md"], "there is no folder /nowhere"),
        (["memory:", PLACED, "--payload", "/nowhere.json"], "--payload /nowhere.json cannot be read"),
        (["memory:", PLACED, "--payload", "x.json", "--generate", "a:b"], "--payload or --generate, not both"),
        (["memory:", PLACED, "--generate", "tests.cli.loads"], "does not name a function: write module:function"),
        (["memory:", PLACED, "--generate", "tests.cli.loads:nothing"], "has no 'nothing'"),
        (["memory:", PLACED, "--generate", "tests.cli.loads:broken"], "failed for message 0: LookupError: no more"),
        (["memory:", PLACED, "--generate", "tests.cli.loads:unlucky"], "returned a Check for message 0"),
        (
            ["memory:", PLACED, "--generate", "tests.cli.loads:wrong"],
            "message 3: the body is not a Placed: Expected `int`",
        ),
        (["amqp://localhost:1/?connect=1s", PLACED, "--yes"], "no RabbitMQ answered at amqp://localhost:1/"),
    ],
)
def test_a_mistake_is_one_clear_sentence(arguments: list[str], told: str) -> None:
    assert told in refused(*arguments, *(SHORT if "--duration" not in arguments else ()))


def test_a_mistake_ends_the_process_with_one_sentence() -> None:
    shown = process(BUS, "Nonsense", *SHORT)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "the messages are: Placed, check" in shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"number": 1}\n\n{"number": "x"}\n', "line 3: the body is not a Placed: Expected `int`"),
        ("a.jsonl", '{"number": 1}\n{"number": \n', "line 2: the body is not a Placed"),
        ("a.json", '[{"number": 1}, {}]', "message 2: the body is not a Placed: Object missing required field"),
        ("a.json", '{"number": 1}\n{"number": 2}\n', "A file with a message on each line is called .jsonl"),
        ("a.json", "[]", "holds no message"),
        ("a.jsonl", "\n", "holds no message"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told_with_its_line_and_field(
    tmp_path: Path, name: str, content: str, told: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    said = refused("memory:", PLACED, *SHORT, "--payload", str(path))
    assert told in said and name in said


# --- reports ------------------------------------------------------------------------------------------------


def test_people_see_a_table_and_a_page_with_charts(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    shown = process("memory:", PLACED, "--duration", "500ms", "--warm-up", "0s", "--report", str(page))
    assert shown.returncode == 0, shown.stderr
    assert "publish to handled" in shown.stdout and "p99.9" in shown.stdout
    html = page.read_text()
    assert html.count("<svg ") == 3 and "<script" not in html
    assert "Throughput" in html and "Latency over time" in html


def test_a_report_in_markdown_has_its_charts_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    measured("memory:", PLACED, "--duration", "500ms", "--warm-up", "0s", "--report", str(page))
    text = page.read_text()
    for number in (1, 2, 3):
        assert f"(report-{number}.svg)" in text
        assert (tmp_path / f"report-{number}.svg").read_text().startswith("<svg ")


def test_the_command_explains_itself() -> None:
    shown = process("--help")
    assert shown.returncode == 0
    for option in ("--payload", "--generate", "--rate", "--burst", "--on", "--yes", "--report", "--json"):
        assert option in shown.stdout


# --- the figures --------------------------------------------------------------------------------------------


def durations(*pairs: tuple[float, float]) -> Durations:
    found = Durations()
    for at, took in pairs:
        found.add(at, took)
    return found


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([7.0], 0.0, 7.0), ([7.0], 1.0, 7.0), ([1.0, 2.0], 0.5, 1.0), ([1.0, 2.0], 0.51, 2.0)],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_the_99th_percentile_of_a_hundred_is_the_99th() -> None:
    assert percentile([float(number) for number in range(1, 101)], 0.99) == 99.0
    assert percentile([float(number) for number in range(1, 1001)], 0.999) == 999.0


def test_what_began_during_the_warm_up_does_not_count() -> None:
    found = durations((10.0, 0.5), (10.4, 0.5), (11.0, 0.5)).since(10.0)
    assert list(found.at) == [11.0]


def test_windows_hold_all_that_ended_in_them_and_a_part_of_a_window_is_left_out() -> None:
    width, found = windows(0.0, 10.05, {"handled": durations((0.05, 1.0), (0.06, 3.0), (9.9, 2.0), (10.02, 9.0))})
    assert (width, len(found)) == (0.2, 50)
    assert (found[0]["handled"], found[0]["handled_p50"], found[0]["handled_p99"]) == (10.0, 1.0, 3.0)
    assert found[1]["handled_p50"] is None
    assert sum(row["handled"] * width for row in found) == pytest.approx(3)


def test_series_of_several_nodes_are_merged_in_order() -> None:
    found = merged([durations((1.0, 0.1), (3.0, 0.3)), durations((2.0, 0.2))])
    assert list(found.took) == [0.1, 0.2, 0.3]
