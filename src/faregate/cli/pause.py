"""`faregate pause` and `faregate resume`: stop a running bus from consuming, and let it go on."""

from typing import Annotated, Any, NamedTuple

import typer

from faregate.cli.loop import run_async
from faregate.cli.output import AsJson, answer, errors, say
from faregate.cli.running import Here, OnBroker, Running, Target, ask, listen_on, locate
from faregate.errors import ConfigurationError
from faregate.plain import plain
from faregate.ports.presence import HEARTBEAT_SECONDS, Consumed, Heartbeat, Instruction

NodeName = Annotated[str, typer.Argument(help="The node, or the word all.", metavar="NODE")]
TypeName = Annotated[str, typer.Argument(help="The type by its wire name, or the word all.", metavar="TYPE")]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", help="For how many seconds to wait for the answers of instances, on RabbitMQ.", min=0.1, max=3600.0
    ),
]
_LISTEN_SECONDS = 1.2 * HEARTBEAT_SECONDS
_YEAR = 365 * 86_400.0


def pause(
    node: NodeName,
    message: TypeName,
    target: Target = None,
    seconds: Annotated[
        float | None, typer.Option(help="Resume by itself after so many seconds.", min=0.0, max=_YEAR)
    ] = None,
    wait: Wait = _LISTEN_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Stop a running bus from consuming a type at a node, until it is resumed or its process ends.

    Handlers that run finish; what was fetched goes back to its place. On RabbitMQ
    every instance that runs now hears it; one that starts later does not. Exits
    with 1 when one of them does not follow.
    """
    _control(Instruction("pause", _named(node), _named(message), seconds), target, wait, as_json)


def resume(
    node: NodeName, message: TypeName, target: Target = None, wait: Wait = _LISTEN_SECONDS, as_json: AsJson = False
) -> None:
    """Let a running bus consume a type at a node again. Exits with 1 when it stays paused somewhere."""
    _control(Instruction("resume", _named(node), _named(message)), target, wait, as_json)


def _named(given: str) -> str | None:
    return None if given == "all" else given


class Subscription(NamedTuple):
    """What was asked for, at one instance."""

    instance: str
    node: str
    consumed: Consumed
    follows: bool

    @property
    def name(self) -> tuple[str, ...]:
        return self.instance, self.node, self.consumed.type, self.consumed.source or ""

    def as_json(self) -> dict[str, Any]:
        consumed = self.consumed
        return {
            "instance": self.instance,
            "node": self.node,
            "type": consumed.type,
            "source": consumed.source,
            "paused": consumed.paused,
            "why": consumed.why,
            "follows": self.follows,
        }


def _control(instruction: Instruction, target: str | None, wait: float, as_json: bool) -> None:
    place = locate(target)
    if isinstance(place, OnBroker):
        if not as_json and errors.is_terminal:
            errors.print(f"listening for {wait:g} s who follows …", markup=False, style="dim")
        found = _on_broker(place, instruction, wait)
    else:
        found = _here(place, instruction)
    told = {"command": instruction.command, "subscriptions": [each.as_json() for each in found]}
    answer(told, lambda: _show(instruction, found), as_json=as_json)
    if not all(each.follows for each in found):
        raise typer.Exit(1)


def _show(instruction: Instruction, found: list[Subscription]) -> None:
    for each in found:
        what = plain(f"{each.consumed.type} at {each.node}, {each.instance}: ")
        state = "paused" if each.consumed.paused else "running"
        why = f" ({each.consumed.why})" if each.consumed.why else ""
        lasts = f" for {instruction.seconds:g} s" if instruction.seconds is not None and each.consumed.paused else ""
        refused = "" if each.follows else "; it does not follow"
        say(f"{what}{state}{lasts}{plain(why)}{refused}", "" if each.follows else "bold red")


# --- over control sockets -------------------------------------------------------------------------------------


def _here(place: Here, instruction: Instruction) -> list[Subscription]:
    running = place.running()
    if place.target is None:
        running = _only_one_bus(running, instruction)
    found: list[Subscription] = []
    for each in running:
        status = ask(each.path, instruction)
        if status is not None:
            found += _meant(status.nodes, instruction)
    return found


def _only_one_bus(running: list[Running], instruction: Instruction) -> list[Running]:
    """Those that have what is meant, unless they are of different buses."""
    meant = [each for each in running if _meant(each.status.nodes, instruction)]
    if not meant:
        raise _unknown([beat for each in running for beat in each.status.nodes], instruction)
    if len({each.key for each in meant}) > 1:
        places = ", ".join(f"{each.status.url} (unix:{each.path})" for each in meant)
        raise ConfigurationError(f"several buses that run here have that: name one of them as TARGET: {places}")
    return meant


def _meant(beats: list[Heartbeat], instruction: Instruction) -> list[Subscription]:
    wanted = instruction.command == "pause"
    return [
        Subscription(beat.instance, beat.node, each, each.paused == wanted)
        for beat in beats
        if instruction.node in (None, beat.node)
        for each in beat.consumes
        if instruction.type in (None, each.type)
    ]


def _unknown(beats: list[Heartbeat], instruction: Instruction) -> ConfigurationError:
    there = sorted({f"{beat.node} {each.type}" for beat in beats for each in beat.consumes})
    what = f"takes {instruction.type}" if instruction.type is not None else "takes anything"
    where = f"at node {instruction.node!r}" if instruction.node is not None else "at any node"
    return ConfigurationError(plain(f"no running process {what} {where}; there are: {', '.join(there) or 'none'}"))


# --- through RabbitMQ -----------------------------------------------------------------------------------------


def _on_broker(broker: OnBroker, instruction: Instruction, wait: float) -> list[Subscription]:
    nodes = [instruction.node] if instruction.node is not None else broker.expected or _heard_nodes(broker, wait)
    last: dict[tuple[str, str], Heartbeat] = {}
    followed: dict[tuple[str, ...], Subscription] = {}
    """Those that were as wanted, in any heartbeat since: a pause may be shorter than the wait."""

    def hear(beat: Heartbeat) -> None:
        last[beat.node, beat.instance] = beat
        for each in _meant([beat], instruction):
            if each.follows:
                followed[each.name] = each

    asking = [Instruction(instruction.command, node, instruction.type, instruction.seconds) for node in nodes]
    run_async(listen_on(broker, hear, wait, asking))
    beats = [last[each] for each in sorted(last) if not last[each].leaving]
    found = _meant(beats, instruction)
    if not found:
        raise _unknown(beats, instruction)
    if instruction.command == "resume":
        return found
    return [each if each.follows else followed.get(each.name, each) for each in found]


def _heard_nodes(broker: OnBroker, wait: float) -> list[str]:
    heard: set[str] = set()
    run_async(listen_on(broker, lambda beat: heard.add(beat.node), wait))
    return sorted(heard)
