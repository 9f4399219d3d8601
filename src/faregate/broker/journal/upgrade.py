"""Bringing a journal of an older version to this one: the logic of `faregate journal upgrade`.

Opening it for writing is enough to go on with it: the version is raised, and what comes is written in the new form.
What was written before stays as it is, and is read as ever. Upgrading rewrites that, too: segment by segment, each at
once and checked, so that an upgrade that is interrupted goes on where it was.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout, check_meta
from faregate.broker.journal.sealing import seal_all


class Upgraded(NamedTuple):
    version_before: int
    version: int
    segments: int
    """How many were rewritten."""
    bytes_before: int
    bytes: int


def upgrade(root: Path, progress: Callable[[int, int], None] | None = None) -> Upgraded:
    """Raises `JournalLocked` while a process writes to it, `JournalNotFound`, `JournalTooNew`, `JournalCorrupt`."""
    layout, disk = Layout(root), RealDisk()
    before = check_meta(layout, disk).version
    size = layout.bytes(disk)
    journal = Journal(root)
    try:
        sealed = seal_all(layout, disk, progress)
    finally:
        journal.release()
    return Upgraded(before, journal.meta.version, sealed, size, layout.bytes(disk))
