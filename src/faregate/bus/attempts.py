"""The sending side of tokens: before a signal goes out, the recipient's token is there, and it is the right one.

    resolve    the outbox row of a publication becomes one for all recipients with a ledger, and one each with tokens
    D1         register a fresh attempt id with the row                        compare-and-swap
    D2         create the token of that attempt, at most once                 if absent, and in time
    D3         choose it; who loses reloads and uses the winner's              compare-and-swap
    D4         the dispatcher sends the signal with the chosen attempt
    G1         tokens of attempts that were registered and not chosen go, once nobody can create them any more

Where the token store is the node's own database, resolving and D1 to D3 are one transaction.

An attempt id is used for one create only. A create whose outcome is unknown may still arrive, long after its message
was consumed; with the same attempt id it would let a late copy in again.
"""

from collections.abc import Mapping, Sequence
from uuid import uuid4

import msgspec

from faregate import ids
from faregate.bus.alarms import Alarms
from faregate.bus.directory import Directory, topic_of
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.store import LedgerRow, OutboxRow, Store, Transaction
from faregate.ports.tokens import NOBODY, Mode, Token

PENDING = "pending"
"""The attempt id of a signal whose attempt is not chosen yet."""
FOR_NOBODY = ("(nobody)",)
"""The recipients of an event whose list was empty: no node can be called so."""
FENCE_SECONDS = 60.0
"""How long after its registration an attempt may be created."""
_FOR_EVER = 1e15
_LOOK_THROUGH = 10_000


def is_unresolved(row: OutboxRow) -> bool:
    return not row.envelope.recipients and row.envelope.attempt_id is None


def is_pending(row: OutboxRow) -> bool:
    return row.envelope.attempt_id == PENDING


def without_attempt(row: OutboxRow) -> OutboxRow:
    """A signal where nobody wants tokens any more: the ledger of its recipient recognises it."""
    return row if not is_pending(row) else row._replace(envelope=msgspec.structs.replace(row.envelope, attempt_id=None))


def has_strays(row: OutboxRow) -> bool:
    """Whether tokens may appear that no signal carries."""
    return len(row.registered) > len(row.chosen)


