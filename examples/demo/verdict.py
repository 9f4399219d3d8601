"""The verdict: what must have come of the plan, beside what is found in the database and in the log.

Rules kept here:
- Expected numbers come from the plan, found ones from plain SQL on the business tables and from the log. No code of the
  bus is asked: a row that is there twice counts twice.
- `audit` is the same question without a plan: is every message that was published handled or a dead letter, once? It is
  what `fg.spark.audit` answers on Spark, small enough to be read in one go, and the judge where there is no Spark.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Any, NamedTuple
from uuid import UUID

from faregate import ids
from faregate.columns import altered_offsets
from faregate.ports.log import LogTransport
from faregate.ports.schemes import open_log

from .plan import Plan
from .site import Database, Site

EFFECTS = {
    "billing": "select message_id from invoices",
    "payments": "select message_id from charges",
    "shipping": "select message_id from parcels",
}
"""For each node the query that gives the message id of every effect it had."""


class Check(NamedTuple):
    """One line of the verdict."""

    what: str
    expected: int
    found: int

    @property
    def held(self) -> bool:
        return self.expected == self.found

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "held": self.held}


def judge(plan: Plan, site: Site) -> list[Check]:
    """Compare."""
    log = open_log(site.log)
    orders = Counter(publication for publication, type, _ in _publications(log) if type == "OrderPlaced")
    good = {placement.order_id for placement in plan.good}
    checks = [Check("orders on the bus", plan.orders, len(orders))]
    if not site.keeps_copies:
        checks.append(Check("orders on the bus twice", 0, _more_than_once(orders)))
    with site.database() as connection:

        def count(query: str) -> int:
            found: int = connection.execute(query).fetchone()[0]
            return found

        doubled = foreign = 0
        for table, done in (("invoices", "billed"), ("charges", "charged"), ("parcels", "shipped")):
            rows = Counter(order for (order,) in connection.execute(f"select order_id from {table}"))
            checks.append(Check(f"orders {done}", len(good), len(rows.keys() & good)))
            doubled += _more_than_once(rows)
            foreign += len(rows.keys() - good)
        reasons = dict(connection.execute("select reason, count(*) from faregate_dead group by reason"))
        checks += [
            Check("billed, charged or shipped twice", 0, doubled),
            Check("billed, charged or shipped and impossible", 0, foreign),
            Check("money charged", plan.money, count("select coalesce(sum(amount), 0) from charges")),
            Check("impossible orders dead", plan.impossible, reasons.pop("permanent", 0)),
            Check("unreadable orders dead", plan.garbled, reasons.pop("undecodable", 0)),
            Check("dead for another reason", 0, sum(reasons.values())),
            Check("customers billed in order", *_in_order(plan, connection)),
            Check("messages not sent yet", 0, count("select count(*) from faregate_outbox")),
        ]
    return checks


def _more_than_once(rows: Counter[str]) -> int:
    return sum(count - 1 for count in rows.values())


def _in_order(plan: Plan, connection: Database) -> tuple[int, int]:
    """How many customers there are, and of how many the invoices are the right ones in the right order."""
    wanted = plan.billed_in_order()
    found: dict[str, list[str]] = {}
    for customer, order in connection.execute("select customer, order_id from invoices order by rowid"):
        found.setdefault(customer, []).append(order)
    return len(wanted), sum(found.get(customer) == orders for customer, orders in wanted.items())


# --- the audit ---------------------------------------------------------------------------------------------------


@dataclass
class Audit:
    """What an audit found; `fg.spark.audit` gives the same names."""

    table: list[dict[str, Any]]
    findings: list[dict[str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def summary(self) -> str:
        messages = sum(row["published"] for row in self.table)
        if self.ok:
            return f"{messages:,} messages: every one handled or a dead letter, every effect once"
        kinds = Counter(finding["what"] for finding in self.findings)
        told = ", ".join(f"{count:,} {what}" for what, count in kinds.most_common())
        return f"{messages:,} messages: {told}"


def audit(site: Site) -> Audit:
    """Of what is at rest. Doubles come from the business data: a ledger cannot show one."""
    log = open_log(site.log)
    published: dict[str, Counter[str]] = {}
    for publication, _, recipients in _publications(log):
        for node in recipients:
            copies = published.setdefault(node, Counter())
            id = ids.message_id(publication, node)
            copies[id] = 1 if site.keeps_copies else copies[id] + 1
    found = Audit([], [{"node": node, "message_id": id, "what": "body altered"} for node, id in _altered(log)])
    with site.database() as connection:
        handled = _by_node(connection.execute("select node, message_id from faregate_ledger where outcome = 'handled'"))
        skipped = _by_node(connection.execute("select node, message_id from faregate_ledger where outcome = 'skipped'"))
        dead = _by_node(connection.execute("select node, message_id from faregate_dead"))
        for node in sorted(published):
            query = EFFECTS.get(node)
            rows = Counter(row[0] for row in connection.execute(query)) if query else None
            ended = (handled.get(node, set()), skipped.get(node, set()), dead.get(node, set()))
            found.table.append(_account(node, published[node], ended, rows, found.findings))
        found.findings += _not_as_recorded(log, connection)
    return found


def _altered(log: LogTransport) -> Iterable[tuple[str, str]]:
    """Who published, and which publication, where the body is not the one that its digest was made of."""
    wrong = [offset for batch in log.batches() for offset in altered_offsets(batch)]
    return [(each.source, each.publication_id) for each in log.load(wrong)]


def _not_as_recorded(log: LogTransport, connection: Database) -> Iterable[dict[str, str]]:
    """Where a ledger row says that other messages were sent, or another body was handled, than the log has."""
    sent: dict[tuple[str, str], set[str]] = {}
    bodies: dict[tuple[str, str], set[bytes]] = {}
    for batch in log.batches():
        names = ("publication_id", "source", "causation_id", "recipients", "body_digest")
        for publication, source, cause, recipients, digest in zip(
            *(batch.column(name).to_pylist() for name in names), strict=True
        ):
            if cause:
                sent.setdefault((source, cause), set()).add(publication)
            for node in recipients:
                bodies.setdefault((node, ids.message_id(publication, node)), set()).add(digest)
    for node, id, digest, count, combined in connection.execute(
        "select node, message_id, digest, sent, sent_ids from faregate_ledger where outcome = 'handled'"
    ):
        at = (node, _text(id))
        together = reduce(xor, (UUID(each).int for each in sent.get(at, ())), 0)
        if count is not None and (count, int.from_bytes(combined or b"")) != (len(sent.get(at, ())), together):
            yield {"node": node, "message_id": at[1], "what": "sent and lost"}
        if digest not in bodies.get(at, {digest}):
            yield {"node": node, "message_id": at[1], "what": "another body handled"}


Ended = tuple[set[str], set[str], set[str]]


def _account(
    node: str, published: Counter[str], ended: Ended, effects: Counter[str] | None, findings: list[dict[str, str]]
) -> dict[str, Any]:
    """One line of the audit; what is wrong goes to the findings, with the message's id."""
    handled, skipped, dead = ended
    wrong = {
        "published twice": [id for id, count in published.items() if count > 1],
        "lost": published.keys() - handled - skipped - dead,
        "handled and never published": (handled | skipped | dead) - published.keys(),
        "handled and a dead letter": (handled | skipped) & dead,
    }
    if effects is not None:
        wrong["effect missing"] = handled - effects.keys()
        wrong["effect twice"] = [id for id, count in effects.items() if count > 1]
        wrong["effect of nothing handled"] = effects.keys() - handled
    for what, messages in wrong.items():
        findings += [{"node": node, "message_id": id, "what": what} for id in sorted(messages)]
    return {
        "node": node,
        "published": len(published),
        "handled": len(handled),
        "skipped": len(skipped),
        "dead": len(dead),
        "lost": len(wrong["lost"]),
        "effects": None if effects is None else sum(effects.values()),
        "doubles": None if effects is None else _more_than_once(effects),
    }


def _publications(log: LogTransport) -> Iterable[tuple[str, str, list[str]]]:
    for batch in log.batches():
        columns = [batch.column(name).to_pylist() for name in ("publication_id", "type", "recipients")]
        yield from zip(*columns, strict=True)


def _by_node(rows: Iterable[tuple[str, bytes | UUID]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node, message_id in rows:
        found.setdefault(node, set()).add(_text(message_id))
    return found


def _text(id: bytes | UUID) -> str:
    """An id as SQLite, or PostgreSQL, keeps it."""
    return str(UUID(bytes=id) if isinstance(id, bytes) else id)
