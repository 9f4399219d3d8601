"""Faregate: an exactly-once service bus for Python whose data pipeline runs on Spark.

    import faregate as fg

Declare messages (`Event`, `Command`) and nodes (`Node`), and run them on a `Bus`.
"""

from typing import TYPE_CHECKING, Any

from faregate import ids
from faregate.bus import probes
from faregate.bus.bus import Bus, SubscriptionCounts
from faregate.bus.dead_letter_retention import RetainDead
from faregate.bus.outbox import AsyncOutbox, Outbox, outbox
from faregate.bus.requests import RequestCounts
from faregate.codec import Codec, register_codec
from faregate.core.alarms import Alarm
from faregate.core.breaker import Breaker, BreakerStatus
from faregate.core.context import AsyncContext, BlockingContext, Context
from faregate.core.handler_database import HandlerDatabase
from faregate.errors import (
    ArchiveUnavailable,
    BareCommand,
    BatchDiffers,
    BelowFloor,
    BreakerOpen,
    BrokerUnavailable,
    CommitUnknown,
    ConfigurationError,
    ConsumerRefused,
    DeadLetterClosed,
    DeadLetterNotFound,
    DuplicateIdKey,
    Expired,
    FaregateError,
    HandlerConflict,
    HandlerFailed,
    IdleTimeout,
    InvalidFilter,
    InvalidName,
    InvalidOption,
    InvalidSelector,
    JournalCorrupt,
    JournalFailed,
    JournalFull,
    JournalLocked,
    JournalNotFound,
    JournalTooNew,
    LeaseLost,
    MessageTooLarge,
    MissingExtra,
    MissingProperties,
    NotAJournal,
    NotAnArchive,
    OffsetGone,
    OutcomeUnknown,
    Permanent,
    PipelineMisused,
    QueueDiffers,
    QueueNotFound,
    RequestFailed,
    RequestTimeout,
    ResourceFailed,
    RetryAfter,
    StaleLock,
    StoreConflict,
    StoreTooNew,
    StoreUnavailable,
    StreamNotFound,
    TransactionMisused,
    Transient,
    TryEnded,
    Unavailable,
    Undecodable,
    UnfitColumns,
    UnfitValue,
    UninterpretedEffect,
    UnknownKey,
    UnknownMessage,
    UnknownToken,
    UnknownType,
    UnreadableKey,
    Unroutable,
    Unwritable,
    ViewTaken,
    WrongEventLoop,
    WrongSignature,
)
from faregate.message import Command, Envelope, Event, command, event
from faregate.node.every import Tick
from faregate.node.key import Each
from faregate.node.kill_switch import KillSwitch, SwitchTripped
from faregate.node.node import Node
from faregate.node.outgoing import Options, Outgoing, Reply, publish, reply, send
from faregate.node.policy import ByKey, Parallel, Redeliver, Requeue, Retry, Serial
from faregate.node.rules import When
from faregate.ports.dead_letter import DeadLetter
from faregate.version import __version__ as __version__

if TYPE_CHECKING:
    from faregate import asyncapi, observe, spark, testing

__all__ = [
    "Alarm",
    "ArchiveUnavailable",
    "AsyncContext",
    "AsyncOutbox",
    "BareCommand",
    "BatchDiffers",
    "BelowFloor",
    "BlockingContext",
    "Breaker",
    "BreakerOpen",
    "BreakerStatus",
    "BrokerUnavailable",
    "Bus",
    "ByKey",
    "Codec",
    "Command",
    "CommitUnknown",
    "ConfigurationError",
    "ConsumerRefused",
    "Context",
    "DeadLetter",
    "DeadLetterClosed",
    "DeadLetterNotFound",
    "DuplicateIdKey",
    "Each",
    "Envelope",
    "Event",
    "Expired",
    "FaregateError",
    "HandlerConflict",
    "HandlerDatabase",
    "HandlerFailed",
    "IdleTimeout",
    "InvalidFilter",
    "InvalidName",
    "InvalidOption",
    "InvalidSelector",
    "JournalCorrupt",
    "JournalFailed",
    "JournalFull",
    "JournalLocked",
    "JournalNotFound",
    "JournalTooNew",
    "KillSwitch",
    "LeaseLost",
    "MessageTooLarge",
    "MissingExtra",
    "MissingProperties",
    "Node",
    "NotAJournal",
    "NotAnArchive",
    "OffsetGone",
    "Options",
    "Outbox",
    "OutcomeUnknown",
    "Outgoing",
    "Parallel",
    "Permanent",
    "PipelineMisused",
    "QueueDiffers",
    "QueueNotFound",
    "Redeliver",
    "Reply",
    "RequestCounts",
    "RequestFailed",
    "RequestTimeout",
    "Requeue",
    "ResourceFailed",
    "RetainDead",
    "Retry",
    "RetryAfter",
    "Serial",
    "StaleLock",
    "StoreConflict",
    "StoreTooNew",
    "StoreUnavailable",
    "StreamNotFound",
    "SubscriptionCounts",
    "SwitchTripped",
    "Tick",
    "TransactionMisused",
    "Transient",
    "TryEnded",
    "Unavailable",
    "Undecodable",
    "UnfitColumns",
    "UnfitValue",
    "UninterpretedEffect",
    "UnknownKey",
    "UnknownMessage",
    "UnknownToken",
    "UnknownType",
    "UnreadableKey",
    "Unroutable",
    "Unwritable",
    "ViewTaken",
    "When",
    "WrongEventLoop",
    "WrongSignature",
    "asyncapi",
    "command",
    "event",
    "ids",
    "observe",
    "outbox",
    "probes",
    "publish",
    "register_codec",
    "reply",
    "send",
    "spark",
    "testing",
]


if not TYPE_CHECKING:  # else every misspelled name would pass as Any

    def __getattr__(name: str) -> Any:
        """`fg.asyncapi`, `fg.observe`, `fg.spark` and `fg.testing` load on first use, and cost nobody else anything.

        Raises `MissingExtra` when `fg.spark` is used without pyspark.
        """
        if name in ("asyncapi", "observe", "spark", "testing"):
            from importlib import import_module

            return import_module(f"faregate.{name}")
        raise AttributeError(f"module 'faregate' has no attribute {name!r}")
