"""The broker: topics, queues, dead letters, the schedule, and the window of recent publications."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from secrets import token_hex

from msgspec.structs import force_setattr

from faregate.broker.consumer import QueueConsumer
from faregate.broker.delivery import BrokerDelivery
from faregate.broker.entry import Entry
from faregate.broker.in_flight import InFlight
from faregate.broker.queue import Queue
from faregate.broker.recent import DUPLICATE_WINDOW, RecentPublications
from faregate.broker.schedule import Schedule
from faregate.broker.selector import Selector
from faregate.broker.topics import Route, Topics
from faregate.errors import ConfigurationError, QueueNotFound, Unroutable
from faregate.message import Envelope
from faregate.plain import plain
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.progress import Occupation
from faregate.ports.queue import Binding, check_command, dead_letter_queue
from faregate.ports.store import SCHEDULE_KEY


def _goes_with(envelope: Envelope, other: Envelope) -> bool:
    """Whether an event goes wherever another one goes."""
    return (
        envelope.type == other.type
        and envelope.source == other.source
        and envelope.kind == other.kind == "event"
        and not envelope.recipients
        and envelope.attempt_id is None
    )


def unsent(node: str, envelope: Envelope, reason: str, error: str, at: float) -> DeadLetter:
    """The dead letter of a message that never reached a queue."""
    return DeadLetter.of(node, envelope, reason, error, at, queue=node)


class Broker:
    def __init__(
        self,
        clock: Clock,
        *,
        duplicate_window: int = DUPLICATE_WINDOW,
        on_disagreement: Callable[[Envelope], None] | None = None,
    ) -> None:
        self.topics = Topics()
        self.in_flight = InFlight()
        self.recent = RecentPublications(duplicate_window)
        self.recent.on_disagreement = on_disagreement
        self._clock = clock
        self._schedule = Schedule(clock)
        self._queues: dict[str, Queue] = {}
        self._bindings: dict[str, Binding] = {}
        self._listeners: dict[str, Callable[[Envelope], None]] = {}
        """Who waits for replies, by address."""

    def bind(self, binding: Binding, *, consumed: bool = True) -> Queue:
        """Lead the binding's topic to its queue, made with its dead-letter queue if it is not there yet.

        What waits in a queue that nobody here consumes is not in flight.
        """
        queue = self._declare(binding, consumed=consumed)
        self.topics.add(binding, queue)
        if consumed:
            queue.count_in(self.in_flight)
        return queue

    def unbind(self, name: str) -> None:
        """Lead no topic to that queue any more. What waits in it stays, and is no longer in flight."""
        if name not in self._bindings:
            names = ", ".join(sorted(self._bindings)) or "none"
            raise QueueNotFound(f"there is no bound queue {name!r}; there are: {names}")
        queue = self._queues[name]
        self.topics.remove(self._bindings[name], queue)
        queue.count_in(InFlight())

    def _declare(self, binding: Binding, *, consumed: bool) -> Queue:
        """The binding's queue, without leading anything there."""
        known = self._bindings.get(binding.queue)
        if known is not None and known != binding:
            raise ConfigurationError(f"the queue {binding.queue} is bound already, with other properties")
        if known is None:
            self._make(
                binding.queue,
                in_flight=self.in_flight if consumed else InFlight(),
                key_of=binding.key_of,
                strict=binding.strict,
                serial=binding.serial,
                lock_seconds=binding.lock_seconds,
                max_deliveries=binding.max_deliveries,
                expires=binding.expires,
                on_dead_letter=binding.on_dead_letter,
            )
            self._bindings[binding.queue] = binding
            if dead_letter_queue(binding.node) not in self._queues:
                self._make(dead_letter_queue(binding.node))
        return self._queues[binding.queue]

    def _make(self, name: str, kind: type[Queue] = Queue, **properties: object) -> Queue:
        queue = self._queues[name] = kind(
            name,
            clock=self._clock,
            schedule=self._schedule,
            make_dead_letter=self._make_dead_letter,
            **properties,  # type: ignore[arg-type]
        )
        return queue

    def queue(self, name: str) -> Queue:
        try:
            return self._queues[name]
        except KeyError:
            names = ", ".join(sorted(self._queues)) or "none"
            raise QueueNotFound(f"there is no queue {name!r}; there are: {names}") from None

    def browse(self, name: str) -> Iterable[Entry]:
        """The entries of a queue in order; nothing when there is no such queue."""
        queue = self._queues.get(name)
        return () if queue is None else queue.browse()

    def occupations(self) -> Iterator[Occupation]:
        for queue in self._queues.values():
            yield from queue.occupations()

    def queues(self) -> Iterable[Queue]:
        return self._queues.values()

    def append(self, envelopes: Sequence[Envelope]) -> None:
        """Take all publications or none: every route is found before the first entry is made."""
        add = self.recent.add
        for envelope, route in [(envelope, self.route(envelope)) for envelope in envelopes]:
            if add(envelope, route.partial):
                for queue in route.queues:
                    queue.enqueue(envelope)

    def cancel(self, source: str, publication_id: str | None, key: str | None) -> int:
        """Take back what is scheduled; in how many queues it was."""

        def wanted(envelope: Envelope) -> bool:
            if envelope.source != source:
                return False
            named = key is not None and envelope.headers.get(SCHEDULE_KEY) == key
            return named or envelope.publication_id == publication_id

        return sum(queue.cancel(wanted) for queue in self._queues.values())

    def routes(self, envelopes: Sequence[Envelope]) -> list[Route]:
        """Where each publication goes; fills in its recipients.

        Raises `Unroutable` for a command without a way, and for a signal with a token whose recipient is gone.
        """
        routes: list[Route] = []
        last: tuple[Envelope, Route] | None = None
        for envelope in envelopes:
            if last is not None and _goes_with(envelope, last[0]):  # as most of what is published together
                route = last[1]
                force_setattr(envelope, "recipients", route.recipients)
            else:
                route = self.route(envelope)
                last = None if route.partial else (envelope, route)
            routes.append(route)
        return routes

    def route(self, envelope: Envelope) -> Route:
        """Where a publication goes; the same for one."""
        route = self.topics.route(envelope)
        if envelope.kind == "command":
            check_command(envelope, route.recipients if route.queues else ())
        elif not route.queues and envelope.attempt_id is not None:
            raise Unroutable(
                f"the signal {envelope} goes to {plain(', '.join(envelope.recipients))}, which has unsubscribed since: "
                "subscribe again and replay it, or discard it"
            )
        force_setattr(envelope, "recipients", route.recipients)
        return route

    def consume(
        self,
        name: str,
        deliver: Callable[[BrokerDelivery], None],
        *,
        prefetch: int,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> QueueConsumer:
        parsed = None if selector is None else Selector(selector)
        return self.queue(name).attach(deliver, credit=prefetch, window=True, selector=parsed, exclusive=exclusive)

    def open_replies(self, on_reply: Callable[[Envelope], None]) -> str:
        """An address of this process. It is as good as its name is new: replies that an earlier process left find
        nobody."""
        address = f"here-{token_hex(16)}"
        self._listeners[address] = on_reply
        return address

    def reply(self, envelopes: Sequence[Envelope]) -> int:
        """Straight to who waits, in memory only; how many found nobody."""
        lost = 0
        for envelope in envelopes:
            listener = self._listeners.get(envelope.destination or "")
            if listener is None:
                lost += 1
            else:
                listener(envelope)
        return lost

    def dead_letter(self, record: DeadLetter) -> None:
        """Put it into its node's dead-letter queue."""
        name = dead_letter_queue(record.node)
        queue = self._queues.get(name)
        if queue is None:  # an empty queue counts as false
            queue = self._make(name)
        queue.enqueue(record.envelope, letter=record)

    def _make_dead_letter(self, queue: Queue, entry: Entry, reason: str, error: str) -> None:
        self.dead_letter(self._describe(queue, entry, reason, error))

    def _describe(self, queue: Queue, entry: Entry, reason: str, error: str) -> DeadLetter:
        node = entry.letter.node if entry.letter else self._bindings[queue.name].node
        return DeadLetter.of(
            node,
            entry.envelope,
            reason,
            error,
            self._clock.time(),
            queue=queue.name,
            tries=entry.tries,
            redeliveries=entry.redeliveries,
        )

    def close(self) -> None:
        self._listeners.clear()
        for queue in self._queues.values():
            queue.close()
        self._schedule.close()
