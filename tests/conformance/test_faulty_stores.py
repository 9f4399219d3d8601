"""The store and token suites are worth something: for every case there is a store with one fault that fails it.

A fault is a few lines over the memory store, at the port. One that breaks nearly everything proves nothing, so each
must still pass most of the other cases.
"""

import asyncio
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, ClassVar

import pytest

from faregate.errors import FaregateError, LeaseLost, StoreConflict, StoreUnavailable
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store import ClaimRecord, DeadFilter, Generation, Known, LedgerRow, OutboxRow, Parked, Sent
from faregate.ports.tokens import NOBODY, Claim, Mode, Recipients, Token
from faregate.stores.sql.columns import id_bytes
from faregate.stores.sqlite import MemoryStore, MemoryTokenStore, SqliteStore
from faregate.stores.sqlite.reading import SqliteReader
from faregate.stores.sqlite.rows import QUERIES
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.testing import (
    READER_CASES,
    STORE_CASES,
    TOKEN_CASES,
    memory_store_subject,
    memory_token_subject,
    run_store_case,
    run_token_case,
    sqlite_store_subject,
)
from tests.conformance.faults import Faults, passes

FAULTS = Faults([*STORE_CASES, *READER_CASES, *TOKEN_CASES])
breaks = FAULTS.breaks
NEEDS_A_FILE = {"what_is_committed_is_there_after_reopening"}


class Faulty(MemoryStore):
    """The memory store with an opening for faults in its transactions."""

    tx: type[SqliteTransaction] = SqliteTransaction

    def transaction(self) -> SqliteTransaction:
        return self.tx(self._database, self._clock)


