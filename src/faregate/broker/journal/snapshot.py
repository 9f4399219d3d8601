"""What waited in each queue at some moment, so that opening reads only what came later."""

from typing import NamedTuple

import msgspec

from faregate.broker.journal.log import LogPoint


class Returning(NamedTuple):
    """An entry that was tried before: its offset and counts, and when it is due if it waits for redelivery. `behind`:
    its place is at the end, and no longer where it was published."""

    offset: int
    tries: int
    redeliveries: int
    due: float | None
    behind: bool = False


class QueueSnapshot(msgspec.Struct):
    """What a queue held, in terms of the journal: enough to fill it again."""

    runs: list[tuple[int, int]]
    """Stretches of offsets (first, last) within which everything of this queue waited."""
    returning: list[Returning] = []


class Snapshot(msgspec.Struct):
    offset: int = 0
    """What was appended from here on is not in the snapshot: it waits, unless the side logs say otherwise."""
    queues: dict[int, QueueSnapshot] = {}
    """By queue number. A queue that is not here had nothing."""
    settled: dict[int, int] = {}
    """By segment, how many bytes of its side log are in the snapshot already."""
    log: LogPoint | None = None
    """Where opening begins to read the hot segment; its offset is not below the snapshot's."""
    checksum: str = ""
    """CRC-32 of this file's content with an empty checksum, in hexadecimal."""
