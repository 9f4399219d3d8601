"""Looks for subscriptions to events of a node that the log knows nothing of: they would wait in silence.

Rules kept here:
- It is no error, as that node may publish later. So it is a warning, when the run starts.
- A node is known when it subscribes to something, or has messages in the log. Where the log cannot tell without reading
  them, the last ones are read, and no more. The warning says whether the whole log was looked at, or only these.
"""

import logging

from faregate.errors import FaregateError
from faregate.node.node import Node
from faregate.node.sources import did_you_mean
from faregate.ports.log import LogTransport, is_outlined
from faregate.spark.logs import open_log, open_subscribed
from faregate.spark.options import Place

log = logging.getLogger("faregate.spark")

_READ = 10_000
"""Messages that are read at most."""


def warn_of_unknown_sources(node: Node, place: Place) -> None:
    subscriptions = [each for each in node.subscriptions.values() if each.source is not None]
    wanted = {each.source for each in subscriptions if each.source is not None}
    try:
        known = {node.name, *(queue.node for queue in open_subscribed(place).topology().queues)}
        said = "the log knows no such node"
        if not wanted <= known:
            found, are_all = _sources(open_log(place), wanted - known)
            known |= found
            if not are_all:
                said = f"no such node subscribes to anything, or is the source of one of the last {_READ:,} messages"
    except FaregateError as exc:
        log.debug("whether the log knows the sources of %s cannot be found out now: %s", node.name, exc)
        return
    for each in subscriptions:
        if each.source is not None and each.source not in known:
            hint = did_you_mean(each.source, known)
            log.warning("%s waits for events of node %r, and %s%s", each, each.source, said, hint)


def _sources(source: LogTransport, wanted: set[str]) -> tuple[set[str], bool]:
    """Who has published what is in the log, at least as many as it takes to know those that are wanted; whether these
    are all, if those are not among them."""
    found: set[str] = set()
    start, end = source.earliest(), source.latest()
    unread = [(start, end)]
    if is_outlined(source):
        unread = []
        for stretch in source.stretches(start, end):
            if stretch.sources is None:
                unread.append((stretch.start, stretch.end))
            else:
                found.update(stretch.sources)
    left = _READ
    while unread and left > 0 and not wanted <= found:
        start, behind = unread.pop()
        first = max(start, behind - left)
        left -= behind - first
        for batch in source.batches(first, behind):
            found.update(batch.column("source").unique().to_pylist())
        if start < first:
            unread.append((start, first))
    return found, not unread
