"""From counts to a verdict: the table per recipient, the findings with their ids, and what could not be judged."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from faregate.spark.jobs.audit_evidence import NOBODY
from faregate.spark.jobs.deliveries import id_text, publications
from faregate.spark.jobs.settlements import JournalPlan
from faregate.spark.jobs.stores import JobStore
from faregate.stores.sql.columns import id_text as as_text

COLUMNS = (
    "published",
    "handled",
    "skipped",
    "filtered",
    "duplicate",
    "dead",
    "parked",
    "in_flight",
    "missing",
    "double",
    "out_of_order",
    "not_sent",
    "altered",
    "unpublished",
)
FINDINGS = "kind string, node string, message_id string, publication_id string, offset long, text string"
BAD = {
    "unrecorded": ("missing", "it was settled as handled, and the ledger of its node has no row of it"),
    "unrecorded_bare": (
        "missing",
        "it was settled as handled, and the store of its node has neither a ledger row nor an effect of it",
    ),
    "no_letter": ("missing", "it was settled as dead, and the store of its node has no dead letter of it"),
    "effectless": ("missing", "it was handled, and its effect is not in the business data"),
    "passed": ("missing", "its node has read past it in the log, and the node's store has no record of it"),
    "passed_bare": ("missing", "its node has read past it in the log, and there is neither a record nor an effect"),
    "in_flight": ("in flight", "it waits in its queue, or is being handled"),
}
"""By class: the kind of finding, and what it says."""


@dataclass(frozen=True)
class Audit:
    """What an audit found."""

    ok: bool
    table: list[dict[str, Any]]
    """A row per recipient: `node`, then `COLUMNS`. duplicate: copies that were recognised; not part of the sum."""
    findings: DataFrame
    """kind (missing, double, out of order, not sent, altered, never published, in flight, unrecorded effect, outbox),
    node, message_id, publication_id, offset, text; as many as were asked for. Of a body that was altered in the log the
    node is who published it, and there is no message id."""
    summary: dict[str, int]
    """The table's sums, how many findings there are, and the offsets that were audited: from_offset, to_offset."""
    notes: list[str] = field(default_factory=list)
    """What could not be judged, and why."""


@dataclass
class Judged:
    """The counts, and which queues' rows of a class are findings."""

    table: dict[str, dict[str, int]]
    bad_queues: dict[str, set[int]]
    ghosts: int
    bodies: int
    """How many bodies in the log are not those that their digests were made of."""
    notes: list[str]
    at_rest: bool

    @property
    def total(self) -> int:
        wrong = sum(row[name] for row in self.table.values() for name in WRONG)
        waiting = sum(row["in_flight"] for row in self.table.values()) if self.at_rest else 0
        return wrong + waiting + self.ghosts + self.bodies

    @property
    def ok(self) -> bool:
        return not self.total

    def result(
        self,
        spark: SparkSession,
        plan: JournalPlan,
        floor: dict[str, float],
        listed: list[tuple[Any, ...]],
        unsent: int,
    ) -> Audit:
        notes = [*self.notes]
        if plan.earliest:
            notes.append(f"the log begins at offset {plan.earliest}: what was before it was removed and is not judged")
        for node in sorted(set(floor) & set(plan.nodes)):
            notes.append(f"the ledger of {node} was cut: what was appended before its floor is judged by settlements")
        rows = [{"node": node, **row} for node, row in sorted(self.table.items())]
        summary = {name: sum(row[name] for row in self.table.values()) for name in COLUMNS}
        summary |= {"findings": self.total + unsent, "from_offset": plan.segments[0].start, "to_offset": plan.latest}
        return Audit(not summary["findings"], rows, spark.createDataFrame(listed, FINDINGS), summary, notes)


WRONG = ("missing", "double", "out_of_order", "not_sent", "altered", "unpublished")
_NOT_HANDLED = {**{name: name for name in ("skipped", "filtered", "dead", "parked", "in_flight")}, "no_letter": "dead"}
"""Where a class counts when its queue gives no reason to call it missing; all others count as handled."""


