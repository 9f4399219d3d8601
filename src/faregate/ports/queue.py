"""The queue transport port: moves envelopes at least once, and lets a consumer hold one until it is settled.

`QueueTransport` and `Held` are the core, which every transport keeps (`faregate.testing.queue_suite` checks it):
- What `publish` confirmed is delivered until it is settled or a dead letter; never silently dropped.
- What a consumer held comes back when it is released, or when the consumer goes away. A delivery ends once: a stale
  end raises `StaleLock`.

What only some transports can do is a `Capability`. A transport names its own in `capabilities`; each has cases in the
suite, and where it has methods a protocol here. The bus supplies what is missing (`bus/supplied.py`) or refuses.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, get_args, runtime_checkable

from faregate.errors import StaleLock, Unroutable
from faregate.message import Envelope, Kind
from faregate.plain import plain
from faregate.ports.dead_letter import DeadLetter

Outcome = Literal["handled", "skipped", "filtered", "dead", "duplicate"]
"""How a consumer is done with a message. filtered: it is none that its handler is for. dead: it keeps the dead letter
itself, so nothing goes to the dead-letter queue. duplicate: it was handled before."""


Capability = Literal[
    "browse", "cancel", "count", "dead letters", "delay", "expire", "lock", "order", "partitions", "place",
    "recipients", "recognise", "reply", "select",
]  # fmt: skip
"""
- browse: dead letters can be looked at without taking them (`Browsing`).
- cancel: what waits for its `deliver_at` can be taken back (`Cancelling`).
- count: it knows what waits and what is out (`Counting`).
- dead letters: a queue of them for each node (`DeadLettering`, `Delivery.dead_letter`). What was started
  `Binding.max_deliveries` times and comes back goes there by itself, and so does what expires.
- delay: a message waits for its `deliver_at`, or for its `delay` where it has one; `Delivery.redeliver`.
- expire: what waited past its `expires_at`, or for `Binding.expires`, is a dead letter. What is held does not expire;
  its delivery says when its time is over (`Delivery.expired`).
- lock: a delivery that is neither ended nor renewed for `Binding.lock_seconds` comes back.
- order: within one key, a message is withheld while an earlier one is out, and (`strict`) while one waits for
  redelivery. One with several keys (`keys.Keys`) comes after the earlier and before the later ones of each. Of a
  `serial` binding, all are withheld while one waits for redelivery.
- partitions: an ordered binding's messages are in queues of their own, by key (`Partitioned`). It is for those that
  lack "order": the bus supplies the rest to nodes with a store, and leases say which process consumes which of them.
- place: what is released returns to its own position; where no handler has begun, as if it had never been out.
- recipients: `publish` fills in each envelope's `recipients`, so that publishing it again leads where it led before.
- recognise: a repetition of a recent publication is confirmed and not appended again (`Recognising`).
- reply: it brings replies to the process that asked, while that is there (`Replying`).
- select: a consumer may take some messages alone, or be the only one (`Selecting`).
"""
EVERY_CAPABILITY: frozenset[Capability] = frozenset(get_args(Capability))


Remembers = Literal["ledger", "tokens", "off", "nothing"]
"""`nothing`: it has no store."""


def dead_letter_queue(node: str) -> str:
    """Where a node's dead letters wait for people. The name is stored in journals, see `QueueRecord`."""
    return f"{node}-dead-letters"


def check_command(envelope: Envelope, nodes: Collection[str]) -> None:
    """A command needs its destination's queue, and those of all recipients that it names. An event may have none.

    `nodes`: whose queues the command would go to. Raises `Unroutable`.
    """
    if envelope.kind == "event" or (nodes and set(envelope.recipients).issubset(nodes)):
        return
    if nodes:
        raise Unroutable(
            f"the command {envelope} to {envelope.destination!r} names recipients that do not handle it there: "
            f"{plain(', '.join(envelope.recipients))}"
        )
    raise Unroutable(
        f"no node {envelope.destination!r} handles the command {envelope}: subscribe to it there, or send it elsewhere"
    )


