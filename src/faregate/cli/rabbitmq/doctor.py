"""What `faregate rabbitmq doctor` finds, and what it says of it.

AMQP shows whether a queue is there, whether it is declared as it should be, what is ready in it and how many consume
it. It does not show bindings: a bus declares them whenever it starts, and so does `faregate rabbitmq migrate`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from faregate.bus.bus import Bus
from faregate.cli.output import say
from faregate.cli.table import Cell, Column, numbers, show_table
from faregate.plain import plain
from faregate.ports.queue import Binding
from faregate.ports.store import MIGRATION, REPARTITION, Lease
from faregate.units import counted

if TYPE_CHECKING:
    from faregate.transports.rabbitmq import RabbitmqQueue
    from faregate.transports.rabbitmq.survey import SeenQueue


@dataclass(frozen=True, slots=True)
class Finding:
    queue: str
    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Part:
    """The queues of one subscription, or the dead letters of one node."""

    title: str
    queues: "list[SeenQueue]"
    leases: dict[str, Lease]
    findings: list[Finding]


async def examine(bus: Bus, transport: "RabbitmqQueue", target: str) -> list[Part]:
    from faregate.transports.rabbitmq.survey import as_noted, survey, survey_dead

    parts: list[Part] = []
    for wanted in bus.bindings:
        store = bus.store_of(wanted.node)
        binding = await as_noted(wanted, store)
        seen = await survey(transport, binding)
        leases: dict[str, Lease] = {}
        if store is not None and binding.partitions is not None:
            leases = {each.queue: each for each in await store.leases(binding.node, [each.name for each in seen])}
        findings = [*_findings(seen, leases, target, binding), *_number(wanted, binding, target)]
        parts.append(Part(_title(binding), seen, leases, findings))
    for node in dict.fromkeys(binding.node for binding in bus.bindings):
        seen = await survey_dead(transport, node)
        has_store = bus.store_of(node) is not None
        findings = [*_findings(seen[1:], {}, target), *_dead_findings(seen[0], target, has_store)]
        parts.append(Part(f"dead letters of {node}", seen, {}, findings))
    return parts


def _title(binding: Binding) -> str:
    source = f" from {binding.source}" if binding.source is not None else ""
    parted = ""
    if binding.partitions is not None:
        parted = f": {counted(binding.partitions, 'partition')}, generation {binding.generation}"
    return f"{binding.node} takes {binding.type}{source}{parted}"


def _findings(
    seen: "Sequence[SeenQueue]", leases: dict[str, Lease], target: str, binding: Binding | None = None
) -> Iterator[Finding]:
    again = "consume it with the earlier program, or take the messages by hand"
    if binding is not None and binding.partitions is not None:
        again = _repartition(target, binding, binding.partitions)
    migrate = f"faregate rabbitmq migrate {target}"
    for each in seen:
        if each.role == "moving":
            yield Finding(each.name, "a migration was interrupted, and messages may be here", migrate)
        elif each.role == "left over" and each.consumers:
            yield Finding(each.name, "left over, and still consumed", "stop the instances with the earlier program")
        elif each.role == "left over" and each.waiting:
            told = f"left over, and {counted(each.waiting, 'message waits', 'messages wait')} in it"
            yield Finding(each.name, told, again)
        elif each.role == "left over":
            yield Finding(each.name, "left over, and empty", f"faregate rabbitmq doctor {target} --prune")
        elif not each.exists:
            yield Finding(each.name, "it is not there", f"{migrate} (or start the bus)")
        elif each.difference is not None:
            yield Finding(each.name, f"it is declared otherwise: {each.difference}", migrate)
        elif each.name in leases and leases[each.name].owner == REPARTITION:
            told = "the partitions are being changed, or that was interrupted, and nobody may consume it"
            yield Finding(each.name, told, again)
        elif each.name in leases and leases[each.name].owner == MIGRATION:
            yield Finding(each.name, "a migration was interrupted, and nobody may consume it", migrate)
        elif each.waiting and not each.consumers and not (each.name in leases and leases[each.name].is_held):
            told = f"{counted(each.waiting, 'message waits', 'messages wait')}, and nobody consumes"
            yield Finding(each.name, told, f"faregate run {target}")


def _dead_findings(dead: "SeenQueue", target: str, has_store: bool) -> Iterator[Finding]:
    if not dead.exists or dead.difference is not None:
        yield from _findings([dead], {}, target)
    elif dead.waiting and not has_store:
        told = f"{counted(dead.waiting, 'dead letter waits', 'dead letters wait')}, and the node has no store"
        yield Finding(dead.name, told, "read them with bus.dead_letters(); with a store= `faregate dead` replays them")
    elif dead.waiting and not dead.consumers:
        told = f"{counted(dead.waiting, 'dead letter waits', 'dead letters wait')} to be taken into the store"
        yield Finding(dead.name, told, f"faregate run {target}; then faregate dead list {target}")


def _number(wanted: Binding, binding: Binding, target: str) -> Iterator[Finding]:
    if wanted.partitions is not None and wanted.partitions != binding.partitions:
        told = f"it has {binding.partitions} partitions, and the program says partitions={wanted.partitions}"
        mend = f"{_repartition(target, binding, wanted.partitions)} (or say partitions={binding.partitions})"
        yield Finding(binding.queue, told, mend)


def _repartition(target: str, binding: Binding, to: int) -> str:
    return f"faregate rabbitmq repartition {target} {binding.node} {binding.type} --to {to}"


# --- what is said -----------------------------------------------------------------------------------------------


def as_json(url: str, parts: Sequence[Part], removed: Sequence[str]) -> dict[str, Any]:
    return {
        "url": url,
        "sound": not any(part.findings for part in parts),
        "subscriptions": [
            {
                "title": part.title,
                "queues": [asdict(each) | {"held_by": _holder(part, each.name)} for each in part.queues],
                "findings": [asdict(each) for each in part.findings],
            }
            for part in parts
        ],
        "removed": list(removed),
    }


def show(url: str, parts: Sequence[Part], removed: Sequence[str]) -> None:
    for part in parts:
        say(plain(part.title), "bold")
        _show_queues(part)
    for name in removed:
        say(f"removed {plain(name)}", "green")
    findings = [finding for part in parts for finding in part.findings]
    say("")
    if not findings:
        say(f"nothing is to be done on {url}", "green")
        return
    say(f"{counted(len(findings), 'thing is', 'things are')} to be done on {url}:")
    for mend in dict.fromkeys(finding.mend for finding in findings):
        say(f"→ {mend}", "bold")
        for finding in findings:
            if finding.mend == mend:
                say(Text.assemble("    ", (plain(finding.queue), "yellow"), f": {plain(finding.what)}"))


def _show_queues(part: Part) -> None:
    columns = [Column("QUEUE"), *numbers("WAITING", "CONSUMERS"), Column("STATE")]
    rows: list[list[Cell]] = []
    for each in part.queues:
        counts = (f"{each.waiting:,}", f"{each.consumers:,}") if each.exists else ("-", "-")
        holder = [plain(_holder(part, each.name) or "")] if part.leases else []
        rows.append([plain(each.name), *counts, _state(each), *holder])
    if part.leases:
        columns.append(Column("HELD BY"))
    show_table(columns, rows, indent="  ", style="dim")


def _state(each: "SeenQueue") -> Text:
    if not each.exists:
        return Text("missing", "red")
    if each.difference is not None:
        return Text("differs", "red")
    return Text("as declared" if each.role in ("current", "dead letters") else each.role, "dim")


def _holder(part: Part, queue: str) -> str | None:
    lease = part.leases.get(queue)
    return lease.owner if lease is not None and lease.is_held else None
