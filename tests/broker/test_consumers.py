"""Consumers: credit, fairness, exclusive and single-active, selectors, going away, failing, draining."""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import pytest

from faregate.broker.delivery import BrokerDelivery
from faregate.broker.selector import Selector
from faregate.errors import ConfigurationError, ConsumerRefused
from faregate.testing.clock import rest
from tests.broker.rig import Inbox, Rig, refused

# --- credit -----------------------------------------------------------------------------------------------


async def test_a_consumer_without_credit_gets_nothing_until_it_is_granted() -> None:
    rig = Rig()
    inbox = rig.inbox(credit=0, window=False)
    rig.put(*"abc")
    assert await inbox.texts() == []
    inbox.consumer.grant(2)
    assert await inbox.texts() == ["a", "b"]
    inbox.consumer.grant(5)
    assert await inbox.texts() == ["a", "b", "c"]


async def test_plain_credit_is_used_up_and_a_window_comes_back() -> None:
    for window, expected in ((False, ["a", "b"]), (True, ["a", "b", "c"])):
        rig = Rig()
        rig.put(*"abcd")
        inbox = rig.inbox(credit=2, window=window)
        assert await inbox.texts() == ["a", "b"]
        await inbox.got[0].settle("handled")
        assert await inbox.texts() == expected


@pytest.mark.parametrize("ending", ["settle", "release", "redeliver", "dead_letter", "lock expiry"])
async def test_a_window_opens_again_however_a_delivery_ends(ending: str) -> None:
    rig = Rig(lock_seconds=5)
    rig.put("x")
    inbox = rig.inbox(credit=1)
    delivery = await inbox.take()
    if ending == "settle":
        await delivery.settle("handled")
    elif ending == "release":
        await delivery.release()
    elif ending == "redeliver":
        await delivery.redeliver(100)
    elif ending == "dead_letter":
        await delivery.dead_letter("bad", "it is bad")
    else:
        await rig.clock.advance(5)
    rig.put("next")
    comes_back = ending in ("release", "lock expiry")
    assert await inbox.texts() == (["x"] if comes_back else ["next"])


async def test_credit_cannot_be_taken_back() -> None:
    rig = Rig()
    inbox = rig.inbox(credit=1)
    with pytest.raises(ValueError, match="cannot be taken back"):
        inbox.consumer.grant(-1)
    assert inbox.consumer.credit == 1


async def test_a_consumer_that_is_refused_for_its_credit_is_not_attached() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="credit"):
        rig.inbox(credit=-1)
    alone = rig.inbox(exclusive=True)
    rig.put("x")
    assert await alone.texts() == ["x"]


# --- fairness ---------------------------------------------------------------------------------------------


async def test_consumers_with_credit_take_turns() -> None:
    rig = Rig()
    rig.put(*(str(number) for number in range(9)))
    order: list[str] = []
    for name in "abc":
        rig.queue.attach(lambda _, name=name: order.append(name), credit=3)
    await rest()
    assert order == list("abcabcabc")


async def test_the_turn_goes_on_where_it_stopped() -> None:
    rig = Rig()
    got: Counter[str] = Counter()
    for name in "abc":
        rig.queue.attach(lambda _, name=name: got.update(name), credit=100)
    for number in range(30):
        rig.put(str(number))
        await rest(3)
    assert got == {"a": 10, "b": 10, "c": 10}


async def test_a_consumer_without_credit_does_not_hold_the_others() -> None:
    rig = Rig()
    rig.inbox(credit=0)
    paused = rig.inbox()
    paused.consumer.pause()
    able = rig.inbox()
    rig.put(*"abc")
    assert await able.texts() == list("abc")
    assert await paused.texts() == []


async def test_a_paused_consumer_keeps_what_it_holds_and_goes_on_when_resumed() -> None:
    rig = Rig()
    rig.put(*"ab")
    inbox = rig.inbox(credit=1)
    held = await inbox.take()
    inbox.consumer.pause()
    await held.settle("handled")
    assert await inbox.texts() == []
    inbox.consumer.resume()
    assert await inbox.texts() == ["b"]


# --- exclusive and single-active --------------------------------------------------------------------------


async def test_an_exclusive_consumer_is_alone_until_it_leaves() -> None:
    rig = Rig()
    alone = rig.inbox(exclusive=True)
    for exclusive in (False, True):
        with pytest.raises(ConsumerRefused, match="exclusively"):
            rig.inbox(exclusive=exclusive)
    await alone.consumer.close()
    rig.inbox()
    with pytest.raises(ConsumerRefused):
        rig.inbox(exclusive=True)