@dataclass(frozen=True, slots=True)
class Binding:
    """What one subscription asks of a transport: a queue for (node, type, source) with these properties."""

    node: str
    type: str
    kind: Kind
    source: str | None = None
    """The publishing node, for events; None for commands, which may come from any node."""
    key_of: Callable[[Envelope], str | None] | None = None
    """The ordering key of an envelope for this subscription (`keys.Keys` for several); None when it asks for no
    order."""
    several: bool = False
    """Whether an envelope may have several keys."""
    strict: bool = True
    """A message that waits for redelivery keeps its key waiting."""
    serial: bool = False
    """A message that waits for redelivery keeps all others waiting."""
    lock_seconds: float = 60.0
    """A delivery that is neither ended nor renewed for this long returns by itself."""
    max_deliveries: int = 20
    """Started deliveries after which a message that comes back is a dead letter: it may be what kills the process."""
    expires: float | None = None
    """Seconds a message may wait, from when it set out, before it is a dead letter as expired."""
    remembers: Remembers | None = None
    """How the consumer knows what it has handled; None: unknown. A durable transport keeps this, so that an audit knows
    what must be in the ledger."""
    partitions: int | None = None
    """Of an ordered subscription, into how many queues its messages may be parted by the slot of their type's key
    (`ids.slot_of`); 1 where that key does not tell what comes together. None: no order is asked for."""
    generation: int = 1
    """Of the partitions: every change of their number makes new queues."""
    parks: bool = False
    """The consumer itself keeps what has to wait, and its dead letters: it is handed whatever is there."""
    on_dead_letter: Callable[["Delivery", str, str], None] | None = None
    """Called from the event loop when the transport itself makes a dead letter, with the ended delivery, the reason and
    a text: the message expired, or its deliveries are used up."""

    @property
    def queue(self) -> str:
        """Names have no dots, so two bindings cannot share a queue by accident."""
        parts = (self.node, self.type) if self.source is None else (self.node, self.type, self.source)
        return ".".join(parts)

    def order_key(self, key: str | None) -> str | None:
        """The key of the row in which a message with this key waits for a later try, for others to wait behind it;
        None: nobody does. All of a serial binding have the same, and so have those with a key where there are several:
        who waits for whom is then read from their envelopes."""
        if not self.strict:
            return None
        return "" if self.serial or (self.several and key is not None) else key


class Held(Protocol):
    """One acquisition of one message by one consumer. Exactly one of settle and release ends it.

    Ending or renewing a delivery whose lock was lost raises `StaleLock`; the message then belongs to another.
    """

    @property
    def envelope(self) -> Envelope: ...
    @property
    def redelivered(self) -> bool:
        """Whether this message was handed out before."""

    @property
    def tries(self) -> int:
        """How many tries counted, this one included once it is started."""

    @property
    def position(self) -> int | None:
        """Its place in the transport's log, or in the queue where there is no log; None where neither is known."""

    @property
    def lock_seconds(self) -> float: ...

    def start(self) -> None:
        """The handler starts: this counts as a try, unless the message has expired."""

    def renew(self) -> None:
        """Hold it for another lock period from now on."""

    async def settle(self, outcome: Outcome) -> None:
        """It is done and never comes back."""

    async def release(self, *, begun: bool = True) -> None:
        """It is available again at once; the try does not count. `begun`: a handler has begun on it."""


class Delivery(Held, Protocol):
    """What the core needs. A transport with "delay", "expire" and "dead letters" hands these out; for any other the bus
    makes them of `Held`."""

    @property
    def key(self) -> str | None:
        """The ordering key, as the binding's `key_of` gave it; of several keys `keys.Keys`."""

    @property
    def redeliveries(self) -> int:
        """How many counted redeliveries there were."""

    @property
    def expired(self) -> bool:
        """Whether its time is over by now: no handler may begin on it."""

    @property
    def letter(self) -> DeadLetter | None:
        """The dead letter, when this is a delivery from a dead-letter queue."""

    async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        """Back to its own position after `delay` seconds. Uncounted: uses up neither a redelivery nor a try. `behind`:
        to the end of the queue, as far as the transport can; only subscriptions without a strict order ask for it."""

    async def dead_letter(self, reason: str, error: str) -> None:
        """Into the node's dead-letter queue, with the reason; one atomic move."""


@runtime_checkable
class Together(Protocol):
    """Optional: a delivery that starts or settles several of its queue in one call, which is cheaper. It goes on after
    an error, and returns for each what `start` or `settle` would have raised."""

    def start_all(self, deliveries: Sequence[Any]) -> list[StaleLock | None]: ...

    def settle_all(self, deliveries: Sequence[Any], outcomes: Sequence[Outcome]) -> list[StaleLock | None]: ...


def is_together(delivery: Held) -> TypeGuard[Together]:
    """The same as `isinstance`, which on Python 3.11 looks at all methods anew every time, for 4 µs."""
    return _is_together(type(delivery))


_is_together = lru_cache(64)(lambda cls: issubclass(cls, Together))


class Consumer(Protocol):
    def pause(self) -> None:
        """No further deliveries until `resume`; what is out stays out."""

    def resume(self) -> None: ...

    async def close(self) -> None:
        """Go away; what is still out returns to its position at once, in order. Closing twice does nothing."""


@runtime_checkable
class SpoolTransport(Protocol):
    """A transport that one process runs and others may publish to, without opening it."""

    on_unreadable: Callable[[str, str], None] | None
    """Called with the name of a batch that cannot be read, and with what became of it and what to do. None: it is
    logged. It may be set at any time."""

    def begin(self) -> None:
        """All queues of this process are bound: take in what others left. Calling it again does nothing."""

    async def spool(self, envelopes: Sequence[Envelope]) -> None:
        """Leave all of them, as one, for the process that runs the nodes; returns once they are durable.

        Raises `Unroutable` for a command that no queue takes, as far as can be known here.
        """


@runtime_checkable
class Logged(Protocol):
    """A transport whose messages can be read as a log, too."""

    @property
    def log_place(self) -> str | Path | None:
        """Where, as `faregate.ports.schemes.open_log` is told; None: it keeps no log."""


