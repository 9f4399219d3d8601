"""Taking the log view: a subscription is consumed through its queue or through the log, never both.

Rules kept here:
- A subscription that reads the log already may start; one that nobody ever bound is taken on the spot, from the
  beginning of the log. One with a queue is refused, naming the command that hands it over.
- The epochs of a node's subscriptions are the label of its checkpoint, and part of the names of low-water marks and
  positions: after a handover there and back, what an older run knew of the log means nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

from faregate.errors import ConfigurationError, JournalLocked, ViewTaken
from faregate.message import Envelope
from faregate.node.node import Node
from faregate.ports.queue import Binding
from faregate.ports.store import Store
from faregate.ports.topology import Reading, Topology
from faregate.spark.logs import open_subscribed, open_two_views
from faregate.spark.options import Place


def bindings_of(node: Node, body_limit: int) -> list[Binding]:
    return [subscription.binding(body_limit) for subscription in node.subscriptions.values()]


async def with_generations(bindings: list[Binding], store: Store) -> list[Binding]:
    """With the partitions that their queues have now, where queues have some."""
    found = []
    for binding in bindings:
        noted = None if binding.partitions is None else await store.generation(binding.node, binding.queue)
        if noted is not None:
            binding = replace(binding, generation=noted.number, partitions=noted.partitions)
        found.append(binding)
    return found


async def check_parked(bindings: list[Binding], store: Store) -> None:
    """Raises `ConfigurationError` for what a bus keeps in the store until it is tried again: where it lies in the log,
    nobody knows."""
    [node] = {binding.node for binding in bindings}
    async with store.transaction() as transaction:
        parked = await transaction.parked(node)
        await transaction.roll_back()  # it only read
    count = sum(1 for each in parked if any(is_of(binding, each.envelope) for binding in bindings))
    if count:
        raise ConfigurationError(
            f"{count} messages of {node!r} wait in {store.url} until they are tried again: run the bus until they are "
            "done, then hand over"
        )


def is_of(binding: Binding, envelope: Envelope) -> bool:
    same_source = binding.source is None or binding.source == envelope.source
    return (binding.type, binding.kind) == (envelope.type, envelope.kind) and same_source


Check = Callable[[dict[str, Reading]], object]
"""Told where the subscriptions will begin, before any view is taken; raises when they cannot."""
CheckBound = Callable[[list[Binding]], object]
"""Told which subscriptions are taken over from queues; raises when they cannot be."""


def take_views(
    path: Place, bindings: list[Binding], *, has_store: bool, handover: bool, check: Check, check_bound: CheckBound
) -> dict[str, Reading]:
    """See that every subscription of a node reads the log; where each begins. Raises `ViewTaken`, and what the checks
    raise: then nothing was taken."""
    log = open_subscribed(path)
    topology = log.topology()
    missing = [binding for binding in bindings if topology.reading(binding.queue).view != "log"]
    bound = [binding for binding in missing if topology.queue(binding.queue) is not None]
    if bound and not handover:
        raise ViewTaken(
            f"{', '.join(binding.queue for binding in bound)}: consumed through the queue of this log, by a bus. Stop "
            f"the bus and run 'faregate spark handover MODULE:BUS {bound[0].node} --to log', or pass handover=True"
        )
    if bound:
        check_bound(bound)
    if missing:
        others = {each.queue: topology.reading(each.queue) for each in bindings if each not in missing}
        take_log(path, missing, has_store=has_store, check=lambda begins: check({**others, **begins}))
        topology = log.topology()
    tidy(path, [binding for binding in bindings if binding not in missing])
    _note_ways(path, topology, [each if has_store else replace(each, remembers="nothing") for each in bindings])
    return {binding.queue: topology.reading(binding.queue) for binding in bindings}


def tidy(path: Place, bindings: list[Binding]) -> None:
    """Do what an interrupted handover to the view that they have now has left to do."""
    if bindings:
        log = open_two_views(path)
        for binding in bindings:
            log.tidy(binding)


def _note_ways(path: Place, topology: Topology, bindings: list[Binding]) -> None:
    """Keep in the log that a subscription remembers in another way from now on."""
    new = [each for each in bindings if {"unknown", each.remembers}.isdisjoint(topology.ways(each.queue))]
    if not new:
        return
    try:
        with open_two_views(path).handover() as closed:
            for binding in new:
                closed.bind(binding)
    except JournalLocked as exc:
        names = ", ".join(each.queue for each in new)
        raise JournalLocked(f"{exc}. Stop it once: {names} has another dedup= or store than before") from exc


def take_log(path: Place, bindings: list[Binding], *, has_store: bool, check: Check | None = None) -> None:
    """Hand subscriptions over to the log. Raises `JournalLocked` while a bus runs."""
    try:
        with open_two_views(path).handover() as closed:
            waiting = {} if has_store else {each.queue: len(closed.waiting(each)) for each in bindings}
            left = [f"{queue} ({count})" for queue, count in waiting.items() if count]
            if left:
                raise ConfigurationError(
                    f"messages wait in {', '.join(left)}, and without a store nobody could tell which of those behind "
                    "them were handled: run the bus until the queue is empty, then hand over"
                )
            if check is not None:
                check({binding.queue: closed.log_reading(binding) for binding in bindings})
            for binding in bindings:
                binding = binding if has_store else replace(binding, remembers="nothing")
                if closed.reading(binding.queue).view != "log":
                    closed.take_log(binding)
    except JournalLocked as exc:
        raise JournalLocked(f"{exc}. Stop it for the handover; afterwards it may run again, without this node") from exc


def label_of(path: Place, node: Node, body_limit: int) -> str:
    """What tells this run of handovers from others: the same until one of the subscriptions is handed over."""
    topology = open_subscribed(path).topology()
    epochs = sorted((each.queue, topology.reading(each.queue).epoch) for each in bindings_of(node, body_limit))
    return f"epoch-{max((epoch for _, epoch in epochs), default=0)}-{sha256(repr(epochs).encode()).hexdigest()[:8]}"


def reader_name(node: str) -> str:
    """Under which retention waits for the node's log view."""
    return f"spark-{node}"[:100]


LOW_WATER = ""
"""The handler under whose name a store keeps low-water marks as positions: of each subscription, and of all of a node's
in one run of handovers. Below such a mark everything is handled, dead or parked."""


def low_water_name(queue: str, epoch: int) -> str:
    """What the low-water mark of one subscription is kept under."""
    return f"{queue}@{epoch}"


def token_mark_name(queue: str, database: str) -> str:
    """The mark of a subscription that looks for its tokens in that database; its position means nothing."""
    return f"{queue} tokens {database}"
