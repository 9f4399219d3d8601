"""Doubt (`core/doubt.py`): who is tried while it may be an outage, and who waits for that."""

import asyncio
from typing import Any

from faregate.core.doubt import Doubt
from faregate.testing import FakeClock


class Delivery:
    """Doubt knows deliveries by what they are, and nothing else of them."""


def doubted(messages: int = 3) -> tuple[Doubt, FakeClock]:
    clock = FakeClock()
    doubt = Doubt(several=3, enough=20, clock=clock, seconds=5)
    for number in range(messages):
        doubt.failed(str(number))
    return doubt, clock


async def waiting(*calls: Any) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(each) for each in calls]
    await settle()
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def done(tasks: list[asyncio.Task[None]]) -> list[bool]:
    return [task.done() for task in tasks]


async def test_one_message_that_fails_again_and_again_is_no_reason_for_doubt() -> None:
    doubt, _ = doubted(0)
    for _ in range(100):
        doubt.failed("the same")
    assert not doubt.is_there and doubt.failures == 100
    first, second = Delivery(), Delivery()
    await asyncio.wait_for(doubt.turn(first), 1)  # type: ignore[arg-type]
    await asyncio.wait_for(doubt.turn(second), 1)  # type: ignore[arg-type]
    assert doubt.witness is None


async def test_one_is_tried_at_a_time_and_the_others_wait_until_it_is_over() -> None:
    doubt, _ = doubted()
    a, b, c, new = Delivery(), Delivery(), Delivery(), Delivery()
    turns = [doubt.turn(a), doubt.turn(b), doubt.turn(c), doubt.turn(new, fresh=True)]  # type: ignore[arg-type]
    tasks = await waiting(*turns)
    assert doubt.witness is a and done(tasks) == [True, False, False, False] and doubt.waiting == 3
    used_up = await waiting(doubt.wait(a))  # type: ignore[arg-type]
    assert doubt.witness is new and done(tasks) == [True, False, False, True], "what has not failed yet tells more"
    doubt.leave(new)  # type: ignore[arg-type]
    await settle()
    assert doubt.witness is b and done(tasks + used_up) == [True, True, False, True, False]
    doubt.over()
    await settle()
    assert all(done(tasks + used_up)) and doubt.witness is None and not doubt.is_there and doubt.failures == 0


async def test_if_nobody_is_left_everybody_goes_on_and_what_failed_still_counts() -> None:
    doubt, _ = doubted()
    a = Delivery()
    tasks = await waiting(doubt.turn(a), doubt.wait(Delivery()))  # type: ignore[arg-type]
    used_up = await waiting(doubt.wait(a))  # type: ignore[arg-type]
    assert all(done(tasks + used_up)) and doubt.witness is None
    assert doubt.is_there and doubt.failures == 3


async def test_those_between_two_tries_are_waited_for_but_not_for_long() -> None:
    doubt, clock = doubted()
    a, b, c = Delivery(), Delivery(), Delivery()
    await waiting(doubt.turn(a))  # type: ignore[arg-type]
    doubt.rest(b)  # type: ignore[arg-type]
    doubt.rest(c)  # type: ignore[arg-type]
    used_up = await waiting(doubt.wait(a))  # type: ignore[arg-type]
    assert done(used_up) == [False] and doubt.witness is None
    turns = await waiting(doubt.turn(b))  # type: ignore[arg-type]
    assert doubt.witness is b and all(done(turns))
    used_up += await waiting(doubt.wait(b))  # type: ignore[arg-type]
    await clock.advance(4.9)
    assert done(used_up) == [False, False], "there is still c"
    await clock.advance(0.2)
    assert all(done(used_up))
    used_up = await waiting(doubt.wait(b))  # type: ignore[arg-type]
    assert done(used_up) == [False]
    doubt.leave(c)  # type: ignore[arg-type]
    await settle()
    assert all(done(used_up)) and doubt.timer is None


async def test_a_witness_that_takes_its_time_is_not_waited_for() -> None:
    doubt, clock = doubted()
    a, b = Delivery(), Delivery()
    tasks = await waiting(doubt.turn(a), doubt.turn(b), doubt.wait(Delivery()))  # type: ignore[arg-type]
    await clock.advance(4.9)
    assert done(tasks) == [True, False, False]
    await clock.advance(0.2)
    assert doubt.witness is b and done(tasks) == [True, True, False]
    await clock.advance(5)
    assert all(done(tasks)) and doubt.witness is None


async def test_who_is_cancelled_while_it_waits_or_just_as_its_turn_comes_holds_up_nobody() -> None:
    doubt, _ = doubted()
    a, b, c, d = (Delivery() for _ in range(4))
    tasks = await waiting(*(doubt.turn(each) for each in (a, b, c, d)))  # type: ignore[arg-type]
    tasks[1].cancel()
    await settle()
    doubt.leave(a)  # type: ignore[arg-type]
    assert doubt.witness is c
    tasks[2].cancel()  # before it learns of it
    await settle()
    assert doubt.witness is d and tasks[3].done() and not tasks[3].cancelled()


async def test_once_enough_calls_have_failed_those_that_failed_come_first_so_that_one_ends() -> None:
    doubt, _ = doubted()
    for number in range(20):
        doubt.failed(str(number))
    a, b, new = Delivery(), Delivery(), Delivery()
    tasks = await waiting(doubt.turn(a), doubt.turn(new, fresh=True), doubt.turn(b))  # type: ignore[arg-type]
    doubt.leave(a)  # type: ignore[arg-type]
    await settle()
    assert doubt.witness is b and done(tasks) == [True, False, True]
    doubt.over()
    await settle()
    assert all(done(tasks))
