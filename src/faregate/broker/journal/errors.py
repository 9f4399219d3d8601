"""Errors of the journal, on the branches of the tree in `faregate.errors`."""

from faregate.errors import ConfigurationError, FaregateError, Permanent, Transient


class JournalNotFound(ConfigurationError):
    """There is no journal at that path."""


class NotAJournal(ConfigurationError):
    """The folder holds something else."""


class JournalTooNew(ConfigurationError):
    """The journal is written in a newer version of the format."""


class JournalLocked(Transient):
    """Another process writes to the journal."""


class JournalFull(Transient):
    """The disk has no room; nothing of what was refused is in the journal."""


class JournalFailed(FaregateError):
    """The disk did not do what it was told. Nothing more is confirmed; what was confirmed before is safe."""


class JournalCorrupt(FaregateError):
    """Bytes that were confirmed are damaged."""


class Unwritable(Permanent):
    """The message holds something that the format cannot express, such as text that is not Unicode."""


class OffsetGone(FaregateError):
    """The messages from that offset on were removed by retention, or were never there."""
