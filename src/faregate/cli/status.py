"""`faregate status`: who runs which nodes now, and how they fare, as their heartbeats say."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from faregate.cli.load import EXAMPLE, load_bus
from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, console, errors, print_json
from faregate.errors import ConfigurationError
from faregate.plain import plain
from faregate.ports.presence import HEARTBEAT_SECONDS, Consumed, Heartbeat
from faregate.ports.schemes import hide_password
from faregate.units import age

if TYPE_CHECKING:
    from faregate.transports.rabbitmq import RabbitmqQueue

_LISTEN_SECONDS = 1.2 * HEARTBEAT_SECONDS
_SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
_FOR_EVER = 10 * 365 * 86_400.0
_MOST_INSTANCES = 10_000


def status(
    target: Annotated[
        str, typer.Argument(help="The bus, as module:attribute, or its RabbitMQ, as amqp://….", metavar="TARGET")
    ],
    wait: Annotated[
        float, typer.Option("--wait", help="For how many seconds to listen.", min=0.1, max=3600.0)
    ] = _LISTEN_SECONDS,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until you press Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which processes run which nodes on a RabbitMQ, what they consume, and how they fare.

    Each of them tells it every five seconds, so this listens for six. Exits with 1 when nobody runs a node of the bus.
    With --json --watch there is a line for each heartbeat.
    """
    url, transport, expected = _find(target)
    seen = Seen(url, expected)
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(transport, seen, as_json)
        return
    if not as_json and errors.is_terminal:
        errors.print(f"listening for {wait:g} s …", markup=False, style="dim")
    run_async(_listen(transport, seen.hear, wait))
    if as_json:
        print_json(seen.as_json())
    else:
        console.print(seen.shown())
    if seen.missing():
        raise typer.Exit(1)


def _watch(transport: "RabbitmqQueue", seen: "Seen", as_json: bool) -> None:
    if as_json:
        run_async(_listen(transport, lambda beat: print_json(msgspec.to_builtins(beat)), _FOR_EVER))
        return
    with Live(get_renderable=seen.shown, console=console, refresh_per_second=2, vertical_overflow="visible"):
        run_async(_listen(transport, seen.hear, _FOR_EVER))


def _find(target: str) -> "tuple[str, RabbitmqQueue, list[str]]":
    """The broker, its URL without a password, and the nodes that somebody should run."""
    if target.startswith(("amqp://", "amqps://")):
        from faregate.transports.rabbitmq import RabbitmqQueue

        return hide_password(target), RabbitmqQueue(target), []
    if ":" not in target:
        raise ConfigurationError(f"{target!r} names neither a bus (module:attribute, {EXAMPLE}) nor an amqp://… URL")
    bus = load_bus(target)
    if type(bus.transport).__name__ != "RabbitmqQueue":
        raise ConfigurationError(
            f"{target} runs on {bus.url}, where processes do not tell of themselves: status is for amqp://…"
        )
    from faregate.transports.rabbitmq import RabbitmqQueue

    assert isinstance(bus.transport, RabbitmqQueue)
    return bus.url, bus.transport, list(bus.nodes)


async def _listen(transport: "RabbitmqQueue", heard: Callable[[Heartbeat], None], seconds: float) -> None:
    from faregate.transports.rabbitmq.presence import listen

    await transport.open()
    try:
        await transport.on_channel(lambda channel: listen(channel, heard, seconds))
    finally:
        await transport.close()


class Seen:
    """The last heartbeat of each node at each instance, and when it came: clocks of other machines may be off."""

    def __init__(self, url: str, expected: list[str]) -> None:
        self._url = url
        self._expected = expected
        self._last: dict[tuple[str, str], tuple[float, Heartbeat]] = {}

    def hear(self, beat: Heartbeat) -> None:
        if (beat.node, beat.instance) in self._last or len(self._last) < _MOST_INSTANCES:
            self._last[beat.node, beat.instance] = (time.monotonic(), beat)

    def missing(self) -> list[str]:
        """Nodes of the bus that nobody runs."""
        now = time.monotonic()
        run = {node for (node, _), (at, beat) in self._last.items() if not beat.leaving and now - at < _SILENT_SECONDS}
        return [node for node in self._expected if node not in run]

    def as_json(self) -> dict[str, Any]:
        beats = [msgspec.to_builtins(self._last[each][1]) for each in sorted(self._last)]
        return {"url": self._url, "nodes": beats, "missing": self.missing()}

    def shown(self) -> RenderableType:
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        now = time.monotonic()
        missing = self.missing()
        for node in dict.fromkeys([*self._expected, *sorted(node for node, _ in self._last)]):
            yield Text(plain(node), "bold")
            if node in missing:
                yield Text("  nobody runs it", "bold red")
            found = [self._last[each] for each in sorted(self._last) if each[0] == node]
            if found:
                yield _table(found, now)
        if not self._last and not self._expected:
            yield Text(f"nobody was heard on {self._url}")


def _table(found: list[tuple[float, Heartbeat]], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("  INSTANCE", overflow="fold")
    table.add_column("TAKES", overflow="fold")
    table.add_column("PARTS", overflow="fold")
    for name in ("PER S", "HANDLED", "AGAIN", "DEAD", "BUSY"):
        table.add_column(name, justify="right")
    table.add_column("")
    for at, beat in found:
        name, state = f"  {plain(beat.instance)}", _state(beat, now - at)
        for each in beat.consumes:
            numbers = (each.handled, each.redelivered, each.dead, each.busy)
            told = Text(" ").join([state, Text("paused", "yellow")]) if each.paused else state
            per_second = f"{each.per_second:,.1f}"
            texts = (Text(name), Text(_takes(each)), Text(_parts_of(each)))  # a str would be read as markup
            table.add_row(*texts, per_second, *(f"{number:,}" for number in numbers), told)
            name, state = "", Text("")
        if not beat.consumes:
            table.add_row(Text(name), "nothing", "", "", "", "", "", "", state)
    return table


def _takes(each: Consumed) -> str:
    return plain(each.type if each.source is None else f"{each.type} from {each.source}")


def _parts_of(each: Consumed) -> str:
    """The numbers of its partitions; those of queues that are not parted have none."""
    numbers = [name.rpartition("-")[2] for name in each.queues if ".g" in name]
    if numbers:
        return plain(" ".join(sorted(numbers, key=lambda number: (len(number), number))))
    return "all" if each.queues else "none"


def _state(beat: Heartbeat, silent: float) -> Text:
    if beat.leaving:
        return Text("left", "dim")
    if silent >= _SILENT_SECONDS:
        return Text(f"silent for {silent:.0f} s", "red")
    alarms = sum(beat.alarms.values())
    told = f"started {age(beat.since, beat.at)}" + (f", {alarms:,} alarms" if alarms else "")
    return Text(told, "yellow" if alarms else "green")
