"""What a kill switch does to its subscription: stops it when it trips, asks whether all is well, and lets it go on.

Rules kept here:
- When it trips nothing more begins, and what was fetched goes back to its place. Somebody is told: the alarm
  `kill-switch`, and the node's function that escalates trips.
- A probe is asked again and again, one call at a time, until it says that all is well. One that raises, hangs or says
  False has not; the first of them is logged.
- A message that is about to be given up is a reason to ask the probe, too; a good answer counts for a while.
- Without a probe exactly one message is consumed. If it succeeds, or fails for a reason of its own, all is well. If
  not, it waits for longer each time, so that one that always fails keeps no other from being tried; in a serial
  subscription it stays the first.
- For a store that is away the store itself is asked, at first at once: a lost connection alone is no alarm.
- A pause by hand is another thing. While it lasts no message is tried, and a switch that closes does not end it. To
  resume by hand closes the switch.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from faregate.core import at_hand
from faregate.core.alarms import Alarms
from faregate.core.escalation import Escalation
from faregate.core.kill_switch import Switch, Trial, Trip
from faregate.core.verdict import asked_seconds, first_line
from faregate.errors import Unavailable
from faregate.node.kill_switch import Probe, SwitchTripped
from faregate.node.policy import Serial
from faregate.node.subscription import Subscription
from faregate.ports.clock import Clock
from faregate.ports.store import Store

log = logging.getLogger("faregate.bus")

_LONGEST_PUT_OFF = 300.0


class Consumption(Protocol):
    """What a switch needs of a worker."""

    @property
    def is_paused_by_hand(self) -> bool: ...

    def stop_consuming(self) -> None:
        """Nothing more begins, or is fetched."""

    def go_on_consuming(self) -> None:
        """Unless it is paused by hand."""

    async def give_back_fetched(self) -> None: ...

    async def begin_trial(self, trial: Trial) -> None:
        """Consume one message."""

    async def end_trial(self, trial: Trial) -> None:
        """Consume nothing more."""


class Switching:
    def __init__(
        self,
        switch: Switch,
        subscription: Subscription,
        worker: Consumption,
        clock: Clock,
        alarms: Alarms,
        store: Store | None,
        escalation: Escalation,
    ) -> None:
        self.switch = switch
        switch.on_trip = self._tripped
        if switch.policy.probe is not None and switch.policy.failures is not None:
            switch.ask = self._is_still_well
        self.on_store_down: Callable[[str], None] = lambda why: None
        """Tells the other subscriptions of the store."""
        self._subscription = subscription
        self._worker = worker
        self._clock = clock
        self._alarms = alarms
        self._store = store
        self._escalation = escalation
        self._telling: set[asyncio.Task[None]] = set()
        """Tasks that tell the node's own function of a trip."""
        self._serial = isinstance(subscription.order, Serial)
        self._task: asyncio.Task[None] | None = None
        self._former: set[asyncio.Task[None]] = set()
        """Tasks that were cancelled, and whose trial is not over yet."""
        self._asking: dict[str, asyncio.Task[bool | None]] = {}
        """What was asked last, by name; one that has not answered may not heed that it was cancelled."""
        self._changed = asyncio.Event()
        """Something that the task waits for may have happened."""
        self._trials = 0
        """How many failed since it tripped."""
        self._one_asks = asyncio.Lock()
        self._well_until = float("-inf")
        """So long nobody asks again who gives a message up."""
        self._closed_at = float("-inf")
        self._is_over = False
        """Whether the bus stops."""

    # --- for the worker ---------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Somebody resumes by hand: whatever was wrong is over."""
        self._end_task()
        self.switch.close()

    def wake(self) -> None:
        """A pause by hand begins or ends, or the trial has ended."""
        self._changed.set()

    async def until_ended(self, trial: Trial) -> None:
        while not trial.ended:
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        """The bus stops: nothing is asked, or tried, any more, also if what still runs trips it."""
        self._is_over = True
        self._end_task()

    async def ended(self) -> None:
        if self._former:
            await asyncio.wait(self._former)
        await asyncio.gather(*self._telling, return_exceptions=True)

    def store_is_down(self, why: str) -> None:
        """Another subscription of the same store found it so."""
        self.switch.trip(Trip(why, store=True, told=True))

    # --- tripping ---------------------------------------------------------------------------------------------

    def _tripped(self, trip: Trip) -> None:
        self._worker.stop_consuming()
        if self._is_over:
            return
        self._end_task()
        self._trials = 0
        self._task = asyncio.create_task(self._see_to(trip), name=f"kill-switch-{self._subscription.name}")
        if trip.store and not trip.told:
            self.on_store_down(trip.why)

    def _end_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._former.add(task)
            task.add_done_callback(self._former.discard)

    async def _see_to(self, trip: Trip) -> None:
        """Nobody else closes the switch, so whatever goes wrong here it goes on asking."""
        at_hand.forget()  # it is about them all, not about the one whose failure was the last
        try:
            await self._worker.give_back_fetched()
        except Exception:  # what is not given back comes again when its lock is over
            log.exception("%s could not give back what it had fetched", self._subscription)
        again = False
        while True:
            try:
                await self._until_well(trip, again)
                return
            except Exception:
                log.exception("%s is switched off: an unexpected error; it goes on asking", self._subscription)
            again = True
            await self._sleep(self.switch.policy.every)

    async def _until_well(self, trip: Trip, again: bool) -> None:
        """`again`: somebody was told, and it has waited."""
        policy = self.switch.policy
        is_well = self._is_well(trip)
        seconds = policy.every if trip.seconds is None else trip.seconds
        asks_first = is_well == self._store_answers and self._clock.monotonic() >= self._closed_at + policy.every
        if asks_first and not again and await is_well():
            log.warning("%s goes on at once: its store answers again (%s)", self._subscription, trip.why)
        else:
            if not again:
                self._sound(trip)
                await self._sleep(seconds)
            while not await is_well():
                await self._sleep(max(policy.every, self._asked_seconds))
            log.warning("%s goes on: all is well again (it was: %s)", self._subscription, trip.why)
        self._worker.go_on_consuming()
        self._task = None
        self._closed_at = self._clock.monotonic()
        self.switch.close()

    def _is_well(self, trip: Trip) -> Callable[[], Awaitable[bool]]:
        self._asked_seconds = 0.0
        self._is_told = False
        if trip.store and self._store is not None:
            return self._store_answers
        return self._one_goes_well if self.switch.policy.probe is None else self._probe_says_so

    def _sound(self, trip: Trip) -> None:
        node, wire = self._subscription.node, self._subscription.message_type.wire
        self._alarms.sound(
            "kill-switch",
            node,
            "",
            f"{self._subscription} consumes no more: {trip.why}. What was fetched is back in its place, and no try is "
            f"used up. It goes on by itself once all is well; bus.resume({node!r}, {wire!r}) does not wait for that",
        )
        tripped = SwitchTripped(node, wire, self._subscription.name, trip.why, self.switch.since or self._clock.time())
        telling = asyncio.create_task(self._escalation.publish(tripped))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _sleep(self, seconds: float) -> None:
        over = asyncio.Event()
        timer = self._clock.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    # --- asking -----------------------------------------------------------------------------------------------

    async def _probe_says_so(self) -> bool:
        assert self.switch.policy.probe is not None
        return await self._ask(self.switch.policy.probe, "its probe")

    async def _is_still_well(self) -> bool:
        """Asked before a message is given up."""
        async with self._one_asks:
            if self.switch.is_open or self._clock.monotonic() < self._well_until:
                return True
            self._is_told = True  # a trip tells
            is_well = await self._probe_says_so()
            if is_well:
                self._well_until = self._clock.monotonic() + self.switch.policy.every
            return is_well

    async def _store_answers(self) -> bool:
        return await self._ask(self._ask_store, "its store")

    async def _ask_store(self) -> None:
        assert self._store is not None
        async with self._store.transaction() as transaction:
            await transaction.roll_back()  # it only asked

    async def _ask(self, probe: Probe, what: str) -> bool:
        """Whether it says within its time that all is well."""
        timeout = self.switch.policy.timeout
        if what in self._asking and not self._asking[what].done():
            return False  # the last one still hangs
        self._asking[what] = asking = asyncio.create_task(_call(probe))
        over = asyncio.Event()
        timer = self._clock.call_later(timeout, over.set)
        asking.add_done_callback(lambda _: over.set())
        try:
            await over.wait()
        finally:
            timer.cancel()
            asking.cancel()
        if not asking.done():
            answer = f"it did not answer within {timeout:g} s"
        elif asking.cancelled():
            answer = "it was cancelled"
        elif (error := asking.exception()) is not None:
            answer = first_line(error)
        else:
            try:
                if (said := asking.result()) is None or said:
                    return True
                answer = f"it returned {said!r}"
            except Exception as exc:
                answer = f"it returned what is neither true nor false: {first_line(exc)}"
        self._tell_once("%s stays switched off: %s says so (%s)", self._subscription, what, answer)
        return False

    async def _one_goes_well(self) -> bool:
        while True:
            trial = Trial(None if self._serial else self._put_off_seconds())
            try:
                await self._run_trial(trial)
            except Exception as exc:  # the transport does not let us consume now
                error = first_line(exc)
                self._tell_once("%s stays switched off: nothing can be tried (%s)", self._subscription, error)
                return False
            if trial.error is not None:
                self._trials += 1
                asked = asked_seconds(trial.error) if isinstance(trial.error, Unavailable) else None
                self._asked_seconds = asked or 0.0
                error = first_line(trial.error)
                self._tell_once("%s stays switched off: a message was tried (%s)", self._subscription, error)
                return False
            if trial.ran:
                return True
            # It was no trial: a duplicate, expired, or its turn had not come.

    async def _run_trial(self, trial: Trial) -> None:
        while self._worker.is_paused_by_hand:
            self._changed.clear()
            await self._changed.wait()
        if self._former:
            await asyncio.wait(self._former)
        try:
            await self._worker.begin_trial(trial)
            await self.until_ended(trial)
        finally:
            await self._worker.end_trial(trial)

    def _put_off_seconds(self) -> float:
        return min(self.switch.policy.every * (2 + self._trials), _LONGEST_PUT_OFF)

    def _tell_once(self, text: str, *what: object) -> None:
        log.log(logging.DEBUG if self._is_told else logging.WARNING, text, *what)
        self._is_told = True


async def _call(probe: Probe) -> bool | None:
    return await probe()  # whatever is wrong with it, it is the probe that failed
