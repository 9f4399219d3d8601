"""Handing a node over between the engines: from its queues to the log (Spark), or back (asyncio). The bus is stopped.

Rules kept here:
- A journal's lock is held throughout, so nobody reads either view meanwhile. On RabbitMQ the consumers of the queues
  are looked for, and a mark keeps others away.
- To the queue: from the low-water mark, or the lowest parked message, on. What the ledger knows is settled, what was
  parked waits in the queue with its count and its time, in the order of the log.
- Parked messages from before the subscription was known are in no queue's part of the log. They are published to it
  again, as replays with a number of their own, before anything else: whichever is first, the ledger knows the other.
- The topology is written next, the records of the old view go afterwards: a crash in between leaves records that the
  ledger makes harmless.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal, NamedTuple

import msgspec

from faregate.bus.bus import MAX_MESSAGE_BYTES
from faregate.errors import ConfigurationError
from faregate.ids import message_id_of
from faregate.message import Envelope
from faregate.node.node import Node
from faregate.ports.log import Handover, Waits
from faregate.ports.queue import Binding
from faregate.ports.store import Parked, Store
from faregate.ports.topology import Topology
from faregate.spark.logs import open_appendable, open_log, open_subscribed, open_two_views
from faregate.spark.options import Place
from faregate.spark.runs.driver import LoopThread
from faregate.spark.runs.views import (
    LOW_WATER,
    bindings_of,
    check_parked,
    is_of,
    low_water_name,
    reader_name,
    take_log,
    tidy,
    with_generations,
)

To = Literal["log", "queue"]


class HandedOver(NamedTuple):
    """One subscription, and where its view begins now."""

    queue: str
    view: str
    epoch: int
    offset: int
    changed: bool


def hand_over(node: Node, path: Place, store: Store | None, to: To) -> list[HandedOver]:
    """Let the node's subscriptions be consumed through that view. Those that are already stay as they are; what an
    interrupted handover has left to do for them is done.

    Raises `JournalLocked` while a bus runs, `ConfigurationError` where messages could be lost or doubled.
    """
    bindings = bindings_of(node, MAX_MESSAGE_BYTES)
    before = open_subscribed(path).topology()
    changing = [each for each in bindings if before.reading(each.queue).view != to]
    if changing and to == "log":
        _to_log(path, store, changing, before)
    elif changing:
        _to_queue(node, path, store, changing)
    _tidy(path, store, [each for each in bindings if each not in changing])
    after = open_subscribed(path).topology()
    readings = [(each.queue, after.reading(each.queue)) for each in bindings]
    names = {each.queue for each in changing}
    return [
        HandedOver(queue, reading.view, reading.epoch, reading.offset, queue in names) for queue, reading in readings
    ]


def _to_log(path: Place, store: Store | None, changing: list[Binding], before: Topology) -> None:
    if store is not None:
        bound = [each for each in changing if before.queue(each.queue) is not None]
        with _opened(store) as loop:
            changing = loop.run(with_generations(changing, store))
            if bound:
                loop.run(check_parked(bound, store))
    take_log(path, changing, has_store=store is not None)


def _to_queue(node: Node, path: Place, store: Store | None, changing: list[Binding]) -> None:
    with open_two_views(path).handover() as closed:
        if store is None:
            _fast_path_to_queue(node, closed, changing, path)
            return
        with _opened(store) as loop:
            _back(node, path, store, loop.run(with_generations(changing, store)), closed, loop)
    open_log(path).forget_reader(reader_name(node.name))


def _tidy(path: Place, store: Store | None, bindings: list[Binding]) -> None:
    if bindings and store is not None:
        with _opened(store) as loop:
            bindings = loop.run(with_generations(bindings, store))
    tidy(path, bindings)


@contextmanager
def _opened(store: Store) -> Iterator[LoopThread]:
    loop = LoopThread()
    try:
        loop.run(store.open())
        yield loop
    finally:
        loop.run(store.close())
        loop.close()


def _back(node: Node, path: Place, store: Store, changing: list[Binding], closed: Handover, loop: LoopThread) -> None:
    marks = {each.queue: low_water_name(each.queue, closed.reading(each.queue).epoch) for each in changing}
    low_water, parked = loop.run(_left(store, node.name, list(marks.values())))

    def done(messages: Sequence[tuple[int, Envelope]]) -> dict[int, str]:
        by_id = {message_id_of(envelope, node.name): offset for offset, envelope in messages}
        known = loop.run(store.known(node.name, list(by_id)))
        return {by_id[each]: "handled" if found.state == "handled" else "dead" for each, found in known.items()}

    early: list[Parked] = []
    plans: list[tuple[Binding, int, list[Waits]]] = []
    for binding in changing:
        reading = closed.reading(binding.queue)
        start = max(reading.offset, low_water.get(marks[binding.queue], 0))
        if start < reading.history:
            raise ConfigurationError(
                f"{binding.queue} has messages from before it was known, up to offset {reading.history}, and is at "
                f"{start}: no queue can hold those. Run it on Spark until they are handled, then hand over"
            )
        own = [each for each in parked if is_of(binding, each.envelope)]
        early += [each for each in own if each.position < reading.history]
        later = [each for each in own if each.position >= reading.history]
        waits = [Waits(each.position, each.redeliveries, each.due) for each in later]
        plans.append((binding, min([start, *(each.offset for each in waits)]), waits))
    if early:
        number = int(time.time())  # above every other replay of theirs, so that nobody takes them for known
        again = [msgspec.structs.replace(each.envelope, recipients=(node.name,), replay=number) for each in early]
        name = sha256(repr(sorted(marks.values())).encode()).hexdigest()[:16]
        open_appendable(path).append(again, f"handover-{node.name}-{name}")
    for binding, start, waits in plans:
        closed.take_queue(binding, start, done, waits)
    loop.run(_forget(store, node.name, parked))


def _fast_path_to_queue(node: Node, closed: Handover, changing: list[Binding], path: Place) -> None:
    """Without a store nothing tells what was handled, but how far the query has read."""
    reader = open_log(path)
    read = [each.offset for each in reader.reader_offsets() if each.name == reader_name(node.name)]
    latest = reader.latest()
    left = sum(closed.count(binding, read[0] if read else 0) for binding in changing)
    if left:
        raise ConfigurationError(
            f"node {node.name!r} has no store, and its log view has {left} messages to read: run it on Spark until "
            "nothing is left, then hand over"
        )
    for binding in changing:
        closed.take_queue(binding, latest, lambda messages: {})
    reader.forget_reader(reader_name(node.name))


async def _left(store: Store, node: str, marks: list[str]) -> tuple[dict[str, int], list[Parked]]:
    async with store.transaction() as transaction:
        left = await transaction.positions(node, LOW_WATER, marks), await transaction.parked(node)
        await transaction.roll_back()  # it only read
    return left


async def _forget(store: Store, node: str, parked: Sequence[Parked]) -> None:
    async with store.transaction() as transaction:
        await transaction.unpark(node, {each.message_id: each.position for each in parked})
