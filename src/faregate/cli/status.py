"""`faregate status`: who runs which nodes now, and how they fare, as they say themselves."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, console, errors, print_json
from faregate.cli.running import Here, OnBroker, Target, listen_on, locate
from faregate.cli.table import Column, hanging, numbers, room, table
from faregate.errors import FaregateError
from faregate.plain import plain
from faregate.ports.presence import HEARTBEAT_SECONDS, Consumed, Heartbeat
from faregate.units import age, counted, iso

_LISTEN_SECONDS = 1.2 * HEARTBEAT_SECONDS
_SILENT_SECONDS = 3 * HEARTBEAT_SECONDS
_LOOK_SECONDS = 1.0
_FOR_EVER = 10 * 365 * 86_400.0
_MOST_INSTANCES = 10_000


def status(
    target: Target = None,
    wait: Annotated[
        float, typer.Option("--wait", help="For how many seconds to listen, on RabbitMQ.", min=0.1, max=3600.0)
    ] = _LISTEN_SECONDS,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until you press Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show which processes run which nodes, what they consume, their counts and their alarms.

    A process on this machine answers over its control socket. On RabbitMQ each process reports every five seconds, so
    the command listens for six. Exits with 1 if no process runs a node of the bus, or if one does not answer. With
    --json --watch there is a line for each heartbeat. Without a TARGET, --json prints a list, with one entry for each
    bus.
    """
    place = locate(target)
    failed: list[FaregateError] = []
    with suppress(KeyboardInterrupt) if watch else nullcontext():
        if isinstance(place, Here):
            seen, failed = _watch_here(place, as_json) if watch else _look(place)
        elif watch:
            seen = _watch_broker(place, as_json)
        else:
            if not as_json and errors.is_terminal:
                errors.print(f"listening for {wait:g} s …", markup=False, style="dim")
            seen = [Seen(place.url, place.expected)]
            run_async(listen_on(place, seen[0].hear, wait))
        if as_json:
            told = [each.as_json() for each in seen]
            print_json(told if target is None else told[0])
        else:
            console.print(_all(seen), soft_wrap=True)
        _tell(failed)
        if failed or any(each.missing() for each in seen):
            raise typer.Exit(1)


def _look(place: Here) -> tuple[list["Seen"], list[FaregateError]]:
    """One for each bus; several processes may run it. And what is wrong with those that do not answer."""
    found: dict[str, Seen] = {}
    answering, failed = place.look()
    for running in answering:
        seen = found.setdefault(running.key, Seen(running.status.url, place.expected, shows_url=place.target is None))
        for beat in running.status.nodes:
            seen.hear(beat)
    return list(found.values()), failed


def _all(seen: list["Seen"], failed: Iterable[FaregateError] = ()) -> RenderableType:
    return Group(*(each.shown() for each in seen), *(Text(plain(str(each)), "bold red") for each in failed))


def _tell(failed: list[FaregateError]) -> None:
    """Beside the JSON, which is of those that answer."""
    for each in failed:
        errors.print(plain(str(each)), style="bold red", markup=False, soft_wrap=True)


def _watch_here(place: Here, as_json: bool) -> NoReturn:
    if as_json:
        while True:
            answering, failed = place.look()
            for running in answering:
                for beat in running.status.nodes:
                    print_json(msgspec.to_builtins(beat))
            sys.stdout.flush()
            _tell(failed)
            time.sleep(_LOOK_SECONDS)
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            try:
                shown = _all(*_look(place))
            except FaregateError as exc:  # it may come back
                shown = Text(plain(str(exc)), "bold red")
            live.update(shown, refresh=True)
            time.sleep(_LOOK_SECONDS)


def _watch_broker(broker: OnBroker, as_json: bool) -> list["Seen"]:
    seen = Seen(broker.url, broker.expected)
    if as_json:
        run_async(listen_on(broker, lambda beat: print_json(msgspec.to_builtins(beat)), _FOR_EVER))
    else:
        with Live(get_renderable=seen.shown, console=console, refresh_per_second=2, vertical_overflow="visible"):
            run_async(listen_on(broker, seen.hear, _FOR_EVER))
    return [seen]


