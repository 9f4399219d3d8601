"""What verifying a journal finds, and what repair would do about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Progress = Callable[[int, int], None]
"""Told now and then how many bytes of how many are done."""


Offsets = tuple[int, int]
"""The first and the last of a stretch."""


class Finding(NamedTuple):
    """One thing that is not as it should be."""

    path: Path
    at_byte: int | None
    what: str
    lost: Offsets | None = None
    """Of the messages that are lost by it."""
    is_content: bool = False
    """Whether the bytes are as they were written, and what they say is wrong: no repair can help, nor a copy harm."""


Act = tuple[Any, ...]
"""What `repair` does, by name, and what to do it with: looking cannot change anything."""


@dataclass(frozen=True)
class Step:
    """One thing that repair does."""

    what: str
    act: Act


@dataclass
class Inspection:
    writer: str | None
    id: str = ""
    end: int = 0
    """The first offset that is not in the journal."""
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    """What is worth knowing and does no harm."""
    more: int = 0
    """How many findings there are beside those listed."""
    steps: list[Step] = field(default_factory=list)
    checked: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("bytes", "segments", "frames", "messages", "dead_letters", "settlements", "batches"), 0
        )
    )

    def lost(self) -> list[tuple[int, int]]:
        """The stretches of lost offsets, in order."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(finding.lost for finding in self.problems if finding.lost is not None):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        return joined


def offsets(first: int, last: int) -> str:
    return f"offset {first}" if first == last else f"offsets {first} to {last}"
