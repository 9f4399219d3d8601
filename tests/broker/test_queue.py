"""The queue: acquire, release to the own position, archive; locks, lives, schedule, keys, and what is in flight."""

import asyncio
import logging

import pytest

from faregate.broker.delivery import BrokerDelivery
from faregate.broker.journal.snapshot import Returning
from faregate.message import Envelope
from faregate.testing.clock import rest
from tests.broker.rig import Rig, refused

# --- positions and locks ----------------------------------------------------------------------------------


async def test_entries_come_in_the_order_they_were_enqueued() -> None:
    rig = Rig()
    rig.put(*"abc")
    assert await rig.inbox().texts() == list("abc")


async def test_a_released_entry_comes_before_later_ones() -> None:
    rig = Rig()
    rig.put(*"abcd")
    inbox = rig.inbox(credit=3)
    assert await inbox.texts() == list("abc")
    first, second, _ = inbox.got
    inbox.got.clear()
    await second.release()
    await first.release()
    assert await inbox.texts() == ["a", "b"]
    assert [delivery.redelivered for delivery in inbox.got] == [True, True]


async def test_a_redelivered_entry_comes_before_later_ones_once_it_is_due() -> None:
    rig = Rig()
    rig.put(*"abc")
    inbox = rig.inbox(credit=1)
    await (await inbox.take()).redeliver(5)
    held = await inbox.take()
    assert held.envelope.body == b"b"
    await rig.clock.advance(5)
    await held.settle("handled")
    assert await inbox.texts() == ["a"]


@pytest.mark.parametrize("ending", ["settle", "release", "redeliver", "dead_letter"])
async def test_every_ending_is_refused_after_any_other(ending: str) -> None:
    rig = Rig()
    rig.put("x")
    delivery = await rig.inbox(credit=1, window=False).take()
    endings = {
        "settle": lambda: delivery.settle("handled"),
        "release": delivery.release,
        "redeliver": lambda: delivery.redeliver(5),
        "dead_letter": lambda: delivery.dead_letter("bad", "it is bad"),
    }
    await endings[ending]()
    before = (rig.states(), rig.in_flight.count, dict(rig.queue.settled), list(rig.dead))
    for again in (*endings.values(), delivery.renew):
        assert await refused(again)
    assert (rig.states(), rig.in_flight.count, dict(rig.queue.settled), list(rig.dead)) == before


async def test_a_lock_that_expires_gives_the_entry_back_and_is_stale() -> None:
    rig = Rig(lock_seconds=5)
    rig.put("x")
    inbox = rig.inbox()
    late = await inbox.take()
    await rig.clock.advance(4)
    assert rig.states() == {"x": "acquired"}
    assert inbox.got == []
    await rig.clock.advance(1)
    again = await inbox.take()
    assert again.redelivered
    assert await refused(lambda: late.settle("handled"))
    assert not await refused(lambda: again.settle("handled"))


async def test_a_renewed_lock_holds_and_the_others_expire_in_time() -> None:
    rig = Rig(lock_seconds=5)
    rig.put(*"ab")
    inbox = rig.inbox(credit=2, window=False)
    first, second = await inbox.take(), await inbox.take()
    await rig.clock.advance(3)
    first.renew()
    await rig.clock.advance(3)
    assert rig.states() == {"a": "acquired", "b": "available"}
    assert await refused(second.renew)
    await rig.clock.advance(2)
    assert rig.states() == {"a": "available", "b": "available"}


async def test_a_consumer_that_goes_away_gives_back_in_position_at_once() -> None:
    rig = Rig()
    rig.put(*"abc")
    inbox = rig.inbox(credit=2)
    assert await inbox.texts() == ["a", "b"]
    await inbox.consumer.close()
    assert rig.states() == dict.fromkeys("abc", "available")
    assert await rig.inbox().texts() == list("abc")
    assert await refused(lambda: inbox.got[0].settle("handled"))
    await inbox.consumer.close()