class OnTheReader(SqliteTransaction):
    """Lets a fault do one thing outside of the transaction: remembered, and done after its end."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.later: list[tuple[str, Any]] = []

    async def roll_back(self) -> None:
        was_open = self.is_open
        await super().roll_back()
        if was_open:
            await self._database.write(lambda c: [c.execute(*each) for each in self.later])


# --- scheduled messages ---


@breaks("scheduled_messages_leave_when_they_are_due_in_the_order_of_their_times")
class TakesWhatIsNotDue(Faulty):
    class tx(SqliteTransaction):
        async def take_due(self, now: float, *given: Any, **more: Any) -> list[OutboxRow]:
            return await super().take_due(now + 1, *given, **more)


@breaks("scheduled_messages_leave_when_they_are_due_in_the_order_of_their_times")
class TakesWhatIsDueInAnyOrder(Faulty):
    class tx(SqliteTransaction):
        async def take_due(self, *given: Any, **more: Any) -> list[OutboxRow]:
            return (await super().take_due(*given, **more))[::-1]


@breaks("some_publications_count_as_due_and_some_do_not")
class GoesByTheTimeAlone(Faulty):
    class tx(SqliteTransaction):
        async def take_due(self, *given: Any, also: Sequence[str] = (), but: Sequence[str] = ()) -> list[OutboxRow]:
            return await super().take_due(*given)


@breaks("what_is_cancelled_is_never_due")
class OnlyCountsWhatIsCancelled(Faulty):
    class tx(SqliteTransaction):
        async def cancel_scheduled(self, node: str, which: tuple[str | None, str | None]) -> int:
            found = await super().cancel_scheduled(node, which)
            await self.execute("update faregate_scheduled set cancelled = 0 where name is not null")
            return found


@breaks("what_is_cancelled_is_never_due")
class CancelsForEveryNode(Faulty):
    class tx(SqliteTransaction):
        async def cancel_scheduled(self, node: str, which: tuple[str | None, str | None]) -> int:
            return await super().cancel_scheduled("billing", which)


@breaks("a_publication_is_scheduled_once_and_stays_cancelled")
class SchedulesACancelledOneAgain(Faulty):
    class tx(SqliteTransaction):
        async def schedule(self, rows: Sequence[OutboxRow]) -> None:
            await self.execute("delete from faregate_scheduled where cancelled = 1")
            await super().schedule(rows)


@breaks("the_nodes_of_a_store_are_known")
class KnowsTheLastNodesAlone(Faulty):
    async def note_nodes(self, nodes: Sequence[str], at: float) -> None:
        await self._write(lambda connection: connection.execute("delete from faregate_nodes"))
        await super().note_nodes(nodes, at)


@breaks("what_is_not_sent_is_counted_by_node")
class CountsWhatIsDispatched(Faulty):
    async def keep_dispatched(self, seqs: Sequence[int], at: float) -> None:
        """Forgets it."""


# --- transactions ---


@breaks("a_transaction_that_is_rolled_back_leaves_nothing")
class RecordsInATransactionOfItsOwn(Faulty):
    class tx(OnTheReader):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            self.later += [(QUERIES["record"], (node, id_bytes(row[0]), *row[1:])) for row in rows]
            return await super().record(node, rows)


@breaks("a_transaction_that_is_rolled_back_leaves_nothing")
class CommitsWhatIsRolledBack(Faulty):
    class tx(SqliteTransaction):
        async def roll_back(self) -> None:
            await self.commit()


@breaks("everything_in_a_transaction_is_committed_together")
class ForgetsTheOutboxAtCommit(Faulty):
    class tx(SqliteTransaction):
        async def commit(self) -> None:
            if self.is_open:
                await self.execute("delete from faregate_outbox where message_id is not null")
            await super().commit()


@breaks("everything_in_a_transaction_is_committed_together")
class LeavesABlockWithADeadLetterUncommitted(Faulty):
    class tx(SqliteTransaction):
        with_dead = False

        async def add_dead(self, letter: Any) -> Any:
            self.with_dead = True
            return await super().add_dead(letter)

        async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
            await (self.roll_back() if self.with_dead else super().__aexit__(kind, error, trace))


@breaks("a_block_that_raises_is_rolled_back_and_its_error_is_passed_on")
class CommitsABlockThatRaised(Faulty):
    class tx(SqliteTransaction):
        async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
            await self.commit()


@breaks("a_block_that_raises_is_rolled_back_and_its_error_is_passed_on")
class SwallowsTheErrorOfABlock(Faulty):
    class tx(SqliteTransaction):
        async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:  # type: ignore[override]
            await super().__aexit__(kind, error, trace)
            return True


@breaks("a_block_that_is_cancelled_is_rolled_back_and_the_store_goes_on")
class LeavesACancelledBlockOpen(Faulty):
    class tx(SqliteTransaction):
        async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
            if kind is not asyncio.CancelledError:
                await super().__aexit__(kind, error, trace)


@breaks("what_is_not_committed_is_not_read")
class ReadsWhatIsNotCommitted(Faulty):
    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        return self._database.writer.execute(QUERIES[name], parameters).fetchall()


@breaks("ending_a_transaction_once_more_does_nothing")
class ComplainsAboutASecondEnd(Faulty):
    class tx(SqliteTransaction):
        committed = False

        async def commit(self) -> None:
            if self.committed:
                self._live()
            await super().commit()
            self.committed = True


@breaks("a_transaction_that_has_ended_cannot_be_used")
class GoesOnAfterTheEnd(Faulty):
    class tx(SqliteTransaction):
        def _live(self) -> Any:
            return self._database.writer


@breaks("a_statement_that_ends_the_transaction_is_refused")
class LetsStatementsEndTheTransaction(Faulty):
    class tx(SqliteTransaction):
        async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
            return max(0, self._run(sql, parameters).rowcount)


@breaks("a_cancelled_commit_is_whole_or_nothing_and_the_store_goes_on")
class KeepsTheLockWhenACommitIsCancelled(Faulty):
    class tx(SqliteTransaction):
        async def commit(self) -> None:
            if self._connection is not None:
                self._connection = None
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                await self._database.commit()


@breaks("who_is_cancelled_while_waiting_to_begin_holds_nothing_up")
class BeginsForWhoIsCancelled(Faulty):
    class tx(SqliteTransaction):
        async def begin(self) -> None:
            await asyncio.shield(asyncio.ensure_future(super().begin()))


# --- savepoints and statements ---


@breaks("a_savepoint_undoes_what_came_after_it_and_nothing_else", "a_savepoint_can_be_remade_again_and_again")
class KeepsWhatAFailedTryWrote(Faulty):
    class tx(SqliteTransaction):
        async def roll_back_to_savepoint(self) -> None:
            self._live()


@breaks("a_statement_that_cannot_be_sent_takes_nothing_with_it_of_what_came_before")
class LosesWhatWaitsWithAStatementThatCannotBeSent(Faulty):
    class tx(SqliteTransaction):
        waiting: tuple[str, ...] = ()

        async def savepoint(self) -> None:
            self.waiting += ("savepoint faregate",)

        async def release_savepoint(self) -> None:
            self.waiting += ("release faregate",)

        def _run(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
            waiting, self.waiting = self.waiting, ()
            if not any(type(each) is object for each in parameters):
                for each in waiting:
                    super()._run(each)
            return super()._run(sql, parameters)

        async def commit(self) -> None:
            if self.is_open:
                self._run("select 1")
            await super().commit()


@breaks("a_transaction_can_be_committed_right_after_undoing_a_failed_statement")
class CommitsNothingAfterAFailedStatement(Faulty):
    class tx(SqliteTransaction):
        failed = False

        async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
            try:
                return await super().execute(sql, parameters)
            except Exception:
                self.failed = True
                raise

        async def commit(self) -> None:
            await (self.roll_back() if self.failed else super().commit())


@breaks("rows_removed_from_the_outbox_before_a_savepoint_stay_removed")
class RemovesFromTheOutboxAtTheEnd(Faulty):
    class tx(SqliteTransaction):
        removed: tuple[int, ...] = ()

        async def dispatched(self, seqs: Sequence[int]) -> None:
            self.removed += tuple(seqs)

        async def commit(self) -> None:
            if self.is_open:
                await super().dispatched(self.removed)
            await super().commit()


@breaks("a_failed_statement_is_the_drivers_own_error_and_can_be_undone")
class TranslatesTheUsersErrors(Faulty):
    class tx(SqliteTransaction):
        async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
            try:
                return await super().execute(sql, parameters)
            except FaregateError:
                raise
            except Exception as exc:
                raise StoreUnavailable("it failed") from exc


@breaks("a_question_mark_is_a_parameter_outside_of_quotes")
class TakesEveryQuestionMark(Faulty):
    class tx(SqliteTransaction):
        async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
            return await super().fetchone(sql.replace("'?'", "?", 1), ("q", *parameters)[: sql.count("?")])

        async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
            return await super().fetchall(sql, parameters)


@breaks("statements_tell_how_many_rows_they_changed")
class DoesNotCountChanges(Faulty):
    class tx(SqliteTransaction):
        async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
            return min(1, await super().execute(sql, parameters))


class Queues(SqliteTransaction):
    """Lets a fault keep back what is written."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.queued: list[tuple[str, Sequence[Any]]] = []

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self.queued.append((sql, parameters))

    async def flush(self) -> None:
        queued, self.queued = self.queued, []
        for each in queued:
            await self.execute(*each)


