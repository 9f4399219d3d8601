"""A world in which node `a` runs on Spark: the real engine in Python workers and the real driver around each batch, on
a log that is a list. What Spark itself does is played here:

    checkpoint    where a batch ends is written before it runs, that it is done afterwards; a driver goes on from there
    tasks         the rows of a batch by bucket, in order of position, each with an engine of a worker process
    failures      a task that fails, or whose worker dies, is tried again elsewhere; after four times the query fails,
                  and is started anew; a zombie goes on beside its retry, or beside a driver that came back
    at the end    the checkpoint is lost

`b` is on the bus of `world.py`, and gets what the driver spools.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec

from faregate.columns import to_batch
from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import claims_of
from faregate.core.recipients import RecipientLists
from faregate.errors import FaregateError, Unroutable
from faregate.message import Envelope
from faregate.ports.topology import Reading
from faregate.spark.runs import spec as specs
from faregate.spark.runs.driver import Driver
from faregate.spark.runs.engine import Engine
from faregate.spark.runs.rows import NOBODY, Places
from faregate.spark.runs.spec import RunSpec
from tests.simulation.broker import Copy, SimBroker
from tests.simulation.ports import Port
from tests.simulation.process import Process
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Option
from tests.simulation.world import World

_ATTEMPTS = 4
_MOST_BATCHES = 60
_POLL_SECONDS = 1.0
_LIMIT = 1 << 20
_LABEL = "the run"


class Task:
    """A partition of a batch, with all attempts at it."""

    def __init__(self, world: "SparkWorld", spec: RunSpec, rows: list[tuple[Any, ...]]) -> None:
        self._world, self._spec, self._rows = world, spec, rows
        self.counts: asyncio.Future[dict[str, int]] = world.loop.create_future()
        self.attempts = self.running = 0
        self.doubted = False
        """Whether it was taken for lost once."""

    def start(self) -> None:
        self.attempts += 1
        self.running += 1
        worker = self._world.worker(self._spec)
        worker.task = self
        self._world.scheduler.run_as_last(worker.spawn(worker.work(self._rows)))

    def ended(self, result: dict[str, int] | BaseException) -> None:
        """One attempt did. Another is made if it failed and none is under way."""
        self.running -= 1
        if self.counts.done() or (self.running and isinstance(result, BaseException)):
            return
        if not isinstance(result, BaseException):
            self.counts.set_result(result)
        elif self.attempts < _ATTEMPTS:
            self.start()
        else:
            self.counts.set_exception(result)


class Worker(Process):
    """A Python worker: its engine is kept from task to task."""

    world: "SparkWorld"

    def __init__(self, world: "SparkWorld", spec: RunSpec) -> None:
        super().__init__(world, f"W{next(world.numbers)}")
        self.spec = spec
        self.engine = Engine(spec)
        self.task: Task | None = None

    async def work(self, rows: list[tuple[Any, ...]]) -> None:
        assert self.task is not None
        result: Any = RuntimeError("the attempt did not end")
        try:
            result = await self.engine.run(rows)
        except FaregateError as exc:
            result = exc
            self.world.workers.remove(self)  # its engine is closed
        task, self.task = self.task, None
        task.ended(result)


class DriverProcess(Process):
    world: "SparkWorld"

    async def drive(self) -> None:
        world = self.world
        driver = await self._begin()
        begins = await driver.begin(_LABEL, {world.queue: Reading()}, None, world.committed)
        spec = replace(world.spec, id=f"{world.spec.id}-{self}", begins=begins)
        specs.provide(spec, world.nodes["a"])
        places = Places(spec)
        low = begins[world.queue].offset
        start = max(world.committed, low) if world.committed == 0 else world.committed
        batches = 0
        while batches < _MOST_BATCHES:
            end = world.planned if world.planned > start else min(len(world.log), start + world.on_spark.trigger)
            world.planned = max(end, start)
            parked = places.parked_rows(await driver.due())
            if end > start or parked:
                batches += 1
                low = await self._run_batch(driver, spec, places, start, end, parked, low)
                await world.scheduler.point("spark.commit-log")
                world.committed = start = end = max(end, start)
                world.scheduler.acted()
            else:
                await driver.send()
                await self._wait()
        world.audit.breach(6, f"{self} never comes to rest: what it handles comes back in the next batch")

    async def _begin(self) -> Any:
        """As `Driver.open` leaves it, without a thread."""
        world = self.world
        driver: Any = Driver.__new__(Driver)
        driver._node, driver._clock, driver.path = world.nodes["a"], world.clock, "log"
        driver._store = world.port("store", world.store)
        driver._tokens = None if world.tokens is None else world.port("tokens", world.tokens)
        driver._recipient_lists = None if world.tokens is None else RecipientLists(driver._tokens)
        driver._alarms = Alarms()
        driver._claims = claims_of("a", driver._store, driver._tokens, driver._alarms, world.clock)
        driver._marks, driver._retain_ledger, driver._next_eviction = [], 1e9, 0.0
        driver._next_sweep = 0.0
        driver._body_limit = _LIMIT
        driver._observers = ()
        return driver

    async def _run_batch(
        self, driver: Any, spec: RunSpec, places: Places, start: int, end: int, rows: list[tuple[Any, ...]], low: int
    ) -> int:
        """Returns the low-water mark."""
        world = self.world
        if end > start:
            batch = to_batch(world.log[start:end], [0] * (end - start), range(start, end), 0)
            for offset in places.taken(0, batch).column("offset").to_pylist():
                envelope = world.log[offset]
                rows.append(places.row(0, envelope, offset, envelope.sent_at, None))
            rows.append((end - 1, 0, NOBODY, None, b"", 0.0, 0, False))
        parts: dict[int, list[tuple[Any, ...]]] = {}
        for row in sorted(rows, key=lambda row: row[0]):
            parts.setdefault(row[1] % world.on_spark.partitions, []).append(row)
        tasks = [Task(world, spec, part) for part in parts.values()]
        world.tasks += tasks
        for task in tasks:
            task.start()
        counts = [await task.counts for task in tasks]
        done = max(low, *(each["last"] + 1 for each in counts)) if end > start else low
        await driver.finish_batch(done)
        return done

    async def _wait(self) -> None:
        """As a run looks every second, if there could be anything to find."""
        parked = "select 1 from faregate_parked where node = 'a'"
        unsent = "select 1 from faregate_outbox where node = 'a' and dispatched_at is null"
        if self.world.query(f"{parked} union {unsent}"):
            await self.world.clock.sleep(_POLL_SECONDS)
        else:
            self.world.idle[self] = more = self.world.loop.create_future()
            await more


class LogBroker(SimBroker):
    """What goes to `a` goes to the end of the log."""

    def __init__(self, world: "SparkWorld", routes: dict[str, list[str]]) -> None:
        super().__init__(world.clock, routes)
        self._world = world

    def put(self, envelope: Envelope, node: str, *, key: str | None = None) -> Copy:
        if node != "a":
            return super().put(envelope, node, key=msgspec.json.decode(envelope.body).get("key"))
        self._world.append(envelope)
        return Copy(envelope, node, len(self._world.log) - 1, key)


class SimLog:
    """The log as a driver knows it. What is appended twice is in it twice."""

    def __init__(self, world: "SparkWorld") -> None:
        self._world = world

    def topology(self) -> Any:
        return self

    def check_command(self, envelope: Envelope) -> None:
        if not self._world.broker._takers(envelope):
            raise Unroutable(f"nobody takes {envelope}")

    def save_reader_offset(self, name: str, offset: int) -> None: ...

    def append(self, envelopes: Sequence[Envelope], name: str = "") -> None:
        self._world.broker.append(envelopes)
        self._world.scheduler.acted()

    async def take_in(self) -> bool:
        return True


class SparkWorld(World):
    elsewhere = frozenset("a")

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        assert scenario.spark is not None
        self.on_spark = scenario.spark
        [subscription] = self.nodes["a"].subscriptions.values()
        self.queue = subscription.binding(_LIMIT).queue
        name = self.store.url
        self.spec = RunSpec(
            name, "a", "tests:a", None, name, "application/json", _LIMIT, tokens=self.tokens and self.tokens.url
        )
        self.drivers: list[DriverProcess] = []
        self.workers: list[Worker] = []

    @contextmanager
    def opened(self) -> Iterator[None]:
        log = SimLog(self)
        patches = {
            "engine.open_store": lambda *_, **__: self.port("store", self.store),
            "engine.open_token_store": lambda *_: self.port("tokens", self.tokens),
            "engine.SystemClock": lambda: self.clock,
            "driver.open_log": lambda path: log,
            "outbox.open_subscribed": lambda path: log,
            "outbox.open_appendable": lambda path: log,
        }
        with super().opened(), ExitStack() as stack:
            for name, replacement in patches.items():
                stack.enter_context(mock.patch(f"faregate.spark.runs.{name}", replacement))
            yield
            specs._loaded.clear()

    def port(self, prefix: str, real: Any) -> Any:
        return Port(prefix, real, self.scheduler, self.scenario.modes, self.late, self.audit.watch)

    def prepare(self) -> None:
        for process in (*self.drivers, *self.workers):
            process.crash()
        self.loop.run_ready()
        self.numbers = itertools.count()
        self.log: list[Envelope] = []
        self.committed = self.planned = 0
        self.tasks: list[Task] = []
        self.workers = []
        self.idle: dict[DriverProcess, asyncio.Future[None]] = {}
        specs._loaded.clear()
        specs.provide(self.spec, self.nodes["a"])
        self.drivers = [DriverProcess(self, f"D{number}") for number in range(self.on_spark.drivers)]

    def set_up(self) -> None:
        super().set_up()
        for driver in self.drivers:
            self.start_driver(driver)

    def make_broker(self, routes: dict[str, list[str]]) -> SimBroker:
        return LogBroker(self, routes)

    def envelope(self, type_: str, body: bytes, to: str) -> Envelope:
        return msgspec.structs.replace(super().envelope(type_, body, to), recipients=(to,))

    def append(self, envelope: Envelope) -> None:
        self.log.append(envelope)
        self.wake_drivers()

    def wake_drivers(self) -> None:
        """There is something to find."""
        for more in self.idle.values():
            if not more.done():
                more.set_result(None)
        self.idle.clear()

    # --- drivers and workers ---

    def start_driver(self, driver: DriverProcess) -> None:
        task = driver.spawn(driver.drive())
        self.scheduler.run_as_last(task)
        task.add_done_callback(lambda done: self._driver_ended(driver, done))

    def _driver_ended(self, driver: DriverProcess, done: "asyncio.Task[None]") -> None:
        if done.cancelled() or not driver.alive:
            return
        exc = done.exception()
        if isinstance(exc, FaregateError):  # the query failed, and somebody starts it again
            self.restart_driver(driver)
        elif exc is not None:
            self.loop.errors.append({"exception": exc})

    def restart_driver(self, dead: DriverProcess) -> None:
        dead.crash()
        self.idle.pop(dead, None)
        driver = DriverProcess(self, dead.name + "'")
        self.drivers[self.drivers.index(dead)] = driver
        self.start_driver(driver)

    def worker(self, spec: RunSpec) -> Worker:
        for worker in self.workers:
            if worker.task is None and worker.spec is spec:
                return worker
        self.workers.append(Worker(self, spec))
        return self.workers[-1]

    def _restart(self, dead: Any) -> None:
        if isinstance(dead, DriverProcess):
            self.restart_driver(dead)
        elif isinstance(dead, Worker):
            self.workers.remove(dead)
            if dead.task is not None:
                dead.task.ended(RuntimeError("its worker died"))
        else:
            super()._restart(dead)

    # --- what can happen ---

    def _options(self) -> list[Option]:
        """Besides: a worker dies, also one whose turn it is not; a driver dies while its tasks go on."""
        options = super()._options()
        if self._spent["crash"] < self.scenario.crashes:
            offered = {option.label for option in options}
            busy = [worker for worker in self.workers if worker.task is not None]
            for process in (*busy, *self.drivers) if busy else ():
                if f"crash {process}" not in offered:
                    options.append(Option(f"crash {process}", "crash", self._crash(process)))
        return options

    def _disturbances(self) -> list[Option]:
        options = super()._disturbances()
        if self.on_spark.zombies:
            for task in self.tasks:
                if task.running and not task.doubted and not task.counts.done():
                    options.append(Option("a task is taken for lost", "fault", self._doubt(task)))
        return options

    def _doubt(self, task: Task) -> Callable[[], None]:
        def action() -> None:
            task.doubted = True
            task.start()

        return action

    def come_again(self, envelope: Envelope, node: str) -> None:
        if node != "a" or self.scenario.mode != "off":  # there another copy is another message
            super().come_again(envelope, node)

    def _look_again(self) -> None:
        super()._look_again()
        self.wake_drivers()

    def _rest(self) -> None:
        super()._rest()
        self.committed = self.planned = 0
        for driver in list(self.drivers):
            self.restart_driver(driver)
        self._settle()
