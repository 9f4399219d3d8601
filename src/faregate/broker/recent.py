"""The window of recent publications, in which a repeated one is recognised."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable

from faregate.message import Envelope

log = logging.getLogger("faregate.broker")

DUPLICATE_WINDOW = 100_000
"""How many publications are remembered."""

Identity = str | tuple[str, int, str | None, tuple[str, ...]]
"""What a repetition has in common with the first: the publication id, replay number, attempt id and, when it went to
some of its topic's recipients only, these. Nearly always the last three say nothing, and the id stands alone."""


def identity_of(publication_id: str, replay: int, attempt_id: str | None, recipients: Iterable[str] = ()) -> Identity:
    """`recipients`: only those of a publication that was restricted to them; their order says nothing."""
    named = tuple(sorted(recipients))
    if not replay and attempt_id is None and not named:
        return publication_id
    return (publication_id, replay, attempt_id, named)


class RecentPublications:
    """A publication without an id is never a repetition.

    The same identity with another body is an alarm: two executions disagreed, or a key was used for two things.
    """

    def __init__(self, window: int = DUPLICATE_WINDOW) -> None:
        self.window = window
        self.duplicates = 0
        self.disagreements = 0
        self.on_disagreement: Callable[[Envelope], None] | None = None
        self._known: dict[Identity, bytes | None] = {}
        self._order: deque[Identity] = deque()
        self._forgotten: Counter[Identity] = Counter()
        """Identities that were refused, and how many of their places in the order no longer count."""

    def add(self, envelope: Envelope, partial: bool = False) -> bool:
        """Remember a publication; False when it is known already. `partial`: it goes to its named recipients only."""
        identity: Identity = envelope.publication_id
        if not identity:
            return True
        if partial or envelope.replay or envelope.attempt_id is not None:
            identity = _identity(envelope, partial)
        if identity not in self._known:
            self._remember(identity, envelope.body_digest)
            return True
        self.duplicates += 1
        first, digest = self._known[identity], envelope.body_digest
        if digest is not None and first is not None and digest != first:
            self._disagree(envelope)
        return False

    def restore(self, identity: Identity, digest: bytes | None) -> None:
        """It was published before this process began."""
        if identity and identity not in self._known:
            self._remember(identity, digest)

    def _remember(self, identity: Identity, digest: bytes | None) -> None:
        self._known[identity] = digest
        self._order.append(identity)
        if len(self._order) > 2 * self.window + 64:
            self._order = deque(self._known)
            self._forgotten.clear()
        while len(self._known) > self.window:
            oldest = self._order.popleft()
            if self._forgotten[oldest] > 0:
                self._forgotten[oldest] -= 1  # this place in the order was given up
            else:
                del self._known[oldest]

    def _disagree(self, envelope: Envelope) -> None:
        self.disagreements += 1
        log.error(
            "publication %s came again with another body: the first one counts. Two runs of a handler "
            "disagree, or one idempotency key stands for two things",
            envelope.publication_id,
        )
        if self.on_disagreement is not None:
            try:
                self.on_disagreement(envelope)
            except Exception:  # an alarm that fails must not keep the others of its batch from being published
                log.exception("whoever is told of disagreements failed at %s", envelope)

    def knows(self, envelope: Envelope, partial: bool = False) -> bool:
        return _identity(envelope, partial) in self._known

    def forget(self, envelope: Envelope, partial: bool = False) -> None:
        """It was refused after all: a repetition of it is welcome."""
        identity = _identity(envelope, partial)
        if identity in self._known:
            del self._known[identity]
            self._forgotten[identity] += 1


def _identity(envelope: Envelope, partial: bool) -> Identity:
    recipients = envelope.recipients if partial else ()
    return identity_of(envelope.publication_id, envelope.replay, envelope.attempt_id, recipients)