@breaks(
    "what_is_written_goes_out_in_order_before_whatever_follows",
    "the_drivers_connection_comes_behind_what_was_written",
)
class SendsWhatIsWrittenAtTheCommitOnly(Faulty):
    class tx(Queues):
        async def commit(self) -> None:
            if self.is_open:
                await self.flush()
            await super().commit()


@breaks("a_write_that_is_refused_raises_the_drivers_error_and_can_be_undone")
class ForgetsThatAWriteWasRefused(Faulty):
    class tx(SqliteTransaction):
        def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
            with suppress(sqlite3.Error):
                super().write(sql, parameters)


@breaks("what_is_written_is_undone_with_its_savepoint_and_with_its_transaction")
class SendsWhatWasUndone(Faulty):
    class tx(Queues):
        async def roll_back(self) -> None:
            if self.is_open:
                await self.flush()
                await super().commit()
            await super().roll_back()


@breaks("a_write_that_ends_the_transaction_is_refused")
class WritesWhatEndsTheTransaction(Faulty):
    class tx(SqliteTransaction):
        def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
            self._run(sql, parameters)


@breaks("a_schema_is_applied_whole_or_not_at_all")
class AppliesASchemaStatementByStatement(Faulty):
    async def apply_schema(self, sql: str) -> None:
        for statement in sql.split("; "):
            await super().apply_schema(statement)


@breaks("what_is_committed_is_there_after_reopening")
class ForgetsWhatWasCommitted(Faulty):
    """In memory though a file was asked for: gone with its last user."""


# --- ledger ---


@breaks(
    "a_message_is_recorded_once_per_node",
    "a_duplicate_in_a_batch_does_not_fail_its_neighbours",
    "who_comes_second_waits_for_the_first_and_is_told",
)
class DoesNotReportConflicts(Faulty):
    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            await super().record(node, rows)
            return {}


@breaks("a_message_is_recorded_once_per_node")
class HasOneLedgerForAllNodes(Faulty):
    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            return await super().record("everyone", rows)


@breaks("a_duplicate_in_a_batch_does_not_fail_its_neighbours")
class LeavesOutTheNeighboursOfADuplicate(Faulty):
    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            found = await super().record(node, rows)
            if found:
                await self.unrecord(node, [row.message_id for row in rows if row.message_id not in found])
            return found


@breaks("an_id_that_is_twice_in_a_batch_is_refused")
class SwallowsDoublesInABatch(Faulty):
    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            return await super().record(node, list({row.message_id: row for row in rows}.values()))


@breaks("what_was_taken_out_can_be_recorded_again")
class TakesNothingOut(Faulty):
    class tx(SqliteTransaction):
        async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
            pass


@breaks("overlapping_batches_in_any_order_do_not_lock_each_other")
class LocksEachOtherOverUnsortedBatches(Faulty):
    """What a server with row locks does with rows in the order given."""

    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            given = [row.message_id for row in rows]
            if len(given) > 9 and given != sorted(given):
                raise StoreConflict("deadlock detected")
            return await super().record(node, rows)


# --- outbox and business keys ---


@breaks("outgoing_messages_come_back_in_order_and_as_they_were")
class SendsABatchBackwards(Faulty):
    class tx(SqliteTransaction):
        async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
            return await super().send(rows[::-1])


@breaks("outgoing_messages_come_back_in_order_and_as_they_were")
class ForgetsTheAttempts(Faulty):
    class tx(SqliteTransaction):
        async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
            return await super().send([row._replace(registered=(), chosen=()) for row in rows])


@breaks("dispatched_messages_leave_the_outbox_and_unknown_ones_are_fine")
class RemovesTheWholeRange(Faulty):
    class tx(SqliteTransaction):
        async def dispatched(self, seqs: Sequence[int]) -> None:
            if seqs:
                await super().dispatched(list(range(min(seqs), min(max(seqs), 1000) + 1)))


@breaks("the_number_of_an_outgoing_message_is_never_used_again")
class UsesNumbersAgain(Faulty):
    class tx(SqliteTransaction):
        async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
            await self.execute(
                "update sqlite_sequence set seq = (select coalesce(max(seq), 0) from faregate_outbox)"
                " where name = 'faregate_outbox'"
            )
            return await super().send(rows)


