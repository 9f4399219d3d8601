"""The error tree, branched by what the caller must do.

- `ConfigurationError`: fix the code or the configuration; found at declaration wherever that is possible.
- `Transient`: try again later; the failure policy of a subscription does that by itself.
- `Permanent`: not to be tried again; a handler that raises one makes a dead letter of its message at once.
- `OutcomeUnknown`: it may or may not have happened; repeat with the same identity.
- Anything else (a damaged journal, a batch that differs): look into it; docs/errors.md says how.

Every text says what happened, to what, and what to change.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faregate.message import Envelope


class FaregateError(Exception):
    """Root of all errors that Faregate raises on purpose."""


# --- fix the configuration --------------------------------------------------------------------------------


class ConfigurationError(FaregateError):
    """The code or configuration is wrong; trying again does not help."""


class InvalidName(ConfigurationError):
    """A node, a wire name or a handler name has characters that a broker cannot carry."""


class UnknownMessage(ConfigurationError):
    """A class was used as a message that is none, or as the wrong kind of message."""


class WrongSignature(ConfigurationError):
    """A handler, middleware, interpreter or provider does not take the parameters it must take."""


class HandlerConflict(ConfigurationError):
    """Two handlers for one (type, source), or two providers or interpreters for one class."""


class UnknownKey(ConfigurationError):
    """`key=` or `identity=` names a field that the message does not have, or a function that cannot be imported."""


class BareCommand(ConfigurationError):
    """A command was returned without saying where it goes."""


class DuplicateIdKey(ConfigurationError):
    """The same `id_key` was used twice for one message type in one unit of work."""


class MissingExtra(ConfigurationError):
    """A backend needs an optional dependency that is not installed."""


class QueueNotFound(ConfigurationError):
    """A queue was named that nobody declared."""


class QueueDiffers(ConfigurationError):
    """A queue or an exchange is declared on the broker with other properties than this version declares."""


class DeadLetterNotFound(ConfigurationError):
    """No dead letter has this id."""


class DeadLetterClosed(ConfigurationError):
    """A dead letter was handled after all, or discarded: nothing is left to decide about it."""


class ViewTaken(ConfigurationError):
    """A subscription is consumed through the other view: queue or log."""


class InvalidFilter(ConfigurationError):
    """`where=` does not follow the grammar, names no field, or compares a field with what it never is."""


class InvalidSelector(ConfigurationError):
    """A selector does not follow the documented grammar."""


class InvalidOption(ConfigurationError):
    """An option of the Spark source or sink is unknown or malformed."""


class UnfitColumns(ConfigurationError):
    """The columns of what Spark writes are not those of messages."""


class StoreTooNew(ConfigurationError):
    """A store was set up by a newer version than this one."""


class JournalNotFound(ConfigurationError):
    """There is no journal at that path."""


class NotAJournal(ConfigurationError):
    """The folder holds something else."""


class JournalTooNew(ConfigurationError):
    """The journal is written in a newer version of the format."""


class NotAnArchive(ConfigurationError):
    """There is no archive at that place, or it is another log's, or something else lies there."""


class StreamNotFound(ConfigurationError):
    """RabbitMQ has no stream of that name."""


class WrongEventLoop(ConfigurationError):
    """A bus or a handler's database was used from another event loop, or thread, than the bus runs on."""


class TransactionMisused(ConfigurationError):
    """A handler tried to end the transaction that it runs in, or used it after its end."""


class TryEnded(TransactionMisused):
    """A task or thread that a handler left behind used `ctx` after its try had ended; nothing of that happened."""


class PipelineMisused(ConfigurationError):
    """A middleware called `call_next` again while the handler was running, or returned while it was."""


# --- retry later ------------------------------------------------------------------------------------------


class Transient(FaregateError):
    """It may work later."""


UNAVAILABLE_SECONDS = 10.0


class Unavailable(Transient):
    """Raised by a handler whose dependency is down: it trips the kill switch of its subscription, and messages wait
    without using up a try. The first probe comes after `retry_after` seconds."""

    def __init__(self, *args: object, retry_after: float = UNAVAILABLE_SECONDS) -> None:
        super().__init__(*args)
        self.retry_after = check_delay(retry_after, "retry_after")


class RetryAfter(Transient):
    """Raised by a handler that knows when to try again; does not use up a try."""

    def __init__(self, seconds: float, *args: object) -> None:
        super().__init__(*(args or (f"try again after {seconds} s",)))
        self.seconds = check_delay(seconds, "seconds")


class StaleLock(Transient):
    """A delivery was settled, released or renewed by someone who no longer holds it."""


class LeaseLost(StaleLock):
    """An instance wanted to commit what it did with a partition that is another instance's by now."""

    deliveries: Sequence[object] = ()
    """What came from that partition, of those that were to be committed together."""


class ConsumerRefused(Transient):
    """A queue does not take this consumer now: another one has it exclusively."""


