"""What a subscription may choose: order and failure policy. Durations are seconds."""

import random
from dataclasses import dataclass

from faregate.errors import ConfigurationError, check_delay

DEFAULT_LANES = 10


def check_count(value: object, what: str, lowest: int = 1, highest: int = 10_000) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ConfigurationError(f"{what} must be a whole number from {lowest} to {highest}; got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Retry:
    """Tries again in memory, holding the lane: for failures that pass within moments.

    The n-th wait is `delay * backoff ** (n - 1)`, plus up to `jitter` of itself at random.
    """

    times: int
    delay: float = 0.1
    backoff: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_count(self.times, "Retry(times)", lowest=0, highest=1000)
        check_delay(self.delay, "Retry(delay)")
        check_delay(self.backoff, "Retry(backoff)")
        check_delay(self.jitter, "Retry(jitter)")

    def wait(self, failures: int) -> float:
        """Seconds to wait after that many failures."""
        return _jittered(self.delay * self.backoff ** (failures - 1), self.jitter)


@dataclass(frozen=True, slots=True, init=False)
class Redeliver:
    """Gives the message back to the transport for a while; the lane is free meanwhile.

    One redelivery for each delay, plus up to `jitter` of itself at random.
    """

    delays: tuple[float, ...]
    jitter: float

    def __init__(self, *delays: float, jitter: float = 0.0) -> None:
        object.__setattr__(self, "delays", tuple(check_delay(delay, "Redeliver(…)") for delay in delays))
        object.__setattr__(self, "jitter", check_delay(jitter, "Redeliver(jitter)"))

    def wait(self, redeliveries: int) -> float:
        """Seconds to wait after that many redeliveries."""
        return _jittered(self.delays[redeliveries], self.jitter)


@dataclass(frozen=True, slots=True)
class Requeue:
    """Sends the message to the end of its queue, not before `delay` seconds: behind everything that waits by then. So
    often as `times` says; None: without end."""

    times: int | None = None
    delay: float = 1.0

    def __post_init__(self) -> None:
        if self.times is not None:
            check_count(self.times, "Requeue(times)")
        check_delay(self.delay, "Requeue(delay)")


def _jittered(seconds: float, jitter: float) -> float:
    return seconds * (1 + random.uniform(0, jitter)) if jitter else seconds


DEFAULT_RETRY = Retry(2, delay=0.1)
DEFAULT_REDELIVER = Redeliver(10, 60, 600)


@dataclass(frozen=True, slots=True)
class Serial:
    """One message at a time."""

    @property
    def lanes(self) -> int:
        """How many messages are handled at the same time."""
        return 1


@dataclass(frozen=True, slots=True)
class Parallel:
    """Any order, at most `lanes` at a time."""

    lanes: int = DEFAULT_LANES

    def __post_init__(self) -> None:
        check_count(self.lanes, "Parallel(lanes)")


@dataclass(frozen=True, slots=True)
class ByKey:
    """Messages of one key in order, different keys at the same time, at most `lanes` at a time.

    Strict: a message waiting for redelivery keeps its key waiting. `strict=False` lets later ones pass.
    """

    lanes: int = DEFAULT_LANES
    strict: bool = True

    def __post_init__(self) -> None:
        check_count(self.lanes, "ByKey(lanes)")


Order = Serial | Parallel | ByKey
