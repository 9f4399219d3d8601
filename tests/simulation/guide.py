"""Leads a schedule to a certain moment, by the names of points instead of by numbers.

deliver a#0            takes the option that begins so
P0@tokens.claimed      lets process P0 go on until one of its tasks is at this point
P0 done                lets process P0 go on until none of its tasks is at a point
"""

from collections.abc import Sequence


class Guide:
    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = list(wanted)
        self.decisions = 0
        """How many real decisions were taken by it."""

    def choose(self, labels: list[str]) -> int:
        """The option to take; the default one when there is nowhere left to lead to."""
        while self._wanted:
            wanted = self._wanted[0]
            process, _, point = wanted.partition("@")
            if point:
                if any(_is_at(label, process, point) for label in labels):
                    self._wanted.pop(0)
                    continue
                return self._count(labels, f"go {process}.")
            if wanted.endswith(" done"):
                if not any(label.startswith(f"go {wanted[:-5]}.") for label in labels):
                    self._wanted.pop(0)
                    continue
                return self._count(labels, f"go {wanted[:-5]}.")
            self._wanted.pop(0)
            return self._count(labels, wanted)
        return 0

    def _count(self, labels: list[str], beginning: str) -> int:
        place = next((place for place, label in enumerate(labels) if label.startswith(beginning)), None)
        if place is None:
            raise LookupError(f"nothing begins with {beginning!r} among {labels}; still to do: {self._wanted}")
        self.decisions += len(labels) > 1
        return place

    def check(self) -> None:
        if self._wanted:
            raise LookupError(f"the schedule ended before {self._wanted}")


def _is_at(label: str, process: str, point: str) -> bool:
    return label.startswith(f"go {process}.") and label.endswith(f"@{point}")
