"""The window of recent publications, in which a repeated one is recognised."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

from faregate.ids import PublicationKey, publication_key
from faregate.message import Envelope

log = logging.getLogger("faregate.broker")

DUPLICATE_WINDOW = 100_000
"""How many publications are remembered."""


class RecentPublications:
    """A publication without an id is never a repetition.

    The same key with another body is an alarm: two executions disagreed, or a key was used for two things. A body that
    came without a digest is told from another one by its hash, while the process lives.
    """

    def __init__(self, window: int = DUPLICATE_WINDOW) -> None:
        self.window = window
        self.duplicates = 0
        self.on_disagreement: Callable[[Envelope], None] | None = None
        self._load: Callable[[], Sequence[tuple[PublicationKey, bytes | None]]] = tuple

    def add(self, envelope: Envelope, partial: bool = False) -> bool:
        """Remember a publication; False when it is known already. `partial`: it goes to its named recipients only."""
        key: PublicationKey = envelope.publication_id
        if not key:
            return True
        if partial or envelope.replay or envelope.attempt_id is not None:
            key = _key_of(envelope, partial)
        digest = envelope.body_digest or hash(envelope.body)
        known = self._known
        if key not in known:
            known[key] = digest
            if len(known) > self.window:
                known.popitem(last=False)
            return True
        self.duplicates += 1
        first = known[key]
        if digest != first and type(digest) is type(first):
            self._disagree(envelope)
        return False

    def add_all(self, envelopes: Sequence[Envelope]) -> list[bool]:
        """The same for some that go to all recipients."""
        known = self._known
        fresh = {
            each.publication_id: each.body_digest or hash(each.body)
            for each in envelopes
            if not each.replay and each.attempt_id is None
        }
        if len(fresh) < len(envelopes) or "" in fresh or not known.keys().isdisjoint(fresh):
            return [self.add(envelope) for envelope in envelopes]
        known.update(fresh)
        while len(known) > self.window:
            known.popitem(last=False)
        return [True] * len(envelopes)

    def restore(self, load: Callable[[], Sequence[tuple[PublicationKey, bytes | None]]]) -> None:
        """`load` gives what was published before this process began, the oldest first. It is called when somebody
        publishes, who gets what it raises."""
        self._load = load

    def load(self) -> None:
        """Now, because it could not be had later."""
        _ = self._known

    @cached_property
    def _known(self) -> OrderedDict[PublicationKey, bytes | int | None]:
        """The oldest first. A plain dict would look for it past all that went before."""
        published = self._load()
        known: OrderedDict[PublicationKey, bytes | int | None] = OrderedDict(published)
        if len(known) < len(published):  # the first of a key counts
            known = OrderedDict()
            for key, digest in published:
                known.setdefault(key, digest)
        known.pop("", None)
        while len(known) > self.window:
            known.popitem(last=False)
        self._load = tuple
        return known

    def _disagree(self, envelope: Envelope) -> None:
        log.error(
            "publication %s came again with another body: the first one counts. Two runs of a handler "
            "disagree, or one idempotency key stands for two things",
            envelope.publication_id,
        )
        if self.on_disagreement is not None:
            try:
                self.on_disagreement(envelope)
            except Exception:  # an alarm that fails must not keep the others of its batch from being published
                log.exception("the callback for disagreements failed at %s", envelope)

    def knows(self, envelope: Envelope, partial: bool = False) -> bool:
        return _key_of(envelope, partial) in self._known

    def forget(self, envelope: Envelope, partial: bool = False) -> None:
        """It was refused after all: a repetition of it is welcome."""
        self._known.pop(_key_of(envelope, partial), None)


def _key_of(envelope: Envelope, partial: bool) -> PublicationKey:
    recipients = envelope.recipients if partial else ()
    return publication_key(envelope.publication_id, envelope.replay, envelope.attempt_id, recipients)
