"""The sending side of tokens: a signal goes out after its recipient's token was created.

    resolve    the outbox row of a publication learns its recipients, those that want tokens first
    D1         register fresh attempt ids with the row, one for each of those   compare-and-swap
    D2         create the tokens of these attempts, at most once                if absent, and in time
    D3         choose them; the loser reads again and uses the winner's         compare-and-swap
    D4         the dispatcher sends the signals with the chosen attempts
    G1         remove tokens of attempts that were not chosen, once nobody can create them any more

A row keeps its place in the outbox through all of it: that is the order in which its key is sent, also after a crash.
Where the token store is the node's own database, resolving and D1 to D3 are one transaction.

An attempt id is used for one create only. A create whose outcome is unknown may still arrive, long after its message
was consumed; with the same attempt id it would let a late copy in again.
"""

from collections.abc import Mapping, Sequence
from uuid import uuid4

import msgspec

from faregate import ids
from faregate.core.alarms import Alarms
from faregate.core.recipients import RecipientLists, topic_of
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.store import LedgerRow, OutboxRow, Store, Transaction
from faregate.ports.tokens import NOBODY, Mode, Token

PENDING = "pending"
"""Stands for an attempt that is not chosen yet."""
FOR_NOBODY = ("(nobody)",)
"""The recipients of an event whose list was empty. No node can have this name."""
FENCE_SECONDS = 60.0
"""How long after its registration an attempt may be created."""
_FOR_EVER = 1e15


def is_unresolved(row: OutboxRow) -> bool:
    return not row.envelope.recipients


def is_pending(row: OutboxRow) -> bool:
    return PENDING in row.chosen


def without_attempts(row: OutboxRow) -> OutboxRow:
    """A row of a bus that makes no tokens any more: the ledgers of its recipients recognise its signals."""
    return row._replace(chosen=()) if is_pending(row) else row


def signals(row: OutboxRow) -> list[Envelope]:
    """What is sent for a row: one for all recipients with a ledger, and one for each with tokens."""
    if not row.chosen:
        return [row.envelope]
    recipients = row.envelope.recipients
    by_ledger = recipients[len(row.chosen) :]
    found = [_addressed(row.envelope, by_ledger, None)] if by_ledger else []
    for name, attempt in zip(recipients, row.chosen, strict=False):
        found.append(_addressed(row.envelope, (name,), attempt))
    return found


def has_strays(row: OutboxRow) -> bool:
    """Whether tokens may appear that no signal carries."""
    return len(row.registered) > len(row.chosen)


