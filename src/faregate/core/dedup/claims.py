"""The receiving side of tokens, where the token store is another database than the node's.

    R1  load our claim on the message: NEW -> R4 with its claim id; DONE -> finish
    R2  none: the token is gone -> a duplicate
    R3  insert the claim, NEW, with a fresh id                                     own commit; conflict -> R1
    R4  claim the token for it: ours -> run; gone -> drop the claim, a duplicate; another's -> later, with an alarm
    R5  handler's writes, outgoing messages, and the claim NEW -> DONE              one transaction, only while NEW
    D   the outgoing messages are sent (see `attempts.py`)
    G   delete the token, then the claim                                          each only if the claim id is ours
    A   settle

The claim is looked up before the token: whoever finds none of both is a duplicate, whatever it raced with. A crash
after any step leaves the delivery unsettled, and the next copy goes on from what is recorded.

On Spark one process sends for many that handle (docs/decisions/0055). There a task ends with R5, and whoever sends does
D and G for all that is done (`finish_all`); the log keeps the message, so that nothing has to be settled.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar
from uuid import uuid4

from faregate.core.alarms import Alarms
from faregate.core.dedup import Dedup
from faregate.core.work import Work
from faregate.errors import RetryAfter, StoreConflict
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.store import OutboxRow, Store, Transaction
from faregate.ports.tokens import TokenStore

Admission = Literal["run", "done", "duplicate", "taken"]

Dispatch = Callable[[Sequence[OutboxRow]], Awaitable[None]]
"""Returns once these rows of the outbox are sent."""

T = TypeVar("T")

CLAIM_AGE = 60.0
"""Nobody still works on a claim this old whose token is gone."""
_TAKEN_SECONDS = 5.0
_FINISHED_AT_ONCE = 1_000


class ClaimLost(StoreConflict):
    """Another run of the message finished it, or dropped the claim, before this one could commit."""


class Claims(Dedup):
    one_by_one = True

    def __init__(
        self, node: str, store: Store, tokens: TokenStore, dispatch: Dispatch | None, alarms: Alarms, clock: Clock
    ) -> None:
        """`dispatch` is None where another process sends, and finishes."""
        self._node = node
        self._store = store
        self._tokens = tokens
        self._dispatch = dispatch
        self._alarms = alarms
        self._clock = clock

    async def admit(self, works: Sequence[Work]) -> None:
        for work in works:
            assert work.attempt_id is not None
            admission = await self.claim(work, work.attempt_id)
            if admission == "taken":
                text = f"the token of {work.envelope} is claimed by someone else"
                work.fail(RetryAfter(_TAKEN_SECONDS, text))
            elif admission != "run":
                work.move("known" if admission == "duplicate" else "resumed")

    async def claim(self, work: Work, attempt_id: str) -> Admission:
        """R1 to R4. With `run`, `work.claim_id` is the claim to commit with; with `done`, the claim to finish."""
        while True:
            record = await self._store.claim_record(self._node, work.message_id)
            if record is None:
                if await self._tokens.read(attempt_id) is None:
                    return "duplicate"
                claim_id = str(uuid4())
                inserted = await self._store.insert_claim(
                    self._node, work.message_id, claim_id, attempt_id, self._clock.time()
                )
                if faults.hook is not None:
                    await faults.hook("tokens.claim-recorded")
                if not inserted:
                    continue
            elif record.state == "DONE" and record.attempt_id != attempt_id and await self._is_dead(work.message_id):
                # It is a dead letter whose writer died before the token was gone. This is its replay.
                await self.drop(work.message_id, record.attempt_id)
                continue
            else:
                claim_id, attempt_id = record.claim_id, record.attempt_id
            work.claim_id, work.claimed_attempt = claim_id, attempt_id
            if record is not None and record.state == "DONE":
                return "done"
            claim = await self._tokens.claim(attempt_id, claim_id)
            if faults.hook is not None:
                await faults.hook("tokens.claimed")
            if claim == "claimed":
                return "run"
            if claim == "missing":
                await self._store.delete_claim(self._node, work.message_id, claim_id, only_new=True)
                return "duplicate"
            text = (
                f"the token of {work.envelope} is claimed by a record that this node does not have; it is tried again"
            )
            envelope, key = work.envelope, work.delivery.key
            self._alarms.sound("foreign-claim", self._node, work.message_id, text, envelope=envelope, key=key)
            return "taken"

    async def _is_dead(self, message_id: str) -> bool:
        """Whether its dead letter is open; with the effects of a message it is resolved."""
        known = await self._store.known(self._node, [message_id])
        return message_id in known and known[message_id].state == "dead"

    async def commit(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """R5, within the transaction of the effects."""
        for work in works:
            if work.claim_id is not None and not await self.is_unhandled(transaction, work):
                raise ClaimLost(f"the claim on {work.envelope} at {self._node} is no longer ours")

    async def is_unhandled(self, transaction: Transaction, work: Work) -> bool:
        if work.claim_id is None:
            return True
        return await transaction.finish_claim(self._node, work.message_id, work.claim_id)

    async def release(self, work: Work) -> None:
        if work.state in ("folded", "filtered") or work.in_ledger or work.key_taken:
            await self.dead_lettered(work)
        elif work.state in ("done", "resumed"):
            await self.finish(work)

    async def finish(self, work: Work) -> None:
        """D and G: see that everything is sent, then forget the message."""
        if self._dispatch is not None:
            await self._dispatch(await self._store.outbox_rows_of(self._node, work.message_id))
            await self.forget(work)

    async def finish_all(self, send: Callable[[], Awaitable[T]]) -> T:
        """D and G of all messages that are done by now. `send` sends everything that is in the outbox."""
        done = await self._store.done_claims(self._node)
        answer = await send()
        for start in range(0, len(done), _FINISHED_AT_ONCE):
            some = done[start : start + _FINISHED_AT_ONCE]
            await self._tokens.discard([each.attempt_id for each in some])  # that of a dead letter may be unclaimed
            if faults.hook is not None:
                await faults.hook("tokens.deleted")
            async with self._store.transaction() as transaction:
                await transaction.delete_claims(some)
        return answer

    async def forget(self, work: Work) -> None:
        """G: the token first. The other way round, a late copy would find a token and no claim."""
        if work.claim_id is None or work.claimed_attempt is None:
            return
        await self._tokens.delete(work.claimed_attempt, work.claim_id)
        if faults.hook is not None:
            await faults.hook("tokens.deleted")
        await self._store.delete_claim(self._node, work.message_id, work.claim_id, only_new=False)
        if faults.hook is not None:
            await faults.hook("tokens.forgotten")

    async def dead_lettered(self, work: Work) -> None:
        await self.drop(work.message_id, work.attempt_id, work.claimed_attempt)

    async def drop(self, message_id: str, *attempts: str | None) -> None:
        """The message is not to be handled: a dead letter has it, or the ledger, or no filter takes it. The tokens of
        these attempts go, whoever claimed them, and the claim on one of them. That on another one stays: it is of a
        replay that has begun meanwhile, and without it nobody could ever claim that token."""
        gone = [attempt for attempt in dict.fromkeys(attempts) if attempt is not None]
        record = await self._store.claim_record(self._node, message_id)
        await self._tokens.discard(gone)
        if record is not None and record.attempt_id in gone:
            await self._store.delete_claim(self._node, message_id, record.claim_id, only_new=False)

    async def sweep(self, before: float, limit: int = 500) -> int:
        """Delete claims whose token is gone: whoever made them came too late, or died just before the end."""
        swept = 0
        for record in await self._store.claim_records(before, limit):
            if record.node == self._node and await self._tokens.read(record.attempt_id) is None:
                swept += await self._store.delete_claim(record.node, record.message_id, record.claim_id, only_new=False)
        return swept


def claims_of(
    node: str, store: Store, tokens: TokenStore | None, alarms: Alarms, clock: Clock, dispatch: Dispatch | None = None
) -> Claims | None:
    """How a node claims messages; None where it need not, as tokens and business data are one database."""
    if tokens is None or tokens.database_id == store.database_id:
        return None
    return Claims(node, store, tokens, dispatch, alarms, clock)
