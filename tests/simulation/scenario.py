"""A scenario: which messages there are, what may go wrong, and how much of it at once."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tests.simulation.process import SimProcess
    from tests.simulation.world import World

Mode = Literal["ledger", "merged", "separate", "off"]
"""Deduplication by the ledger; by tokens in the node's own database; by tokens in another one; none (on Spark, where
the positions of keys are left)."""
Do = Callable[["World"], Any]
"""What returns a coroutine has it run."""
Actor = Callable[["SimProcess"], Coroutine[Any, Any, Any]]


def nothing(world: "World") -> None: ...


@dataclass(frozen=True)
class OnSpark:
    """How node `a` runs on Spark."""

    partitions: int = 1
    trigger: int = 100
    """How many rows of the log make a batch, at most."""
    zombies: bool = False
    """Whether Spark may take a task for lost that goes on beside its retry (a fault)."""
    drivers: int = 1
    """How many are started on the same checkpoint."""


@dataclass(frozen=True)
class Scenario:
    begin: Do
    """Puts the messages in, before processes start."""
    mode: Mode = "ledger"
    processes: int = 2
    in_exploration: tuple[str, ...] = ("a",)
    """The nodes whose deliveries are scheduled; the others handle theirs when all is at rest."""
    preemptions: int = 2
    crashes: int = 0
    faults: int = 0
    """Lost, late and failed calls, ended leases, looks at the outbox: so many of them together."""
    deviations: int = 3
    """Decisions against the default in one schedule."""
    modes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Which calls may go wrong, and how (see `ports.py`)."""
    leases: bool = False
    looks: bool = False
    sweeps: int = 0
    batch: int = 1
    savepoints: bool = True
    """Whether a batch gives each message a savepoint; False: only when one has failed."""
    lanes: int = 0
    """How many lanes a process has for node `a`: its batches part from a slow handler when time passes. 0: none, and
    they do not."""
    together: bool = False
    """Whether deliveries start and settle together, as those of the embedded broker do; then the bus has no points."""
    jumps: int = 12
    every_point: bool = False
    """Crash and switch at every named point, also where nobody could tell it from the one before."""
    foreign: bool = False
    """Orders come without tokens, from a sender that knows nothing of them."""
    without_attempts: bool = False
    """Signals of ours may be without tokens, too."""
    below_floor: bool = False
    """What was handled may be dead as well: a copy came when nobody remembered it any more."""
    lax: bool = False
    """Whether later ones of a key may pass: it is not strict, or an earlier one is scheduled."""
    spark: OnSpark | None = None
    """Whether `a` runs on Spark, and how; `b` is on the bus, and handles its messages when all is at rest."""
    subscriber: bool = False
    """Whether there is a node `c`, which is no recipient of anything at the beginning."""
    actors: tuple[Actor, ...] = ()
    """What each process does from the beginning on, besides handling."""
    operator: tuple[Do, ...] = ()
    """What a person does, one after the other, at any time."""
    starting: bool = False
    """Whether processes start within the exploration."""
    retain_ledger: float = 1e9
    claim_age: float = -1.0
    options: dict[str, Any] = field(default_factory=dict)
    """Of the subscriptions."""
    started: Do = nothing
    at_rest: Do = nothing
    """What an operator does once everything is quiet."""
    check: Do = nothing
    """What else must be true."""
