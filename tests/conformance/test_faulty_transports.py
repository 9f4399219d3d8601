"""The queue suite is worth something: for every case there is a transport with one fault that fails it.

A fault is a few lines over the memory transport, at the port: it forgets, ignores or mixes up one thing. A case
without a fault fails `test_every_case_has_a_fault`, and a fault that breaks nearly everything proves nothing, so each
must still pass most of the other cases.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from faregate import ids
from faregate.errors import QueueNotFound, StaleLock, Unroutable
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Consumer, Delivery, Outcome, dead_letter_queue
from faregate.testing import FakeClock, memory_subject, queue_cases, run_queue_case
from faregate.transports.memory import MemoryTransport
from tests.conformance.faults import Faults, passes


class Wrapped:
    """A delivery or a consumer that passes everything on; faults override what they spoil."""

    def __init__(self, inner: Any, transport: "Faulty") -> None:
        self._inner = inner
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Faulty(MemoryTransport):
    """The memory transport with openings for faults: in what goes in, in each delivery and in each consumer."""

    delivery: type[Wrapped] = Wrapped
    consumer: type[Wrapped] = Wrapped

    def __init__(self) -> None:
        self.clock = FakeClock()
        super().__init__(clock=self.clock)

    async def bind(self, binding: Binding) -> None:
        await super().bind(self.bound(binding))

    def bound(self, binding: Binding) -> Binding:
        return binding

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish([self.sent(envelope) for envelope in envelopes])

    def sent(self, envelope: Envelope) -> Envelope:
        return envelope

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            on_delivery(self.delivery(delivery, self))  # type: ignore[arg-type]

        return self.consumer(await super().consume(queue, deliver, **self.consumed(**how)), self)  # type: ignore[return-value]

    def consumed(self, **how: Any) -> dict[str, Any]:
        return how


def as_new(envelope: Envelope) -> Envelope:
    """The same message as a publication that was not seen before."""
    return msgspec.structs.replace(envelope, publication_id=ids.root_id())


CASES = queue_cases(MemoryTransport.capabilities)
FAULTS = Faults(CASES)
breaks = FAULTS.breaks


# --- publish and route ------------------------------------------------------------------------------------


@breaks("a_published_message_is_delivered_as_it_was")
class ForgetsTheCausation(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, causation_id=None)


@breaks("a_published_message_is_delivered_as_it_was")
class DoesNotSayWhoReceives(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes)
        for envelope in envelopes:
            msgspec.structs.force_setattr(envelope, "recipients", ())


@breaks("messages_come_in_the_order_they_were_published")
class AppendsABatchBackwards(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes[::-1])


@breaks("messages_come_in_the_order_they_were_published", "no_more_than_prefetch_are_out")
class DropsEverySecondEvent(Faulty):
    dropped = False

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        kept = []
        for envelope in envelopes:
            self.dropped = not self.dropped
            if self.dropped:
                kept.append(envelope)
        await super().publish(kept)


@breaks("an_event_goes_to_every_subscriber_once")
class GivesAnEventToOneSubscriberOnly(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes)
        for envelope in envelopes:
            copies = [q for q in self.broker.queues() for e in q.browse() if e.envelope is envelope]
            for queue in copies[1:]:
                queue._archive(list(queue.browse())[-1])


@breaks("an_event_of_another_source_or_type_is_not_delivered")
class IgnoresTheSource(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, source="author")


@breaks("an_event_of_another_source_or_type_is_not_delivered")
class IgnoresTheType(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, type="Noted") if envelope.kind == "event" else envelope


@breaks("an_event_nobody_wants_is_confirmed")
class KeepsWhatNobodyWantsForTheNextWhoComes(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.unwanted: list[Envelope] = []

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes)
        self.unwanted += [envelope for envelope in envelopes if not envelope.recipients]

    async def bind(self, binding: Binding) -> None:
        await super().bind(binding)
        for envelope in self.unwanted:
            self.broker.queue(binding.queue).enqueue(envelope)


@breaks("a_command_goes_to_its_destination_only")
class BroadcastsCommands(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[str] = []

    async def bind(self, binding: Binding) -> None:
        await super().bind(binding)
        self.nodes.append(binding.node)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes)
        for envelope in envelopes:
            if envelope.kind == "command":
                others = [node for node in self.nodes if node != envelope.destination]
                await super().publish(
                    [msgspec.structs.replace(as_new(envelope), destination=other, recipients=()) for other in others]
                )


@breaks("a_command_nobody_handles_is_refused_and_the_batch_with_it")
class ConfirmsUnroutableCommands(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        with suppress(Unroutable):
            await super().publish(envelopes)


@breaks("a_command_nobody_handles_is_refused_and_the_batch_with_it")
class AppendsHalfABatch(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            await super().publish([envelope])


@breaks("a_repeated_publication_is_delivered_once")
class DoublesDuplicates(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        self.broker.recent._known.clear()
        return envelope


@breaks("a_replay_of_a_publication_is_delivered_again")
class TakesAReplayForADuplicate(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, replay=0)


@breaks("a_repetition_with_another_body_is_told_and_the_first_counts")
class TellsNobodyOfADisagreement(Faulty):
    def _disagreed(self, envelope: Envelope) -> None:
        pass


@breaks("a_repetition_with_another_body_is_told_and_the_first_counts")
class TellsOfEveryRepetition(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        if self.broker.recent.knows(envelope):
            self._disagreed(envelope)
        return envelope


@breaks("a_repetition_with_another_body_is_told_and_the_first_counts")
class TakesAnotherBodyForAnotherPublication(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        known = self.broker.recent._known.get(envelope.publication_id)
        return as_new(envelope) if known is not None and known != envelope.body_digest else envelope


@breaks("whoever_fails_at_being_told_of_a_disagreement_spoils_no_batch")
class LetsAFailingAlarmRefuseTheBatch(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.broker.recent._disagree = self._disagreed  # type: ignore[method-assign]


# --- recipients -------------------------------------------------------------------------------------------


@breaks(
    "a_publication_that_names_recipients_goes_to_these_only",
    "a_publication_that_is_published_again_goes_where_it_went_before",
    "a_recipient_that_does_not_want_an_event_is_left_out",
    "a_command_that_names_another_recipient_is_refused",
)
class IgnoresNamedRecipients(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        msgspec.structs.force_setattr(envelope, "recipients", ())
        return envelope


@breaks("a_recipient_that_does_not_want_an_event_is_left_out")
class ForgetsForWhomItWasWhenItReachesNobody(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish(envelopes)
        for envelope in envelopes:
            if not self.broker.topics.route(envelope).queues:
                msgspec.structs.force_setattr(envelope, "recipients", ())


@breaks("a_recipient_that_does_not_want_an_event_is_left_out")
class RefusesAnEventForAStranger(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        strangers = "stranger" in envelope.recipients
        return msgspec.structs.replace(envelope, recipients=("stranger",)) if strangers else envelope


@breaks("a_command_that_names_another_recipient_is_refused")
class LeavesOutTheRecipientsThatACommandIsNotFor(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        if envelope.kind == "command" and envelope.destination in envelope.recipients:
            return msgspec.structs.replace(envelope, recipients=(envelope.destination,))
        return envelope


class Confuses(Faulty):
    """Forgets a part of what makes a publication another one."""

    def __init__(self) -> None:
        super().__init__()
        remembered = self.broker.recent.add
        self.broker.recent.add = lambda envelope, partial=False: remembered(*self.confused(envelope, partial))  # type: ignore[method-assign]

    def confused(self, envelope: Envelope, partial: bool) -> tuple[Envelope, bool]:
        return envelope, partial


@breaks("parts_of_one_publication_are_not_taken_for_repetitions_of_each_other")
class TakesOnePartForAnother(Confuses):
    def confused(self, envelope: Envelope, partial: bool) -> tuple[Envelope, bool]:
        return envelope, False


@breaks("parts_of_one_publication_are_not_taken_for_repetitions_of_each_other")
class TakesEveryPartForANewPublication(Confuses):
    def confused(self, envelope: Envelope, partial: bool) -> tuple[Envelope, bool]:
        return (as_new(envelope) if partial else envelope), partial


@breaks("another_attempt_at_a_publication_is_no_repetition")
class TakesAnAttemptForARepetition(Confuses):
    def confused(self, envelope: Envelope, partial: bool) -> tuple[Envelope, bool]:
        return msgspec.structs.replace(envelope, attempt_id=None), partial


@breaks("another_attempt_at_a_publication_is_no_repetition")
class TakesEveryAttemptForANewPublication(Confuses):
    def confused(self, envelope: Envelope, partial: bool) -> tuple[Envelope, bool]:
        return (as_new(envelope) if envelope.attempt_id else envelope), partial


# --- unbind -----------------------------------------------------------------------------------------------


@breaks(
    "an_unbound_queue_collects_no_more_and_gives_what_it_has",
    "a_queue_that_is_bound_again_collects_again",
    "a_command_to_an_unbound_queue_is_refused",
    "an_unbound_queue_is_not_waited_for",
)
class UnbindsNothing(Faulty):
    async def unbind(self, queue: str) -> None:
        self.broker.queue(queue)


@breaks("an_unbound_queue_collects_no_more_and_gives_what_it_has")
class ThrowsAwayWhatAnUnboundQueueHolds(Faulty):
    async def unbind(self, queue: str) -> None:
        await super().unbind(queue)
        for entry in list(self.broker.queue(queue).browse()):
            self.broker.queue(queue)._archive(entry)


@breaks("an_unbound_queue_collects_no_more_and_gives_what_it_has")
class RefusesToUnbindTwice(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.unbound: set[str] = set()

    async def unbind(self, queue: str) -> None:
        await super().unbind(queue)
        assert queue not in self.unbound, "it is unbound already"
        self.unbound.add(queue)


@breaks("a_queue_that_is_bound_again_collects_again")
class BindsAQueueOnce(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.bindings: set[str] = set()

    async def bind(self, binding: Binding) -> None:
        if binding.queue not in self.bindings:
            self.bindings.add(binding.queue)
            await super().bind(binding)


@breaks("an_unbound_queue_is_not_waited_for")
class WaitsForUnboundQueues(Faulty):
    async def unbind(self, queue: str) -> None:
        await super().unbind(queue)
        self.broker.queue(queue).count_in(self.broker.in_flight)


@breaks("unbinding_an_unknown_queue_is_an_error")
class UnbindsWhatIsNotThere(Faulty):
    async def unbind(self, queue: str) -> None:
        with suppress(QueueNotFound):
            await super().unbind(queue)


@breaks("unbinding_an_unknown_queue_is_an_error")
class UnbindsTheDeadLetterQueue(Faulty):
    async def unbind(self, queue: str) -> None:
        if not queue.endswith("-dead-letters"):
            await super().unbind(queue)


# --- hold and end -----------------------------------------------------------------------------------------


@breaks("a_message_settled_as_dead_has_no_second_dead_letter")
class KeepsADeadLetterOfWhatIsSettledAsDead(Faulty):
    class delivery(Wrapped):
        async def settle(self, outcome: Outcome) -> None:
            await (self._inner.dead_letter("dead", "") if outcome == "dead" else self._inner.settle(outcome))


@breaks("a_message_settled_as_dead_or_as_a_duplicate_is_gone")
class ReleasesDuplicates(Faulty):
    class delivery(Wrapped):
        async def settle(self, outcome: Outcome) -> None:
            await (self._inner.release() if outcome == "duplicate" else self._inner.settle(outcome))


@breaks("a_redelivered_message_keeps_its_position_and_its_tries")
class GivesEveryDeliveryAPositionOfItsOwn(Faulty):
    given = 0

    class delivery(Wrapped):
        def __init__(self, inner: Any, transport: Faulty) -> None:
            super().__init__(inner, transport)
            GivesEveryDeliveryAPositionOfItsOwn.given += 1
            self.position = GivesEveryDeliveryAPositionOfItsOwn.given


@breaks("a_delivery_knows_its_position_and_its_tries")
class GivesEveryDeliveryTheSamePosition(Faulty):
    class delivery(Wrapped):
        position = 7


@breaks("a_delivery_knows_its_position_and_its_tries", "a_redelivered_message_keeps_its_position_and_its_tries")
class ForgetsTries(Faulty):
    class delivery(Wrapped):
        tries = 0


@breaks("a_delivery_knows_its_position_and_its_tries")
class CountsTheFirstTryBeforeItStarts(Faulty):
    class delivery(Wrapped):
        tries = 1


@breaks("a_dead_letter_keeps_its_reason_and_identity")
class ForgetsWhyItIsDead(Faulty):
    class delivery(Wrapped):
        letter = None


@breaks("a_settled_message_never_comes_back", "no_more_than_prefetch_are_out", "a_dead_letter_that_is_settled_is_gone")
class SettlesNothing(Faulty):
    class delivery(Wrapped):
        async def settle(self, outcome: Outcome) -> None:
            pass


@breaks("a_released_message_returns_to_its_own_position")
class ReleasesToTheEnd(Faulty):
    class delivery(Wrapped):
        async def release(self, *, begun: bool = True) -> None:
            await self._inner.settle("skipped")
            await self._transport.publish([as_new(self.envelope)])


@breaks("a_message_that_nobody_began_returns_as_if_it_had_never_been_out")
class TakesEveryDeliveryForABeginning(Faulty):
    class delivery(Wrapped):
        async def release(self, *, begun: bool = True) -> None:
            await self._inner.release()


@breaks("a_serial_subscription_waits_for_a_redelivery")
class LetsOthersPassInASerialSubscription(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, serial=False)


@breaks("a_released_message_comes_back")
class DropsWhatIsReleased(Faulty):
    class delivery(Wrapped):
        async def release(self, *, begun: bool = True) -> None:
            await self._inner.settle("skipped")


@breaks("a_released_message_returns_to_its_own_position", "a_lock_that_is_not_renewed_expires")
class NeverSaysThatItWasDeliveredBefore(Faulty):
    class delivery(Wrapped):
        redelivered = False


@breaks("a_released_message_returns_to_its_own_position", "a_released_message_comes_back")
class SaysThatEverythingWasDeliveredBefore(Faulty):
    class delivery(Wrapped):
        redelivered = True


@breaks("a_consumer_that_goes_away_gives_everything_back_in_order")
class KeepsWhatAConsumerHeldThatWentAway(Faulty):
    class consumer(Wrapped):
        async def close(self) -> None:
            self._inner.pause()


@breaks("a_consumer_that_goes_away_gives_everything_back_in_order")
class GivesBackInReverseOrder(Faulty):
    class consumer(Wrapped):
        async def close(self) -> None:
            held = []
            for entry in list(self._inner.queue._acquired.values()):
                queue = self._inner.queue
                queue.settle_all([queue._handed_out(entry)], ["skipped"])
                held.append(entry.envelope)
            await self._inner.close()
            self._transport.broker.recent._known.clear()
            await self._transport.publish(held[::-1])


def without_refusal(name: str) -> Any:
    async def ending(self: Wrapped, *arguments: Any, **options: Any) -> None:
        with suppress(StaleLock):
            await getattr(self._inner, name)(*arguments, **options)

    return ending


@breaks(
    "ending_a_delivery_twice_is_refused",
    "a_lock_that_is_not_renewed_expires",
    "a_consumer_that_goes_away_gives_everything_back_in_order",
)
class AcceptsStaleLocks(Faulty):
    class delivery(Wrapped):
        settle = without_refusal("settle")
        release = without_refusal("release")


@breaks("a_lock_that_is_not_renewed_expires")
class NeverExpiresALock(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, lock_seconds=1e9)


@breaks("a_lock_that_is_renewed_holds")
class DoesNotRenew(Faulty):
    class delivery(Wrapped):
        def renew(self) -> None:
            pass


@breaks("a_redelivery_waits_for_its_time_and_is_counted", "a_key_waits_for_its_redelivery")
class ForgetsTheDelayOfARedelivery(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            await self._inner.redeliver(0.0, counted=counted, behind=behind)


@breaks("a_redelivery_waits_for_its_time_and_is_counted")
class CountsNoRedelivery(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            await self._inner.redeliver(delay, counted=False, behind=behind)


@breaks("a_redelivery_waits_for_its_time_and_is_counted")
class CountsEveryRedelivery(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            await self._inner.redeliver(delay, behind=behind)


@breaks("a_message_waiting_for_redelivery_does_not_hold_the_others")
class HoldsTheSlotUntilTheRedelivery(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            queue, entry, lock = self._inner.queue, self._inner.entry, self._inner.lock
            again = partial(queue.redeliver, entry, lock, 0.0, counted=counted, behind=behind)
            self._transport.clock.call_later(delay, again)


@breaks("a_redelivery_behind_all_others_goes_to_the_end_of_the_queue")
class PutsEveryRedeliveryInItsOwnPlace(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            await self._inner.redeliver(delay, counted=counted)


# --- flow -------------------------------------------------------------------------------------------------


@breaks("no_more_than_prefetch_are_out")
class IgnoresPrefetch(Faulty):
    def consumed(self, **how: Any) -> dict[str, Any]:
        return {**how, "prefetch": 1000}


@breaks("consumers_of_one_queue_share_it")
class GivesEverythingToTheFirstConsumer(Faulty):
    taken = False

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        how["prefetch"] = how["prefetch"] * (1 if self.taken else 2)
        consumer = await super().consume(queue, on_delivery, **how)
        if self.taken:
            consumer.pause()
        self.taken = True
        return consumer


@breaks("consumers_of_one_queue_share_it")
class GivesEveryConsumerACopy(Faulty):
    def __init__(self) -> None:
        super().__init__()
        self.inboxes: list[Callable[[Delivery], None]] = []

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        self.inboxes.append(on_delivery)

        def to_all(delivery: Delivery) -> None:
            for inbox in self.inboxes:
                inbox(delivery)

        return await super().consume(queue, to_all if len(self.inboxes) == 1 else on_delivery, **how)


@breaks("a_paused_consumer_gets_nothing_until_it_resumes")
class DoesNotPause(Faulty):
    class consumer(Wrapped):
        def pause(self) -> None:
            pass


@breaks("a_paused_consumer_gets_nothing_until_it_resumes")
class DoesNotResume(Faulty):
    class consumer(Wrapped):
        def resume(self) -> None:
            pass


@breaks("an_exclusive_consumer_is_alone")
class IgnoresExclusive(Faulty):
    def consumed(self, **how: Any) -> dict[str, Any]:
        return {**how, "exclusive": False}


@breaks("a_selector_leaves_the_others_for_others")
class IgnoresSelectors(Faulty):
    def consumed(self, **how: Any) -> dict[str, Any]:
        return {**how, "selector": None}


@breaks("a_selector_leaves_the_others_for_others")
class ThrowsAwayWhatASelectorDoesNotTake(Faulty):
    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        consumer = await super().consume(queue, on_delivery, **how)
        if how.get("selector"):
            await asyncio.sleep(0)
            for entry in [e for e in self.broker.queue(queue).browse() if e.consumer is None]:
                self.broker.queue(queue)._archive(entry)
        return consumer


@breaks("consuming_an_unknown_queue_is_an_error")
class ConsumesWhatIsNotThere(Faulty):
    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        try:
            return await super().consume(queue, on_delivery, **how)
        except QueueNotFound:
            return Wrapped(None, self)  # type: ignore[return-value]


@breaks("idle_returns_once_everything_is_done")
class IsAlwaysIdle(Faulty):
    async def idle(self) -> None:
        pass


# --- order by key -----------------------------------------------------------------------------------------


@breaks("a_busy_key_withholds_its_next_but_not_the_others", "a_key_waits_for_its_redelivery")
class IgnoresKeys(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, key_of=None)


@breaks("a_busy_key_withholds_its_next_but_not_the_others")
class TakesAllForOneKey(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, key_of=binding.key_of and (lambda envelope: "one"))


@breaks("a_message_with_several_keys_waits_for_all_of_them_and_is_waited_for")
class TakesASetOfKeysForOneKey(Faulty):
    def bound(self, binding: Binding) -> Binding:
        key_of = binding.key_of
        return replace(binding, key_of=key_of and (lambda envelope: str(key_of(envelope))))


@breaks("a_key_waits_for_its_redelivery")
class IgnoresStrictKeys(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, strict=False)


@breaks("a_lenient_key_does_not_wait_for_its_redelivery")
class TakesEveryKeyForStrict(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, strict=True)


# --- time and dead letters ---------------------------------------------------------------------------------


@breaks("what_is_cancelled_is_never_delivered", "an_event_is_cancelled_for_all_its_recipients")
class OnlySaysThatItIsCancelled(Faulty):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        cancelled = self.__dict__.setdefault("cancelled", set())
        is_new = publication_id not in cancelled and publication_id != "no-such-id" and key is None
        cancelled.add(publication_id)
        return is_new or await super().cancel(source, None, key)


@breaks("an_event_is_cancelled_for_all_its_recipients")
class CancelsInOneQueueAlone(Faulty):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        for queue in self.broker.queues() if key is None else ():
            if queue.cancel(lambda each: each.publication_id == publication_id):
                return True
        return key is not None and await super().cancel(source, None, key)


@breaks("cancelling_twice_or_too_late_is_no_error_and_says_so")
class AlwaysSaysThatItWasWaiting(Faulty):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        found = await super().cancel(source, publication_id, key)
        return found or publication_id is not None


@breaks("a_key_cancels_what_its_own_node_has_scheduled_with_it")
class CancelsForAnybody(Faulty):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        return await super().cancel("author", publication_id, key)


@breaks("a_key_cancels_what_its_own_node_has_scheduled_with_it")
class KnowsNoKeys(Faulty):
    async def cancel(self, source: str, publication_id: str | None, key: str | None) -> bool:
        return await super().cancel(source, publication_id, None)


@breaks("what_waits_for_another_try_is_not_cancelled")
class CancelsAnotherTry(Faulty):
    class delivery(Wrapped):
        async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
            envelope = self._inner.envelope
            await self._inner.settle("handled")
            later = msgspec.structs.replace(envelope, deliver_at=self._transport.clock.time() + delay, replay=1)
            await MemoryTransport.publish(self._transport, [later])


@breaks("a_scheduled_message_waits_for_its_time")
class DeliversScheduledMessagesAtOnce(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, deliver_at=None)


@breaks("a_scheduled_message_waits_for_its_time")
class ForgetsScheduledMessages(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish([envelope for envelope in envelopes if envelope.deliver_at is None])


@breaks(
    "a_redelivery_comes_after_its_delay_whatever_the_wall_clock_does",
    "a_delay_is_a_duration",
    "a_message_does_not_expire_because_the_wall_clock_is_set",
)
class MeasuresDurationsByTheWallClock(Faulty):
    async def open(self) -> None:
        await super().open()
        schedule: Any = self.broker._schedule
        schedule.after = lambda seconds, *what: schedule.at(self.clock.time() + seconds, *what)


@breaks("a_wall_time_is_waited_for_by_the_wall_clock")
class TakesAWallTimeForADuration(Faulty):
    async def open(self) -> None:
        await super().open()
        schedule: Any = self.broker._schedule
        schedule.at = lambda wall, *what: schedule.after(wall - self.clock.time(), *what)


@breaks("an_expired_message_is_a_dead_letter_with_the_reason")
class NeverExpires(Faulty):
    def sent(self, envelope: Envelope) -> Envelope:
        return msgspec.structs.replace(envelope, expires_at=None)

    def bound(self, binding: Binding) -> Binding:
        return replace(binding, expires=None)


@breaks("an_expired_message_is_a_dead_letter_with_the_reason")
class DropsExpiredMessagesSilently(Faulty):
    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            if delivery.letter is None or delivery.letter.reason != "expired":
                on_delivery(delivery)

        return await super().consume(queue, deliver, **how)


@breaks("a_held_message_does_not_expire")
class ExpiresWhatIsHeld(Faulty):
    expires: float | None = None

    def bound(self, binding: Binding) -> Binding:
        self.expires = binding.expires
        return binding

    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        def deliver(delivery: Any) -> None:
            on_delivery(delivery)
            if self.expires is not None:
                inner = delivery._inner
                give_up = partial(inner.queue.dead_letter, inner.entry, inner.lock, "expired", "its time was over")
                self.clock.call_later(self.expires, give_up)

        return await super().consume(queue, deliver, **how)


@breaks("a_held_message_does_not_expire")
class DoesNotTellThatTheTimeIsOver(Faulty):
    class delivery(Wrapped):
        expired = False


@breaks("a_held_message_does_not_expire")
class TellsTooSoonThatTheTimeIsOver(Faulty):
    class delivery(Wrapped):
        expired = True


@breaks("a_dead_letter_keeps_its_reason_and_identity")
class LosesTheReason(Faulty):
    class delivery(Wrapped):
        async def dead_letter(self, reason: str, error: str) -> None:
            await self._inner.dead_letter("dead", error)


@breaks("a_dead_letter_keeps_its_reason_and_identity")
class GivesDeadLettersANewIdentity(Faulty):
    class delivery(Wrapped):
        @property
        def letter(self) -> DeadLetter | None:
            letter = self._inner.letter
            return letter and msgspec.structs.replace(letter, envelope=as_new(letter.envelope))


@breaks("a_dead_letter_keeps_its_reason_and_identity", "a_message_that_keeps_coming_back_becomes_a_dead_letter")
class LosesDeadLetters(Faulty):
    async def consume(self, queue: str, on_delivery: Callable[[Delivery], None], **how: Any) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            if delivery.letter is None:
                on_delivery(delivery)

        return await super().consume(queue, deliver, **how)


@breaks("browsing_takes_nothing")
class TakesWhatIsLookedAt(Faulty):
    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        found = await super().dead_letters(node, limit)
        queue = self.broker.queue(dead_letter_queue(node))
        for entry in list(queue.browse())[: len(found)]:
            queue._archive(entry)
        return found


@breaks("browsing_takes_nothing")
class LooksAtMoreThanAsked(Faulty):
    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        return await super().dead_letters(node)


@breaks("a_message_that_keeps_coming_back_becomes_a_dead_letter")
class DeliversForever(Faulty):
    def bound(self, binding: Binding) -> Binding:
        return replace(binding, max_deliveries=10**9)


@breaks("a_delivery_whose_handler_never_started_is_no_try")
class CountsEveryDeliveryAsATry(Faulty):
    class delivery(Wrapped):
        def __init__(self, inner: Any, transport: Faulty) -> None:
            super().__init__(inner, transport)
            inner.start()


@breaks("a_message_that_could_not_be_sent_is_a_dead_letter_of_its_own")
class DropsWhatCouldNotBeSent(Faulty):
    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        pass


@breaks("a_message_that_could_not_be_sent_is_a_dead_letter_of_its_own")
class DoesNotSayWhyItCouldNotBeSent(Faulty):
    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        await super().dead_letter(node, envelope, "unknown", error)


# --- replies ----------------------------------------------------------------------------------------------


@breaks("a_reply_comes_to_the_address_as_it_was")
class ForgetsWhatAReplyAnswers(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return await super().reply([msgspec.structs.replace(each, causation_id=None) for each in envelopes])


@breaks("a_reply_comes_to_the_address_as_it_was", "a_reply_is_no_publication")
class DropsReplies(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return 0


@breaks("replies_come_to_the_address_they_name_in_order")
class AnswersEverybody(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        for envelope in envelopes:
            for listener in self.broker._listeners.values():
                listener(envelope)
        return 0


@breaks("replies_come_to_the_address_they_name_in_order")
class AnswersBackwards(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return await super().reply(envelopes[::-1])


@breaks("a_reply_that_finds_nobody_is_dropped_and_counted")
class SaysThatEveryReplyFoundSomebody(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        await super().reply(envelopes)
        return 0


@breaks("a_reply_that_finds_nobody_is_dropped_and_counted")
class GivesABatchUpAtTheFirstThatFindsNobody(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        for place, envelope in enumerate(envelopes):
            if await super().reply([envelope]):
                return len(envelopes) - place
        return 0


@breaks("a_reply_is_no_publication")
class PublishesReplies(Faulty):
    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        await self.publish([msgspec.structs.replace(each, kind="event", destination=None) for each in envelopes])
        return await super().reply(envelopes)


# --- the proof --------------------------------------------------------------------------------------------


@FAULTS.pairs()
async def test_the_case_fails_on_a_transport_with_this_fault(case: str, fault: type[Faulty]) -> None:
    with pytest.raises(AssertionError):
        await run_queue_case(case, lambda: memory_subject(fault()))


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@pytest.mark.parametrize("name", CASES)
async def test_without_a_fault_the_openings_change_nothing(name: str) -> None:
    await run_queue_case(name, lambda: memory_subject(Faulty()))


@FAULTS.each()
async def test_a_fault_is_one_fault_and_leaves_most_promises_kept(fault: type[Faulty]) -> None:
    kept = [case for case in CASES if await passes(run_queue_case(case, lambda: memory_subject(fault())))]
    assert len(kept) > len(CASES) / 2, f"only {len(kept)} cases pass"