async def test_browsing_takes_nothing_and_shows_every_living_entry_in_order() -> None:
    rig = Rig()
    rig.put("held", key="k")
    rig.put("behind", key="k")
    rig.put("later", after=5)
    rig.put("free")
    inbox = rig.inbox(credit=1)
    await inbox.take()
    expected = {"held": "acquired", "behind": "withheld", "later": "scheduled", "free": "available"}
    assert rig.states() == expected
    assert list(rig.states()) == list(expected)
    assert rig.states() == expected, "looking changed something"
    assert len(rig.queue) == 4


# --- tries ------------------------------------------------------------------------------------------------


async def test_a_delivery_counts_as_a_try_when_the_handler_starts() -> None:
    rig = Rig()
    rig.put("x")
    inbox = rig.inbox()
    delivery = await inbox.take()
    assert delivery.tries == 0
    delivery.start()
    await inbox.consumer.close()
    assert (await rig.inbox().take()).tries == 1


async def test_a_release_forgives_the_try() -> None:
    rig = Rig(max_deliveries=1)
    rig.put("x")
    inbox = rig.inbox()
    for _ in range(3):
        delivery = await inbox.take()
        delivery.start()
        await delivery.release()
    assert (await inbox.take()).tries == 0
    assert rig.dead == []


async def test_a_stale_delivery_that_starts_does_not_use_up_a_try_of_the_new_holder() -> None:
    rig = Rig(lock_seconds=5, max_deliveries=2)
    rig.put("x")
    inbox = rig.inbox()
    late = await inbox.take()
    await rig.clock.advance(6)
    holder = await inbox.take()
    await refused(late.start)
    assert holder.tries == 0


async def test_an_entry_that_keeps_coming_back_is_dead_lettered_with_the_reason() -> None:
    told = []
    rig = Rig(max_deliveries=2, lock_seconds=5, on_dead_letter=lambda delivery, reason, text: told.append(reason))
    rig.put("killer", "next")
    inbox = rig.inbox(credit=1)
    for _ in range(2):
        (await inbox.take()).start()
        await rig.clock.advance(6)
    assert rig.dead == [("killer", "max-deliveries")]
    assert told == ["max-deliveries"]
    assert await inbox.texts() == ["next"]


async def test_counted_redeliveries_are_counted_and_uncounted_ones_use_up_no_try() -> None:
    rig = Rig()
    rig.put("x")
    inbox = rig.inbox()
    for counted, expected in ((True, (1, 1)), (False, (1, 1)), (True, (2, 2)), (False, (2, 2))):
        delivery = await inbox.take()
        delivery.start()
        await delivery.redeliver(1, counted=counted)
        await rig.clock.advance(1)
        assert (inbox.got[0].tries, inbox.got[0].redeliveries) == expected


# --- lives and schedule -----------------------------------------------------------------------------------


async def test_a_message_that_nobody_takes_expires_with_the_reason() -> None:
    rig = Rig()
    rig.put("short", ttl=5)
    rig.put("long", ttl=50)
    await rig.clock.advance(4)
    assert rig.dead == []
    await rig.clock.advance(1)
    assert rig.dead == [("short", "expired")]
    assert await rig.inbox().texts() == ["long"]


@pytest.mark.parametrize(("message", "queue", "life"), [(5, None, 5), (None, 3, 3), (5, 3, 3), (2, 3, 2)])
async def test_the_shorter_life_of_message_and_queue_applies(
    message: float | None, queue: float | None, life: float
) -> None:
    rig = Rig(expires=queue)
    rig.put("x", ttl=message)
    await rig.clock.advance(life - 0.5)
    assert rig.dead == []
    await rig.clock.advance(0.5)
    assert rig.dead == [("x", "expired")]


async def test_a_message_that_is_expired_when_it_comes_is_never_delivered() -> None:
    rig = Rig()
    inbox = rig.inbox()
    rig.put("old", ttl=-1)
    rig.put("new")
    assert await inbox.texts() == ["new"]
    assert rig.dead == [("old", "expired")]


