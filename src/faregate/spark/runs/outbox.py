"""After a batch: what the handlers send goes from the outbox to the log, many at a time, in order. A journal takes them
into its spool; on RabbitMQ they go through the exchange, into the queues and into the stream.

Rules kept here:
- Rows leave the outbox after the log has them safe. A crash in between sends them again with the same ids, under the
  same name of a batch if they are the same rows; the log and the recipients recognise them.
- No log brings replies. One that a bus left in the outbox is dropped; whoever asked runs into its timeout.
- A command that no node handles becomes a dead letter of its sender, in the commit in which it leaves the outbox.
- What `fg.outbox` recorded goes out within the node's outgoing middlewares, as on the bus.
- While no bus runs, nobody takes a journal's spool in. Then the driver does, holding its lock for that moment.
"""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import sha256

from faregate.bus.attempts import Attempts, signals, without_attempts
from faregate.bus.dispatcher import Around, Dispatcher
from faregate.codec import BodyWriter, find_codec
from faregate.core.alarms import Alarms
from faregate.core.dead_letter import unsent
from faregate.core.life import Life
from faregate.core.observer import Observers, confirmed, observed
from faregate.core.recipients import RecipientLists
from faregate.core.resources import Resources
from faregate.core.sender import Sender, message_classes
from faregate.errors import Unroutable
from faregate.message import Envelope
from faregate.node.node import Node
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import Appendable, Subscribed
from faregate.ports.store import FROM_OUTSIDE, OutboxRow, Store
from faregate.spark.logs import open_appendable, open_subscribed
from faregate.spark.options import Place
from faregate.spark.runs.feed import NoTransport

log = logging.getLogger("faregate.spark")

_AT_ONCE = 20_000
"""Rows read and sent together. With ten times as many Python's garbage collector takes a quarter of the time."""
_PATIENCE = 30.0
"""For how many seconds sending is tried where the dispatcher sends; then the run fails, and the next goes on."""


class OutboxSpooler:
    """What one node has in the outbox of its store, and the log that it goes to."""

    def __init__(
        self,
        store: Store,
        node: Node,
        path: Place,
        clock: Clock,
        lists: RecipientLists | None,
        limit: int,
        observers: Observers = (),
    ) -> None:
        self._store = store
        self._nodes = [node.name]
        self._noted = False
        """Whether the store knows that this node is run."""
        self._subscribed, self._log = open_subscribed(path), open_appendable(path)
        """Kept: a log that is opened anew reads all its notes."""
        self._clock = clock
        self._observers = observers
        self._alarms = Alarms()
        self._attempts = None if lists is None else Attempts(store, lists, clock, self._alarms)
        """Where some recipients may want tokens."""
        resources = Resources(node, alarms=self._alarms, only_outgoing=True)
        self._life = Life([resources])
        self._around: dict[str, Around] = {}
        if node.outgoing_middlewares:
            writer = BodyWriter(find_codec("json"), limit=limit)  # nothing is written: it was, when it was recorded
            classes = message_classes([node])
            sender = Sender(node, NoTransport(), writer, clock, {}, self._alarms, classes, resources=resources)
            self._around[node.name] = sender.publish_recorded

    async def open(self) -> None:
        """Make what its outgoing middlewares take and lives as long as a bus: here, as long as the run."""
        await self._life.start()

    async def close(self) -> None:
        await self._life.stop()

    async def send(self) -> int:
        """Send everything that is committed; how many messages."""
        sent = 0
        if not self._noted:
            self._noted = True
            await self._store.note_nodes(self._nodes, self._clock.time())
        await self._take_due()
        while rows := await self._store.undispatched(_AT_ONCE, self._nodes):
            sent += len(rows)
            if self._attempts is not None or (self._around and any(row.ordinal == FROM_OUTSIDE for row in rows)):
                await self._dispatch()
                break
            await self._send_rows([without_attempts(row) for row in rows])
        return sent

    async def _take_due(self) -> None:
        """What `fg.outbox` scheduled, and what is due by now, goes out with the rest; what a bus takes at the same time
        is left to it."""
        now = self._clock.time()
        while (due := await self._store.next_due(self._nodes)) is not None and due <= now:
            async with self._store.transaction() as transaction:
                rows = await transaction.take_due(now, _AT_ONCE, self._nodes)
                await transaction.send(rows)
            if not rows:
                return

    async def _dispatch(self) -> None:
        """Recipients may want tokens, or outgoing middlewares want to see what `fg.outbox` recorded: the bus' own
        dispatcher sees to both, and sends through the log."""
        spooling = _Spooling(self._subscribed, self._log)
        dispatcher = Dispatcher(
            self._store,
            spooling,
            self._clock,
            self._alarms,
            self._attempts,
            self._nodes,
            self._around,
            _PATIENCE,
            observers=self._observers,
        )
        await dispatcher.start()
        await dispatcher.stop(0)

    async def _send_rows(self, rows: list[OutboxRow]) -> None:
        topology = self._subscribed.topology()
        letters: list[DeadLetter] = []
        going: list[OutboxRow] = []
        for row in rows:
            if row.envelope.kind == "reply":
                log.debug("the reply %s is dropped: no log brings replies", row.envelope)
                continue
            try:
                topology.check_command(row.envelope)
                going.append(row)
            except Unroutable as exc:
                text, envelope = str(exc), row.envelope
                self._alarms.sound("unroutable", row.node, envelope.publication_id, text, envelope=envelope)
                letters.append(unsent(row, row.envelope, exc, self._clock.time()))
        if going:
            seqs = f"{self._store.database_id} {[row.seq for row in going]}"
            name = f"outbox-{going[0].seq:020d}-{sha256(seqs.encode()).hexdigest()[:16]}"
            sent = [signal for row in going for signal in signals(row)]
            append = confirmed(self._observers, lambda envelopes: asyncio.to_thread(self._log.append, envelopes, name))
            try:
                await observed(self._observers, append, outbox=True)(sent)
            except Unroutable:  # who was there is gone; the dispatcher finds out which of them it is
                await self._dispatch()
                return
        async with self._store.transaction() as transaction:
            for letter in letters:
                await transaction.add_dead(letter)
            await transaction.dispatched([row.seq for row in rows])

    async def discard_strays(self) -> None:
        """Remove tokens of attempts that no signal carries, once nobody can create them any more."""
        if self._attempts is not None:
            await self._attempts.discard_strays()

    async def take_in(self) -> bool:
        """See that what was appended gets into the log; whether it is there now. False while a bus runs: it does."""
        return await self._log.take_in()


class _Spooling:
    """Publishes to a log."""

    def __init__(self, subscribed: Subscribed, log: Appendable) -> None:
        self._subscribed = subscribed
        self._log = log

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        topology = self._subscribed.topology()
        for envelope in envelopes:
            topology.check_command(envelope)
        await asyncio.to_thread(self._log.append, envelopes)
