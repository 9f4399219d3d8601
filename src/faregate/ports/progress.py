"""Who works on what: how a part shows that it has work, so that somebody notices when it stands still."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable


class Occupation(NamedTuple):
    """Something that a part has to do now."""

    work: object
    """Something hashable, which stays equal as long as there is no progress."""
    node: str
    message_id: str
    """The message at hand; "" where it is not known."""
    text: str
    """Who does what, for people: "the lane of bill at billing works on OrderPlaced 17 from shop"."""


@runtime_checkable
class Occupied(Protocol):
    """A transport, or another part, that shows what it works on."""

    def occupations(self) -> Iterable[Occupation]:
        """What it works on now; nothing when it has nothing to do. Called now and then, from the event loop."""