@runtime_checkable
class Recognising(Protocol):
    """A repetition has the same publication id, replay number and attempt id, and the same recipients if not all."""

    on_disagreement: Callable[[Envelope], None] | None
    """Called with a repeated publication whose body differs from the first one's, which counts: two runs of a handler
    disagree, or one idempotency key was used for two messages. It may be set at any time."""


@runtime_checkable
class InProcess(Protocol):
    in_process: bool
    """Whether its messages never leave this process: then nobody needs digests of their bodies, where there is no store
    to note them either."""


@runtime_checkable
class DeadLettering(Protocol):
    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        """Put a message that could not be sent into the node's dead-letter queue."""


@runtime_checkable
class Browsing(Protocol):
    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        """Look into a node's dead-letter queue, oldest first, without taking anything."""


@runtime_checkable
class Cancelling(Protocol):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        """Take back what this node has scheduled and what is not due yet, by its id, or by the key in its headers
        (`SCHEDULE_KEY`); whether there was any. Returns once that is as safe as what `publish` confirms: it is never
        delivered then. Publishing it again may be taken for a repetition."""


@runtime_checkable
class Counting(Protocol):
    async def idle(self) -> None:
        """Return once no bound queue holds anything but messages scheduled for later; an unbound one may."""


@runtime_checkable
class Measured(Protocol):
    """Optional: it tells how much waits."""

    async def waiting(self, queue: str) -> int:
        """How many messages of a bound queue are still to be handled, as far as it sees. Raises `QueueNotFound`."""


@runtime_checkable
class Connected(Protocol):
    """Optional: it is reached by a connection, which may be lost for a while."""

    @property
    def is_connected(self) -> bool: ...


@runtime_checkable
class Selecting(Protocol):
    async def consume(
        self,
        queue: str,
        on_delivery: Callable[[Delivery], None],
        *,
        prefetch: int,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        """Take only what the selector fits; others get the rest. Exclusive: alone, as long as it consumes.

        Raises `InvalidSelector`, or `ConsumerRefused` when another has it exclusively.
        """


@runtime_checkable
class Partitioned(Protocol):
    async def partitions(self, queue: str) -> list[str]:
        """The queues that an ordered binding's messages are in, by the binding's queue: the current generation. Each
        can be given to `consume`.

        Within one of them messages come in the order in which they were published, to one consumer at a time; all
        messages of one key are in one of them. What is released, or was out when the consumer closed, comes back in its
        place, in order.
        """

    async def abandon(self, binding: Binding) -> None:
        """Nothing leads any more to the partitions of this earlier generation, whether they are there or not."""


@runtime_checkable
class Replying(Protocol):
    """Replies are for a process that waits for them, and nobody else. They are not kept: who is gone gets none."""

    async def open_replies(self, on_reply: Callable[[Envelope], None]) -> str:
        """An address of this process, as long as the transport is open: what `reply` is given for it is handed to the
        callback, from the event loop, as it was but for its recipients. No two are alike, in whichever process.

        After a lost connection the same address is there again; what came for it meanwhile is lost.
        """

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        """Bring each to the address that is its `destination`; how many found nobody there, and are dropped.

        Nothing of it is kept, and nothing else is published by it. Raises `Transient` and `OutcomeUnknown` for what may
        be handed over again (who waits then gets some of it twice), and `Permanent` for what never can.
        """


PROTOCOLS: Mapping[Capability, type] = {
    "browse": Browsing,
    "cancel": Cancelling,
    "count": Counting,
    "dead letters": DeadLettering,
    "partitions": Partitioned,
    "recognise": Recognising,
    "reply": Replying,
    "select": Selecting,
}
"""What a transport with one of these has beside the core."""


class Publishing(Protocol):
    """What takes messages. It is all that senders know of a transport."""

    def publish(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        """Append all of them, in order, or none; done once they are as safe as this transport makes them. It is awaited
        where it is called: it may begin, and raise, before that.

        Where `recipients` are given an envelope goes to these only; what is delivered names its node among them.
        Raises `Unroutable` for a command that no queue takes, or not every given recipient; an event that nobody wants
        is confirmed and delivered to nobody, and one with a recipient that does not want it to the others.
        """


class QueueTransport(Publishing, Protocol):
    """All methods are called from one event loop. Errors of a driver are translated to `faregate.errors`."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do beyond the core."""

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Closes every consumer first. Closing twice does nothing."""

    async def bind(self, binding: Binding) -> None:
        """Declare the subscription's queue, and the node's dead-letter queue where there are such. Idempotent; before
        `consume`. A later generation of partitions than before comes beside the earlier one."""

    async def unbind(self, queue: str) -> None:
        """The topic no longer leads to that queue, as durably as `bind` made it; binding again adds it again.

        What waits in the queue stays there and is still delivered to whoever consumes it. Unbinding twice does
        nothing. Raises `QueueNotFound` when no binding ever made such a queue.
        """

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        """Hand deliveries to the callback, at most `prefetch` of them out at a time. Who is cancelled meanwhile leaves
        no consumer behind. Raises `QueueNotFound`."""

    async def failed(self) -> Exception:
        """Return, with the reason, once the transport cannot go on; it may never."""
