"""Faregate: an exactly-once service bus for Python whose data pipeline runs on Spark.

    import faregate as fg

Declare messages (`Event`, `Command`) and nodes (`Node`), and run them on a `Bus`.
"""

from typing import TYPE_CHECKING, Any

from faregate import ids
from faregate.broker.journal.errors import (
    JournalCorrupt,
    JournalFailed,
    JournalFull,
    JournalLocked,
    JournalNotFound,
    JournalTooNew,
    NotAJournal,
    OffsetGone,
)
from faregate.bus.bus import Bus, SubscriptionCounts
from faregate.bus.context import Context
from faregate.bus.node import Node
from faregate.bus.outgoing import Outgoing, publish, send
from faregate.bus.policy import ByKey, Parallel, Redeliver, Retry, Serial
from faregate.errors import (
    BareCommand,
    ConfigurationError,
    ConsumerRefused,
    DuplicateIdKey,
    FaregateError,
    HandlerConflict,
    IdleTimeout,
    InvalidName,
    InvalidSelector,
    MessageTooLarge,
    MissingExtra,
    MissingProperties,
    OutcomeUnknown,
    Permanent,
    QueueNotFound,
    RetryAfter,
    StaleLock,
    Transient,
    Unavailable,
    Undecodable,
    UninterpretedEffect,
    UnknownKey,
    UnknownMessage,
    UnknownType,
    Unroutable,
    WrongSignature,
)
from faregate.message import Command, Envelope, Event, command, event
from faregate.ports.queue import Poisoned

if TYPE_CHECKING:
    from faregate import testing

__version__ = "0.1.0"

__all__ = [
    "BareCommand",
    "Bus",
    "ByKey",
    "Command",
    "ConfigurationError",
    "ConsumerRefused",
    "Context",
    "DuplicateIdKey",
    "Envelope",
    "Event",
    "FaregateError",
    "HandlerConflict",
    "IdleTimeout",
    "InvalidName",
    "InvalidSelector",
    "JournalCorrupt",
    "JournalFailed",
    "JournalFull",
    "JournalLocked",
    "JournalNotFound",
    "JournalTooNew",
    "MessageTooLarge",
    "MissingExtra",
    "MissingProperties",
    "Node",
    "NotAJournal",
    "OffsetGone",
    "OutcomeUnknown",
    "Outgoing",
    "Parallel",
    "Permanent",
    "Poisoned",
    "QueueNotFound",
    "Redeliver",
    "Retry",
    "RetryAfter",
    "Serial",
    "StaleLock",
    "SubscriptionCounts",
    "Transient",
    "Unavailable",
    "Undecodable",
    "UninterpretedEffect",
    "UnknownKey",
    "UnknownMessage",
    "UnknownType",
    "Unroutable",
    "WrongSignature",
    "command",
    "event",
    "ids",
    "publish",
    "send",
    "testing",
]


def __getattr__(name: str) -> Any:
    """`fg.testing` loads on first use: production code does not pay for it."""
    if name == "testing":
        from importlib import import_module

        return import_module("faregate.testing")
    raise AttributeError(f"module 'faregate' has no attribute {name!r}")
