"""Nothing that comes with a message forges a line of a log, steers a terminal, or cannot be written."""

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.table import Table
from rich.text import Text

import faregate as fg
import faregate.spark
from faregate.cli.output import Screen
from faregate.plain import LOGGERS, plain

HOSTILE = "k\nCRITICAL:faregate.bus:forged \x1b[31m\x9b2J\u2028\u202e\ud800\r\0"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler with the usual format writes."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
    logging.getLogger("faregate").addHandler(handler)
    yield written
    logging.getLogger("faregate").removeHandler(handler)


def check(text: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in text), repr(text)
    assert not any(line.startswith("CRITICAL") for line in text.splitlines()), text


def test_what_cannot_be_printed_is_written_as_its_escape() -> None:
    assert plain("Größe 1 €, 漢字") == "Größe 1 €, 漢字"
    assert plain("a\n\x1b[31m\x9b\u2028\ud800") == r"a\n\x1b[31m\x9b\u2028\ud800"
    assert plain(plain(HOSTILE)) == plain(HOSTILE)


def test_every_logger_of_faregate_makes_its_lines_plain() -> None:
    """A module that logs under a name of its own has to add it to `LOGGERS`."""
    source = Path(faregate.__file__).parent
    names = {
        line.partition('getLogger("')[2].partition('"')[0]
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if 'getLogger("' in line
    }
    assert names and names <= set(LOGGERS)


async def test_a_key_or_an_error_text_forges_no_line_of_the_log(lines: io.StringIO) -> None:
    class Keyed(fg.Event):
        key: str

    source, node = fg.Node("source"), fg.Node("node")

    @node.on(Keyed, source="source", key="key", retry=None, redeliver=None)
    async def fail(message: Keyed, ctx: fg.Context) -> None:
        raise RuntimeError(f"cannot take {message.key}")

    @node.use
    async def after(ctx: fg.Context, call_next: object) -> None:
        try:
            await call_next()  # type: ignore[operator]
        finally:
            check(str(ctx))

    async with fg.Bus("memory:", nodes=[source, node], store="memory:") as bus:
        # A lone surrogate is no JSON, so it cannot come as a key.
        await bus.publish(Keyed(key=HOSTILE.replace("\ud800", "")), node="source")
        await bus.idle()
        [letter] = await bus.dead_letters()
        check(str(letter))
    check(lines.getvalue())
    assert "is a dead letter (after all its tries)" in lines.getvalue()


def test_the_text_of_an_exception_forges_no_line_of_a_traceback(lines: io.StringIO) -> None:
    log = logging.getLogger("faregate.bus")
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        log.exception("it failed at %s of %d", HOSTILE, 3)
    check(lines.getvalue())
    first, *rest = lines.getvalue().splitlines()
    assert first.startswith("ERROR:faregate.bus:it failed at k\\nCRITICAL") and first.endswith(" of 3")
    assert all(line.startswith("    ") for line in rest), rest


@pytest.mark.parametrize("field", ["type", "source", "publication_id", "destination", "key"])
def test_errors_name_messages_in_plain_text(field: str) -> None:
    envelope = msgspec.structs.replace(
        fg.Envelope(publication_id="1", type="T", kind="command", destination="there"), **{field: HOSTILE}
    )
    check(str(envelope))
    from faregate.broker import Broker
    from faregate.ports.clock import SystemClock

    with pytest.raises(fg.Unroutable) as caught:
        Broker(SystemClock()).route(envelope)
    check(str(caught.value))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_that_is_printed_steers_the_terminal(is_terminal: bool) -> None:
    written = io.StringIO()
    screen = Screen(file=written, force_terminal=is_terminal, color_system=None, width=200, highlight=False)
    table = Table("name")
    table.add_row(HOSTILE)
    for each in (HOSTILE, Text(HOSTILE), table):
        screen.print(each, markup=False)
    assert not {"\x1b", "\x9b", "\u202e", "\0", "\ud800"} & set(written.getvalue()), repr(written.getvalue())


def test_styles_still_reach_the_terminal() -> None:
    written = io.StringIO()
    Screen(file=written, force_terminal=True, color_system="standard", highlight=False).print(Text("so", "red"))
    assert written.getvalue() == "\x1b[31mso\x1b[0m\n"
