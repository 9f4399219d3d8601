"""One simulated process: the real receivers, dispatcher and housekeepers of the nodes, on ports of their own.

Several of them run the same nodes on the same stores. A crash ends all tasks of one; what it held returns, what it had
not committed is gone, what it had on the wire may still arrive.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from contextvars import Context, copy_context
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from faregate.bus.attempts import Attempts
from faregate.bus.dispatcher import Dispatcher
from faregate.bus.housekeeping import Housekeeper
from faregate.bus.lanes import Lanes
from faregate.codec import BodyWriter, find_codec
from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import Claims
from faregate.core.feed import QueueFeed
from faregate.core.handling import Handling
from faregate.core.node_store import NodeStore
from faregate.core.pace import BATCH_LIMIT
from faregate.core.recipients import RecipientLists
from faregate.core.sender import Sender
from faregate.errors import StaleLock
from faregate.node.key import Key
from tests.simulation.broker import SimDelivery, SimTransport
from tests.simulation.loop import PROCESS
from tests.simulation.ports import Port

if TYPE_CHECKING:
    from tests.simulation.world import World

_LIMIT = 1 << 20
_KEY = Key(("key",), None, attrgetter("key"))
_WRITER = BodyWriter(find_codec("json"), limit=_LIMIT)


class Process:
    """What can crash: all tasks that it made end."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], int] = {}
        """All it ever made, each with its number."""
        self._context: Context = copy_context()
        self._context.run(PROCESS.set, self)

    def __str__(self) -> str:
        return self.name

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return self.world.loop.create_task(coroutine, context=self._context)

    def crash(self) -> None:
        self.alive = False
        for task in list(self.tasks):
            task.cancel()


class SimProcess(Process):
    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.started = False
        """Only then it takes deliveries."""
        self.held: dict[SimDelivery, None] = {}
        self.lanes: Lanes | None = None
        """Of node `a`."""
        scenario, scheduler, clock = world.scenario, world.scheduler, world.clock
        self.store: Any = Port("store", world.store, scheduler, scenario.modes, world.late, world.audit.watch)
        self.tokens: Any = None
        attempts = None
        if world.tokens is not None:
            self.tokens = Port("tokens", world.tokens, scheduler, scenario.modes, world.late, world.audit.watch)
            attempts = Attempts(self.store, RecipientLists(self.tokens), clock)
        transport: Any = SimTransport(world.broker, scheduler, scenario.modes.get("transport.publish", ()))
        alarms = Alarms()
        nodes = {name: node for name, node in world.nodes.items() if name not in world.elsewhere}
        self.dispatcher = Dispatcher(self.store, transport, clock, alarms, attempts, list(nodes))
        self.shared: dict[str, NodeStore] = {}
        self.senders: dict[str, Sender] = {}
        self.handlings: dict[str, Handling] = {}
        self.housekeepers: list[Housekeeper] = []
        for node in nodes.values():
            claims = None
            if self.tokens is not None and self.tokens.database_id != self.store.database_id:
                claims = Claims(node.name, self.store, self.tokens, self.dispatcher.dispatch, alarms, clock)
            shared = NodeStore(self.store, self.dispatcher, alarms, self.tokens, claims)
            sender = Sender(node, transport, _WRITER, clock, {("command", "b", "Bill"): _KEY}, alarms)
            [subscription] = node.subscriptions.values()
            self.shared[node.name] = shared
            self.senders[node.name] = sender
            sender.use_store(shared, None if attempts is None else RecipientLists(self.tokens))
            self.handlings[node.name] = Handling(
                subscription,
                node,
                sender,
                QueueFeed(),
                store=shared,
                clock=clock,
                alarms=alarms,
                pool=cast(Executor, None),
                body_limit=_LIMIT,
            )
            if scenario.lanes and node.name == "a":
                self.lanes = self._make_lanes(self.handlings["a"], scenario.lanes)
            self.housekeepers.append(
                Housekeeper(
                    node.name,
                    shared,
                    self.dispatcher,
                    transport,
                    clock,
                    retain_ledger=scenario.retain_ledger,
                    retain_dead=None,
                )
            )

    def _make_lanes(self, handling: Handling, size: int) -> Lanes:
        """As a worker has them."""

        async def work(deliveries: list[Any]) -> list[Any]:
            again: list[Any] = []
            try:
                again = await handling.handle(deliveries)
            finally:
                for delivery in set(deliveries).difference(again):
                    self.held.pop(delivery, None)
            return again

        def put_back(unbegun: Sequence[Any], ended: Sequence[Any]) -> None:
            for delivery in ended:
                self.held.pop(delivery, None)
            lanes.put_back(unbegun, ended)

        lanes = Lanes(size, work, by_key=True)
        lanes.batch = BATCH_LIMIT
        handling.let_part(put_back)
        return lanes

    def submit(self, deliveries: list[SimDelivery]) -> None:
        """As a worker takes what is delivered."""
        assert self.lanes is not None
        for delivery in deliveries:
            self._context.run(self.lanes.submit, delivery)

    # --- what it does ---

    async def start(self) -> None:
        """As a bus does: what an earlier process left is sent before anything is consumed."""
        await self.dispatcher.start()
        self.started = True

    async def handle(self, deliveries: list[SimDelivery]) -> None:
        """As a worker does: what shall come again runs again, alone."""
        node = deliveries[0].copy.node
        handling = self.handlings[node]
        waiting: list[list[SimDelivery]] = [deliveries]
        try:
            while waiting:
                again = await handling.handle(cast(Any, waiting.pop(0)))
                waiting[:0] = [[cast(SimDelivery, delivery)] for delivery in again]
        except StaleLock:
            pass
        finally:
            for delivery in deliveries:
                self.held.pop(delivery, None)

    async def sweep(self) -> None:
        for housekeeper in self.housekeepers:
            await housekeeper._evict()

    def crash(self) -> None:
        super().crash()
        for delivery in self.held:
            if delivery.copy.held is delivery:
                self.world.broker.give_back(delivery.copy)
        self.held.clear()