class Attempts:
    """For one store, whose outbox rows it prepares for sending."""

    def __init__(self, store: Store, directory: Directory, clock: Clock, alarms: Alarms | None = None) -> None:
        self._store = store
        self._directory = directory
        self._tokens = directory.tokens
        self._clock = clock
        self._alarms = alarms or Alarms()
        self.merged = self._tokens.identity == store.identity
        """Whether tokens and outbox are in one database."""

    # --- resolving -------------------------------------------------------------------------------------------

    async def resolve(self, rows: Sequence[OutboxRow]) -> dict[int, list[OutboxRow]]:
        """Replace unresolved rows by one per kind of recipient, in one commit; old seq -> the new rows.

        An event without recipients is for nobody from then on, but for those who read the transport's log. A command
        without a list stays as it is: the transport says whether anybody takes it.
        """
        lists = await self._directory.resolve(row.envelope for row in rows)
        modes = {row.seq: lists.get(topic_of(row.envelope), NOBODY).modes for row in rows}
        listed = [row for row in rows if modes[row.seq] or row.envelope.kind == "event"]
        if not listed:
            return {}
        replaced: dict[int, list[OutboxRow]] = {}
        tokens: list[Token] = []
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            ours = await transaction.withdraw([row.seq for row in listed])
            for row in listed:
                if row.seq in ours and await self._is_repetition(transaction, row):
                    replaced[row.seq] = []
                elif row.seq in ours:
                    replaced[row.seq] = self._split(row, modes[row.seq], tokens)
            seqs = iter(await transaction.send([row for split in replaced.values() for row in split]))
            if tokens:
                await transaction.create_tokens(tokens)
            if faults.hook is not None:
                await faults.hook("tokens.resolved")
            await transaction.commit()
        finally:
            await transaction.roll_back()
        replaced = {old: [row._replace(seq=next(seqs)) for row in split] for old, split in replaced.items()}
        for row in listed:
            if row.seq not in ours:
                replaced[row.seq] = await self._resolved_by_another(row)
        return replaced

    async def _is_repetition(self, transaction: Transaction, row: OutboxRow) -> bool:
        """Whether the same idempotency key was published before: the ledger of the sending node remembers those that it
        resolved, since each would get tokens of its own."""
        envelope = row.envelope
        if row.message_id is not None or not ids.is_idempotent(envelope.publication_id):
            return False
        record = LedgerRow(envelope.publication_id, envelope.body_digest, None, None, self._clock.time())
        known = await transaction.record(row.node, [record])
        if known and known[envelope.publication_id] != envelope.body_digest:
            text = f"{envelope} was published again with another body; the first one counts"
            self._alarms.sound("disagreement", row.node, envelope.publication_id, text)
        return bool(known)

    async def _resolved_by_another(self, row: OutboxRow) -> list[OutboxRow]:
        """Another dispatcher was faster, or our own commit happened without our knowing: what replaced the row may not
        be sent yet, and goes in its place, before what follows with the same key."""
        if row.message_id is not None:
            rows = await self._store.outbox_rows_of(row.node, row.message_id)
        else:
            rows = await self._store.undispatched(_LOOK_THROUGH, [row.node])
        publication = row.envelope.publication_id
        return [each for each in rows if each.envelope.publication_id == publication and not is_unresolved(each)]

    def _split(self, row: OutboxRow, modes: Mapping[str, Mode], tokens: list[Token]) -> list[OutboxRow]:
        by_ledger = tuple(name for name, mode in modes.items() if mode != "tokens") if modes else FOR_NOBODY
        rows = [row._replace(envelope=_addressed(row.envelope, by_ledger, None))] if by_ledger else []
        for name, mode in modes.items():
            if mode == "tokens":
                attempt = str(uuid4()) if self.merged else PENDING
                envelope = _addressed(row.envelope, (name,), attempt)
                rows.append(row._replace(envelope=envelope))
                if self.merged:
                    tokens.append(self._token(envelope, attempt, self._clock.time(), _FOR_EVER))
        return rows

    # --- D1 to D3 --------------------------------------------------------------------------------------------

    async def choose(self, row: OutboxRow) -> OutboxRow | None:
        """The row as it may be sent: its envelope carries the chosen attempt, whose token is there.

        None when another dispatcher has sent it meanwhile.
        """
        while True:
            current = await self._store.outbox_row(row.seq)
            if current is None or current.dispatched_at is not None:
                return None
            if current.chosen:
                envelope = msgspec.structs.replace(current.envelope, attempt_id=current.chosen[0])
                return current._replace(envelope=envelope)
            await self._try(current)

    async def _try(self, row: OutboxRow) -> None:
        attempt, now = str(uuid4()), await self._tokens.now()
        not_after = max(now + FENCE_SECONDS, row.not_after or 0.0)
        if not await self._store.register_attempts(row.seq, row.version, [attempt], not_after):
            return
        if faults.hook is not None:
            await faults.hook("tokens.registered")
        await self._tokens.create([self._token(row.envelope, attempt, now, now + FENCE_SECONDS)])
        if faults.hook is not None:
            await faults.hook("tokens.created")
        if await self._tokens.read(attempt) is not None:  # else it came too late, and the next attempt has to do
            await self._store.choose_attempts(row.seq, row.version + 1, [attempt])
            if faults.hook is not None:
                await faults.hook("tokens.chosen")

    def _token(self, envelope: Envelope, attempt: str, now: float, not_after: float) -> Token:
        recipient = envelope.recipients[0]
        message_id = ids.message_id(envelope.publication_id, recipient)
        return Token(attempt, message_id, recipient, envelope.source, now, not_after, envelope.payload_ref)

    async def give_up(self, row: OutboxRow) -> None:
        """Its signal cannot be sent: nobody will use its token up."""
        attempts = {row.envelope.attempt_id, *row.registered} - {None, PENDING}
        if attempts:
            await self._tokens.discard([attempt for attempt in attempts if attempt is not None])

    # --- G1 --------------------------------------------------------------------------------------------------

    async def discard_strays(self, limit: int = 500) -> int:
        """Remove sent rows, and the tokens of their other attempts, once those cannot be created any more."""
        now = await self._tokens.now()
        due = [row for row in await self._store.dispatched_rows(limit) if now > (row.not_after or 0.0)]
        if not due:
            return 0
        await self._tokens.discard([attempt for row in due for attempt in row.registered if attempt not in row.chosen])
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            await transaction.dispatched([row.seq for row in due])
            await transaction.commit()
        finally:
            await transaction.roll_back()
        return len(due)


def _addressed(envelope: Envelope, recipients: tuple[str, ...], attempt: str | None) -> Envelope:
    return msgspec.structs.replace(envelope, recipients=recipients, attempt_id=attempt)
