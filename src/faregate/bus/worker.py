"""Works on one subscription: takes deliveries, keeps their locks, and hands them through the lanes to a handling."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from faregate.bus.leases import LeasedConsumer, OfPartition, Partition
from faregate.bus.several_keys import lanes_of
from faregate.bus.supplied import Entrance, Waiting
from faregate.bus.switching import Switching
from faregate.core.alarms import Alarms
from faregate.core.handling import Handling
from faregate.core.kill_switch import Switch, Trial
from faregate.errors import ConfigurationError, StaleLock
from faregate.ids import message_id_of
from faregate.ports import faults
from faregate.ports.cancellation import finish
from faregate.ports.clock import Clock, Timer
from faregate.ports.progress import Occupation
from faregate.ports.queue import Consumer, Delivery, Held, QueueTransport
from faregate.ports.store import Store

log = logging.getLogger("faregate.bus")

_UNFORESEEN_SECONDS = 10.0
_FULL_BATCHES = 2
"""Of a subscription whose transactions follow each other: one is written, and one is read and looked up meanwhile."""


class Lessor(NamedTuple):
    """Where the leases of partitions are, and who wants them."""

    store: Store
    instance: str


class Worker:
    def __init__(
        self,
        handling: Handling,
        *,
        transport: QueueTransport,
        clock: Clock,
        body_limit: int,
        prefetch: int,
        alarms: Alarms,
        store: Store | None = None,
        waiting: Waiting | None = None,
        lessor: Lessor | None = None,
    ) -> None:
        """`store` is its node's; `waiting` supplies what the transport lacks; `lessor`: the messages are in
        partitions."""
        self.subscription = handling.subscription
        binding = self.subscription.binding(body_limit)
        remembers = binding.remembers if handling.has_store else "nothing"
        self.binding = replace(binding, remembers=remembers, parks=waiting is not None, on_dead_letter=self._tell_dead)
        self.outcomes = handling.outcomes
        self._handling = handling
        self._transport = transport
        self._clock = clock
        self._prefetch = prefetch
        self._waiting = waiting
        self._lessor = lessor
        assert handling.switch is not None
        self.switching = Switching(handling.switch, self.subscription, self, clock, alarms, store, handling.escalation)
        self._entrance = Entrance(self.binding, self._take_admitted, self._tell_dead, lambda: self._is_shut)
        # A transport that lacks nothing hands out deliveries.
        self._on_delivery = cast(Callable[[Held], None], self._take)
        self._on_trial = cast(Callable[[Held], None], self._take_admitted)
        if waiting is not None:
            waiting.add(self._entrance)
            self._on_trial = self._on_delivery = partial(waiting.take, self._entrance)
        full_batches = _FULL_BATCHES if handling.one_writer else None
        self._lanes = lanes_of(self.subscription, self._work, full_batches=full_batches)
        handling.let_part(self._put_back)
        self._consumer: Consumer | None = None
        self._trial: Trial | None = None
        """Until it is over, and its consumer closed."""
        self._trial_consumer: Consumer | None = None
        self._takes_one = False
        """Whether the next message that comes is the one on trial."""
        self.is_paused_by_hand = False
        self._held: set[Delivery] = set()
        self._telling: set[asyncio.Task[None]] = set()
        """Tasks that tell of dead letters that the transport made."""
        self._turned = asyncio.Event()
        """A lane is done with what it had, or with some of it."""
        self._renewal: Timer | None = None
        self._resumption: Timer | None = None

    @property
    def busy(self) -> int:
        """How many lanes are at work, and how many dead letters are being told of."""
        return self._lanes.busy + len(self._telling)

    @property
    def queues(self) -> list[str]:
        """Those that it consumes now."""
        if isinstance(self._consumer, LeasedConsumer):
            return self._consumer.partitions
        return [] if self._consumer is None or self.paused else [self.binding.queue]

    def occupations(self) -> Iterator[Occupation]:
        """The message of each lane; or the first that no lane takes though all are free."""
        for deliveries in self._lanes.at_work.values():
            delivery = self._handling.current(deliveries)
            yield self._occupation(delivery, f"a lane of {self.subscription} works on {delivery.envelope}")
        neglected = self._lanes.neglected
        if neglected is not None:
            yield self._occupation(neglected, f"no lane of {self.subscription} takes {neglected.envelope}")

    def _occupation(self, delivery: Delivery, text: str) -> Occupation:
        node = self.subscription.node
        return Occupation(delivery, node, message_id_of(delivery.envelope, node), text)

    async def bind(self) -> None:
        """Declare its queues; those of an ordered subscription as its store has them noted."""
        if self._lessor is not None and self.binding.partitions is not None:
            wanted, binding = self.binding.partitions, self.binding
            found = await self._lessor.store.note_generation(binding.node, binding.queue, wanted)
            if wanted == 1 < found.partitions:
                raise ConfigurationError(
                    f"{self.subscription} is one part of what is ordered, and its messages are in {found.partitions}: "
                    "they would not stay in order. Give it the key of its type, as before, or change the number of its "
                    "partitions first"
                )
            if found.partitions != wanted:
                log.warning(
                    "%s has %d partitions, and partitions=%d has no effect: `faregate rabbitmq repartition` changes it",
                    self.subscription, found.partitions, wanted,
                )  # fmt: skip
            self.binding = replace(binding, generation=found.number, partitions=found.partitions)
        await self._transport.bind(self.binding)

    async def start(self) -> None:
        if self._lessor is not None and self._waiting is not None:
            await self._start_leased(self._lessor, self._waiting)
            return
        self._consumer = await self._transport.consume(self.binding.queue, self._on_delivery, prefetch=self._prefetch)
        if self.paused:
            self._consumer.pause()

    async def _start_leased(self, lessor: Lessor, waiting: Waiting) -> None:
        self._consumer = consumer = LeasedConsumer(
            self.binding,
            lessor.store,
            self._transport,
            lessor.instance,
            self._clock,
            self._prefetch,
            take=lambda partition, held: waiting.take(self._entrance, held, partition),
            move_in=waiting.move_in,
            move_out=partial(self._move_out, waiting),
        )
        if self.paused:
            consumer.pause()
        await consumer.start()

    async def _move_out(self, waiting: Waiting, partition: Partition, wait: bool) -> None:
        """Forget what has not begun of a partition; closing its consumer brings that back. What has begun ends."""

        def is_meant(delivery: Delivery) -> bool:
            return cast(OfPartition, delivery).partition is partition

        self._forget(self._lanes.take_back(is_meant))
        waiting.move_out(partition)
        while wait and any(is_meant(each) for taken in self._lanes.at_work.values() for each in taken):
            self._turned.clear()
            await self._turned.wait()
        self._forget(self._lanes.take_back(is_meant))

    async def stop(self, deadline: float) -> int:
        """Take nothing more, finish what runs within the deadline, give the rest back.

        Returns how many handlers had not finished by then.
        """
        left = 0
        if self._resumption is not None:
            self._resumption.cancel()
        self._take_none()
        self.switching.end()
        if self._consumer is not None:
            self._consumer.pause()
            self._handling.pause()
            left = await self._lanes.close(deadline, partial(self._tell_left, deadline))
            if self._trial is not None:
                self._end(self._trial)
            await self.switching.ended()
            await self._consumer.close()
        if self._renewal is not None:
            self._renewal.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        return left

    def _tell_left(self, deadline: float, deliveries: list[Delivery]) -> None:
        log.warning(
            "%s had not finished %s after %g s of draining: %s; "
            "nothing of it is committed, and it is delivered again%s",
            self.subscription,
            self._handling.current(deliveries).envelope,
            deadline,
            "its thread is left behind" if self.subscription.handler.in_thread else "it is cancelled",
            f", as is what was not committed of {len(deliveries) - 1} more" if len(deliveries) > 1 else "",
        )

    # --- pausing, by hand and by the kill switch --------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """By hand, or by its kill switch; or because it stops."""
        return self._handling.paused

    @property
    def pause_reason(self) -> str | None:
        """Why it is paused, in words."""
        if self.is_paused_by_hand:
            return "paused by hand"
        return None if self.switch.reason is None else f"kill switch: {self.switch.reason}"

    @property
    def switch(self) -> Switch:
        return self.switching.switch

    async def pause(self, seconds: float | None) -> None:
        """Let nothing more begin: what was fetched goes back to its place at once, also from a batch that runs."""
        self._forget_resumption()
        self.is_paused_by_hand = True
        self.stop_consuming()
        self._take_none()
        if seconds is not None:
            self._resumption = self._clock.call_later(seconds, self._end_pause)
        await self.give_back_fetched()

    def resume(self) -> None:
        """Somebody says that all is well."""
        self._take_none()
        if self._trial is not None and isinstance(self._consumer, LeasedConsumer):
            self._consumer.pause()  # what came beside the trial goes back first
        self.switching.reset()
        self._end_pause()

    def _end_pause(self) -> None:
        self._forget_resumption()
        self.is_paused_by_hand = False
        if self.switch.is_open:
            self.switching.wake()
        else:
            self.go_on_consuming()

    def stop_consuming(self) -> None:
        self._handling.pause()
        if self._consumer is not None:
            self._consumer.pause()

    def go_on_consuming(self) -> None:
        if self.is_paused_by_hand:
            return
        self._handling.paused = False
        if self._consumer is not None:
            self._consumer.resume()

    async def give_back_fetched(self) -> None:
        await self._give_back(self._lanes.take_back())

    async def begin_trial(self, trial: Trial) -> None:
        self._trial = self._handling.trial = trial
        self._takes_one = True
        if isinstance(self._consumer, LeasedConsumer):
            # With its whole prefetch: of what came back to a quorum queue all has to be fetched, or none. What is
            # returned a second time comes behind the rest.
            self._consumer.resume()
            return
        self._trial_consumer = await self._transport.consume(self.binding.queue, self._on_trial, prefetch=1)
        if not self._takes_one:
            self._trial_consumer.pause()

    async def end_trial(self, trial: Trial) -> None:
        """What came beside it goes back with its consumer, which it needs until it is over."""
        self._take_none()
        if isinstance(self._consumer, LeasedConsumer):
            if self.paused:
                self._consumer.pause()
        elif (consumer := self._trial_consumer) is not None:
            self._trial_consumer = None
            consumer.pause()
            await self.switching.until_ended(trial)
            await consumer.close()
        self._trial = None

    def _take_none(self) -> None:
        """No message is tried any more, unless its handler runs."""
        self._takes_one = False
        trial = self._trial
        if trial is not None and not trial.ran:
            self._handling.trial = None
            if trial.delivery is None:
                self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.ended = True
        self._handling.trial = None
        self.switching.wake()

    def _look_at_trial(self, ended: Sequence[Delivery]) -> None:
        """Whether the message on trial is among those that are over with."""
        trial = self._trial
        if trial is not None and any(each is trial.delivery for each in ended):
            self._end(trial)

    @property
    def _is_shut(self) -> bool:
        """Whether it takes nothing now."""
        return self.paused and not self._takes_one

    def _take_admitted(self, delivery: Delivery) -> None:
        """Of those that come for a trial the first one alone; closing their consumer brings back the others."""
        trial = self._trial
        if trial is not None:
            if not self._takes_one and self.paused:
                return
            if self._takes_one:
                self._takes_one = False
                trial.delivery = delivery
                if self._trial_consumer is not None:
                    self._trial_consumer.pause()
        self._take(delivery)

    def _forget_resumption(self) -> None:
        if self._resumption is not None:
            self._resumption.cancel()
            self._resumption = None

    def _forget(self, unbegun: list[Delivery]) -> None:
        self._held.difference_update(unbegun)
        self._look_at_trial(unbegun)

    async def _give_back(self, deliveries: list[Delivery]) -> None:
        """All of them, even if whoever asked for it is cancelled: no lane has them any more."""
        self._forget(deliveries)
        if deliveries:
            await finish(self._give_back_each(deliveries))

    async def _give_back_each(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            await self._handling.give_back(delivery)

    def _take(self, delivery: Delivery) -> None:
        self._held.add(delivery)
        if self._renewal is None:
            self._renewal = self._clock.call_later(delivery.lock_seconds / 3, self._renew)
        self._lanes.submit(delivery)

    def _renew(self) -> None:
        """Keep the locks on everything that is worked on or waits in a lane."""
        self._renewal = None
        for delivery in list(self._held):
            try:
                delivery.renew()
            except StaleLock:
                self._held.discard(delivery)
        if self._held:
            period = min(delivery.lock_seconds for delivery in self._held) / 3
            self._renewal = self._clock.call_later(period, self._renew)

    async def _work(self, deliveries: list[Delivery]) -> list[Delivery]:
        again: list[Delivery] = []
        try:
            try:
                begun = deliveries if self._waiting is None else await self._waiting.admit(deliveries)
                again = await self._handling.handle(begun) if begun else []
            except faults.Crash:
                await self._vanish()
            except asyncio.CancelledError:
                # Not by us, and not by a handler, which would have failed: by other code, or the loop is about to end.
                if not self._lanes.closing:
                    log.warning("%s was cancelled from outside; its message is delivered again", self.subscription)
                    await self._put_off(deliveries)
                    if self._handling.stopped:
                        await self._give_back_all([])
                raise
            except Exception:
                log.critical("%s: an unexpected error; the lane goes on", self.subscription, exc_info=True)
                await self._put_off(deliveries)
            finally:
                self._held.difference_update(set(deliveries).difference(again) if again else deliveries)
                self._lanes.batch = self._handling.batch
                if self._trial is not None:
                    self._look_at_trial(deliveries)
            if not self._handling.stopped:
                return again
            await self._give_back_all(again)
            return []
        finally:
            self._turned.set()  # nothing is waited for between this and the lane's end: who waits for it looks once

    async def _give_back_all(self, again: list[Delivery]) -> None:
        """Nothing more may begin: everything that was fetched goes back to its place."""
        self._handling.put_off = False
        await self._give_back([*again, *self._lanes.take_back()])

    async def _put_off(self, deliveries: list[Delivery]) -> None:
        """Redeliver those that are not settled yet, without using up a try."""
        for delivery in deliveries:
            try:
                await self._handling.redeliver(delivery, _UNFORESEEN_SECONDS, counted=False)
            except StaleLock:
                pass  # it is settled, or another consumer has it
            except Exception as exc:  # the transport delivers again what nobody settles
                log.warning("%s could not be put off: %s", delivery.envelope, exc)

    def _put_back(self, unbegun: Sequence[Delivery], ended: Sequence[Delivery]) -> None:
        self._held.difference_update(ended)
        self._look_at_trial(ended)
        self._lanes.put_back(unbegun, ended)
        self._turned.set()

    def _tell_dead(self, delivery: Delivery, reason: str, error: str) -> None:
        told = asyncio.create_task(self._handling.tell_dead(delivery, reason, error))
        self._telling.add(told)
        told.add_done_callback(self._telling.discard)

    async def _vanish(self) -> None:
        """A test crashed us: everything goes back, as when a process dies."""
        if self._consumer is not None:
            self._held.clear()
            if self._waiting is not None:
                self._waiting.forget_all()
            await self._consumer.close()
            await self.start()
