"""The queue against a model that is too simple to be wrong, over random histories.

The model keeps a plain list and looks through all of it every time. It does not predict which consumer gets an
entry; it follows the deliveries in the order they happened and says whether each was allowed: the consumer had
credit and was not paused, the entry was the first available one it may have, no other of its keys was out. After
every step nothing deliverable is left, and states, credit, dead letters, counts and what is in flight agree.

Times are chosen so that events of different kinds never fall on the same instant: operations happen at whole
seconds, locks end at .125, lives at .25 (or, counted from a scheduled delivery, at .0), redeliveries at .5 and
scheduled deliveries at .75.
"""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faregate.broker.consumer import QueueConsumer
from faregate.broker.delivery import BrokerDelivery
from faregate.broker.entry import Entry
from faregate.broker.queue import Queue
from faregate.broker.selector import Selector
from faregate.errors import StaleLock
from faregate.testing.clock import rest
from tests.broker.rig import Rig

LOCK_SECONDS = 4.125
COLOURS = st.sampled_from(["red", "blue"])


@dataclass(eq=False)
class Item:
    """An entry as the model sees it: waiting, acquired or archived; a waiting one may have to wait for a time."""

    number: int
    """Its place in the list, and the text of its message."""
    key: str | None
    colour: str
    place: int = 0
    """Lower ones are delivered before it."""
    behind: bool = False
    """When it is due it goes to the end."""
    state: str = "waiting"
    due: float | None = None
    asked: int = 0
    """When `due` was asked for, as a sequence number: events of one instant happen in the order of asking."""
    redelivering: bool = False
    expires: float | None = None
    tries: int = 0
    redeliveries: int = 0
    delivered: bool = False
    delivered_before: bool = False
    started: bool = False
    lock_until: float = 0.0
    holder: "Taker | None" = None
    scheduled: bool = False
    has_turn: bool = False
    """Whether it has its keys: it is available, out, or (strict) waits for redelivery."""

    @property
    def keys(self) -> set[str]:
        return set(self.key.split("+")) if self.key is not None else set()


@dataclass(eq=False)
class Taker:
    colour: str | None
    window: bool
    credit: int
    paused: bool = False
    real: QueueConsumer | None = None