class Attempts:
    """Prepares the outbox rows of one store for sending."""

    def __init__(self, store: Store, lists: RecipientLists, clock: Clock, alarms: Alarms | None = None) -> None:
        self._store = store
        self._lists = lists
        self._tokens = lists.tokens
        self._clock = clock
        self._alarms = alarms or Alarms()
        self.merged = self._tokens.database_id == store.database_id
        """Whether tokens and outbox are in one database."""

    # --- resolving -------------------------------------------------------------------------------------------

    async def resolve(self, rows: Sequence[OutboxRow]) -> dict[int, OutboxRow | None]:
        """Give unresolved rows their recipients, in one commit; seq -> the row as it is then, None where it is gone.

        An event without recipients then goes to nobody but the readers of the transport's log. A command without a list
        stays as it is: the transport says whether anybody takes it.
        """
        lists = await self._lists.resolve(row.envelope for row in rows)
        modes = {row.seq: lists.get(topic_of(row.envelope), NOBODY).modes for row in rows}
        listed = [row for row in rows if modes[row.seq] or row.envelope.kind == "event"]
        fresh = [self._addressed_to(row, modes[row.seq]) for row in listed]
        if not fresh:
            return {}
        resolved: dict[int, OutboxRow | None] = {}
        async with self._store.transaction() as transaction:
            ours = await transaction.revise(fresh)
            for row in fresh:
                if row.seq in ours:
                    repeated = await self._is_repetition(transaction, row)
                    resolved[row.seq] = None if repeated else row._replace(version=row.version + 1)
            await transaction.dispatched([seq for seq, row in resolved.items() if row is None])
            if self.merged:
                now = self._clock.time()
                tokens = [self._tokens_of(row, row.chosen, now, _FOR_EVER) for row in resolved.values() if row]
                await transaction.create_tokens([token for each in tokens for token in each])
            if faults.hook is not None:
                await faults.hook("tokens.resolved")
        for row in fresh:
            if row.seq not in ours:  # another dispatcher was faster, or our commit with an unknown outcome
                resolved[row.seq] = await self._current(row.seq)
        return resolved

    async def _is_repetition(self, transaction: Transaction, row: OutboxRow) -> bool:
        """Whether the same idempotency key was published before. Recipients cannot see it, as each publication has
        tokens of its own; so the ledger of the sending node keeps it."""
        envelope = row.envelope
        if row.message_id is not None or not ids.is_idempotent(envelope.publication_id):
            return False
        record = LedgerRow(envelope.publication_id, envelope.body_digest, None, None, self._clock.time())
        known = await transaction.record(row.node, [record])
        if known and known[envelope.publication_id] != envelope.body_digest:
            text = f"{envelope} was published again with another body; the first one counts"
            self._alarms.sound("disagreement", row.node, envelope.publication_id, text, envelope=envelope)
        return bool(known)

    def _addressed_to(self, row: OutboxRow, modes: Mapping[str, Mode]) -> OutboxRow:
        wanting = tuple(name for name, mode in modes.items() if mode == "tokens")
        by_ledger = tuple(name for name, mode in modes.items() if mode != "tokens") if modes else FOR_NOBODY
        chosen = tuple(str(uuid4()) if self.merged else PENDING for _ in wanting)
        return row._replace(envelope=_addressed(row.envelope, wanting + by_ledger, None), chosen=chosen)

    # --- D1 to D3 --------------------------------------------------------------------------------------------

    async def choose(self, row: OutboxRow) -> OutboxRow | None:
        """The row as it may be sent: with chosen attempts, whose tokens are there.

        None when another dispatcher has sent it meanwhile.
        """
        while True:
            current = await self._current(row.seq)
            if current is None or not is_pending(current):
                return current
            await self._try(current)

    async def _current(self, seq: int) -> OutboxRow | None:
        """The row as it is now; None once it is sent."""
        row = await self._store.outbox_row(seq)
        return None if row is None or row.dispatched_at is not None else row

    async def _try(self, row: OutboxRow) -> None:
        attempts, now = [str(uuid4()) for _ in row.chosen], await self._tokens.now()
        not_after = max(now + FENCE_SECONDS, row.not_after or 0.0)
        if not await self._store.register_attempts(row.seq, row.version, attempts, not_after):
            return
        if faults.hook is not None:
            await faults.hook("tokens.registered")
        await self._tokens.create(self._tokens_of(row, attempts, now, now + FENCE_SECONDS))
        if faults.hook is not None:
            await faults.hook("tokens.created")
        for attempt in attempts:
            if await self._tokens.read(attempt) is None:
                return  # it came too late: `choose` tries again with others
        await self._store.choose_attempts(row.seq, row.version + 1, attempts)
        if faults.hook is not None:
            await faults.hook("tokens.chosen")

    def _tokens_of(self, row: OutboxRow, attempts: Sequence[str], now: float, not_after: float) -> list[Token]:
        envelope = row.envelope
        return [
            Token(
                attempt,
                ids.message_id(envelope.publication_id, recipient),
                recipient,
                envelope.source,
                now,
                not_after,
                envelope.payload_ref,
            )
            for recipient, attempt in zip(envelope.recipients, attempts, strict=False)
        ]

    async def drop(self, row: OutboxRow, signals: Sequence[Envelope]) -> None:
        """These signals of a row cannot be sent: discard their tokens, and those of earlier attempts."""
        strays = set(row.registered).difference(row.chosen)
        unsent = {signal.attempt_id for signal in signals if signal.attempt_id is not None}
        if strays | unsent:
            await self._tokens.discard(sorted(strays | unsent))

    # --- G1 --------------------------------------------------------------------------------------------------

    async def discard_strays(self, limit: int = 500) -> int:
        """Remove sent rows, and the tokens of their other attempts, once those cannot be created any more."""
        now = await self._tokens.now()
        due = [row for row in await self._store.dispatched_rows(limit) if now > (row.not_after or 0.0)]
        if not due:
            return 0
        await self._tokens.discard([attempt for row in due for attempt in row.registered if attempt not in row.chosen])
        async with self._store.transaction() as transaction:
            await transaction.dispatched([row.seq for row in due])
        return len(due)


def _addressed(envelope: Envelope, recipients: tuple[str, ...], attempt: str | None) -> Envelope:
    return msgspec.structs.replace(envelope, recipients=recipients, attempt_id=attempt)
