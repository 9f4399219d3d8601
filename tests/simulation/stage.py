"""What a simulated world consists of: stores, broker, processes, a clock; and how a schedule finds it at its beginning.

The stores are opened once and emptied between schedules: opening them takes longer than a schedule.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

import faregate as fg
from faregate import ids
from faregate.core.recipients import RecipientLists, topic_for
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import DeadFilter
from faregate.ports.tokens import Token
from faregate.stores.sqlite import MemoryStore, MemoryTokenStore
from faregate.testing.clock import FakeClock
from tests.simulation.audit import Audit
from tests.simulation.broker import SimBroker
from tests.simulation.loop import SimLane, VirtualLoop, running
from tests.simulation.nodes import SCHEMA, Runs, make_nodes
from tests.simulation.ports import LateCall
from tests.simulation.process import SimProcess
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Scheduler, Step

_FOR_EVER = 1e15
_EMPTIED = ("ledger", "outbox", "identities", "dead", "floor", "claims", "tokens", "topics", "parked", "positions")
_names = itertools.count(1)


class Stage:
    scheduler: Scheduler
    broker: SimBroker
    clock: FakeClock
    audit: Audit
    runs: Runs
    elsewhere: frozenset[str] = frozenset()
    """Nodes that no process of the bus runs."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.merged = scenario.mode == "merged"
        self._clock = _Shared()
        name = f"simulation-{next(_names)}"
        self.store = MemoryStore(name, clock=self._clock)
        self.store.dear_savepoints = not scenario.savepoints
        self.tokens: MemoryTokenStore | None = None
        if scenario.mode in ("merged", "separate"):
            self.tokens = MemoryTokenStore(name if self.merged else f"{name}-tokens", clock=self._clock)
        self.runs = Runs()
        dedup = "tokens" if self.tokens is not None else scenario.mode
        self.nodes: dict[str, fg.Node] = make_nodes(
            self.runs, dedup, subscriber=scenario.subscriber, **scenario.options
        )
        self.floor: dict[str, float | None] = {}
        self.late: list[LateCall] = []
        self.processes: list[SimProcess] = []
        self.published: set[tuple[str, str]] = set()
        self.messages_of: dict[str, str] = {}
        self.steps: list[Step] = []

    # --- looking ---

    def query(self, sql: str, parameters: Sequence[Any] = (), *, everywhere: bool = False) -> list[tuple[Any, ...]]:
        rows = self.store._database.reader.execute(sql, parameters).fetchall()
        if everywhere and self.tokens is not None and not self.merged:
            rows += self.tokens._database.reader.execute(sql, parameters).fetchall()
        return rows

    def count_tokens(self, attempt: str) -> int:
        counts = self.query("select count(*) from faregate_tokens where attempt_id = ?", (attempt,), everywhere=True)
        return int(sum(count for (count,) in counts))

    def outbox_of(self, message_id: str) -> list[Envelope]:
        rows = self.loop_free(self.store.outbox_rows_of("a", message_id))
        return [row.envelope for row in rows]

    def dead_letters(self) -> list[DeadLetter]:
        found: list[DeadLetter] = self.loop_free(self.store.dead(DeadFilter()))
        return found

    def ended(self) -> set[tuple[str, str]]:
        """What was handled or is a dead letter, as (node, message id). What is replayed has still to come to an end."""
        handled = self.query("select node, message_id from effects")
        dead = [letter for letter in self.dead_letters() if letter.status != "replayed"]
        return {*handled, *((letter.node, letter.message_id) for letter in dead)}  # type: ignore[arg-type]

    def outputs_of(self, message_id: str) -> set[tuple[str, str]]:
        """What the handler of `a` sends for this message, as (node, message id)."""
        found = set()
        for number in range(self.runs.outputs):
            correlation = self.correlations[message_id]
            publication = ids.publication_id(
                correlation_id=correlation, node="a", causation_id=message_id, handler="take", type="Bill", slot=number
            )
            if self.runs.to in self.nodes:
                found.add((self.runs.to, ids.message_id(publication, self.runs.to)))
            else:
                found.add(("a", publication))
        return found

    @staticmethod
    def loop_free(coroutine: Any) -> Any:
        """The result of a read, which never waits in memory."""
        try:
            coroutine.send(None)
        except StopIteration as done:
            return done.value
        raise RuntimeError("the store waits for something")

    # --- beginning ---

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Stores open, fault points armed, ids counted: schedules may run."""
        with ExitStack() as stack:
            stack.enter_context(running(self.loop))
            for module in ("core.dedup.claims", "bus.attempts"):
                stack.enter_context(mock.patch(f"faregate.{module}.uuid4", self._uuid))
            for module in ("bus.housekeeping", "spark.runs.driver"):
                stack.enter_context(mock.patch(f"faregate.{module}.CLAIM_AGE", self.scenario.claim_age))
            stack.enter_context(mock.patch("faregate.bus.lanes.LaneTask", SimLane))
            stack.enter_context(mock.patch.object(faults, "hook", None if self.scenario.together else self._hook))
            level = logging.root.manager.disable
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, level)
            self._clock.current = FakeClock()
            self.loop.run(self.store.open())
            stack.callback(lambda: self.loop.run(self.store.close()))
            if self.tokens is not None:
                self.loop.run(self.tokens.open())
                stack.callback(lambda: self.loop.run(self.tokens.close()))  # type: ignore[union-attr]
            self.loop.run(self.store.apply_schema(SCHEMA))
            yield

    async def _hook(self, point: str) -> None:
        await self.scheduler.hook(point)

    def _uuid(self) -> str:
        return f"00000000-0000-4000-8000-{next(self._uuids):012x}"

    def set_up(self) -> None:
        for process in self.processes:
            process.crash()  # or its tasks would end in the middle of the next schedule
        self.loop.run_ready()
        self.loop.forget()
        self.empty()
        self._uuids = itertools.count(1)
        self._publications = itertools.count(1)
        self.clock = self._clock.current = FakeClock()
        self.scheduler = Scheduler(self.loop, every_point=self.scenario.every_point)
        self.broker = self.make_broker({"Order": ["a"], "Bill": ["b"], "Noted": []})
        self.audit = Audit(self)
        self.broker.on_signal = self.audit.on_signal
        self.runs.__init__()  # type: ignore[misc]
        self.late.clear()
        self.floor.clear()
        self.published, self.messages_of, self.correlations = set(), {}, dict[str, str]()
        self.steps = []
        if self.tokens is not None:
            recipient_lists = RecipientLists(self.tokens)
            for node in (self.nodes["a"], self.nodes["b"]):
                for subscription in node.subscriptions.values():
                    self.loop.run(recipient_lists.subscribe(topic_for(subscription), node.name, subscription.dedup))
        self.processes = []
        self.prepare()
        self.scenario.begin(self)
        self.processes = [SimProcess(self, f"P{number}") for number in range(self.scenario.processes)]
        self.scheduler.active = self.scenario.starting
        for process in self.processes:
            process.spawn(process.start())
            self.loop.run_ready()
        self.scheduler.active = True
        for process, actor in zip(self.processes, self.scenario.actors, strict=False):
            process.spawn(actor(process))
        self.scenario.started(self)

    def prepare(self) -> None:
        """What a kind of world needs before there are messages."""

    def make_broker(self, routes: dict[str, list[str]]) -> SimBroker:
        return SimBroker(self.clock, routes)

    def empty(self) -> None:
        for store in (self.store, self.tokens):
            if store is not None:
                for table in _EMPTIED:
                    store._database.writer.execute(f"delete from faregate_{table}")
        self.store._database.writer.execute("delete from effects")

    # --- putting messages in, for scenarios ---

    def order(self, name: str = "x", *, copies: int = 1, key: str | None = None, sent_at: float | None = None) -> str:
        """An Order is on its way to `a`, in so many copies; its message id."""
        envelope = self.envelope("Order", _body(name=name, key=key), "a")
        if sent_at is not None:
            envelope = msgspec.structs.replace(envelope, sent_at=sent_at)
        message_id = ids.message_id(envelope.publication_id, "a")
        if self.tokens is not None and not self.scenario.foreign:
            attempt = self._uuid()
            envelope = msgspec.structs.replace(envelope, attempt_id=attempt)
            self.loop.run(self.tokens.create([Token(attempt, message_id, "a", "shop", self.clock.time(), _FOR_EVER)]))
            self.messages_of[attempt] = message_id
        self.published.add(("a", message_id))
        self.correlations[message_id] = envelope.correlation_id
        self.broker.signals.append((envelope, "a"))
        for _ in range(copies):
            self.broker.put(envelope, "a", key=key)
        return message_id

    def expect(self, node: str, envelope: Envelope) -> None:
        """This is on its way to a node, or will be: it has to be handled there, or to be a dead letter."""
        message_id = ids.message_id(envelope.publication_id, node)
        self.published.add((node, message_id))
        self.correlations[message_id] = envelope.correlation_id

    def directory(self) -> MemoryTokenStore:
        assert self.tokens is not None
        return self.tokens

    def envelope(self, type_: str, body: bytes, to: str) -> Envelope:
        publication = ids.idempotent_id("shop", type_, str(next(self._publications)))
        return Envelope(
            publication_id=publication,
            type=type_,
            kind="command",
            source="shop",
            body=body,
            recipients=(to,) if self.tokens is not None else (),
            destination=to,
            correlation_id=publication,
            sent_at=self.clock.time(),
        )


def _body(**fields: Any) -> bytes:
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


class _Shared:
    """The clock of stores that outlive a schedule: the schedule's own."""

    current: FakeClock

    def time(self) -> float:
        return self.current.time()

    def monotonic(self) -> float:
        return self.current.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self.current.sleep(seconds)

    def call_later(self, seconds: float, callback: Any) -> Any:
        return self.current.call_later(seconds, callback)
