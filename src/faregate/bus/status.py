"""What a bus says of itself: to its program, to its control socket, and in heartbeats.

It is put together when somebody asks. Nothing is counted or timed for it per message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from faregate.bus.dispatcher import Dispatcher
from faregate.bus.worker import Worker
from faregate.core.alarms import Alarms
from faregate.ports.clock import Clock
from faregate.ports.presence import BusStatus, Consumed, Heartbeat, ScheduleStatus, State
from faregate.version import __version__


@dataclass(kw_only=True, eq=False)
class Reporter:
    instance: str
    url: str
    nodes: Sequence[str]
    workers: Sequence[Worker]
    outboxes: Mapping[str, Dispatcher]
    """By node, where it has a store; nodes of one store share one."""
    clock: Clock
    alarms: Alarms
    state: Callable[[], State]
    breaker: Callable[[], str | None] = lambda: None
    schedules: Mapping[str, Callable[[], list[ScheduleStatus]]] = field(default_factory=dict)
    """By node."""
    notices: Callable[[], Mapping[str, list[str]]] = dict
    since: float = 0.0
    """When the bus started."""
    _handled: dict[Worker, int] = field(default_factory=dict)
    """What each had handled when the rates were measured."""
    _rates: dict[Worker, float] = field(default_factory=dict)
    _measured_at: float = 0.0

    def start(self) -> None:
        self.since, self._measured_at = self.clock.time(), self.clock.monotonic()

    def measure(self) -> None:
        """Rates are from the last call of this to the next."""
        now = self.clock.monotonic()
        seconds, self._measured_at = now - self._measured_at, now
        for worker in self.workers:
            handled = worker.outcomes["handled"]
            recent, self._handled[worker] = handled - self._handled.get(worker, 0), handled
            self._rates[worker] = round(recent / seconds, 1) if seconds > 0 else 0.0

    def status(self) -> BusStatus:
        return BusStatus(
            instance=self.instance,
            version=__version__,
            url=self.url,
            since=self.since,
            at=self.clock.time(),
            state=self.state(),
            nodes=self.heartbeats(),
            outboxes=[each.status() for each in dict.fromkeys(self.outboxes.values())],
            alarms=dict(self.alarms.counts),
            breaker=self.breaker(),
        )

    def heartbeats(self, *, leaving: bool = False) -> list[Heartbeat]:
        consumed: dict[str, list[Consumed]] = {node: [] for node in self.nodes}
        for worker in self.workers:
            consumed[worker.subscription.node].append(self._consumed(worker))
        notices = self.notices()
        at, alarms, state, breaker = self.clock.time(), dict(self.alarms.counts), self.state(), self.breaker()
        return [
            Heartbeat(
                node=node,
                instance=self.instance,
                version=__version__,
                since=self.since,
                at=at,
                consumes=consumes,
                alarms=alarms,
                leaving=leaving,
                state=state,
                outbox=self.outboxes[node].status() if node in self.outboxes else None,
                breaker=breaker,
                schedules=self.schedules[node]() if node in self.schedules else [],
                notices=notices.get(node, []),
            )
            for node, consumes in consumed.items()
        ]

    def _consumed(self, worker: Worker) -> Consumed:
        outcomes = worker.outcomes
        return Consumed(
            type=worker.subscription.message_type.wire,
            source=worker.subscription.source,
            queues=worker.queues,
            per_second=self._rates.get(worker, 0.0),
            handled=outcomes["handled"],
            redelivered=outcomes["redelivered"],
            dead=outcomes["dead"],
            busy=worker.busy,
            paused=worker.paused,
            why=_why_paused(worker),
            skipped=outcomes["skipped"],
            duplicate=outcomes["duplicate"],
            filtered=outcomes["filtered"],
        )


def _why_paused(worker: Worker) -> str | None:
    if not worker.paused:
        return None
    return (worker.pause_reason or "by hand").removeprefix("paused ")