@breaks("what_a_handler_sent_is_kept_in_its_ledger_row")
class ForgetsWhatWasSent(Faulty):
    class tx(SqliteTransaction):
        async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
            await super().note_sent(node, rows[:1])


@breaks("what_a_handler_sent_is_kept_in_its_ledger_row")
class ForgetsWhatWasSentBefore(Faulty):
    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            return await super().record(node, [row._replace(sent=0, sent_ids=None) for row in rows])


@breaks("what_was_sent_is_kept_with_its_own_row_when_others_leave_meanwhile")
class NotesWhatWasSentWhereARowOnceWas(Faulty):
    """Goes by the numbers of rows, which a savepoint gives back when it is undone."""

    class tx(SqliteTransaction):
        async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
            found = await super().record(node, rows)
            [last] = await self.fetchall("select max(rowid) from faregate_ledger")
            places = zip(
                sorted(row.message_id for row in rows), range(last[0] - len(rows) + 1, last[0] + 1), strict=True
            )
            self.places = {**getattr(self, "places", {}), **dict(places)}
            return found

        async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
            update = "update faregate_ledger set sent = ?, sent_ids = ? where rowid = ?"
            await self.executemany(update, [(count, sent, self.places[each]) for each, count, sent in rows])


@breaks("a_business_key_is_taken_once_per_handler")
class TakesABusinessKeyAgain(Faulty):
    class tx(SqliteTransaction):
        async def take_business_key(self, node: str, handler: str, key: str, at: float) -> bool:
            await super().take_business_key(node, handler, key, at)
            return True


# --- dead letters ---


@breaks("a_dead_letter_comes_back_as_it_was_and_is_known_as_dead")
class WritesALedgerRowForADeadLetter(Faulty):
    class tx(SqliteTransaction):
        async def add_dead(self, letter: DeadLetter) -> DeadLetter:
            await self.record(letter.node, [LedgerRow(letter.message_id, None, None, None, 0.0)])
            return await super().add_dead(letter)


@breaks("another_failure_folds_into_the_dead_letter")
class WritesOverTheFirstLetter(Faulty):
    class tx(SqliteTransaction):
        async def add_dead(self, letter: DeadLetter) -> DeadLetter:
            if not await self.fetchall("select 1 from faregate_dead where status = 'discarded'"):
                await self.execute("delete from faregate_dead where message_id = ?", (id_bytes(letter.message_id),))
            return await super().add_dead(letter)


@breaks("a_discarded_dead_letter_only_counts_its_copies")
class KnowsWhatWasDiscardedAsDead(Faulty):
    """A replay that is under way would run."""

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        found = await super().known(node, message_ids)
        return {key: each._replace(state="dead") if each.state == "discarded" else each for key, each in found.items()}


@breaks("a_discarded_dead_letter_only_counts_its_copies")
class ReopensWhatWasDiscarded(Faulty):
    class tx(SqliteTransaction):
        async def add_dead(self, letter: DeadLetter) -> DeadLetter:
            await self.execute("update faregate_dead set status = 'open' where status = 'discarded'")
            return await super().add_dead(letter)


@breaks("a_message_that_is_handled_after_all_resolves_its_dead_letter")
class ResolvesNothing(Faulty):
    class tx(SqliteTransaction):
        async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
            pass


@breaks("an_operator_changes_only_what_waits_for_a_decision")
class ReplaysWhatWasDiscarded(Faulty):
    class tx(SqliteTransaction):
        async def set_dead_status(
            self, node: str, message_id: str, status: DeadStatus, *, by: str, at: float
        ) -> DeadLetter | None:
            await self.execute("update faregate_dead set status = 'open' where status = 'discarded'")
            return await super().set_dead_status(node, message_id, status, by=by, at=at)


@breaks("dead_letters_are_found_by_what_is_asked_for")
class ListsTheNewestFirst(Faulty):
    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        return (await super().dead(which, limit))[::-1]


# --- retention ---


@breaks("old_ledger_rows_are_evicted_and_the_floor_rises_with_them", "the_floor_never_sinks")
class EvictsWithoutAFloor(Faulty):
    async def floor(self, node: str) -> float | None:
        return None


@breaks("the_floor_never_sinks")
class LowersTheFloor(Faulty):
    async def evict(self, node: str, before: float, limit: int) -> int:
        gone = await super().evict(node, before, limit)
        if gone:
            sql = "update faregate_floor set floor = ? where node = ?"
            await self._write(lambda connection: connection.execute(sql, (before, node)))
        return gone


@breaks("what_has_outputs_to_dispatch_is_not_evicted")
class EvictsWhatHasOutputsToDispatch(Faulty):
    async def evict(self, node: str, before: float, limit: int) -> int:
        gone = await super().evict(node, before, limit)
        sql = "delete from faregate_ledger where node = ? and handled_at < ?"
        if gone < limit:
            gone += (await self._write(lambda connection: connection.execute(sql, (node, before)))).rowcount
        return gone


@breaks("business_keys_are_evicted_with_the_ledger")
class KeepsBusinessKeysForEver(Faulty):
    async def evict(self, node: str, before: float, limit: int) -> int:
        sql = "update faregate_identities set claimed_at = 1e12"
        await self._write(lambda connection: connection.execute(sql))
        return await super().evict(node, before, limit)