class JournalLocked(Transient):
    """Another process writes to the journal."""


class JournalFull(Transient):
    """The disk has no room; nothing of what was refused is in the journal."""


class ArchiveUnavailable(Transient):
    """The place of an archive cannot be read or written now. Nothing is lost: the log keeps what is not archived."""


class StoreUnavailable(Unavailable):
    """The node's database is not reachable; the message waits without using up a try."""


class BrokerUnavailable(Unavailable):
    """No broker answered in time, or it takes nothing now; nothing was sent."""


class BreakerOpen(BrokerUnavailable):
    """Publishing failed so often in a row that it is not tried for a while; nothing was sent."""


class StoreConflict(Transient):
    """A conflict with another transaction (a deadlock, a serialization failure, a lock): a retry may work."""


class IdleTimeout(Transient, TimeoutError):
    """`bus.idle(timeout=…)` ran out while messages were still in flight."""


class RequestTimeout(Transient, TimeoutError):
    """Nobody answered a request in time. The command may be handled all the same."""


# --- not again --------------------------------------------------------------------------------------------


class Permanent(FaregateError):
    """Trying again does not help; the message of a handler that raises this is a dead letter at once."""

    reason = "permanent"


class Undecodable(Permanent):
    """The body is not what its content type and class promise."""

    reason = "undecodable"


class UnknownType(Permanent):
    """A message arrived at a queue whose subscription does not handle its type."""

    reason = "unknown-type"


class MissingProperties(Permanent):
    """A message lacks a property without which it has no identity or address."""

    reason = "missing-properties"


class Unroutable(Permanent):
    """A command was sent to a node that does not handle it."""

    reason = "unroutable"


class MessageTooLarge(Permanent):
    """The encoded message is over the limit of the bus."""

    reason = "too-large"


class UnknownToken(Permanent):
    """A message came with a token that cannot be looked for: the bus has no token store."""

    reason = "unknown-token"


class BelowFloor(Permanent):
    """A message is older than what the ledger remembers, so it cannot be told from a repetition."""

    reason = "below-floor"


class Expired(Permanent):
    """A message waited longer than its sender or its subscription allows, and no handler has begun on it."""

    reason = "expired"


class UnfitValue(Permanent):
    """A row that Spark writes holds a value that no message can have."""


class Unwritable(Permanent):
    """The message holds something that the format cannot express, such as text that is not Unicode."""


class UnreadableKey(Permanent):
    """The function given as `key=` or `identity=` failed at a message."""

    reason = "unreadable-key"


class UninterpretedEffect(Permanent):
    """A handler returned something that is neither a message nor an effect with an interpreter."""

    reason = "uninterpreted-effect"


class RequestFailed(Permanent):
    """A request became a dead letter where it was handled: `reason` is that of the dead letter. Or `reason` is
    "filtered": the filter (`where=`) of its handler does not take it."""

    def __init__(self, *args: object, reason: str = "failed") -> None:
        super().__init__(*args)
        self.reason = reason


# --- look into it -------------------------------------------------------------------------------------------


class HandlerFailed(FaregateError):
    """A handler of a node without a store failed in a way that a run on Spark cannot go on from."""


class ResourceFailed(FaregateError):
    """What a node makes, or runs, when its bus starts failed; or it was lost while the bus ran."""


class JournalFailed(FaregateError):
    """The disk did not do what it was told, or the folder cannot be written. Nothing more is confirmed; what was before
    is safe."""


class JournalCorrupt(FaregateError):
    """Bytes that were confirmed are damaged."""


class OffsetGone(FaregateError):
    """The messages from that offset on were removed by retention, or were never there."""


class BatchDiffers(FaregateError):
    """A batch came to the Spark sink again, under its number and with other content."""


# --- outcome unknown --------------------------------------------------------------------------------------


class OutcomeUnknown(FaregateError):
    """It was neither confirmed nor refused in time; repeat it with the same identity.

    `publications`: the messages that it is about, where they were to be published. `bus.publish(error.publications[0])`
    publishes one again, under its id.
    """

    def __init__(self, *args: object, publications: Sequence["Envelope"] = ()) -> None:
        super().__init__(*args)
        self.publications = tuple(publications)


class CommitUnknown(OutcomeUnknown, Transient):
    """The connection broke while committing: the ledger tells, at the next try, whether it happened."""


def check_delay(seconds: float | timedelta, name: str) -> float:
    """A duration in seconds as given by a user: finite and not negative."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"{name} must be seconds >= 0, as a number; got {seconds!r}")
    return float(seconds)


def check_expires(expires: float | timedelta) -> float:
    """How many seconds a message may wait, as given by a user."""
    seconds = check_delay(expires, "expires")
    if seconds == 0:
        raise ConfigurationError("expires must be more than 0 seconds: nobody can take a message before it is sent")
    return seconds