def judge(
    counts: Sequence[Any],
    stretches: Mapping[int, int],
    plan: JournalPlan,
    databases: Sequence[JobStore],
    at_rest: bool,
) -> Judged:
    """What the counts mean; `stretches`: by node, how many were committed out of order.

    Where the log does not say how a queue's handler remembers, it is seen from its other messages: if none has a ledger
    row, the mode is another one; if some have, all must. So with effects, which not every handler of a node may write;
    but where a node has none at all, all are missing.
    """
    table: dict[str, dict[str, int]] = {node: dict.fromkeys(COLUMNS, 0) for node in plan.nodes}
    names = {queue.number: queue.name for queue in plan.queues}
    in_ledger: dict[int, int] = defaultdict(int)
    with_effects: dict[int, int] = defaultdict(int)
    at_node: dict[int, int] = defaultdict(int)
    for row in counts:
        if row["class"] != "beyond":
            in_ledger[row["queue"]] += row["in_ledger"]
            with_effects[row["queue"]] += row["with_effects"]
            at_node[row["node"]] += row["with_effects"]
    bad: dict[str, set[int]] = {name: set() for name in BAD}
    notes: list[str] = []
    trusted: dict[int, int] = defaultdict(int)
    settled: dict[int, int] = defaultdict(int)
    again: dict[int, int] = defaultdict(int)
    ghosts = bodies = uncounted = 0
    for row in counts:
        if row["node"] == NOBODY:
            bodies += row["altered"]
            continue
        own, kind, queue = table[plan.nodes[row["node"]]], row["class"], row["queue"]
        own["double"] += row["double"]
        own["not_sent"] += row["not_sent"] + row["sent_other"]
        own["altered"] += row["altered"]
        own["unpublished"] += row["unpublished"]
        ghosts += row["ghost"]
        uncounted += row["uncounted"]
        if kind == "beyond":
            continue
        again[queue] += row["again"]
        own["published"] += row["messages"]
        own["duplicate"] += row["duplicate"]
        must_record = in_ledger[queue] > 0 or plan.ways.get(queue) == ("ledger",)
        must_have_effect = with_effects[queue] > 0 or not at_node[row["node"]]
        lost = (
            kind == "no_letter"
            or (kind in ("unrecorded", "unrecorded_bare", "passed", "passed_bare") and must_record)
            or (kind in ("effectless", "unrecorded_bare", "passed_bare") and must_have_effect)
        )
        if kind in ("trusted", "passed", "passed_bare") and not lost:
            trusted[queue] += row["messages"]
        if kind in ("unrecorded", "unrecorded_bare") and not must_record:
            settled[queue] += row["messages"]
        own["missing" if lost else _NOT_HANDLED.get(kind, "handled")] += row["messages"]
        if lost or (kind == "in_flight" and at_rest):
            bad[kind].add(queue)
    for node, count in stretches.items():
        table[plan.nodes[node]]["out_of_order"] = count
    for queue, count in sorted(settled.items()):
        by = "settlements and effects, not for what they sent" if with_effects[queue] else "settlements alone"
        why = "dedup='off'" if "off" in plan.ways.get(queue, ()) else "dedup='off', or another store"
        notes.append(
            f"{names.get(queue, queue)}: its store has no ledger row of any of its {count:,} handled messages, so they "
            f"are judged by {by} ({why})"
        )
    for queue, count in sorted(trusted.items()):
        notes.append(
            f"{names.get(queue, queue)}: {count:,} of its messages count as handled because its node has read past "
            "them in the log; nothing else records them (no store, dedup='off' or 'tokens', identity=, or a ledger "
            "that was cut)"
        )
    for queue, count in sorted(again.items()):
        if count:
            notes.append(
                f"{names.get(queue, queue)}: {count:,} of its messages had their effect more than once; dedup='off' "
                "promises no more"
            )
    if uncounted:
        notes.append(
            f"{uncounted:,} messages were handled before the ledger kept what handlers send: whether that arrived is "
            "not known"
        )
    without = [node for node in plan.nodes if not any(each.holds(node) for each in databases)]
    if without:
        notes.append(f"without a store, judged by settlements alone, and not for order: {', '.join(without)}")
    return Judged(table, bad, ghosts, bodies, notes, at_rest)


