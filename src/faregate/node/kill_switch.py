"""What a subscription's kill switch goes by, and what is told of it. What it does then: `core/kill_switch.py`,
`bus/switching.py`."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from faregate.errors import ConfigurationError, check_delay
from faregate.node.policy import check_count

Probe = Callable[[], Awaitable[bool | None]]
"""Asks a dependency whether it works: True or None if so. False, or any error: it does not."""
Counts = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]


@dataclass(frozen=True, slots=True)
class KillSwitch:
    """Stops consuming a type at a node while what its handler depends on is down.

    It trips when, of at least `sample` messages within `window` seconds, the share `failures` used up their tries in
    memory; when `sample` calls in a row have failed, of five messages or more; when a message is to become a dead
    letter with an error that counts and `probe` fails; and at once by `fg.Unavailable`, `ctx.trip`, and a store that is
    away. With `failures=None` only the last three trip it. `counts` says which errors are the dependency's: classes, or
    a function of the error; None: all but those that are the message's own (see docs/recovery.md). Then `probe` is
    asked every `every` seconds, for at most `timeout` seconds each, until it says that all is well. Without one a
    single message is tried.
    """

    failures: float | None = 0.5
    window: float = 30.0
    sample: int = 20
    counts: Counts | None = None
    probe: Probe | None = None
    every: float = 5.0
    timeout: float = 5.0

    def __post_init__(self) -> None:
        share = self.failures
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ConfigurationError(
                f"KillSwitch(failures) is a share, above 0 and up to 1, or None: no share of failures trips it; "
                f"got {share!r}"
            )
        check_count(self.sample, "KillSwitch(sample)", highest=1_000_000)
        for name in ("window", "every", "timeout"):
            if not check_delay(getattr(self, name), f"KillSwitch({name})"):
                raise ConfigurationError(f"KillSwitch({name}) must be more than 0 seconds")
        _check_counts(self.counts)
        if self.probe is not None:
            _check_probe(self.probe)


@dataclass(frozen=True, slots=True)
class SwitchTripped:
    """A kill switch has tripped: a subscription consumes no more until all is well. What `@node.escalates` is told."""

    node: str
    type: str
    """The message's type, by its wire name."""
    handler: str
    reason: str
    since: float
    """When, in seconds since the epoch."""

    def __str__(self) -> str:
        return f"the kill switch of {self.handler} at {self.node} ({self.type})"


def _check_counts(counts: object) -> None:
    if counts is None or (callable(counts) and not isinstance(counts, type)):
        return
    classes = counts if isinstance(counts, tuple) else (counts,)
    if not classes or not all(isinstance(each, type) and issubclass(each, Exception) for each in classes):
        raise ConfigurationError(
            f"KillSwitch(counts) takes an exception class, a tuple of them, or a function of the error; got {counts!r}"
        )


def _check_probe(probe: object) -> None:
    if isinstance(probe, type) or not callable(probe) or not _is_async(probe):
        raise ConfigurationError(
            f"KillSwitch(probe) takes an 'async def' function without parameters, such as fg.probes.http('…'); "
            f"got {probe!r}"
        )
    try:
        inspect.signature(probe).bind()
    except TypeError as exc:
        raise ConfigurationError(f"KillSwitch(probe) is called without arguments, and {probe!r}: {exc}") from exc


def _is_async(probe: Callable[..., object]) -> bool:
    return any(map(inspect.iscoroutinefunction, (probe, type(probe).__call__)))


DEFAULT_KILL_SWITCH = KillSwitch()


def chosen_switch(given: object, default: KillSwitch, where: str) -> KillSwitch:
    """What `kill_switch=` says: a switch; None, the default; False, one that no share of failures trips."""
    if given is None:
        return default
    if given is False:
        return KillSwitch(failures=None, probe=default.probe, every=default.every, timeout=default.timeout)
    if not isinstance(given, KillSwitch):
        raise ConfigurationError(f"{where}: kill_switch takes an fg.KillSwitch(…), None or False; got {given!r}")
    return given


GivenSwitch = KillSwitch | Literal[False] | None
