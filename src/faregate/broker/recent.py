"""The window of recent publications, in which a repeated one is recognised."""

import logging
from collections import Counter, deque

log = logging.getLogger("faregate.broker")

DUPLICATE_WINDOW = 100_000
"""How many publications are remembered."""

Identity = str | tuple[str, int]


class RecentPublications:
    """Identities are (publication id, replay number); a publication without an id is never a repetition.

    The same identity with another body is an alarm: two executions disagreed, or a key was used for two things.
    """

    def __init__(self, window: int = DUPLICATE_WINDOW) -> None:
        self.window = window
        self.duplicates = 0
        self.disagreements = 0
        self._known: dict[Identity, bytes | None] = {}
        self._order: deque[Identity] = deque()
        self._forgotten: Counter[Identity] = Counter()
        """Identities that were refused, and how many of their places in the order no longer count."""

    def add(self, publication_id: str, replay: int, digest: bytes | None = None) -> bool:
        """Remember a publication; False when it is known already."""
        if not publication_id:
            return True
        identity: Identity = (publication_id, replay) if replay else publication_id
        if identity in self._known:
            self.duplicates += 1
            first = self._known[identity]
            if digest is not None and first is not None and digest != first:
                self.disagreements += 1
                log.error(
                    "publication %s came again with another body: the first one counts. Two runs of a handler "
                    "disagree, or one idempotency key stands for two things",
                    publication_id,
                )
            return False
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
        return True

    def knows(self, publication_id: str, replay: int) -> bool:
        return ((publication_id, replay) if replay else publication_id) in self._known

    def forget(self, publication_id: str, replay: int) -> None:
        """It was refused after all: a repetition of it is welcome."""
        identity: Identity = (publication_id, replay) if replay else publication_id
        if identity in self._known:
            del self._known[identity]
            self._forgotten[identity] += 1
