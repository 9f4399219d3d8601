"""Every table of the command line at 80 columns: whole headings, and no line longer than that."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from faregate import ids
from faregate.cli import app, dead_view
from faregate.cli.bench import report
from faregate.cli.journal import info, tail
from faregate.cli.output import console
from faregate.cli.rabbitmq import doctor
from faregate.cli.spark import jobs
from faregate.cli.status import Seen
from faregate.cli.store import _show as show_store
from faregate.cli.table import Column, numbers, table
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.presence import Consumed, Heartbeat
from faregate.ports.store import Lease, StoreInfo

WIDTH = 80
NODE = "warehouse-fulfilment"
TYPE = "eu.example.warehouse.ConsignmentDespatched"
BIG = 12_345_678


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(console, "_width", WIDTH)


def check(shown: str, headings: list[str], *cells: str) -> list[str]:
    """The lines; each heading is on one of them, or its words are in a column over several; cells may be folded."""
    lines = shown.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    words = shown.split()
    missing = [word for heading in headings for word in heading.split() if word not in words]
    assert missing == [], shown
    assert all(any(cell in line for line in lines) for cell in cells), shown
    return lines


def letters(count: int = 3) -> list[DeadLetter]:
    found = []
    for number in range(count):
        envelope = Envelope(
            publication_id=ids.root_id(), type=TYPE, source=NODE, correlation_id="c", sent_at=time.time(), body=b"{}"
        )
        found.append(
            DeadLetter.of(
                NODE, envelope, "too-many-starts", "Permanent: " + "why " * 40, time.time(), queue=f"{number}"
            )
        )
    return found


def test_dead_letters(capsys: pytest.CaptureFixture[str]) -> None:
    listed = letters()
    dead_view.show_list(listed, more=False)
    shown = capsys.readouterr().out
    lines = check(shown, ["ID", "TYPE", "NODE", "REASON", "STATUS", "LAST FAILED"], "3 open", "open")
    beginnings = {line.split()[0] for line in lines if line.startswith("01") and "open" in line}
    assert len(beginnings) == 3
    for begun, letter in zip(sorted(beginnings), sorted(each.message_id for each in listed), strict=True):
        assert letter.startswith(begun)


def test_where_there_is_room_the_ids_of_dead_letters_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = letters()
    monkeypatch.setattr(console, "_width", 200)
    dead_view.show_list(listed, more=False)
    wide = capsys.readouterr().out
    monkeypatch.delenv("COLUMNS")  # a pipe
    monkeypatch.setattr(console, "_width", WIDTH)
    dead_view.show_list(listed, more=False)
    piped = capsys.readouterr().out.splitlines()
    for letter in listed:
        assert letter.message_id in wide
        assert any(letter.message_id in line and TYPE in line and NODE in line for line in piped)
    assert sum("why why" in line and len(line) > WIDTH for line in piped) == 3


def test_ids_that_begin_alike_are_told_apart() -> None:
    same = "01a1e18c-44bf-81ad-837d-f571280e1cb"
    assert dead_view._beginnings([f"{same}3", f"{same}4", f"{same}4"]) == [f"{same}3", f"{same}4", f"{same}4"]
    assert dead_view._beginnings([f"{same}3", "01a1e18c-44c0-81ad-837d-f571280e1cb3"]) == [same[:13], "01a1e18c-44c0"]


@pytest.mark.parametrize("parted", [False, True])
def test_status(capsys: pytest.CaptureFixture[str], parted: bool) -> None:
    queues = [f"{NODE}.{TYPE}.g1-{number}" for number in range(24)] if parted else [f"{NODE}.{TYPE}"]
    consumed = Consumed(TYPE, NODE, queues, 12_345.6, BIG, BIG, BIG // 10, 100, paused=True, why="by hand")
    beat = Heartbeat("billing", "a-machine-with-a-name-15767-df20e89b", "0.1.0", 1.0, 2.0, [consumed], {"stalled": 3})
    seen = Seen("journal:./data", ["billing", "shop"])
    seen.hear(beat)
    console.print(seen.shown())
    headings = ["SUBSCRIPTION", "PER S", "HANDLED", "REDELIVERED", "DEAD", "BUSY", *(["PARTS"] if parted else [])]
    cells = ["12,345.6", "12,345,678", "100", *(["23"] if parted else [])]
    lines = check(capsys.readouterr().out, headings, *cells)
    assert any(all(heading in line for heading in headings) for line in lines), lines


def test_store_info(capsys: pytest.CaptureFixture[str]) -> None:
    show_store(StoreInfo(url="sqlite:shop.db", version=3, known=3, tables={"faregate_" + "x" * 90: BIG, "y": 1}))
    check(capsys.readouterr().out, ["TABLE", "ROWS"], "12,345,678")


def test_journal_info(capsys: pytest.CaptureFixture[str]) -> None:
    queue = {"queue": f"{NODE}.{TYPE}.{NODE}", "node": NODE, "waiting": BIG, "later": BIG}
    segments = {"count": 9, "bytes": BIG, "sealed": 8, "rolled": 1, "compacted": 1, "compacted_messages": 5}
    told = {"path": "./data", "id": "x" * 32, "version": 2, "writer": 17, "earliest": 0, "latest": BIG}
    told |= {"first_time": "2026-11-17T14:57:56.000Z", "last_time": "2026-11-17T14:57:56.000Z", "segments": segments}
    told |= {"types": {TYPE * 3: BIG}, "queues": [{**queue, "dead_letters": False}, {**queue, "dead_letters": True}]}
    told |= {"readers": [{"name": "spark " + TYPE * 2, "offset": BIG, "lag": BIG}], "spool": 2, "quarantine": 1}
    info.show({**told, "foreign": [], "trouble": []})
    headings = ["TYPE", "MESSAGES", "QUEUE", "WAITING", "DUE LATER", "DEAD LETTERS AT", "READER"]
    check(capsys.readouterr().out, [*headings, "NEXT OFFSET", "BEHIND"], "12,345,678")


@pytest.mark.parametrize("key", [None, "customer-17"])
def test_journal_tail(capsys: pytest.CaptureFixture[str], key: str | None) -> None:
    kind = "OrderPlaced" if key is None else TYPE[11:]
    line: dict[str, Any] = {
        "offset": BIG,
        "time": "2026-11-17T14:57:56.000Z",
        "type": kind,
        "source": "shop",
        "destination": None,
    }
    line |= {"key": key, "publication_id": ids.root_id(), "payload": "x" * 500, "payload_cut": False}
    tail.print_line({**line, "content_encoding": None, "payload_bytes": 500}, as_json=False)
    check(capsys.readouterr().out, [], line["publication_id"], str(BIG), key or kind)


@pytest.mark.parametrize("leased", [False, True])
def test_rabbitmq_doctor(capsys: pytest.CaptureFixture[str], leased: bool) -> None:
    names = [f"{NODE}.{TYPE}.{NODE}.g1-{number}" for number in range(2)]
    queues: list[Any] = [
        SimpleNamespace(name=names[0], role="current", exists=True, difference=None, waiting=BIG, consumers=12),
        SimpleNamespace(name=names[1], role="left over", exists=False, difference=None, waiting=0, consumers=0),
    ]
    leases = {name: Lease(NODE, name, "a-machine-15767-df20e89b", 1, 9.0, None) for name in names} if leased else {}
    doctor.show("amqp://localhost/", [doctor.Part("billing takes it", queues, leases, [])], [])
    headings = ["QUEUE", "WAITING", "CONSUMERS", "STATE", *(["HELD BY"] if leased else [])]
    check(capsys.readouterr().out, headings, "12,345,678", "missing")


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"count": BIG, "p50": 0.000_123, "p90": 0.123, "p99": 0.987, "p999": 1.23, "max": 1234.5}
    result = {"message": "OrderPlaced", "where": "journal", "stores": [], "producers": 1, "burst": 1, "rate": None}
    result |= {"warm_up": 1, "seconds": 9.9, "publish": times, "end_to_end": times, "published_per_second": 123_456.7}
    each = {"type": TYPE, "node": NODE, "per_second": 99_999.9, **times}
    result |= {"handled_per_second": 99_999.9, "subscriptions": [each, each], "late": None, "errors": {}}
    report.show({**result, "outcomes": {}, "alarms": {}, "waiting": 0})
    headings = ["count", "per s", "p50", "p90", "p99", "p99.9", "max"]
    check(capsys.readouterr().out, headings, "123 µs", "987 ms", "publish to")


AUDITED = (
    *("published", "handled", "skipped", "filtered", "duplicate", "dead", "parked", "in_flight", "missing", "double"),
    *("out_of_order", "not_sent", "altered", "unpublished"),
)


@pytest.mark.parametrize("names", [AUDITED, ("published", "handled", "in_flight", "missing", "double", "out_of_order")])
@pytest.mark.parametrize("count", [1, BIG])
def test_spark_audit(capsys: pytest.CaptureFixture[str], names: tuple[str, ...], count: int) -> None:
    pytest.importorskip("pyspark")
    rows = [{"node": node, **dict.fromkeys(AUDITED, 0), **dict.fromkeys(names, count)} for node in (NODE, "billing")]
    summary = {**dict.fromkeys(AUDITED, 0), **dict.fromkeys(names, count), "findings": 0, "from_offset": 0}
    found = SimpleNamespace(summary={**summary, "to_offset": BIG}, table=rows, notes=[], ok=True)
    jobs._show_audit(found, [])
    headings = ["RECIPIENT", *(name.replace("_", " ").upper() for name in names)]
    shown = capsys.readouterr().out
    check(shown, headings, "it holds")
    assert shown.split().count(f"{count:,}") >= 2 * len(names)


def test_spark_rates(capsys: pytest.CaptureFixture[str]) -> None:
    start = datetime(2026, 11, 17, 14, tzinfo=UTC)
    times = {"p50": 0.0123, "p95": 1.25, "p99": 12.5}
    rows = [
        {"node": NODE, "type": TYPE, "from": start + timedelta(seconds=10 * at), "per_second": 34.5 * at, **times}
        | {"to": start + timedelta(seconds=10 * at + 10), "ended": BIG, "dead": 12_345, "redelivered": 12_345}
        for at in range(300)
    ]
    jobs._show_rates(rows, 10.0)
    headings = ["NODE", "TYPE", "ENDED", "PEAK/S", "DEAD", "REDELIVERED", "P50", "P95", "P99"]
    check(capsys.readouterr().out, headings, "10,315.5", "▁▁▂▂")


COLUMNS = [Column("NODE"), *numbers("OUT OF ORDER", "DEAD"), Column("NOTE")]


def lay(rows: list[list[str | Text]], width: int | None, **more: Any) -> list[str]:
    return [line.plain for line in table(COLUMNS, rows, width, **more)]


def test_where_it_fits_a_row_is_a_line() -> None:
    assert lay([["billing", "1", "2,000", "so"]], 80, indent="  ") == [
        "  NODE     OUT OF ORDER   DEAD  NOTE",
        "  billing             1  2,000  so",
    ]


def test_headings_take_lines_and_text_is_folded_before_anything_is_put_below() -> None:
    assert lay([["warehouse", "1", "2,000", "a note of several words"]], 36) == [
        "           OUT OF",
        "NODE        ORDER   DEAD  NOTE",
        "warehouse       1  2,000  a note of",
        "                          several",
        "                          words",
    ]


def test_what_does_not_fit_is_a_table_below_with_the_first_column_again() -> None:
    rows: list[list[str | Text]] = [["billing", "1", "2,000", "so"], ["shop", "0", "0", ""]]
    assert lay(rows, 16, below=[Text("first line below"), Text("second")]) == [
        "          OUT OF",
        "NODE       ORDER",
        "billing        1",
        "shop           0",
        "",
        "NODE      DEAD",
        "billing  2,000",
        "shop         0",
        "",
        "NODE     NOTE",
        "billing  so",
        "    first line …",
        "shop",
        "    second",
    ]


def test_in_a_pipe_a_row_is_a_line_however_long() -> None:
    assert len(lay([["x" * 300, "1", "2", "y " * 300]], None)) == 2


def test_wide_characters_count_twice() -> None:
    [_, row] = lay([["倉庫", "1", "2", "so"]], 80)
    assert row == "倉庫             1     2  so"


def test_no_markup_is_read_in_a_cell() -> None:
    assert "[red]x[/]" in lay([["[red]x[/]", "1", "2", ""]], 80)[1]


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, (*path, name))


@pytest.mark.parametrize("path", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_help(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(WIDTH), "TERM": "dumb"}).output
    assert [line for line in shown.splitlines() if len(line) > WIDTH] == []
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    options = [option for each in command.params for option in each.opts if option.startswith("--")]
    assert [option for option in [*options, *getattr(command, "commands", {})] if option not in shown] == []