# --- mode `tokens` ---


@breaks("a_claim_is_inserted_once_and_finished_once")
class OverwritesAClaim(Faulty):
    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        await self._write(lambda connection: connection.execute("delete from faregate_claims where state = 'NEW'"))
        return await super().insert_claim(node, message_id, claim_id, attempt_id, at)


@breaks("a_claim_is_inserted_once_and_finished_once")
class FinishesAnybodysClaim(Faulty):
    class tx(SqliteTransaction):
        async def finish_claim(self, node: str, message_id: str, claim_id: str) -> bool:
            return await self.execute("update faregate_claims set state = 'DONE'") == 1


@breaks("a_claim_is_deleted_only_by_its_holder")
class DeletesAClaimThatIsDone(Faulty):
    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        return await super().delete_claim(node, message_id, claim_id, only_new=False)


@breaks("claims_that_are_done_are_found_and_deleted_together")
class FindsClaimsThatAreNotDone(Faulty):
    async def done_claims(self, node: str) -> list[ClaimRecord]:
        return [each for each in await self.claim_records(1e12, 1000) if each.node == node]


@breaks("claims_that_are_done_are_found_and_deleted_together")
class DeletesNewerClaims(Faulty):
    class tx(SqliteTransaction):
        async def delete_claims(self, records: Sequence[ClaimRecord]) -> int:
            rows = [(each.node, self.id_in(each.message_id)) for each in records]
            return await self.executemany("delete from faregate_claims where node = ? and message_id = ?", rows)


@breaks("old_claims_are_found_oldest_first")
class SweepsFreshClaims(Faulty):
    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        return await super().claim_records(1e12, limit)


@breaks("attempts_change_only_from_the_version_that_was_read", "of_two_that_choose_at_once_one_wins")
class ChoosesWithoutComparing(Faulty):
    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        row = await self.outbox_row(seq)
        return await super().choose_attempts(seq, row.version if row else 0, chosen)

    async def _change(self, name: str, parameters: Sequence[Any]) -> int:
        changed = await super()._change(name, parameters)
        return max(1, changed) if name == "choose_attempts" else changed


@breaks("attempts_change_only_from_the_version_that_was_read")
class ReplacesRegisteredAttempts(Faulty):
    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        sql = "update faregate_outbox set registered = null where seq = ? and version = ?"
        await self._write(lambda connection: connection.execute(sql, (seq, version)))
        return await super().register_attempts(seq, version, attempts, not_after)


@breaks("a_revised_row_keeps_its_place")
class PutsARevisedRowAtTheEnd(Faulty):
    class tx(SqliteTransaction):
        async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
            ours = await super().revise(rows)
            for seq in sorted(ours):
                last = "(select max(seq) + 1 from faregate_outbox)"
                await self.execute(f"update faregate_outbox set seq = {last} where seq = ?", (seq,))
            return ours


@breaks("rows_are_revised_only_from_the_version_that_was_read")
class RevisesWithoutComparing(Faulty):
    class tx(SqliteTransaction):
        async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
            for row in rows:
                await self.execute("update faregate_outbox set version = ? where seq = ?", (row.version, row.seq))
            return await super().revise(rows)


@breaks("rows_that_are_marked_as_dispatched_stay_until_they_are_removed")
class RemovesWhatIsMarked(Faulty):
    async def keep_dispatched(self, seqs: Sequence[int], at: float) -> None:
        rows = [(seq,) for seq in seqs]
        await self._write(lambda connection: connection.executemany(QUERIES["dispatched"], rows))


@breaks("tokens_are_created_and_consumed_with_the_transaction")
class CreatesLateTokensInATransaction(Faulty):
    class tx(SqliteTransaction):
        async def create_tokens(self, tokens: Sequence[Token]) -> None:
            await super().create_tokens([token._replace(not_after=1e12) for token in tokens])


@breaks("a_dead_letter_is_removed_only_as_it_was_read")
class RemovesWhatHasChanged(Faulty):
    class tx(SqliteTransaction):
        async def remove_dead(self, letters: Sequence[DeadLetter]) -> int:
            sql = "delete from faregate_dead where node = ? and message_id = ?"
            return sum([await self.execute(sql, (each.node, id_bytes(each.message_id))) for each in letters])


# --- token stores ---


@breaks("a_token_comes_back_as_it_was")
class ForgetsThePayload(MemoryTokenStore):
    async def create(self, tokens: Sequence[Token]) -> None:
        await super().create([token._replace(payload_ref=None) for token in tokens])


@breaks("creating_a_token_again_changes_nothing")
class CreatesOverAnotherToken(MemoryTokenStore):
    async def create(self, tokens: Sequence[Token]) -> None:
        await self.discard([token.attempt_id for token in tokens])
        await super().create(tokens)


@breaks("a_token_is_not_created_after_its_time")
class HasNoFence(MemoryTokenStore):
    async def create(self, tokens: Sequence[Token]) -> None:
        await super().create([token._replace(not_after=1e12) for token in tokens])


