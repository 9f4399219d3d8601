"""The four mistakes in seed 003's own code that `broker.md` names, each as a check that must pass on the queue and
must fail on a queue from which exactly that fix was taken out."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from faregate.broker.entry import ARCHIVED, Entry
from faregate.broker.queue import Queue
from faregate.broker.selector import Selector
from faregate.errors import StaleLock
from faregate.testing.clock import rest
from tests.broker.rig import Inbox, MakeQueue, Rig

# --- a signal that arrives while the pump is exiting ------------------------------------------------------


class Looking(Selector):
    """Takes nothing, and tells when the pump makes it look."""

    def __init__(self, looked: Callable[[], None]) -> None:
        super().__init__("x = 'y'")
        self._looked = looked

    def matches(self, headers: Mapping[str, str]) -> bool:
        self._looked()
        return False


async def check_a_signal_while_the_pump_is_exiting_is_not_lost(make: MakeQueue) -> None:
    """In its last round the pump has passed the first consumer, which had no credit; then it gets some."""
    rig = Rig(make)
    rig.put("waiting")
    late = rig.inbox(credit=0)
    Inbox(rig.queue, credit=1, selector=Looking(lambda: late.consumer.grant(1)))
    assert await late.texts() == ["waiting"], "the pump slept although it was signalled"


class ForgetsTheWakeupAfterwards(Queue):
    """The fix taken out: "was woken" is forgotten when the pump ends instead of before it looks."""

    _pumping = False

    def signal(self) -> None:
        if not self._pumping:
            super().signal()

    def _pump(self) -> None:
        self._pumping = True
        try:
            super()._pump()
        finally:
            self._pumping = False


async def test_a_signal_while_the_pump_is_exiting_is_not_lost() -> None:
    await check_a_signal_while_the_pump_is_exiting_is_not_lost(Queue)


async def test_without_the_fix_a_signal_while_the_pump_is_exiting_is_lost() -> None:
    with pytest.raises(AssertionError, match="the pump slept"):
        await check_a_signal_while_the_pump_is_exiting_is_not_lost(ForgetsTheWakeupAfterwards)


# --- a pump that spins ------------------------------------------------------------------------------------


def all_are_acquired(rig: Rig) -> None:
    rig.put("a", "b")
    rig.inbox(credit=10)


def nobody_has_credit(rig: Rig) -> None:
    rig.put("a", "b", "c")
    rig.inbox(credit=2)
    rig.inbox(credit=0)


def everybody_is_paused(rig: Rig) -> None:
    rig.put("a")
    rig.inbox().consumer.pause()


def nothing_fits_the_selector(rig: Rig) -> None:
    rig.put("a")
    rig.inbox(selector="colour = 'red'")


def all_wait_behind_a_held_key(rig: Rig) -> None:
    rig.put("a", "b", key="k")
    rig.inbox()


STANDSTILLS = [
    all_are_acquired,
    nobody_has_credit,
    everybody_is_paused,
    nothing_fits_the_selector,
    all_wait_behind_a_held_key,
]


async def check_the_pump_sleeps_at_a_standstill(make: MakeQueue, standstill: Callable[[Rig], None]) -> None:
    runs = 0

    class Counted(make):  # type: ignore[misc, valid-type]
        def _pump(self) -> None:
            nonlocal runs
            runs += 1
            super()._pump()

    standstill(Rig(Counted))
    await rest(10)
    settled, runs = runs, 0
    assert settled <= 2, f"the pump ran {settled} times to deliver what there was"
    await rest(100)
    assert runs == 0, f"the pump ran {runs} times in 100 turns with nothing to do"


class GoesOnWhileThereIsWorkAndSomebody(Queue):
    """The fix taken out: entries and consumers are enough for another run, whether or not anything can move."""

    def _pump(self) -> None:
        super()._pump()
        if self._entries and self._consumers:
            asyncio.get_running_loop().call_soon(self._pump)


@pytest.mark.parametrize("standstill", STANDSTILLS, ids=lambda standstill: standstill.__name__)
async def test_the_pump_sleeps_at_a_standstill(standstill: Callable[[Rig], None]) -> None:
    await check_the_pump_sleeps_at_a_standstill(Queue, standstill)


@pytest.mark.parametrize("standstill", STANDSTILLS, ids=lambda standstill: standstill.__name__)
async def test_without_the_fix_the_pump_spins_at_a_standstill(standstill: Callable[[Rig], None]) -> None:
    with pytest.raises(AssertionError, match="the pump ran"):
        await check_the_pump_sleeps_at_a_standstill(GoesOnWhileThereIsWorkAndSomebody, standstill)


# --- expiry of an entry that somebody holds ---------------------------------------------------------------


async def check_a_held_entry_does_not_expire(make: MakeQueue) -> None:
    rig = Rig(make)
    rig.put("held", ttl=5)
    delivery = await rig.inbox().take()
    await rig.clock.advance(6)
    assert rig.dead == [], "it expired while a consumer held it"
    assert rig.states() == {"held": "acquired"}
    await delivery.settle("handled")
    assert (rig.queue.settled["handled"], rig.in_flight.count) == (1, 0)


class ExpiresWhateverItFinds(Queue):
    """The fix taken out: only an archived entry is spared."""

    def _expire(self, entry: Entry) -> None:
        if entry.state != ARCHIVED:
            self._abandon(entry, "expired", "its time was over")


async def test_a_held_entry_does_not_expire() -> None:
    await check_a_held_entry_does_not_expire(Queue)


async def test_without_the_fix_a_held_entry_expires() -> None:
    with pytest.raises(AssertionError, match="while a consumer held it"):
        await check_a_held_entry_does_not_expire(ExpiresWhateverItFinds)


# --- release of an entry that is archived -----------------------------------------------------------------

Archive = Callable[[Rig, Inbox], Awaitable[None]]


async def it_was_settled(rig: Rig, inbox: Inbox) -> None:
    await inbox.got[0].settle("handled")


async def it_became_a_dead_letter(rig: Rig, inbox: Inbox) -> None:
    await inbox.got[0].dead_letter("bad", "it is bad")


async def another_settled_it_after_the_lock_expired(rig: Rig, inbox: Inbox) -> None:
    await rig.clock.advance(rig.queue.lock_seconds + 1)
    await inbox.got[1].settle("handled")
    del inbox.got[1]


WAYS_TO_ARCHIVE = [it_was_settled, it_became_a_dead_letter, another_settled_it_after_the_lock_expired]


async def check_a_late_release_does_not_resurrect(make: MakeQueue, archive: Archive) -> None:
    rig = Rig(make)
    rig.put("done")
    inbox = rig.inbox()
    assert await inbox.texts() == ["done"]
    await archive(rig, inbox)
    assert len(rig.queue) == 0, "it is not archived"
    accepted = True
    try:
        await inbox.got[0].release()
    except StaleLock:
        accepted = False
    assert await inbox.texts() == ["done"], "an archived entry was delivered again"
    assert rig.states() == {}
    assert not accepted, "the late release was accepted"


class ReleasesWithoutLookingAtTheLock(Queue):
    """The fix taken out: a release is taken at its word."""

    def release(self, entry: Entry, lock: int, *, forgive: bool = False, begun: bool = True) -> None:
        self._acquired.pop(lock, None)
        entry.consumer = None
        self._return(entry, 0.0)


@pytest.mark.parametrize("archive", WAYS_TO_ARCHIVE, ids=lambda archive: archive.__name__)
async def test_a_late_release_does_not_resurrect(archive: Archive) -> None:
    await check_a_late_release_does_not_resurrect(Queue, archive)


@pytest.mark.parametrize("archive", WAYS_TO_ARCHIVE, ids=lambda archive: archive.__name__)
async def test_without_the_fix_a_late_release_resurrects(archive: Archive) -> None:
    with pytest.raises(AssertionError, match="delivered again"):
        await check_a_late_release_does_not_resurrect(ReleasesWithoutLookingAtTheLock, archive)