@dataclass
class Model:
    strict: bool
    serial: bool
    max_deliveries: int | None
    expires: float | None
    items: list[Item] = field(default_factory=list)
    dead: list[tuple[int, str]] = field(default_factory=list)
    settled: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("handled", "skipped", "filtered", "dead", "duplicate"), 0)
    )
    acquisitions: list[Item] = field(default_factory=list)
    sequence: int = 0

    def ask(self) -> int:
        self.sequence += 1
        return self.sequence

    # --- whose turn it is

    def turns(self) -> None:
        """Give every key to the first that wants it, if it can have all that it wants: later ones wait for it."""
        wanted = {key for item in self.items if item.has_turn for key in item.keys}
        for item in sorted(self.items, key=lambda i: i.place):
            if item.state == "waiting" and item.due is None and not item.has_turn:
                item.has_turn = not item.keys & wanted
                wanted |= item.keys

    def available(self, item: Item) -> bool:
        return item.state == "waiting" and item.due is None and item.has_turn

    def first_for(self, taker: Taker) -> Item | None:
        if self.serial and any(i.redelivering for i in self.items):
            return None
        fitting = (i for i in self.items if self.available(i) and taker.colour in (None, i.colour))
        return min(fitting, key=lambda i: i.place, default=None)

    # --- what happens

    def enqueue(self, item: Item, now: float) -> None:
        self.items.append(item)
        item.asked = item.place = self.ask()
        self.turns()

    def deliver(self, taker: Taker, delivery: BrokerDelivery, now: float) -> None:
        assert taker.credit > 0, "a delivery without credit"
        assert not taker.paused, "a delivery to a paused consumer"
        item = self.items[int(delivery.envelope.body)]
        assert item.state != "archived", "an archived entry came back"
        assert item is self.first_for(taker), f"{item.number} was not the first that was available"
        same_key = [i for i in self.items if i.keys & item.keys and i is not item]
        assert not any(i.state == "acquired" for i in same_key), "two of one key are out"
        if self.strict:
            assert not any(i.redelivering and not i.behind for i in same_key), "the key waits for a redelivery"
            earlier = [i for i in same_key if i.place < item.place and not i.scheduled and not i.behind]
            assert all(i.state == "archived" for i in earlier), "it overtook an earlier one of its key"
        seen = (delivery.redelivered, delivery.tries, delivery.redeliveries)
        assert seen == (item.delivered, item.tries, item.redeliveries), "its counts are wrong"
        taker.credit -= 1
        item.state, item.holder, item.started = "acquired", taker, False
        item.delivered_before, item.delivered = item.delivered, True
        item.lock_until = now + LOCK_SECONDS
        self.acquisitions.append(item)

    def end(self, item: Item) -> None:
        assert item.holder is not None
        item.holder.credit += item.holder.window
        item.holder = None
        self.acquisitions.remove(item)

    def archive(self, item: Item, outcome: str, reason: str | None = None) -> None:
        item.state, item.due, item.redelivering = "archived", None, False
        self.settled[outcome] += 1
        if reason is not None:
            self.dead.append((item.number, reason))
        item.has_turn = False
        self.turns()

    def come_back(self, item: Item, delay: float, now: float, *, behind: bool = False) -> None:
        self.end(item)
        if self.max_deliveries is not None and item.tries >= self.max_deliveries:
            self.archive(item, "dead", "max-deliveries")
        elif item.expires is not None and item.expires <= now:
            self.archive(item, "dead", "expired")
        else:
            item.state = "waiting"
            if delay:
                item.due, item.asked, item.redelivering, item.behind = now + delay, self.ask(), True, behind
                item.has_turn = self.strict and not behind
                self.turns()

    def catch_up(self, now: float) -> None:
        """Let everything happen whose time has come; all of it is of one instant and one kind."""
        for item in [i for i in self.acquisitions if i.lock_until <= now]:
            self.come_back(item, 0.0, now)
        for item in [i for i in self.items if i.state == "waiting" and i.expires is not None and i.expires <= now]:
            self.archive(item, "dead", "expired")
        for item in sorted((i for i in self.items if i.due is not None and i.due <= now), key=lambda i: i.asked):
            if item.behind:
                item.place, item.behind = self.ask(), False
            item.due, item.redelivering = None, False
            self.turns()

    # --- what must agree

    def states(self) -> dict[int, str]:
        def state(item: Item) -> str:
            if item.state == "acquired":
                return "acquired"
            if item.due is not None:
                return "scheduled"
            return "available" if self.available(item) else "withheld"

        return {item.number: state(item) for item in self.items if item.state != "archived"}

    def alarms(self, now: float) -> int:
        living = [i for i in self.items if i.state != "archived"]
        return sum((i.due is not None) + (i.expires is not None and i.expires > now) for i in living)

    def in_flight(self) -> int:
        return sum(i.state != "archived" and (i.due is None or i.redelivering) for i in self.items)


class NumberRig(Rig):
    """A rig whose record of dead entries names their numbers."""

    def _add_dead(self, queue: Queue, entry: Entry, reason: str, error: str) -> None:
        assert reason and error, "a dead letter without a reason"
        self.dead.append((int(entry.envelope.body), reason))

    def __init__(self, **properties: Any) -> None:
        self.dead: list[tuple[int, str]] = []
        super().__init__(**properties)