@breaks("a_token_is_not_created_after_its_time")
class RefusesABatchWithALateToken(MemoryTokenStore):
    async def create(self, tokens: Sequence[Token]) -> None:
        if all(token.not_after > self._clock.time() for token in tokens):
            await super().create(tokens)


@breaks("a_claim_is_set_once", "of_many_that_claim_at_once_one_wins")
class OverwritesTheClaimOfAToken(MemoryTokenStore):
    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        sql = "update faregate_tokens set claim_id = null where attempt_id = ?"
        await self._write(lambda connection: connection.execute(sql, (attempt_id,)))
        return await super().claim(attempt_id, claim_id)


@breaks("a_claim_is_set_once")
class DoesNotKnowItsOwnClaim(MemoryTokenStore):
    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        token = await self.read(attempt_id)
        return "taken" if token is not None and token.claim_id else await super().claim(attempt_id, claim_id)


@breaks("of_many_that_claim_at_once_one_wins")
class LooksBeforeItClaims(MemoryTokenStore):
    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        token = await self.read(attempt_id)
        await asyncio.sleep(0)
        if token is not None and token.claim_id is None:
            await super().claim(attempt_id, claim_id)
            return "claimed"
        return await super().claim(attempt_id, claim_id)


@breaks("a_token_is_deleted_only_by_its_claim")
class DeletesForAnybody(MemoryTokenStore):
    async def delete(self, attempt_id: str, claim_id: str) -> None:
        await self.discard([attempt_id])


@breaks("tokens_are_discarded_whoever_holds_them")
class SparesClaimedTokens(MemoryTokenStore):
    async def discard(self, attempt_ids: Sequence[str]) -> None:
        for attempt_id in attempt_ids:
            token = await self.read(attempt_id)
            if token is not None and token.claim_id is None:
                await super().discard([attempt_id])


@breaks("tokens_are_counted")
class CountsNothing(MemoryTokenStore):
    async def count(self) -> int:
        return 0


@breaks("the_same_database_has_one_identity")
class IsSomebodyElseEachTime(MemoryTokenStore):
    @property
    def database_id(self) -> str:
        return f"{super().database_id} {id(self)}"


@breaks("a_topic_without_a_list_has_nobody")
class LeavesOutTopicsWithoutAList(MemoryTokenStore):
    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        return {topic: found for topic, found in (await super().recipients(topics)).items() if found != NOBODY}


@breaks("a_list_is_replaced_only_from_the_version_that_was_read", "of_many_that_replace_a_list_at_once_one_wins")
class SwapsWithoutComparing(MemoryTokenStore):
    async def swap(self, topic: str, version: int, modes: Mapping[str, Mode]) -> bool:
        current = (await self.recipients([topic]))[topic].version
        return await super().swap(topic, current, modes)


# --- parked messages and positions ---


@breaks("a_transaction_knows_what_it_has_recorded_itself")
class KnowsOnlyWhatIsCommitted(Faulty):
    class tx(SqliteTransaction):
        async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
            self._connection, writer = self._database.reader, self._connection
            try:
                return await super().known(node, message_ids)
            finally:
                self._connection = writer


@breaks("parked_messages_that_are_due_come_back_as_they_were_in_the_order_of_the_log")
class GivesParkedMessagesByTheirTime(Faulty):
    class tx(SqliteTransaction):
        async def parked(self, *given: Any) -> list[Parked]:
            return sorted(await super().parked(*given), key=lambda each: each.due)


@breaks("parked_messages_that_are_due_come_back_as_they_were_in_the_order_of_the_log")
class CountsWhatIsParkedByAnybody(Faulty):
    class tx(SqliteTransaction):
        async def count_parked(self, node: str) -> tuple[int, int | None]:
            return self._fetch("select count(*), min(position) from faregate_parked")[0]


@breaks("a_message_is_parked_once_and_again_only_from_the_row_that_was_read")
class ParksOverWhatIsParked(Faulty):
    class tx(SqliteTransaction):
        async def park(self, node: str, rows: Sequence[tuple[Parked, int | None]]) -> None:
            there = {each.message_id: each.position for each in await self.parked(node)}
            found = [each.message_id for each, before in rows if before is None and each.message_id in there]
            await self.unpark(node, {message_id: there[message_id] for message_id in found})
            await super().park(node, rows)


@breaks("a_message_is_parked_once_and_again_only_from_the_row_that_was_read")
class ParksAgainWithoutComparing(Faulty):
    class tx(SqliteTransaction):
        async def park(self, node: str, rows: Sequence[tuple[Parked, int | None]]) -> None:
            there = {each.message_id: each.redeliveries for each in await self.parked(node)}
            await super().park(node, [(each, before and there.get(each.message_id)) for each, before in rows])


@breaks("what_is_taken_out_is_not_parked_any_more")
class TakesOutOnlyTheFirst(Faulty):
    class tx(SqliteTransaction):
        async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
            await super().unpark(node, dict(list(positions.items())[:1]))


@breaks("only_the_row_that_was_read_is_taken_out")
class TakesOutWhateverIsParked(Faulty):
    class tx(SqliteTransaction):
        async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
            there = {each.message_id: each.position for each in await self.parked(node)}
            await super().unpark(node, {each: there.get(each, 0) for each in positions})


