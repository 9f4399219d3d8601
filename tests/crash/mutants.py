"""Deliberate mistakes in the order of things, made inside a worker: the matrix must see each of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from faregate.bus.attempts import Attempts, is_unresolved
from faregate.bus.dispatcher import Dispatcher
from faregate.core.dedup.claims import Claims
from faregate.core.unit import UnitOfWork
from faregate.core.work import Work
from faregate.ports import faults
from faregate.ports.store import OutboxRow
from faregate.stores.sqlite import SqliteStore
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.transports.journal import JournalTransport


class Mutant(NamedTuple):
    form: str
    point: str
    """Where to kill the worker, so that the mistake matters."""
    break_it: Callable[[], None]
    nth: int = 3
    orders: int = 12
    together: bool = False
    """Whether it needs many messages of a key under way at once."""
    """How many are under way at once."""


def settle_before_commit() -> None:
    commit, open_transport = UnitOfWork.commit, JournalTransport.open
    opened: list[JournalTransport] = []

    async def remember(self: JournalTransport) -> None:
        await open_transport(self)
        opened.append(self)

    async def broken(self: UnitOfWork, *given: Any) -> None:
        for work in self.works:
            if work.state == "done":
                await work.delivery.settle("handled")
        await opened[-1].journal.barrier()  # the settlement is on its way to the disk
        await commit(self, *given)

    JournalTransport.open = remember  # type: ignore[method-assign]
    UnitOfWork.commit = broken  # type: ignore[method-assign]


def remove_before_publish() -> None:
    publish = Dispatcher._publish

    async def broken(self: Dispatcher, rows: list[OutboxRow]) -> None:
        self._sent.update(dict.fromkeys(row.seq for row in rows))
        await self._remove()
        if faults.hook is not None:
            await faults.hook("mutant.removed")
        await publish(self, rows)

    Dispatcher._publish = broken  # type: ignore[method-assign]


def ledger_row_in_a_commit_of_its_own() -> None:
    open_ = UnitOfWork.open

    async def broken(self: UnitOfWork) -> Any:
        if self.transaction is None:
            assert self.home.store is not None
            marked = await open_(self)
            await marked.commit()
            self.transaction = self.home.store.transaction()
            await self.transaction.begin()
        return self.transaction

    UnitOfWork.open = broken  # type: ignore[method-assign]


def no_memory() -> None:
    async def nothing(self: Any, node: str, rows: Sequence[Any]) -> dict[str, Any]:
        return {}

    SqliteStore.known = nothing  # type: ignore[method-assign]
    SqliteTransaction.record = nothing  # type: ignore[method-assign]


def token_deleted_before_the_commit() -> None:
    claim = Claims.claim

    async def broken(self: Claims, work: Work, attempt_id: str) -> Any:
        admission = await claim(self, work, attempt_id)
        if admission == "run":
            await self._tokens.discard([attempt_id])
        return admission

    Claims.claim = broken  # type: ignore[method-assign]


def claim_made_anew() -> None:
    """A claim that is there already is not resumed but dropped, and the handler runs again."""
    claim = Claims.claim

    async def broken(self: Claims, work: Work, attempt_id: str) -> Any:
        record = await self._store.claim_record(self._node, work.message_id)
        if record is not None:
            await self._store.delete_claim(self._node, work.message_id, record.claim_id, only_new=False)
            await self._tokens.delete(record.attempt_id, record.claim_id)
            work.attempt_id = None
            return "run"
        return await claim(self, work, attempt_id)

    Claims.claim = broken  # type: ignore[method-assign]


def resolved_rows_go_to_the_end() -> None:
    resolve = Attempts.resolve

    async def broken(self: Attempts, rows: Sequence[OutboxRow]) -> dict[int, OutboxRow | None]:
        resolved = await resolve(self, rows)
        there = [row for row in resolved.values() if row is not None]
        transaction = self._store.transaction()
        await transaction.begin()
        await transaction.dispatched([row.seq for row in there])
        seqs = iter(await transaction.send(there))
        await transaction.commit()
        moved = {row.key for row in there if row.destination == "first.Passed"}
        waiting = await self._store.undispatched(1000)
        overtaking = {row.key for row in waiting if row.destination == "first.Passed" and is_unresolved(row)}
        if faults.hook is not None and moved & overtaking - {"lane-0"}:  # there, some are dead-lettered
            await faults.hook("mutant.overtaken")
        return {seq: row._replace(seq=next(seqs)) if row is not None else None for seq, row in resolved.items()}

    Attempts.resolve = broken  # type: ignore[method-assign]


MUTANTS = {
    "settle before commit": Mutant("ledger-sqlite", "unit.before-commit", settle_before_commit),
    "outbox row removed before it is published": Mutant("ledger-sqlite", "mutant.removed", remove_before_publish),
    "ledger row in a commit of its own": Mutant(
        "ledger-sqlite", "unit.before-commit", ledger_row_in_a_commit_of_its_own
    ),
    "no memory": Mutant("ledger-sqlite", "unit.after-commit", no_memory),
    "token deleted before the commit": Mutant(
        "tokens-apart-sqlite", "unit.before-commit", token_deleted_before_the_commit
    ),
    "resolved rows go to the end": Mutant(
        "tokens-merged-sqlite", "mutant.overtaken", resolved_rows_go_to_the_end, nth=1, orders=60, together=True
    ),
    "claim made anew": Mutant("tokens-apart-sqlite", "unit.after-commit", claim_made_anew),
}
