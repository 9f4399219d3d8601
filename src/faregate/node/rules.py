"""Rules for failures: what a subscription does about which error. Checked where they are declared.

An error that says itself what becomes of its message (`fg.Permanent`, `fg.RetryAfter`, `fg.Unavailable`, anything with
a `retry_after`) is asked first, in `core/verdict.py`; rules are about all others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

from faregate.errors import ConfigurationError, OutcomeUnknown, Permanent, RetryAfter, Unavailable
from faregate.node.policy import Redeliver, Requeue, Retry

_STEERING = (Permanent, RetryAfter, Unavailable, OutcomeUnknown, ConfigurationError)
"""Errors that say themselves what becomes of their message."""


class FailurePolicy(NamedTuple):
    """What is done about a failure: these in turn, then it is a dead letter."""

    retry: Retry
    redeliver: Redeliver
    requeue: Requeue | None = None
    dead: bool = False
    """It is one at once."""

    @property
    def most_redeliveries(self) -> int:
        """How many it counts. What comes without end is not counted."""
        return len(self.redeliver.delays) + (0 if self.requeue is None else self.requeue.times or 0)


@dataclass(frozen=True, slots=True, init=False)
class When:
    """A rule for some errors: what it names replaces what the subscription says, the rest stays. `dead=True`: no more
    tries."""

    errors: tuple[type[Exception], ...]
    retry: Retry | EllipsisType | None
    redeliver: Redeliver | EllipsisType | None
    requeue: Requeue | EllipsisType | None
    dead: bool

    def __init__(
        self,
        *errors: type[Exception],
        retry: Retry | EllipsisType | None = ...,
        redeliver: Redeliver | EllipsisType | None = ...,
        requeue: Requeue | EllipsisType | None = ...,
        dead: bool = False,
    ) -> None:
        if not errors:
            raise ConfigurationError("fg.When(…) needs the errors that it is about: fg.When(TimeoutError, dead=True)")
        for each in errors:
            if not isinstance(each, type) or not issubclass(each, Exception):
                raise ConfigurationError(f"fg.When(…) takes classes of exceptions; got {each!r}")
            if issubclass(each, _STEERING):
                raise ConfigurationError(
                    f"fg.When({each.__name__}) would never count: this error says itself what becomes of its message"
                )
        named = [each for each in (retry, redeliver, requeue) if each is not ...]
        if dead and named:
            raise ConfigurationError("fg.When(…, dead=True) makes a dead letter at once, so it takes nothing else")
        if not dead and not named:
            raise ConfigurationError("fg.When(…) needs what to do: retry=, redeliver=, requeue= or dead=True")
        _check_policies("fg.When", retry, redeliver, requeue)
        for name, value in (("errors", errors), ("retry", retry), ("redeliver", redeliver), ("requeue", requeue)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dead", dead)


def each_error(exc: BaseException | None) -> Iterator[Any]:
    """It and, of an `ExceptionGroup`, as an `asyncio.TaskGroup` raises it, those in it."""
    yield exc
    if isinstance(exc, ExceptionGroup):
        for each in exc.exceptions:
            yield from each_error(each)


Rule = tuple[tuple[type[Exception], ...], FailurePolicy]


class FailurePolicies:
    """What a subscription does about each error: the first rule that fits, or what it says itself."""

    __slots__ = ("_rules", "default")

    def __init__(self, default: FailurePolicy, rules: Sequence[Rule]) -> None:
        self.default = default
        self._rules = tuple(rules)

    def of(self, exc: BaseException | None) -> FailurePolicy:
        for errors, policy in self._rules:
            if any(isinstance(each, errors) for each in each_error(exc)):
                return policy
        return self.default

    def __iter__(self) -> Iterator[FailurePolicy]:
        yield self.default
        for _, policy in self._rules:
            yield policy


def read_policies(
    retry: Retry | None,
    redeliver: Redeliver | None,
    requeue: Requeue | None,
    rules: Sequence[When],
    where: str,
) -> FailurePolicies:
    """Raises `ConfigurationError`."""
    _check_policies(where, retry, redeliver, requeue)
    default = FailurePolicy(retry or Retry(0), redeliver or Redeliver(), requeue)
    if isinstance(rules, When) or not all(isinstance(each, When) for each in rules):
        raise ConfigurationError(f"{where}: rules takes a list of fg.When(…); got {rules!r}")
    return FailurePolicies(default, [(rule.errors, _replaced(default, rule)) for rule in rules])


def _replaced(default: FailurePolicy, rule: When) -> FailurePolicy:
    if rule.dead:
        return FailurePolicy(Retry(0), Redeliver(), dead=True)
    return FailurePolicy(
        default.retry if rule.retry is ... else rule.retry or Retry(0),
        default.redeliver if rule.redeliver is ... else rule.redeliver or Redeliver(),
        default.requeue if rule.requeue is ... else rule.requeue,
    )


def _check_policies(where: str, retry: object, redeliver: object, requeue: object) -> None:
    wanted = ((retry, Retry, "retry"), (redeliver, Redeliver, "redeliver"), (requeue, Requeue, "requeue"))
    for value, cls, option in wanted:
        if value is not None and value is not ... and not isinstance(value, cls):
            raise ConfigurationError(f"{where}: {option} must be an fg.{cls.__name__} or None; got {value!r}")