async def test_a_held_message_whose_life_is_over_expires_when_it_comes_back() -> None:
    rig = Rig()
    rig.put("x", ttl=5)
    inbox = rig.inbox()
    delivery = await inbox.take()
    await rig.clock.advance(6)
    await delivery.release()
    assert rig.dead == [("x", "expired")]
    assert await inbox.texts() == []


@pytest.mark.parametrize("state", ["withheld", "scheduled", "waiting for redelivery"])
async def test_a_message_expires_while_it_waits_for_its_turn_or_time(state: str) -> None:
    rig = Rig()
    inbox = rig.inbox(credit=1)
    if state == "withheld":
        rig.put("holder", key="k")
        rig.put("x", key="k", ttl=5)
        await inbox.take()
    elif state == "scheduled":
        rig.put("x", ttl=5, after=10)
    else:
        rig.put("x", ttl=5)
        await (await inbox.take()).redeliver(10)
    in_flight = rig.in_flight.count
    await rig.clock.advance(5)
    assert rig.dead == [("x", "expired")]
    assert rig.in_flight.count == in_flight - (state != "scheduled")
    await rig.clock.advance(20)
    assert await inbox.texts() == []


async def test_the_queues_life_of_a_scheduled_message_begins_when_it_is_due() -> None:
    rig = Rig(expires=5)
    rig.put("x", after=10)
    await rig.clock.advance(14)
    assert rig.states() == {"x": "available"}
    await rig.clock.advance(1)
    assert rig.dead == [("x", "expired")]


async def test_a_scheduled_message_waits_and_then_takes_its_own_position() -> None:
    rig = Rig()
    rig.put("later", after=5)
    rig.put("a", "b")
    inbox = rig.inbox(credit=1)
    held = await inbox.take()
    assert held.envelope.body == b"a"
    await rig.clock.advance(5)
    await held.settle("handled")
    assert await inbox.texts() == ["later"]


async def test_a_delivery_time_in_the_past_is_now() -> None:
    rig = Rig()
    rig.put("x", after=-5)
    assert rig.in_flight.count == 1
    assert await rig.inbox().texts() == ["x"]


# --- keys -------------------------------------------------------------------------------------------------


async def test_only_the_first_of_a_key_is_out_and_other_keys_go_on() -> None:
    rig = Rig()
    for text in ("a1", "a2", "b1", "a3", "b2"):
        rig.put(text, key=text[0])
    rig.put("free")
    inbox = rig.inbox()
    assert await inbox.texts() == ["a1", "b1", "free"]
    await inbox.got.pop(0).settle("handled")
    assert await inbox.texts() == ["b1", "free", "a2"]


@pytest.mark.parametrize("ending", ["settle", "dead_letter", "expire"])
async def test_the_next_of_a_key_has_its_turn_however_the_first_ends(ending: str) -> None:
    rig = Rig(expires=5)
    rig.put("a1", key="a")
    inbox = rig.inbox(credit=1)
    delivery = await inbox.take()
    await rig.clock.advance(3)
    rig.put("a2", key="a")
    if ending == "settle":
        await delivery.settle("handled")
    elif ending == "dead_letter":
        await delivery.dead_letter("bad", "it is bad")
    else:
        await rig.clock.advance(3)
        await delivery.release()
    assert await inbox.texts() == ["a2"]


async def test_a_released_first_of_a_key_stays_the_first() -> None:
    rig = Rig()
    rig.put("a1", "a2", key="a")
    inbox = rig.inbox()
    await (await inbox.take()).release()
    assert await inbox.texts() == ["a1"]


async def test_a_strict_key_waits_for_its_redelivery() -> None:
    rig = Rig()
    rig.put("a1", "a2", key="a")
    inbox = rig.inbox()
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == []
    await rig.clock.advance(10)
    assert await inbox.texts() == ["a1"]


async def test_a_lenient_key_does_not_wait_for_its_redelivery() -> None:
    rig = Rig(strict=False)
    rig.put("a1", "a2", "a3", key="a")
    inbox = rig.inbox()
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == ["a2"]
    await rig.clock.advance(10)
    assert await inbox.texts() == ["a2"], "two of one key are out"
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["a1"], "it does not come before a3"


