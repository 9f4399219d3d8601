"""Dead letters for people: look at them, and decide about them. Behind `bus.replay` and `faregate dead`.

Rules kept here:
- A decision is one commit: the letter's new status, and the outbox row that carries it out. Whoever dispatches the
  outbox of that store sends it, now or when it starts.
- A replay keeps the identity, so that a half-done one finishes and is not doubled. A number tells it from earlier
  replays. It goes only to the node where the message failed. An output that nobody took is published anew.
- An edited message is a new one that names the original, which stays as it is: both can be seen.
- What was discarded or handled since cannot be replayed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from faregate import ids
from faregate.bus.attempts import PENDING
from faregate.codec import BodyReader, BodyWriter, JsonCodec
from faregate.core.sealing import outbox_row
from faregate.errors import ConfigurationError, DeadLetterClosed, DeadLetterNotFound, Unroutable
from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store import DeadFilter, OutboxRow, Store

EDITED_FROM = "faregate-edited-from"
"""The header of an edited message: the message id of the original."""
EDITED_BY = "faregate-edited-by"
SHORTEST_PREFIX = 8
_AT_ONCE = 200
MOST = 100_000
"""How many are looked at together."""
_BODY_LIMIT = 1 << 30
_DECIDABLE = ("open", "replayed")


class Found(NamedTuple):
    """A dead letter and the store that it is in."""

    letter: DeadLetter
    store: Store


class DeadLetters:
    """The dead letters of some stores, which are open."""

    def __init__(self, stores: Iterable[Store], clock: Clock) -> None:
        self.stores = list(stores)
        self._clock = clock

    async def letters(self, which: DeadFilter | None = None, limit: int = 1000) -> list[DeadLetter]:
        """Those that fit, oldest last failure first."""
        return [found.letter for found in await self.find(which or DeadFilter(), limit)]

    async def find(self, which: DeadFilter, limit: int = MOST) -> list[Found]:
        found = [Found(letter, store) for store in self.stores for letter in await store.dead(which, limit)]
        return sorted(found, key=lambda each: each.letter.last_failed_at)[:limit]

    async def one(self, message_id: str, node: str | None = None) -> Found:
        """The letter with this message id, or this publication's only one, or the only one whose id begins like this.

        Raises `DeadLetterNotFound`, and `ConfigurationError` for a beginning that several have.
        """
        wanted = message_id.strip().lower()
        is_whole = _is_id(wanted)
        if not is_whole and len(wanted) < SHORTEST_PREFIX:
            raise ConfigurationError(
                f"{message_id!r} is too short: give {SHORTEST_PREFIX} or more characters of the id"
            )
        found = await self.find(DeadFilter(node=node, message_id=wanted if is_whole else None))
        fitting = [each for each in found if each.letter.message_id.startswith(wanted)]
        if is_whole and not fitting:
            found = await self.find(DeadFilter(node=node))
            fitting = [each for each in found if each.letter.publication_id == wanted]
        if not fitting:
            where = " and ".join(store.url for store in self.stores)
            raise DeadLetterNotFound(f"there is no dead letter {message_id} in {where}")
        if len(fitting) > 1:
            some = ", ".join(each.letter.message_id for each in fitting[:3])
            more = ", …" if len(fitting) > 3 else ""
            raise ConfigurationError(
                f"{message_id} stands for {len(fitting)} dead letters: give the id of one ({some}{more})"
            )
        return fitting[0]

    # --- decisions -----------------------------------------------------------------------------------------

    async def decide(
        self, message_ids: Sequence[str], status: DeadStatus, by: str, node: str | None = None
    ) -> list[DeadLetter]:
        """Have these handled again (`replayed`), or never, nor any copy of them (`discarded`): all of one store, or
        none. Returns the letters as they are then.

        Raises `DeadLetterNotFound`, and `DeadLetterClosed` for one that was handled or discarded.
        """
        found = [await self.one(each, node) for each in message_ids]
        for letter, _ in found:
            if letter.status not in _DECIDABLE:
                raise _not_decidable(letter, status)
        return await self._decide(found, status, by, only_decidable=False)

    async def decide_all(self, found: Sequence[Found], status: DeadStatus, by: str) -> list[DeadLetter]:
        """The same for letters of a listing; those that changed meanwhile are left out."""
        return await self._decide(found, status, by, only_decidable=True)

    async def _decide(
        self, found: Sequence[Found], status: DeadStatus, by: str, *, only_decidable: bool
    ) -> list[DeadLetter]:
        decided: list[DeadLetter] = []
        for store in self.stores:
            here = list({(each.node, each.message_id): each for each, its in found if its is store}.values())
            step = _AT_ONCE if only_decidable else max(1, len(here))
            for start in range(0, len(here), step):
                decided += await self._decide_here(store, here[start : start + step], status, by, only_decidable)
        return decided

    async def _decide_here(
        self, store: Store, letters: Sequence[DeadLetter], status: DeadStatus, by: str, only_decidable: bool
    ) -> list[DeadLetter]:
        pending = await _pending_replays(store) if status == "discarded" else {}
        changed: list[DeadLetter] = []
        async with store.transaction() as transaction:
            for letter in letters:
                now = self._clock.time()
                after = await transaction.set_dead_status(letter.node, letter.message_id, status, by=by, at=now)
                if after is not None:
                    changed.append(after)
                elif not only_decidable:
                    raise _not_decidable(await _read_again(store, letter), status)
            if status == "replayed":
                await transaction.send([_replay_row(letter) for letter in changed])
            elif rows := [row for each in changed for row in pending.get((each.node, each.publication_id), ())]:
                # Those that nobody has begun to send.
                await transaction.dispatched(sorted(await transaction.revise(rows)))
        return changed

    async def edit(self, message_id: str, body: str | bytes, by: str, node: str | None = None) -> Envelope:
        """Send the message with another body, given as JSON, to the node where it failed; returns what is sent.

        Editing the same letter to the same body again is the same publication.
        """
        letter, store = await self.one(message_id, node)
        envelope = edited(letter, body, by, self._clock.time())
        async with store.transaction() as transaction:
            await transaction.send([outbox_row(letter.node, envelope)])
        return envelope


def _sent_anew(letter: DeadLetter, **changes: Any) -> Envelope:
    anew = {"attempt_id": None, "deliver_at": None, "expires_at": None, "redeliveries": 0}
    return msgspec.structs.replace(letter.envelope, recipients=_recipients(letter), **anew, **changes)


def _replay_row(letter: DeadLetter) -> OutboxRow:
    """The latest replay, in the outbox. A token is used once: whoever had one gets a new attempt."""
    row = outbox_row(letter.node, _sent_anew(letter, replay=letter.replays))
    wanting = 0 if letter.envelope.attempt_id is None else len(row.envelope.recipients)
    return row._replace(chosen=(PENDING,) * wanting)


def edited(letter: DeadLetter, body: str | bytes, by: str, now: float) -> Envelope:
    """The message with another body, as a new one. Raises `ConfigurationError` for what is no JSON."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as exc:
        raise ConfigurationError(f"the new body of {letter} is no JSON: {exc}") from exc
    encoded, encoding, digest = BodyWriter(JsonCodec(), limit=_BODY_LIMIT).write(value)
    assert digest is not None
    # The body is part of the id, so that another edit of the same letter is another message.
    publication_id = ids.publication_id(
        correlation_id=letter.correlation_id,
        node=letter.node,
        causation_id=letter.message_id,
        handler=EDITED_FROM,
        type=letter.type,
        slot=f"edit {letter.publication_id} {letter.replays} {digest.hex()}",
    )
    return _sent_anew(
        letter,
        publication_id=publication_id,
        correlation_id=letter.correlation_id,
        causation_id=letter.message_id,
        body=encoded,
        content_type=JsonCodec.content_type,
        content_encoding=encoding,
        body_digest=digest,
        payload_ref=None,
        sent_at=now,
        replay=0,
        headers={**letter.envelope.headers, EDITED_FROM: letter.message_id, EDITED_BY: by},
    )