def make_findings(rows: Sequence[Any], plan: JournalPlan, judged: Judged) -> list[tuple[Any, ...]]:
    """(kind, node, message id, publication id, offset, text) of each, by offset."""
    known = publications(plan.path, [row["offset"] for row in rows if row["offset"] is not None])
    found: list[tuple[Any, ...]] = []
    for row in sorted(rows, key=lambda row: (row["offset"] is None, row["offset"] or 0)):
        publication, type_name, source = known.get(row["offset"], (None, None, None))
        if row["node"] == NOBODY:
            why = "its body in the log is not the one that its digest was made of"
            found.append(("altered", source, None, publication, row["offset"], f"{type_name} of {source}: {why}"))
            continue
        node = plan.nodes[row["node"]]
        address = (node, id_text(row["hi"], row["lo"]), publication, row["offset"])
        told = f"{type_name or 'a message'} at {node}"
        if row["queue"] in judged.bad_queues.get(row["class"], ()):
            kind, why = BAD[row["class"]]
            found.append((kind, *address, f"{told}: {why}"))
        found += [(kind, *address, f"{told} {why}") for kind, why in _wrong(row)]
    return found


def _wrong(row: Any) -> Iterator[tuple[str, str]]:
    """Of a row, each kind of finding that its flags stand for, and what it says."""
    if row["double"]:
        many = f"has {row['effects']} effects" if row["effects"] > 1 else f"was handled {row['handled_n']} times"
        yield "double", many
    if row["disorder"]:
        later = f"the ledger row of offset {row['overtaken']} was written later"
        yield "out of order", f"was handled before an earlier one of its key: {later}"
    if row["ghost"]:
        yield "unrecorded effect", "has an effect, and nothing says that it was handled"
    if row["not_sent"] or row["sent_other"]:
        yield "not sent", _unsent(row)
    if row["altered"]:
        yield "altered", "was handled with another body than the log has, by the digest in its ledger row"
    if row["unpublished"]:
        what = "a ledger row" if row["ledger"] is not None else "an effect"
        yield "never published", f"has {what} under this id, and the log has no such message for it"


def _unsent(row: Any) -> str:
    sent, arrived = row["sent"], row["outs"] or 0
    if arrived >= sent:
        return f"sent {sent} messages by its ledger row, and the log has {arrived}, not the same ones"
    lost = f"{sent - arrived} of them"
    if sent - arrived == 1:
        lost = "publication " + id_text(
            *((row[f"sent_{part}"] or 0) ^ (row[f"out_{part}"] or 0) for part in ("hi", "lo"))
        )
    return f"sent {sent} messages, and {lost} neither arrived nor waits in the outbox"


def outbox_findings(
    databases: Sequence[JobStore], nodes: Sequence[str], limit: int
) -> tuple[int, list[tuple[Any, ...]]]:
    """The outgoing messages that wait in an outbox, none of which may at rest: how many, and some of them."""
    total = 0
    found: list[tuple[Any, ...]] = []
    for database in databases:
        for seq, node, message, _, destination, _, dispatched_at in database.rows("outbox"):
            if node in nodes and dispatched_at is None:
                total += 1
                if len(found) < limit:
                    text = f"outbox row {seq} of {node}, to {destination}, is not dispatched"
                    found.append(("outbox", node, None if message is None else as_text(message), None, None, text))
    return total, found
