"""Records of a store as named queries and rows: what is the same on every SQL store, written once.

A backend says how it runs a query of its `queries.sql`, and what a message id is in its tables. What is worth a faster
way on one database (a batch of ledger rows, of outgoing messages) is the backend's own.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from faregate.errors import LeaseLost
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.extras import needs_extra
from faregate.ports.store import (
    NEXT,
    SCHEDULE_KEY,
    ClaimRecord,
    DeadFilter,
    Generation,
    Lease,
    OpenSession,
    OutboxRow,
    Parked,
    Statements,
)
from faregate.ports.tokens import Claim, Mode, Token
from faregate.stores.sql.columns import (
    attempts_text,
    dead_letter,
    dead_state,
    dead_values,
    modes_text,
    outbox_row,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from faregate.stores.sql.sessions import Sessions, UnitDialect

_NO_LIMIT = (1 << 63) - 1
ENDED = (
    "the database has ended this transaction already: a statement committed it or rolled it back, so nothing of it may "
    "be relied on. Leave beginning and ending to the unit of work, also on ctx.db.raw"
)


class SqlRecords:
    """How a database is asked, and what its rows mean."""

    @staticmethod
    def id_in(text: str) -> Any:
        """A message id as queries take it."""
        return text

    @staticmethod
    def id_out(value: Any) -> str:
        """A message id as text, from what queries give."""
        return str(value)

    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        """The rows of a query."""
        raise NotImplementedError

    async def _change(self, name: str, parameters: Any) -> int:
        """How many rows a statement changed."""
        raise NotImplementedError

    def _now(self) -> dict[str, float]:
        """The time for queries that take it, where the database has no clock that we ask."""
        return {}

    async def floor(self, node: str) -> float | None:
        rows = await self._read("floor", (node,))
        return rows[0][0] if rows else None


def scheduled_values(row: OutboxRow, id_in: Callable[[str], Any]) -> tuple[Any, ...]:
    """The columns of an outgoing message that is due later."""
    envelope = row.envelope
    cause = None if row.message_id is None else id_in(row.message_id)
    own = (row.node, envelope.publication_id, envelope.headers.get(SCHEDULE_KEY), envelope.deliver_at)
    return (*own, cause, row.ordinal, row.destination, row.key, pack(envelope))


def nodes_text(nodes: Sequence[str] | None) -> str | None:
    return None if nodes is None else json.dumps(list(nodes))


class SqlTransaction(SqlRecords):
    async def _change_many(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """A statement once for each row; how many rows it changed in all."""
        raise NotImplementedError

    # --- scheduled messages ---

    async def schedule(self, rows: Sequence[OutboxRow]) -> None:
        await self._change_many("schedule", [scheduled_values(row, self.id_in) for row in rows])

    async def take_due(
        self,
        now: float,
        limit: int,
        nodes: Sequence[str] | None = None,
        *,
        also: Sequence[str] = (),
        but: Sequence[str] = (),
    ) -> list[OutboxRow]:
        values = {"now": now, "limit": limit, "nodes": nodes_text(nodes), "but": json.dumps(list(but))}
        found = await self._read("take_due", values)
        for publication_id in also:
            found += await self._read("take_scheduled", (publication_id,))
        return [outbox_row((0, *row[2:], None, None), self.id_out) for row in sorted(found, key=itemgetter(0, 1))]

    async def cancel_scheduled(self, node: str, which: tuple[str | None, str | None]) -> int:
        return await self._change("cancel_scheduled", (node, *which))

    # --- business keys ---

    async def take_business_key(self, node: str, handler: str, key: str, at: float) -> bool:
        return await self._change("take_business_key", (node, handler, key, at)) == 1

    async def free_business_key(self, node: str, handler: str, key: str) -> None:
        await self._change("free_business_key", (node, handler, key))

    # --- dead letters ---

    async def add_dead(self, letter: DeadLetter) -> DeadLetter:
        [row] = await self._read("add_dead", dead_values(letter, self.id_in(letter.message_id)))
        return dead_letter(row, self.id_out)

    async def fold(self, node: str, message_id: str) -> None:
        await self._change("fold", (node, self.id_in(message_id)))

    async def set_dead_status(
        self, node: str, message_id: str, status: DeadStatus, *, by: str, at: float
    ) -> DeadLetter | None:
        values = {"node": node, "message_id": self.id_in(message_id), "status": status, "by": by, "at": at}
        rows = await self._read("set_dead_status", values)
        return dead_letter(rows[0], self.id_out) if rows else None

    async def remove_dead(self, letters: Sequence[DeadLetter]) -> int:
        return await self._change_many(
            "remove_dead", [dead_state(each, self.id_in(each.message_id)) for each in letters]
        )

    # --- parked messages and positions ---

    async def park(self, node: str, rows: Sequence[tuple[Parked, int | None]]) -> None:
        fresh, again = [], []
        for row, before in sorted(rows, key=lambda row: row[0][0]):
            kept = self.id_in(row.message_id)
            if before is not None:
                again.append((row.due, row.redeliveries, row.key, node, kept, before))
            elif row.position != NEXT:
                fresh.append((node, kept, *row[1:5], pack(row.envelope), row.queue, row.starts))
        await self._change_many("park", fresh)
        await self._change_many("park_again", again)
        await self._change_many("park_next", self._numbered(node, [row for row, before in rows if before is None]))

    def _numbered(self, node: str, rows: Sequence[Parked]) -> list[tuple[Any, ...]]:
        """Those that the store numbers, in the order in which they come."""
        now = [round(1e6 * each) for each in self._now().values()]
        numbered = []
        for row in rows:
            if row.position == NEXT:
                behind = (*now, node, row.queue, row.key)
                numbered.append((node, self.id_in(row.message_id), *row[1:4], *behind, pack(row.envelope), *row[6:]))
        return numbered

    async def parked(self, node: str, due: float = math.inf, limit: int = _NO_LIMIT) -> list[Parked]:
        return [self._parked(row) for row in await self._read("parked", (node, due, limit))]

    def _parked(self, row: Sequence[Any]) -> Parked:
        message_id, due, redeliveries, key, position, envelope, *others = row
        return Parked(self.id_out(message_id), due, redeliveries, key, position, unpack(envelope), *others)

    async def claim_parked(
        self, node: str, queues: Sequence[str], due: float, limit: int, owner: str, seconds: float
    ) -> list[Parked]:
        given = {"node": node, "queues": json.dumps(list(queues)), "due": due, "limit": limit, "owner": owner}
        found = [self._parked(row) for row in await self._read("due_parked", given | self._now())]
        own = [(owner, node, self.id_in(row.message_id)) for row in found if row.queue is None]
        if own:
            await self._change_many("claim_parked", own)
            await self.keep_claimed(node, owner, seconds)
        return found

    async def keep_claimed(self, node: str, owner: str, seconds: float) -> None:
        await self._change("keep_claimed", {"node": node, "owner": owner, "seconds": seconds} | self._now())

    async def count_starts(self, node: str, message_ids: Sequence[str], step: int = 1) -> dict[str, int]:
        found: dict[str, int] = {}
        for message_id in sorted(message_ids):
            for (starts,) in await self._read("count_start", (step, node, self.id_in(message_id))):
                found[message_id] = starts
        return found

    async def next_of_key(self, node: str, queue: str, key: str, due: float) -> Parked | None:
        await self._change("next_of_key", (due, *(node, queue, key) * 2))
        rows = await self._read("first_of_key", (node, queue, key))
        return self._parked(rows[0]) if rows else None

    async def parked_keys(self, node: str, queue: str) -> dict[str, int]:
        return dict(await self._read("count_keys", (node, queue)))

    # --- leases ---

    async def hold_lease(self, node: str, queue: str, epoch: int) -> None:
        if not await self._read("hold_lease", (node, queue, epoch)):
            raise LeaseLost(f"{queue} is another instance's by now: the lease under epoch {epoch} has ended")

    async def count_parked(self, node: str) -> tuple[int, int | None]:
        [(count, lowest)] = await self._read("count_parked", (node,))
        return count, lowest

    # --- mode `tokens` ---

    async def finish_claim(self, node: str, message_id: str, claim_id: str) -> bool:
        return await self._change("finish_claim", (node, self.id_in(message_id), claim_id)) == 1

    async def delete_claims(self, records: Sequence[ClaimRecord]) -> int:
        given = sorted(records)  # two that remove the same ones do not wait for each other crosswise
        rows = [(each.node, self.id_in(each.message_id), each.claim_id, False) for each in given]
        return await self._change_many("delete_claim", rows)


class SqlStore(SqlRecords):
    """Reads see what is committed; each change is a commit of its own."""

    _sessions: "Sessions | None" = None

    @staticmethod
    def _unit_dialect() -> "UnitDialect":
        """SQLAlchemy's dialect for this database."""
        raise NotImplementedError

    def session(self, statements: Statements) -> OpenSession:
        if self._sessions is None:
            with needs_extra("sqlalchemy", "ctx.session"):
                from faregate.stores.sql.sessions import Sessions

                self._sessions = Sessions(self._unit_dialect())
        return self._sessions.open(statements)

    async def _answer(self, name: str, parameters: Any) -> list[Any]:
        """The rows of a statement that changes something."""
        raise NotImplementedError

    # --- leases ---

    async def claim_lease(self, node: str, queue: str, owner: str, seconds: float) -> int | None:
        given = {"node": node, "queue": queue, "owner": owner, "seconds": seconds}
        rows = await self._answer("claim_lease", given | self._now())
        return rows[0][0] if rows else None

    async def renew_leases(self, node: str, owner: str, epochs: Mapping[str, int], seconds: float) -> set[str]:
        given = {"node": node, "owner": owner, "held": json.dumps(list(epochs.items())), "seconds": seconds}
        return {queue for (queue,) in await self._answer("renew_leases", given | self._now())} if epochs else set()

    async def release_lease(self, node: str, queue: str, owner: str, epoch: int, keep_seconds: float) -> None:
        given = {"node": node, "queue": queue, "owner": owner, "epoch": epoch, "seconds": keep_seconds}
        await self._change("release_lease", given | self._now())

    async def ask_for_lease(self, node: str, queue: str, epoch: int, instance: str) -> bool:
        return await self._change("ask_for_lease", (instance, node, queue, epoch)) == 1

    async def leases(self, node: str, queues: Sequence[str]) -> list[Lease]:
        given = {"node": node, "queues": json.dumps(list(queues))}
        return [Lease(*row) for row in await self._read("leases", given | self._now())]

    async def generation(self, node: str, queue: str) -> Generation | None:
        rows = await self._read("generation", (node, queue))
        return Generation(*rows[0]) if rows else None

    async def note_generation(self, node: str, queue: str, partitions: int) -> Generation:
        await self._change("note_generation", (node, queue, partitions))
        [row] = await self._read("generation", (node, queue))
        return Generation(*row)

    async def next_generation(self, node: str, queue: str, after: int, partitions: int) -> bool:
        return await self._change("next_generation", (partitions, node, queue, after)) == 1

    async def has_business_key(self, node: str, handler: str, key: str) -> bool:
        return bool(await self._read("has_business_key", (node, handler, key)))

    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        values = {name: getattr(which, name) for name in DeadFilter.__struct_fields__}
        values["message_id"] = None if which.message_id is None else self.id_in(which.message_id)
        return [dead_letter(row, self.id_out) for row in await self._read("dead", {**values, "limit": limit})]

    # --- nodes ---

    async def note_nodes(self, nodes: Sequence[str], at: float) -> None:
        for node in nodes:
            await self._change("note_node", (node, at))

    async def known_nodes(self) -> list[str]:
        return [node for (node,) in await self._read("known_nodes")]

    # --- outbox ---

    async def unsent(self) -> dict[str, tuple[int, int]]:
        return {node: (count, first) for node, count, first in await self._read("unsent")}

    async def next_due(self, nodes: Sequence[str] | None = None) -> float | None:
        rows = await self._read("next_due", {"nodes": nodes_text(nodes)})
        return rows[0][0] if rows else None

    async def scheduled(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        found = await self._read("scheduled", {"limit": limit, "nodes": nodes_text(nodes)})
        return [outbox_row((0, *row, None, None), self.id_out) for row in found]

    async def count_scheduled(self, nodes: Sequence[str] | None = None) -> int:
        [(count,)] = await self._read("count_scheduled", {"nodes": nodes_text(nodes)})
        return int(count)

    async def keyed_before(self, seq: int, nodes: Sequence[str] | None = None) -> list[tuple[int, str, str]]:
        return [tuple(row) for row in await self._read("keyed_before", {"seq": seq, "nodes": nodes_text(nodes)})]

    async def outbox_row(self, seq: int) -> OutboxRow | None:
        rows = await self._read("outbox_row", (seq,))
        return outbox_row(rows[0], self.id_out) if rows else None

    async def outbox_rows_of(self, node: str, message_id: str) -> list[OutboxRow]:
        return [
            outbox_row(row, self.id_out) for row in await self._read("outbox_rows_of", (node, self.id_in(message_id)))
        ]

    async def dispatched_rows(self, limit: int) -> list[OutboxRow]:
        return [outbox_row(row, self.id_out) for row in await self._read("dispatched_rows", (limit,))]

    # --- mode `tokens` ---

    async def claim_record(self, node: str, message_id: str) -> ClaimRecord | None:
        rows = await self._read("claim_record", (node, self.id_in(message_id)))
        return self._claim(rows[0]) if rows else None

    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        return [self._claim(row) for row in await self._read("claim_records", (before, limit))]

    async def done_claims(self, node: str) -> list[ClaimRecord]:
        return [self._claim(row) for row in await self._read("done_claims", (node,))]

    def _claim(self, row: Sequence[Any]) -> ClaimRecord:
        node, message_id, *others = row
        return ClaimRecord(node, self.id_out(message_id), *others)

    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        return await self._change("insert_claim", (node, self.id_in(message_id), claim_id, attempt_id, at)) == 1

    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        return await self._change("delete_claim", (node, self.id_in(message_id), claim_id, only_new)) == 1

    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        added = attempts_text(attempts) or "[]"
        return await self._change("register_attempts", (added, not_after, seq, version)) == 1

    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        return await self._change("choose_attempts", (attempts_text(chosen), seq, version)) == 1


class SqlTokenStore(SqlRecords):
    """Every method is a commit of its own."""

    async def read(self, attempt_id: str) -> Token | None:
        for attempt, message_id, *others in await self._read("read_token", (attempt_id,)):
            return Token(attempt, self.id_out(message_id), *others)
        return None

    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        if await self._change("claim_token", (claim_id, attempt_id, claim_id)):
            return "claimed"
        return "missing" if await self.read(attempt_id) is None else "taken"

    async def delete(self, attempt_id: str, claim_id: str) -> None:
        await self._change("delete_token", (attempt_id, claim_id))

    async def count(self) -> int:
        return int((await self._read("count_tokens"))[0][0])

    async def swap(self, topic: str, version: int, modes: Mapping[str, Mode]) -> bool:
        text = modes_text(modes)
        if version == 0:
            return await self._change("insert_topic", (topic, text)) == 1
        return await self._change("swap_topic", (text, topic, version)) == 1