@breaks("parked_messages_are_found_by_id_or_key")
class FindsAMessageOnceForEachReason(Faulty):
    class tx(SqliteTransaction):
        async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
            return await super().parked_with(node, message_ids, []) + await super().parked_with(node, [], keys)


@breaks("the_position_of_a_key_never_goes_back")
class SetsPositionsBack(Faulty):
    class tx(SqliteTransaction):
        async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
            gone = "delete from faregate_positions where node = ? and handler = ? and key = ?"
            self._run_many(gone, [(node, handler, key) for key in positions])
            await super().advance(node, handler, positions)


@breaks("the_position_of_a_key_never_goes_back")
class KeepsOnePositionForAllHandlers(Faulty):
    class tx(SqliteTransaction):
        async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
            await super().advance(node, "any", positions)

        async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
            return await super().positions(node, "any", keys)


@breaks("who_wants_a_bucket_waits_for_the_end_of_its_holder")
class LetsOthersInWithTheLock(Faulty):
    class tx(SqliteTransaction):
        async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
            await self.commit()

        async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
            return {}

        async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
            pass


@breaks("what_waits_of_keys_is_found_up_to_a_place")
class FindsWhatIsDispatched(Faulty):
    async def keyed_before(self, seq: int, nodes: Sequence[str] | None = None) -> list[tuple[int, str, str]]:
        rows = await self._rows("select seq, destination, key from faregate_outbox where key is not null")
        return [row for row in rows if row[0] < seq]


# --- leases, and parked messages that several instances share ---


@breaks("a_lease_is_one_instances_until_it_runs_out_and_each_owner_has_a_higher_epoch")
class GivesALeaseToWhoeverAsks(Faulty):
    async def claim_lease(self, node: str, queue: str, owner: str, seconds: float) -> int | None:
        await self._write(lambda c: c.execute("update faregate_leases set until = 0"))
        return await super().claim_lease(node, queue, owner, seconds)


@breaks("a_lease_is_one_instances_until_it_runs_out_and_each_owner_has_a_higher_epoch")
class KeepsTheEpoch(Faulty):
    async def claim_lease(self, node: str, queue: str, owner: str, seconds: float) -> int | None:
        epoch = await super().claim_lease(node, queue, owner, seconds)
        await self._write(lambda c: c.execute("update faregate_leases set epoch = 1"))
        return epoch and 1


@breaks("only_its_owner_under_its_epoch_renews_a_lease")
class RenewsUnderAnyEpoch(Faulty):
    async def renew_leases(self, node: str, owner: str, epochs: Mapping[str, int], seconds: float) -> set[str]:
        there = {each.queue: each.epoch for each in await self.leases(node, list(epochs))}
        return await super().renew_leases(node, owner, there, seconds)


@breaks("a_released_lease_is_kept_for_who_asked_for_it_and_else_for_anybody")
class KeepsALeaseForNobody(Faulty):
    async def release_lease(self, node: str, queue: str, owner: str, epoch: int, keep_seconds: float) -> None:
        await super().release_lease(node, queue, owner, epoch, 0)


@breaks("a_released_lease_is_kept_for_who_asked_for_it_and_else_for_anybody")
class ForgetsWhoAskedFirst(Faulty):
    async def ask_for_lease(self, node: str, queue: str, epoch: int, instance: str) -> bool:
        await self._write(lambda c: c.execute("update faregate_leases set wanted_by = null"))
        return await super().ask_for_lease(node, queue, epoch, instance)


@breaks("a_generation_is_noted_once_and_followed_once")
class NotesAnyNumberOfPartitions(Faulty):
    async def note_generation(self, node: str, queue: str, partitions: int) -> Generation:
        found = await super().note_generation(node, queue, partitions)
        return found._replace(partitions=partitions)


@breaks("a_commit_under_a_lease_that_is_anothers_is_refused")
class HoldsALeaseThatWasLetGo(Faulty):
    class tx(SqliteTransaction):
        async def hold_lease(self, node: str, queue: str, epoch: int) -> None:
            given = "select 1 from faregate_leases where node = ? and queue = ? and epoch = ?"
            if not self._fetch(given, (node, queue, epoch)):
                raise LeaseLost(queue)


@breaks("a_takeover_waits_for_a_commit_under_the_lease_and_a_renewal_does_not")
class LetsGoOfTheLeaseAtOnce(Faulty):
    class tx(SqliteTransaction):
        async def hold_lease(self, node: str, queue: str, epoch: int) -> None:
            await super().hold_lease(node, queue, epoch)
            await self.commit()


@breaks("what_no_transport_numbers_is_parked_in_the_order_in_which_it_comes")
class NumbersByTheClockAlone(Faulty):
    class tx(SqliteTransaction):
        def _numbered(self, node: str, rows: Sequence[Parked]) -> list[tuple[Any, ...]]:
            return [(*row[:6], "nobody", *row[7:]) for row in super()._numbered(node, rows)]