async def test_of_single_active_consumers_only_the_first_gets_deliveries() -> None:
    rig = Rig()
    first, second, third = (rig.inbox(credit=2, single_active=True) for _ in range(3))
    rig.put(*"abcd")
    assert await first.texts() == ["a", "b"]
    assert await second.texts() == await third.texts() == []
    await first.got[0].settle("handled")
    assert await first.texts() == ["a", "b", "c"]


async def test_the_next_single_active_consumer_takes_over_when_the_active_one_leaves() -> None:
    rig = Rig()
    first, second, third = (rig.inbox(credit=9, single_active=True) for _ in range(3))
    rig.put(*"abc")
    assert await first.texts() == list("abc")
    await first.consumer.close()
    assert await second.texts() == list("abc"), "not everything came back in order"
    assert await third.texts() == []
    await second.consumer.close()
    assert await third.texts() == list("abc")


async def test_a_single_active_consumer_that_waits_may_leave_without_effect() -> None:
    rig = Rig()
    first, second, third = (rig.inbox(credit=9, single_active=True) for _ in range(3))
    await second.consumer.close()
    rig.put("a")
    assert await first.texts() == ["a"]
    await first.consumer.close()
    assert await third.texts() == ["a"]


async def test_a_single_active_consumer_that_fails_hands_over() -> None:
    rig = Rig()

    def fail(delivery: BrokerDelivery) -> None:
        raise RuntimeError("on purpose")

    rig.queue.attach(fail, credit=5, single_active=True)
    second = rig.inbox(single_active=True)
    rig.put(*"ab")
    assert await second.texts() == ["a", "b"]


async def test_single_active_and_other_consumers_do_not_mix() -> None:
    rig = Rig()
    rig.inbox(single_active=True)
    with pytest.raises(ConfigurationError, match="single-active"):
        rig.inbox()


# --- selectors --------------------------------------------------------------------------------------------


