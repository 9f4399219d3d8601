"""What becomes of a message whose tries in memory are used up: again later, or given up on."""

import traceback
from typing import NamedTuple

from faregate.errors import CommitUnknown, ConfigurationError, Permanent, RetryAfter

_LONGEST_ERROR = 16_384
_UNKNOWN_SECONDS = 10.0


class Verdict(NamedTuple):
    delay: float | None
    """Seconds until it is delivered again; None: it is given up on."""
    counted: bool = True
    """Whether that uses up a redelivery."""
    reason: str = "failed"
    """Why it is given up on."""


def judge(exc: BaseException, redeliveries: int, delays: tuple[float, ...]) -> Verdict:
    if isinstance(exc, Permanent):
        return Verdict(None, reason=exc.reason)
    if isinstance(exc, ConfigurationError):
        return Verdict(None, reason="permanent")
    if isinstance(exc, CommitUnknown):  # it may be handled: what became of it must be known before it is given up on
        return Verdict(_UNKNOWN_SECONDS, counted=False)
    asked = exc.seconds if isinstance(exc, RetryAfter) else getattr(exc, "retry_after", None)
    if isinstance(asked, int | float) and 0 <= asked < float("inf"):
        return Verdict(float(asked), counted=False)
    if redeliveries < len(delays):
        return Verdict(delays[redeliveries])
    return Verdict(None)


def first_line(exc: BaseException) -> str:
    """The exception's class and text; the text of a broken `__str__` is said to be so."""
    try:
        text = str(exc)
    except Exception as broken:
        text = f"(its text is unreadable: {type(broken).__name__})"
    return f"{type(exc).__name__}: {text}" if text else type(exc).__name__


def describe_error(exc: BaseException) -> str:
    """What a dead letter says of its error: one line, then the traceback, bounded."""
    try:
        trace = "".join(traceback.format_exception(exc))
    except Exception as broken:
        trace = f"(no traceback: {type(broken).__name__})"
    return f"{first_line(exc)}\n\n{trace}"[:_LONGEST_ERROR].replace("\0", "\\0")
