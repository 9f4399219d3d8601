"""What becomes of a message whose tries in memory are used up: again later, behind all others, or a dead letter."""

import asyncio
import traceback
from typing import NamedTuple

from faregate.core.lane_task import take_back_own
from faregate.errors import (
    UNAVAILABLE_SECONDS,
    ConfigurationError,
    JournalFull,
    OutcomeUnknown,
    Permanent,
    RetryAfter,
    Unavailable,
)
from faregate.node.rules import FailurePolicy, each_error
from faregate.ports import faults

_LONGEST_ERROR = 16_384
_UNKNOWN_SECONDS = 10.0
_LONGEST_ASKED = 366 * 86_400.0
"""What asks for more has put something else there: a time of day, say."""
_OTHERS = 3


class Verdict(NamedTuple):
    delay: float | None
    """Seconds until it is delivered again; None: it becomes a dead letter."""
    counted: bool = True
    """Whether that uses up a redelivery."""
    reason: str = "failed"
    """Why it becomes a dead letter."""
    behind: bool = False
    """Whether it goes behind everything that waits, not to its own place."""


def judge(exc: BaseException, redeliveries: int, policy: FailurePolicy) -> Verdict:
    """Redeliveries and counted requeues are one count, so that it travels wherever redeliveries do."""
    if isinstance(exc, Permanent):
        return Verdict(None, reason=exc.reason)
    if isinstance(exc, ConfigurationError):
        return Verdict(None, reason="permanent")
    if isinstance(exc, OutcomeUnknown | JournalFull):
        # A commit: it may be handled, which must be known before it becomes a dead letter. What it sends, without a
        # store: the broker does not take it now, which is no fault of the message.
        return Verdict(_UNKNOWN_SECONDS, counted=False)
    asked = asked_seconds(exc)
    if asked is not None:
        return Verdict(asked, counted=False)
    if policy.dead:
        return Verdict(None, reason="permanent")
    if redeliveries < len(policy.redeliver.delays):
        return Verdict(policy.redeliver.wait(redeliveries))
    requeue = policy.requeue
    if requeue is not None and (requeue.times is None or redeliveries < policy.most_redeliveries):
        return Verdict(requeue.delay, counted=requeue.times is not None, behind=True)
    return Verdict(None)


def asked_seconds(exc: BaseException) -> float | None:
    """After how many seconds it says that it may be tried again; None where it does not. Errors of others, and of
    subclasses, have anything there: what is no number of seconds counts as if it were not there."""
    try:
        asked = exc.seconds if isinstance(exc, RetryAfter) else getattr(exc, "retry_after", None)
        if isinstance(asked, int | float) and not isinstance(asked, bool) and 0 <= asked <= _LONGEST_ASKED:
            return float(asked)
    except Exception:  # a property
        pass
    return UNAVAILABLE_SECONDS if isinstance(exc, Unavailable) else None


def failure_of(exc: BaseException) -> BaseException | None:
    """What a try failed with; None for what is no failure of the message: our lane is cancelled from outside, or the
    process is to end. Of errors that were raised together it is the one that decides. Anything else that is no
    `Exception` (`SystemExit`, `GeneratorExit`, the lane that the handler itself cancelled: that is taken back) must not
    end the lane; nor must a group of such, also with a `KeyboardInterrupt` in it, as that ends no event loop."""
    if isinstance(exc, ExceptionGroup):
        return _deciding(exc)
    if isinstance(exc, Exception):
        return exc
    if isinstance(exc, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            return exc  # someone cancelled what the handler awaited
        if not take_back_own():
            return None
        text = "the handler cancelled the task that it runs in: to fail raise an error, to stop early return"
    else:
        crash = exc.subgroup(faults.Crash) if isinstance(exc, BaseExceptionGroup) else None
        if isinstance(exc, KeyboardInterrupt | faults.Crash) or crash is not None:
            return None
        text = f"the handler was left with {first_line(exc)}, which is no Exception"
    failure = RuntimeError(text)
    failure.__cause__ = exc
    return failure


def _deciding(group: ExceptionGroup[Exception]) -> Exception:
    """The one that says itself what becomes of the message, a later try before none; the only one; or all of them. A
    group of a class of its own may be the one that says it, or have a rule, as any other error."""
    first: Exception = min(each_error(group), key=_rank)
    if _rank(first) < _OTHERS:
        return first
    while type(first) is ExceptionGroup and len(first.exceptions) == 1:
        first = first.exceptions[0]
    return first


def _rank(exc: Exception) -> int:
    if isinstance(exc, Unavailable):
        return 0
    if asked_seconds(exc) is not None:
        return 1
    return 2 if isinstance(exc, Permanent | ConfigurationError) else _OTHERS


def first_line(exc: BaseException) -> str:
    """The exception's class and the first line of its text; the text of a broken `__str__` is said to be so."""
    try:
        text = first_line_of(str(exc))
    except Exception as broken:
        text = f"(its text is unreadable: {type(broken).__name__})"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def first_line_of(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def describe_error(exc: BaseException) -> str:
    """What a dead letter says of its error: one line, then the traceback, bounded."""
    try:
        trace = "".join(traceback.format_exception(exc))
    except Exception as broken:
        trace = f"(no traceback: {type(broken).__name__})"
    text = f"{first_line(exc)}\n\n{trace}"[:_LONGEST_ERROR].replace("\0", "\\0")
    # A database takes no lone surrogates.
    return text.encode(errors="backslashreplace").decode()