class Counting(Selector):
    """Counts how often it looks at each message."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.looked: Counter[str] = Counter()

    def matches(self, headers: Mapping[str, str]) -> bool:
        self.looked[headers["id"]] += 1
        return super().matches(headers)


async def test_a_selector_takes_what_comes_after_it_was_attached_to_an_empty_queue() -> None:
    rig = Rig()
    red = rig.inbox(selector="colour = 'red'")
    rig.put("a", colour="red")
    rig.put("b", colour="blue")
    rig.put("c", colour="red")
    assert await red.texts() == ["a", "c"]


async def test_a_selector_takes_what_came_before_it_and_leaves_the_others() -> None:
    rig = Rig()
    rig.put("a", "b", colour="red")
    rig.put("c", colour="blue")
    assert await rig.inbox(selector="colour = 'blue'").texts() == ["c"]
    assert await rig.inbox().texts() == ["a", "b"]


async def test_a_selector_that_has_seen_all_there_was_takes_what_comes_later() -> None:
    rig = Rig()
    rig.put("a", colour="red")
    red = rig.inbox(selector="colour = 'red'")
    assert await red.texts() == ["a"]
    rig.put("b", colour="red")
    assert await red.texts() == ["a", "b"]
    await red.got[0].release()
    assert await red.texts() == ["a", "b", "a"]


async def test_a_selector_looks_at_an_entry_at_most_once_per_availability() -> None:
    rig = Rig()
    picky, other = Counting("colour = 'red'"), Counting("colour = 'green'")
    rig.put("first", colour="blue", id="first")
    for selector in (picky, other):
        Inbox(rig.queue, credit=100, window=True, selector=selector)
    for number in range(50):
        rig.put(f"{number}", colour="blue", id=f"{number}")
        await rest(2)
    assert set(picky.looked.values()) == {1}, f"looked {picky.looked}"
    assert len(picky.looked) == len(other.looked) == 51
    plain = rig.inbox(credit=1)
    await (await plain.take()).release()
    await rest()
    assert picky.looked["first"] == 2, "an entry that became available again was not looked at once more"
    assert picky.looked.total() == 52


async def test_an_entry_that_came_back_often_meanwhile_is_looked_at_once() -> None:
    rig = Rig()
    selector = Counting("colour = 'red'")
    rig.put("x", colour="blue", id="x")
    idle = Inbox(rig.queue, credit=0, selector=selector)
    plain = rig.inbox(credit=1)
    for _ in range(5):
        await (await plain.take()).release()
    last = await plain.take()
    plain.consumer.pause()
    await last.release()
    idle.consumer.grant(1)
    await rest()
    assert selector.looked == {"x": 1}


async def test_a_selector_is_not_asked_while_its_consumer_cannot_take_anything() -> None:
    rig = Rig()
    selector = Counting("colour = 'red'")
    rig.put("a", "b", colour="blue", id="x")
    Inbox(rig.queue, credit=0, selector=selector)
    await rest()
    assert selector.looked.total() == 0


async def test_a_selector_takes_matching_entries_of_a_key_in_order_only() -> None:
    rig = Rig()
    rig.put("a1", key="a", colour="blue")
    rig.put("a2", key="a", colour="red")
    red = rig.inbox(selector="colour = 'red'")
    assert await red.texts() == [], "it overtook the first of its key"
    plain = rig.inbox(credit=1)
    await (await plain.take()).settle("handled")
    plain.consumer.pause()
    assert len(await red.texts()) + len(await plain.texts()) == 1


# --- failing and going away -------------------------------------------------------------------------------


async def test_a_consumer_that_raises_is_detached_and_its_entry_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    kept: list[BrokerDelivery] = []

    def fail_at_the_second(delivery: BrokerDelivery) -> None:
        if kept:
            raise RuntimeError("on purpose")
        kept.append(delivery)

    rig.put(*"abc")
    broken = rig.queue.attach(fail_at_the_second, credit=9)
    with caplog.at_level(logging.ERROR, "faregate.broker"):
        await rest()
    assert "is detached" in caplog.text
    assert broken.held.count == 0
    assert rig.states() == dict.fromkeys("abc", "available")
    assert await refused(lambda: kept[0].settle("handled"))
    inbox = rig.inbox()
    assert await inbox.texts() == list("abc")
    assert [delivery.redelivered for delivery in inbox.got] == [True, True, False]


async def test_a_consumer_that_raises_does_not_keep_others_from_their_deliveries() -> None:
    rig = Rig()

    def fail(delivery: BrokerDelivery) -> None:
        raise RuntimeError("on purpose")

    rig.queue.attach(fail, credit=9)
    able = rig.inbox()
    rig.put(*"abc")
    assert sorted(await able.texts()) == list("abc")


async def test_a_consumer_may_close_itself_or_another_while_it_gets_a_delivery() -> None:
    rig = Rig()
    others = [rig.inbox(credit=1) for _ in range(2)]

    def close_all(delivery: BrokerDelivery) -> None:
        for consumer in (consumer for consumer in list(rig.queue._consumers)):
            rig.queue.detach(consumer)

    rig.queue.attach(close_all, credit=9)
    rig.put(*"abcde")
    await rest()
    assert rig.states() == dict.fromkeys("abcde", "available")
    assert [delivery.position for other in others for delivery in other.got] == [0, 1]
    assert await rig.inbox().texts() == list("abcde")


# --- draining ---------------------------------------------------------------------------------------------


async def test_draining_waits_for_all_that_is_out_and_takes_no_more() -> None:
    rig = Rig()
    rig.put(*"abc")
    inbox = rig.inbox(credit=2)
    first, second = await inbox.take(), await inbox.take()
    draining = asyncio.ensure_future(inbox.consumer.drain())
    await first.settle("handled")
    await rest()
    assert not draining.done()
    await second.release()
    await asyncio.wait_for(draining, 5)
    assert await inbox.texts() == []
    assert rig.states() == {"b": "available", "c": "available"}


async def test_draining_an_idle_consumer_returns_at_once() -> None:
    rig = Rig()
    inbox = rig.inbox()
    await asyncio.wait_for(inbox.consumer.drain(), 5)
    rig.put("x")
    assert await inbox.texts() == []


async def test_draining_ends_when_the_consumer_goes_away_or_the_locks_expire() -> None:
    for close in (True, False):
        rig = Rig(lock_seconds=5)
        rig.put("x")
        inbox = rig.inbox()
        await inbox.take()
        draining = asyncio.ensure_future(inbox.consumer.drain())
        await rest()
        if close:
            await inbox.consumer.close()
        else:
            await rig.clock.advance(5)
        await asyncio.wait_for(draining, 5)
        assert rig.states() == {"x": "available"}


async def test_giving_up_one_drain_does_not_end_another() -> None:
    rig = Rig()
    rig.put("x")
    inbox = rig.inbox()
    held = await inbox.take()
    impatient, patient = (asyncio.ensure_future(inbox.consumer.drain()) for _ in range(2))
    await rest()
    impatient.cancel()
    await rest()
    assert not patient.done(), "it was cancelled with the other"
    await held.settle("handled")
    await asyncio.wait_for(patient, 5)
    assert len(rig.queue) == 0