class Seen:
    """The last heartbeat of each node at each instance, and when it came: clocks of other machines may be off."""

    def __init__(self, url: str, expected: list[str], *, shows_url: bool = False) -> None:
        self._url = url
        self._shows_url = shows_url
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
        if self._shows_url:
            yield Text(plain(self._url), "dim", no_wrap=True, overflow="ignore")
        for node in dict.fromkeys([*self._expected, *sorted(node for node, _ in self._last)]):
            yield Text(plain(node), "bold")
            if node in missing:
                yield Text("  nobody runs it", "bold red")
            found = [self._last[each] for each in sorted(self._last) if each[0] == node]
            if found:
                yield from _instances(found, now)
        yield from _remarks([self._last[each][1] for each in sorted(self._last)])
        if not self._last and not self._expected:
            yield Text(f"nobody was heard on {self._url}")


def _instances(found: list[tuple[float, Heartbeat]], now: float) -> Iterator[RenderableType]:
    """A line for each, and below it a line for each type that it takes: both fit a narrow terminal."""
    for at, beat in found:
        state = _state(beat, now - at)
        taking = "" if beat.consumes else ", no subscriptions"
        yield from hanging(Text.assemble(f"{plain(beat.instance)}  ", state, taking), room(), "  ")
        if beat.consumes:
            yield from _table(beat.consumes)
        for schedule in beat.schedules:
            zone = "" if schedule.zone == "UTC" else f" {schedule.zone}"
            following = "never again" if schedule.next is None else f"next {iso(schedule.next)}"
            last = "" if schedule.last is None else f", last {iso(schedule.last)}"
            yield from _line(f"{schedule.name}: {schedule.when}{zone}, {following}{last}", indent="    ")
        for each in beat.consumes:
            if each.paused:
                why = f": {each.why}" if each.why else ""
                yield from _line(f"{_takes(each)} is paused{why}", "yellow", indent="    ")


def _table(consumes: list[Consumed]) -> Iterator[Text]:
    parts = [_parts_of(each) for each in consumes]
    columns = [Column("SUBSCRIPTION"), *numbers("PER S", "HANDLED", "REDELIVERED", "DEAD", "BUSY")]
    rows = []
    for each, part in zip(consumes, parts, strict=True):
        counts = (each.handled, each.redelivered, each.dead, each.busy)
        rows.append([_takes(each), f"{each.per_second:,.1f}", *(f"{count:,}" for count in counts), part])
    if any(parts):
        columns.append(Column("PARTS"))
    else:
        rows = [row[:-1] for row in rows]
    return table(columns, rows, room(), indent="    ", style="dim")


def _remarks(beats: list[Heartbeat]) -> Iterator[Text]:
    """What somebody may have to look at, once for each instance."""
    by_instance: dict[str, list[Heartbeat]] = {}
    for beat in beats:
        if not beat.leaving:
            by_instance.setdefault(beat.instance, []).append(beat)
    for instance, its in by_instance.items():
        outboxes = {beat.outbox.store: beat.outbox for beat in its if beat.outbox is not None}
        for outbox in outboxes.values():
            if outbox.waiting:
                wait = counted(outbox.waiting, "message waits", "messages wait")
                told = f"{wait} in the outbox {outbox.store}, the oldest for {outbox.oldest_seconds or 0:,.1f} s"
                yield from _line(f"{instance}: {told}", "yellow")
        for notice in dict.fromkeys(notice for beat in its for notice in beat.notices):
            yield from _line(f"{instance}: {notice}", "bold yellow")
        if its[0].breaker not in (None, "closed"):
            yield from _line(f"{instance}: the breaker on sending is {its[0].breaker}", "red")
        if its[0].alarms:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(its[0].alarms.items()))
            yield from _line(f"{instance}: alarms since it started: {kinds}", "yellow")


def _line(text: str, style: str = "", *, indent: str = "") -> Iterator[Text]:
    return hanging(Text(plain(text), style), room(), indent)


def _takes(each: Consumed) -> str:
    return plain(each.type if each.source is None else f"{each.type} from {each.source}")


def _parts_of(each: Consumed) -> str:
    """The numbers of its partitions; a queue that is not parted has none."""
    numbers = [name.rpartition("-")[2] for name in each.queues if ".g" in name]
    return plain(" ".join(sorted(numbers, key=lambda number: (len(number), number))))


def _state(beat: Heartbeat, silent: float) -> Text:
    if beat.leaving:
        return Text("left", "dim")
    if silent >= _SILENT_SECONDS:
        return Text(f"silent for {silent:.0f} s", "red")
    if beat.state != "running":
        return Text(beat.state, "yellow")
    return Text(f"started {age(beat.since, beat.at)}", "yellow" if beat.alarms else "green")
