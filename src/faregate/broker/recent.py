"""The window of recent publications, in which a repeated one is recognised."""

from collections import deque

DUPLICATE_WINDOW = 100_000
"""How many publications are remembered."""


class RecentPublications:
    """Identities are (publication id, replay number); a publication without an id is never a repetition."""

    def __init__(self, window: int = DUPLICATE_WINDOW) -> None:
        self.duplicates = 0
        self.window = window
        self._known: set[str | tuple[str, int]] = set()
        self._order: deque[str | tuple[str, int]] = deque()

    def add(self, publication_id: str, replay: int) -> bool:
        """Remember a publication; False when it is known already."""
        if not publication_id:
            return True
        identity = (publication_id, replay) if replay else publication_id
        if identity in self._known:
            self.duplicates += 1
            return False
        self._known.add(identity)
        self._order.append(identity)
        if len(self._order) > self.window:
            self._known.discard(self._order.popleft())
        return True

    def forget(self, publication_id: str, replay: int) -> None:
        """It was refused after all: a repetition of it is welcome."""
        self._known.discard((publication_id, replay) if replay else publication_id)