async def test_a_message_scheduled_for_later_does_not_hold_its_key() -> None:
    rig = Rig()
    rig.put("later", key="a", after=10)
    rig.put("now", key="a")
    inbox = rig.inbox()
    assert await inbox.texts() == ["now"]
    await rig.clock.advance(10)
    assert await inbox.texts() == ["now"], "two of one key are out"
    await inbox.got[0].settle("handled")
    assert await inbox.texts() == ["now", "later"]


async def test_no_trace_of_a_key_is_left_when_its_entries_are_done() -> None:
    rig = Rig()
    for number in range(100):
        rig.put("x", "y", key=f"k{number}")
    inbox = rig.inbox(credit=5)
    while len(rig.queue):
        await (await inbox.take()).settle("handled")
    assert (rig.queue._holders, rig.queue._behind) == ({}, {})


# --- the pump ---------------------------------------------------------------------------------------------


async def test_the_pump_lets_the_event_loop_go_on_during_a_long_run() -> None:
    rig = Rig()
    rig.put(*(str(number) for number in range(2000)))
    inbox = rig.inbox(credit=2000)
    seen = []
    for _ in range(20):
        await asyncio.sleep(0)
        seen.append(len(inbox.got))
    assert seen[-1] == 2000, "not everything was delivered"
    assert 0 < seen[0] < 1000, f"the first turn delivered {seen[0]}"


async def test_an_entry_that_is_enqueued_by_a_consumer_is_delivered() -> None:
    rig = Rig()
    got = []

    def chain(delivery: BrokerDelivery) -> None:
        got.append(delivery.position)
        if len(got) < 10:
            rig.put(f"after {delivery.position}")

    rig.queue.attach(chain, credit=20)
    rig.put("first")
    await rest()
    assert got == list(range(10))


async def test_without_consumers_nothing_runs_and_nothing_is_lost() -> None:
    rig = Rig()
    rig.put(*"abc")
    await rest()
    assert rig.states() == dict.fromkeys("abc", "available")
    assert not rig.queue._awake
    assert await rig.inbox().texts() == list("abc")


# --- in flight, counts and closing ------------------------------------------------------------------------


async def test_what_is_in_flight_is_everything_but_the_done_and_the_scheduled() -> None:
    rig = Rig()
    rig.put("later", after=5)
    assert rig.in_flight.count == 0
    rig.put("a", "b", "c")
    assert rig.in_flight.count == 3
    inbox = rig.inbox(credit=3, window=False)
    for end in (lambda d: d.settle("handled"), lambda d: d.redeliver(20), lambda d: d.dead_letter("bad", "bad")):
        await end(await inbox.take())
    assert rig.in_flight.count == 1, "what waits for redelivery is in flight"
    await rig.clock.advance(5)
    assert rig.in_flight.count == 2


async def test_waiting_for_nothing_in_flight_ends_with_the_last_one() -> None:
    rig = Rig()
    rig.put("a", "b")
    inbox = rig.inbox()
    waiting = asyncio.ensure_future(rig.in_flight.landed())
    await (await inbox.take()).settle("handled")
    await rest()
    assert not waiting.done()
    await (await inbox.take()).settle("skipped")
    await asyncio.wait_for(waiting, 5)
    assert rig.queue.settled == {"handled": 1, "skipped": 1, "filtered": 0, "dead": 0, "duplicate": 0}


async def test_a_dead_letter_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.put("old", ttl=1)
    with caplog.at_level(logging.WARNING, "faregate.broker"):
        await rig.clock.advance(1)
    [record] = caplog.records
    assert "is a dead letter (expired)" in record.getMessage()


async def test_activity_grows_with_every_enqueue_and_every_acquisition() -> None:
    rig = Rig()
    before = rig.queue.activity
    rig.put("x")
    assert rig.queue.activity == before + 1
    await rig.inbox().take()
    assert rig.queue.activity == before + 2