@breaks("what_waits_behind_others_is_due_when_it_is_the_first_of_its_key")
class LetsAllOfAKeyGo(Faulty):
    class tx(SqliteTransaction):
        async def next_of_key(self, node: str, queue: str, key: str, due: float) -> Parked | None:
            self._run("update faregate_parked set due_at = ? where node = ? and queue = ?", (due, node, queue))
            return await super().next_of_key(node, queue, key, due)


@breaks("a_parked_message_of_no_partition_is_tried_by_one_instance_at_a_time")
class LetsEverybodyTry(Faulty):
    class tx(SqliteTransaction):
        async def claim_parked(self, node: str, queues: Sequence[str], *given: Any) -> list[Parked]:
            self._run("update faregate_parked set claimed_by = null, claimed_until = null")
            return await super().claim_parked(node, queues, *given)


@breaks("starts_of_a_parked_message_are_counted")
class CountsStartsUpOnly(Faulty):
    class tx(SqliteTransaction):
        async def count_starts(self, node: str, message_ids: Sequence[str], step: int = 1) -> dict[str, int]:
            return await super().count_starts(node, message_ids, abs(step))


# --- the reader ---


class FaultyReader(SqliteReader):
    """The reader with other queries."""

    altered: ClassVar[dict[str, tuple[str, str]]]

    def __init_subclass__(cls) -> None:
        cls.queries = {**QUERIES}
        for name, (before, after) in cls.altered.items():
            assert before in QUERIES[name]
            cls.queries[name] = QUERIES[name].replace(before, after)


class ReadBadly(SqliteStore):
    read_by: type[SqliteReader]

    def reader(self) -> SqliteReader:
        given = super().reader()
        return self.read_by(given.url, given.path)


@breaks("a_reader_gives_the_ledger_as_it_is_committed")
class OrdersCommitsByTheClock(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"read_ledger": ("outcome, seq", "outcome, cast(handled_at as integer) - seq")}


@breaks("a_reader_gives_the_ledger_as_it_is_committed", "what_a_handler_sent_is_kept_in_its_ledger_row")
class LeavesOutThePartThatIsLast(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"ledger_span": ("max(seq)", "max(seq) - 1")}


@breaks("a_reader_gives_dead_and_parked_messages")
class GivesIdsAsText(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"read_parked": ("node, message_id", "node, lower(hex(message_id))")}


@breaks("a_reader_gives_what_waits_in_the_outbox_and_what_nobody_takes")
class CountsWhatIsDispatchedAsWaiting(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"read_waiting": ("dispatched_at is null and", "")}


@breaks("a_reader_gives_what_waits_in_the_outbox_and_what_nobody_takes")
class TakesEveryDeadLetterForUnroutable(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"read_unroutable": ("where", "where 1 or")}


@breaks("a_reader_tells_floors_low_water_marks_and_what_there_is")
class TakesPositionsOfHandlersForMarks(ReadBadly):
    class read_by(FaultyReader):
        altered: ClassVar = {"low_water": ("where handler = ''", "")}


@breaks("a_reader_runs_a_query_and_changes_nothing")
class WritesWhatItIsTold(ReadBadly):
    class read_by(SqliteReader):
        def _stream(self, sql: str, values: Any = ()) -> Any:
            try:
                with closing(sqlite3.connect(self.path)) as connection, connection:
                    yield connection.execute(sql, values).fetchall()
            except sqlite3.Error as exc:
                raise self._refused(sql, exc) from exc


# --- the proof ---


async def run(case: str, fault: type[Any], path: Any) -> None:
    if case in TOKEN_CASES:
        await run_token_case(case, partial(memory_token_subject, fault))
    elif case in READER_CASES:
        await run_store_case(case, partial(sqlite_store_subject, path / f"{case}.db", fault))
    elif case in NEEDS_A_FILE:
        await run_store_case(
            case, partial(sqlite_store_subject, path / "store.db", lambda _, clock: fault(clock=clock))
        )
    else:
        await run_store_case(case, partial(memory_store_subject, fault))


@FAULTS.pairs()
async def test_the_case_fails_on_a_store_with_this_fault(case: str, fault: type[Any], tmp_path: Any) -> None:
    with pytest.raises((AssertionError, TimeoutError, FaregateError)):
        await run(case, fault, tmp_path)


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@pytest.mark.parametrize("name", STORE_CASES)
async def test_without_a_fault_the_openings_change_nothing(name: str) -> None:
    await run_store_case(name, partial(memory_store_subject, Faulty))


@FAULTS.each()
async def test_a_fault_is_one_fault_and_leaves_most_promises_kept(fault: type[Any], tmp_path: Any) -> None:
    cases = TOKEN_CASES if issubclass(fault, MemoryTokenStore) else STORE_CASES
    kept = 0
    if issubclass(fault, ReadBadly):  # on a file, which takes its time; none of these waits for ever
        cases = READER_CASES
        results = [await asyncio.gather(run(case, fault, tmp_path), return_exceptions=True) for case in cases]
        kept = results.count([None])
    else:
        for case in set(cases) - NEEDS_A_FILE:
            kept += await passes(run(case, fault, tmp_path))
    assert kept > len(cases) / 2, f"only {kept} of {len(cases)} cases pass"