class QueueAgainstModel(RuleBasedStateMachine):
    @initialize(
        strict=st.booleans(),
        serial=st.booleans(),
        max_deliveries=st.none() | st.integers(1, 3),
        expires=st.none() | st.integers(5, 20).map(lambda s: s + 0.25),
    )
    def begin(self, strict: bool, serial: bool, max_deliveries: int | None, expires: float | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = Model(strict, serial, max_deliveries, expires)
        self.rig = NumberRig(
            strict=strict, serial=serial, lock_seconds=LOCK_SECONDS, max_deliveries=max_deliveries, expires=expires
        )
        self.queue = self.rig.queue
        self.takers: list[Taker] = []
        self.out: dict[BrokerDelivery, Item] = {}
        self.ended: list[BrokerDelivery] = []
        self.observed: list[tuple[Taker, BrokerDelivery]] = []

    # --- following what really happens

    @property
    def now(self) -> float:
        return self.rig.clock.time()

    def do(self, action: Any) -> Any:
        async def run() -> Any:
            result = action()
            if asyncio.iscoroutine(result):
                result = await result
            await rest()
            return result

        result = self.loop.run_until_complete(run())
        self.follow()
        return result

    def follow(self) -> None:
        for taker, delivery in self.observed:
            self.model.deliver(taker, delivery, self.now)
            self.out[delivery] = self.model.items[int(delivery.envelope.body)]
        self.observed.clear()
        for delivery in [d for d, item in self.out.items() if item.state != "acquired" or self.latest(item) is not d]:
            del self.out[delivery]
            self.ended.append(delivery)

    def latest(self, item: Item) -> BrokerDelivery:
        return next(d for d in reversed(self.out) if self.out[d] is item)

    def pick(self, index: int) -> tuple[BrokerDelivery, Item]:
        return list(self.out.items())[index % len(self.out)]

    # --- entries

    @rule(
        key=st.sampled_from([None, "a", "b", "a+b", "b+c", "a+b+c"]),
        colour=COLOURS,
        ttl=st.none() | st.integers(0, 6),
        after=st.none() | st.integers(0, 4),
    )
    def enqueue(self, key: str | None, colour: str, ttl: int | None, after: int | None) -> None:
        life = None if ttl is None else ttl + 0.25
        delay = None if after is None else after + 0.75
        item = Item(len(self.model.items), key, colour, scheduled=after is not None)
        item.due = None if delay is None else self.now + delay
        limits = [] if life is None else [self.now + life]
        if self.model.expires is not None:
            limits.append((item.due or self.now) + self.model.expires)
        item.expires = min(limits, default=None)
        self.model.enqueue(item, self.now)
        self.do(lambda: self.rig.put(f"{item.number}", key=key, ttl=life, after=delay, colour=colour))

    @rule(keys=st.lists(st.sampled_from([None, "a", "a", "b", "a+b", "c+b"]), min_size=1, max_size=4), colour=COLOURS)
    def enqueue_plain_ones(self, keys: list[str | None], colour: str) -> None:
        for key in keys:
            self.enqueue(key, colour, None, None)

    # --- consumers

    @precondition(lambda self: len(self.takers) < 3)
    @rule(colour=st.sampled_from([None, None, "red", "blue"]), credit=st.integers(0, 3), window=st.booleans())
    def attach(self, colour: str | None, credit: int, window: bool) -> None:
        taker = Taker(colour, window, credit)
        selector = None if colour is None else Selector(f"colour = '{colour}'")

        def deliver(delivery: BrokerDelivery) -> None:
            self.observed.append((taker, delivery))

        def attach() -> None:
            taker.real = self.queue.attach(deliver, credit=credit, window=window, selector=selector)

        self.takers.append(taker)
        self.do(attach)

    @precondition(lambda self: self.takers)
    @rule(index=st.integers(0, 2))
    def detach(self, index: int) -> None:
        taker = self.takers.pop(index % len(self.takers))
        for item in [i for i in self.model.acquisitions if i.holder is taker]:
            self.model.come_back(item, 0.0, self.now)
        assert taker.real is not None
        self.do(taker.real.close)

    @precondition(lambda self: self.takers)
    @rule(index=st.integers(0, 2), credit=st.integers(1, 3))
    def grant(self, index: int, credit: int) -> None:
        taker = self.takers[index % len(self.takers)]
        taker.credit += credit
        self.do(lambda: taker.real.grant(credit))  # type: ignore[union-attr]

    @precondition(lambda self: self.takers)
    @rule(index=st.integers(0, 2))
    def pause_or_resume(self, index: int) -> None:
        taker = self.takers[index % len(self.takers)]
        taker.paused = not taker.paused
        assert taker.real is not None
        self.do(taker.real.pause if taker.paused else taker.real.resume)

    # --- deliveries

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5))
    def start(self, index: int) -> None:
        delivery, item = self.pick(index)
        self.try_it(item)
        self.do(delivery.start)

    def try_it(self, item: Item) -> None:
        """What has expired is not counted as tried: its handler does not see it."""
        if item.expires is None or item.expires > self.now:
            item.tries += 1
            item.started = True

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5), outcome=st.sampled_from(["handled", "skipped", "filtered", "dead", "duplicate"]))
    def settle(self, index: int, outcome: Any) -> None:
        delivery, item = self.pick(index)
        self.model.end(item)
        self.model.archive(item, outcome)
        self.do(lambda: delivery.settle(outcome))

    @precondition(lambda self: self.out)
    @rule(count=st.integers(1, 5), outcome=st.sampled_from(["handled", "skipped", "filtered", "duplicate"]))
    def start_and_settle_together(self, count: int, outcome: Any) -> None:
        picked = list(self.out.items())[:count]
        late = self.ended[-1:]
        together = [*late, *(delivery for delivery, _ in picked)]
        for _, item in picked:
            self.try_it(item)
        found = self.do(lambda: together[0].start_all(together))
        for _, item in picked:
            self.model.end(item)
            self.model.archive(item, outcome)
        found += self.do(lambda: together[0].settle_all(together, [outcome] * len(together)))
        ended = [isinstance(each, StaleLock) for each in found]
        assert ended == 2 * ([True] * len(late) + [False] * len(picked))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5), begun=st.booleans())
    def release(self, index: int, begun: bool) -> None:
        delivery, item = self.pick(index)
        item.tries -= item.started
        item.delivered = begun or item.delivered_before
        self.model.come_back(item, 0.0, self.now)
        self.do(lambda: delivery.release(begun=begun))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5), seconds=st.integers(0, 5), counted=st.booleans())
    def redeliver_behind_all_others(self, index: int, seconds: int, counted: bool) -> None:
        delivery, item = self.pick(index)
        if counted:
            item.redeliveries += 1
        else:
            item.tries -= item.started
        self.model.come_back(item, seconds + 0.5, self.now, behind=True)
        self.do(lambda: delivery.redeliver(seconds + 0.5, counted=counted, behind=True))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5), seconds=st.none() | st.integers(0, 5), counted=st.booleans())
    def redeliver(self, index: int, seconds: int | None, counted: bool) -> None:
        delay = 0.0 if seconds is None else seconds + 0.5
        delivery, item = self.pick(index)
        if counted:
            item.redeliveries += 1
        else:
            item.tries -= item.started
        self.model.come_back(item, delay, self.now)
        self.do(lambda: delivery.redeliver(delay, counted=counted))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5))
    def dead_letter(self, index: int) -> None:
        delivery, item = self.pick(index)
        self.model.end(item)
        self.model.archive(item, "dead", "bad")
        self.do(lambda: delivery.dead_letter("bad", "it is bad"))

    @precondition(lambda self: self.out)
    @rule(index=st.integers(0, 5))
    def renew(self, index: int) -> None:
        delivery, item = self.pick(index)
        item.lock_until = self.now + LOCK_SECONDS
        self.do(delivery.renew)

    @precondition(lambda self: self.ended)
    @rule(index=st.integers(0, 50), what=st.sampled_from(["settle", "release", "redeliver", "dead_letter", "renew"]))
    def end_again(self, index: int, what: str) -> None:
        delivery = self.ended[index % len(self.ended)]
        arguments: dict[str, tuple[Any, ...]] = {"settle": ("handled",), "redeliver": (1.0,), "dead_letter": ("r", "e")}
        with pytest.raises(StaleLock):
            self.do(lambda: getattr(delivery, what)(*arguments.get(what, ())))

    # --- time

    @rule(seconds=st.integers(1, 8))
    def time_passes(self, seconds: int) -> None:
        target = self.rig.clock.monotonic() + seconds
        while (delay := self.rig.clock.next_timer()) is not None:
            if self.rig.clock.monotonic() + delay > target:
                break
            self.step(delay)
        self.step(target - self.rig.clock.monotonic())

    def step(self, delay: float) -> None:
        self.model.catch_up(self.now + delay)
        self.do(lambda: self.rig.clock.jump(delay))

    # --- what always holds

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        real = {int(text): state for text, state in self.rig.states().items()}
        assert real == self.model.states()
        assert list(real) == sorted(real, key=self.last_place), "browsing is out of order"
        assert self.queue._available_count == list(real.values()).count("available"), "the pump is misled"
        assert len(self.rig.schedule) == self.model.alarms(self.now), "an alarm is missing or left over"
        assert self.rig.in_flight.count == self.model.in_flight()
        assert sorted(self.rig.dead) == sorted(self.model.dead)
        assert self.queue.settled == self.model.settled
        assert len(self.queue) + sum(self.queue.settled.values()) == len(self.model.items), "lost or doubled"
        for taker in self.takers:
            assert taker.real is not None
            assert taker.real.credit == taker.credit
            held = [item for item in self.model.acquisitions if item.holder is taker]
            acquired = self.queue._acquired.values()
            out = [int(entry.envelope.body) for entry in acquired if entry.consumer is taker.real]
            assert out == [item.number for item in held] and taker.real.held.count == len(held)
            if taker.credit and not taker.paused:
                assert self.model.first_for(taker) is None, "something deliverable was left"

    def last_place(self, number: int) -> int:
        return self.model.items[number].place

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        try:
            self.everything_ends_once()
        finally:
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()

    def everything_ends_once(self) -> None:
        while self.takers:
            self.detach(0)
        self.attach(None, 3, True)
        for _ in range(10 * len(self.model.items) + 20):
            while self.out:
                self.settle(0, "handled")
            if not len(self.queue):
                break
            self.time_passes(1)
        self.they_agree()
        assert len(self.queue) == 0, "some never came"
        assert self.rig.in_flight.count == 0


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Dead letters and lost locks are logged, thousands of times here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class TestQueueAgainstModel(QueueAgainstModel.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=200,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