async def test_a_closed_queue_delivers_nothing_and_leaves_no_timer() -> None:
    rig = Rig()
    rig.put("a", "b")
    inbox = rig.inbox(credit=1)
    held = await inbox.take()
    rig.queue.close()
    await rest()
    assert inbox.got == []
    assert await refused(lambda: held.settle("handled"))
    assert rig.clock.next_timer() is None


# --- several keys -------------------------------------------------------------------------------------------


async def test_an_entry_with_several_keys_waits_for_all_of_them_and_those_behind_it_wait_for_it() -> None:
    rig = Rig()
    rig.put("a1", key="a")
    rig.put("b1", key="b")
    rig.put("ab", key="a+b")
    rig.put("a2", key="a")
    rig.put("bc", key="c+b")
    rig.put("c1", key="c")
    rig.put("d1", key="d")
    inbox = rig.inbox()
    assert await inbox.texts() == ["a1", "b1", "d1"]
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["b1", "d1"], "b is not free"
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["d1", "ab"]
    await inbox.take()
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["a2", "bc"]
    await inbox.take()
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["c1"]


@pytest.mark.parametrize("strict", [True, False])
async def test_an_entry_that_waits_for_redelivery_keeps_all_its_keys_waiting_if_strict(strict: bool) -> None:
    rig = Rig(strict=strict)
    rig.put("ab", key="a+b")
    rig.put("a", key="a")
    rig.put("bc", key="b+c")
    inbox = rig.inbox()
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == ([] if strict else ["a", "bc"])
    await rig.clock.advance(10)
    assert await inbox.texts() == (["ab"] if strict else ["a", "bc"])
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == (["a", "bc"] if strict else ["bc"])


async def test_two_that_were_scheduled_against_their_order_do_not_wait_for_each_other() -> None:
    """The later one waits for b and has a; then the earlier one comes, and wants both."""
    rig = Rig()
    rig.put("b", key="b")
    rig.put("earlier", key="a+b", after=5)
    rig.put("later", key="b+a")
    inbox = rig.inbox()
    busy = await inbox.take()
    await rig.clock.advance(5)
    await busy.settle("handled")
    assert await inbox.texts() == ["earlier"]
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["later"]


async def test_one_that_expires_while_it_waits_for_its_keys_lets_go_of_those_that_it_has() -> None:
    rig = Rig()
    rig.put("b", key="b")
    rig.put("ab", key="a+b", ttl=5)
    rig.put("a", key="a")
    inbox = rig.inbox()
    busy = await inbox.take()
    assert await inbox.texts() == []
    await rig.clock.advance(5)
    assert rig.dead == [("ab", "expired")]
    assert await inbox.texts() == ["a"]
    await busy.settle("handled")
    rig.put("b2", key="b")
    assert await inbox.texts() == ["a", "b2"]


async def test_one_that_was_restored_with_some_of_its_keys_lets_earlier_ones_pass() -> None:
    """Of what waited for redelivery when the process ended, another has a key: it must not hold on to the rest."""
    rig = Rig()

    def message(text: str, key: str, **times: float) -> Envelope:
        return Envelope(publication_id=text, type="Noted", body=text.encode(), headers={"key": key}, **times)

    now = rig.clock.time()
    rig.queue.restore_entry(0, message("a", "a"), Returning(0, 0, 0, None))
    rig.queue.restore_entry(1, message("c", "c"), Returning(1, 0, 0, None))
    rig.queue.restore_entry(2, message("earlier", "b+c", deliver_at=now + 5), Returning(2, 0, 0, None))
    rig.queue.restore_entry(3, message("restored", "a+b+c"), Returning(3, 1, 1, now + 10))
    inbox = rig.inbox()
    busy, other = await inbox.take(), await inbox.take()
    await rig.clock.advance(5)
    await other.settle("handled")
    assert await inbox.texts() == [], "b is held by the restored one"
    await rig.clock.advance(5)
    assert await inbox.texts() == ["earlier"]
    await (await inbox.take()).settle("handled")
    await busy.settle("handled")
    assert await inbox.texts() == ["restored"]