def body_of(envelope: Envelope) -> Any:
    """The body as plain values. Raises `Undecodable`."""
    return BodyReader(object, limit=_BODY_LIMIT).read(envelope)


def _recipients(letter: DeadLetter) -> tuple[str, ...]:
    """Who gets the replay. An output that nobody took is a letter of its sender, and goes to all who take it now; with
    tokens only to those that did not get it, or the others would get it twice."""
    if letter.reason != Unroutable.reason:
        return (letter.node,)
    return () if letter.envelope.attempt_id is None else letter.envelope.recipients


async def _pending_replays(store: Store) -> dict[tuple[str, str], list[OutboxRow]]:
    """Replays that nobody has begun to send, by node and publication: a discard takes them back. One that has attempts
    goes on, or its tokens would stay for ever; its recipient finds that the message is discarded."""
    pending: dict[tuple[str, str], list[OutboxRow]] = {}
    for row in await store.undispatched(MOST):
        if row.envelope.replay and not row.registered and set(row.chosen) <= {PENDING}:
            pending.setdefault((row.node, row.envelope.publication_id), []).append(row)
    return pending


async def _read_again(store: Store, letter: DeadLetter) -> DeadLetter:
    found = await store.dead(DeadFilter(node=letter.node, message_id=letter.message_id), 1)
    return found[0] if found else letter


def _not_decidable(letter: DeadLetter, status: DeadStatus) -> DeadLetterClosed:
    who = f" by {letter.changed_by}" if letter.changed_by and letter.status == "discarded" else ""
    what = "handled after all" if letter.status == "resolved" else f"{letter.status}{who}"
    return DeadLetterClosed(f"the dead letter {letter} was {what}: it cannot be {status} any more")


def _is_id(text: str) -> bool:
    parts = text.split("-")
    return [len(part) for part in parts] == [8, 4, 4, 4, 12] and set(text) <= set("0123456789abcdef-")
