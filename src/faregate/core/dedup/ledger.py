"""The ledger: a row for each message that was handled, in the same commit as its effects.

Rules kept here:
- The row is the first thing in the transaction: two copies meet in it, and the second learns it before it writes.
- What is older than the ledger remembers cannot be told from a repetition, so it does not run. That is looked at before
  it runs, and once more in the transaction: a handler may run so long that another copy was handled and forgotten.
- A replay may pass: its dead letter says that it never was handled.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import xor

from faregate.codec import digest_of
from faregate.core.alarms import Alarms
from faregate.core.dedup import Dedup
from faregate.core.work import Work
from faregate.errors import BelowFloor
from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.keys import Keys
from faregate.ports.store import Known, LedgerRow, Sent, Store, Transaction


class Ledger(Dedup):
    def __init__(self, node: str, alarms: Alarms, clock: Clock, young_seconds: float) -> None:
        self._node = node
        self._alarms = alarms
        self._clock = clock
        self._young_seconds = young_seconds

    def enlist(self, work: Work) -> None:
        work.dedup = self
        work.by_ledger = True

    async def mark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        there = await transaction.record(self._node, [_row(work) for work in works if work.by_ledger])
        for work in works:
            work.marked = True
            if work.sent:
                work.noted = True
        for work in works if there else ():
            if work.message_id in there:
                work.marked = False
                work.move("known")
                check_digest(self._alarms, self._node, work, there[work.message_id])

    async def unmark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        # Only rows of ours: another copy may have been handled since the look-up, and left one.
        marked = [work.message_id for work in works if work.marked]
        if marked:
            await transaction.unrecord(self._node, marked)

    async def commit(self, transaction: Transaction, works: Sequence[Work]) -> None:
        await self._check_floor(transaction, works)
        skipped = [work for work in works if work.ctx is not None and not work.ctx._completed]
        if skipped:
            await self.unmark(transaction, skipped)
            rows = [_row(work)._replace(outcome="skipped") for work in skipped if work.by_ledger]
            await transaction.record(self._node, rows)

    async def _check_floor(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """Nobody raises the floor from here on without finding our row."""
        old = self._clock.time() - self._young_seconds
        asked = [work for work in works if work.set_out_at < old and not work.replayed]
        floor = await transaction.floor(self._node) if asked else None
        for work in asked:
            if floor is not None and work.set_out_at < floor:
                raise below_floor(work, floor)

    async def sent(self, transaction: Transaction, works: Sequence[Work]) -> None:
        sent = [_sent_by(work) for work in works if work.sent and work.by_ledger and not work.noted]
        if sent:
            await transaction.note_sent(self._node, sent)

    async def is_unhandled(self, transaction: Transaction, work: Work) -> bool:
        if work.by_ledger:
            if await transaction.record(self._node, [_row(work)]):
                return False
            await transaction.unrecord(self._node, [work.message_id])
        return True

    async def was_committed(self, work: Work, known: Mapping[str, Known]) -> bool:
        return work.message_id in known


class LookUp:
    """What a node's store says of messages before they run: handled before, dead, or too old to be told."""

    def __init__(
        self, store: Store, node: str, clock: Clock, alarms: Alarms, young_seconds: float, *, recognises: bool
    ) -> None:
        self._store = store
        self._node = node
        self._clock = clock
        self._alarms = alarms
        self._young_seconds = young_seconds
        self._recognises = recognises
        """Whether one that was handled does not run again."""

    async def look_up(self, works: Sequence[Work]) -> None:
        asked = [work for work in works if work.state == "new"]
        if not asked:
            return
        known = await self._store.known(self._node, [work.message_id for work in asked])
        # Behind the look at the rows: who finds one gone finds the floor raised.
        old = self._clock.time() - self._young_seconds
        floor = None
        if [work for work in asked if work.set_out_at < old and work.message_id not in known]:
            floor = await self._store.floor(self._node)
        for work in asked if known or floor is not None else ():
            found = known.get(work.message_id)
            if found is None:
                if work.by_ledger and floor is not None and work.set_out_at < floor:
                    work.fail(below_floor(work, floor))
            elif found.state == "handled":
                if self._recognises:
                    work.move("known")
                    work.in_ledger = True
                    check_digest(self._alarms, self._node, work, found.digest)
            elif found.state == "dead" and work.envelope.replay:
                work.replayed = True
            else:
                work.move("folded")


def check_digest(alarms: Alarms, node: str, work: Work, digest: bytes | None) -> None:
    """A copy of a message that was handled came: was it the same message?"""
    mine = work.envelope.body_digest or digest_of(work.envelope)
    if digest is not None and mine is not None and digest != mine:
        alarms.sound(
            "disagreement",
            node,
            work.message_id,
            f"{work.envelope} came again with another body than the one that was handled; the handled one "
            "counts. Two runs of a handler disagree, or one idempotency key stands for two things",
            envelope=work.envelope,
            key=work.delivery.key,
        )


def below_floor(work: Work, floor: float) -> BelowFloor:
    return BelowFloor(
        f"{work.envelope} was sent at {work.set_out_at:.0f}, before {floor:.0f}: the ledger of this node "
        "remembers nothing from before, so a repetition could not be recognised. If it never was handled, replay its "
        "dead letter"
    )


def _row(work: Work) -> LedgerRow:
    """Its row in the ledger. If its handler ran before anybody needed the transaction, with what that sent."""
    envelope, delivery = work.envelope, work.delivery
    digest = envelope.body_digest or digest_of(envelope)
    sent = _sent_by(work)[1:] if work.sent else (0, None)
    key = delivery.key
    if key.__class__ is Keys:
        key = str(key)  # drivers and codecs know texts
    return LedgerRow(work.message_id, digest, key, delivery.position, work.at, "handled", *sent)


def filtered_row(work: Work) -> LedgerRow:
    """The row of one that its handler was not for. It has no place in the order of its key."""
    return _row(work)._replace(key=None, outcome="filtered")


def _sent_by(work: Work) -> Sent:
    """What the handler of a message sent, for its ledger row."""
    if len(work.sent) == 1:  # as nearly always
        return Sent(work.message_id, 1, _id_bytes(work.sent[0]))
    ids = map(int.from_bytes, map(_id_bytes, work.sent))
    return Sent(work.message_id, len(work.sent), reduce(xor, ids).to_bytes(16))


def _id_bytes(envelope: Envelope) -> bytes:
    return bytes.fromhex(envelope.publication_id.replace("-", ""))
