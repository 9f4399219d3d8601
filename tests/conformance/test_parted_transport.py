"""A transport that has partitions and nothing more keeps the suite; each case of partitions fails on a faulty one."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from faregate.message import Envelope
from faregate.ports.queue import Binding, Consumer, Held
from faregate.testing import FakeClock, memory_subject, queue_cases, run_queue_case
from tests.bus.parted import Parted, PartedHeld
from tests.conformance.faults import Faults, passes

CASES = queue_cases(frozenset({"partitions"}))
OWN = sorted(set(CASES) - set(queue_cases(frozenset())))
FAULTS = Faults(OWN)
breaks = FAULTS.breaks


class Faulty(Parted):
    def __init__(self) -> None:
        super().__init__(FakeClock())


@pytest.mark.parametrize("name", CASES)
async def test_a_transport_with_partitions_alone(name: str) -> None:
    await run_queue_case(name, lambda: memory_subject(Faulty()))


@breaks("all_messages_of_one_key_are_in_one_partition_in_order")
class PartsByChance(Faulty):
    number = 0

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        for each in envelopes:
            self.number += 1
            key = None if each.key is None else f"{each.key}{self.number}"
            await super().publish([msgspec.structs.replace(each, key=key)])


@breaks("all_messages_of_one_key_are_in_one_partition_in_order")
class PutsEverythingIntoTheFirst(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await super().publish([msgspec.structs.replace(each, key=None) for each in envelopes])


@breaks("a_binding_with_one_partition_has_all_messages_in_order")
class LosesWhatHasNoKey(Faulty):
    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        keyed = any(each.key is not None for each in envelopes)
        parted = any(0 not in counts for counts in self.server.parts.values())
        await super().publish(envelopes if keyed or not parted else [])


@breaks("what_a_partition_had_out_comes_back_in_order_when_its_consumer_closes")
class SaysThatItWasNeverOut(Faulty):
    class held(PartedHeld):  # type: ignore[assignment]
        redelivered = False


class AtTheEnd(PartedHeld):
    """Goes back to the end of its queue: it is published anew and settled."""

    faulty: "Faulty"

    async def release(self, *, begun: bool = True) -> None:
        other = msgspec.structs.replace(self.envelope, publication_id=f"{self.envelope.publication_id}-again")
        await self.faulty.publish([other])
        await self.settle("handled")


@breaks("what_is_released_to_a_partition_comes_back_in_its_place")
class ReleasesToTheEnd(Faulty):
    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        self.held = type("held", (AtTheEnd,), {"faulty": self})
        return await super().consume(queue, on_delivery, prefetch=prefetch)


@breaks("a_later_generation_comes_beside_the_earlier_one_until_that_is_abandoned")
class AbandonsNothing(Faulty):
    async def abandon(self, binding: Binding) -> None:
        pass


@breaks("a_later_generation_comes_beside_the_earlier_one_until_that_is_abandoned")
class AbandonsTooSoon(Faulty):
    async def bind(self, binding: Binding) -> None:
        former = self._bindings.get(binding.queue)
        await super().bind(binding)
        if former is not None and former.generation != binding.generation:
            await self.abandon(former)


@FAULTS.pairs()
async def test_the_case_fails_on_a_transport_with_this_fault(case: str, fault: type[Faulty]) -> None:
    with pytest.raises(AssertionError):
        await run_queue_case(case, lambda: memory_subject(fault()))


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@FAULTS.each()
async def test_a_fault_is_one_fault_and_leaves_most_promises_kept(fault: type[Faulty]) -> None:
    kept = [case for case in CASES if await passes(run_queue_case(case, lambda: memory_subject(fault())))]
    assert len(kept) > len(CASES) / 2, f"only {len(kept)} cases pass"
