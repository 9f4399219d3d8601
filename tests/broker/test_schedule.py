"""The schedule: alarms in order of time, one timer, cancelled ones forgotten, a wall clock that jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faregate.broker.schedule import Schedule
from faregate.testing import FakeClock


def made() -> tuple[FakeClock, Schedule, list[str]]:
    clock = FakeClock()
    return clock, Schedule(clock), []


def timers(clock: FakeClock) -> int:
    return sum(timer.callback is not None for _, _, timer in clock._timers)


def test_alarms_ring_in_order_of_time_then_of_asking() -> None:
    clock, schedule, rung = made()
    for name, seconds in (("late", 9), ("first", 3), ("second", 3), ("early", 1)):
        schedule.at(clock.time() + seconds, rung.append, name)
    clock.jump(3)
    assert rung == ["early", "first", "second"]
    clock.jump(6)
    assert rung[-1] == "late"
    assert len(schedule) == 0


def test_an_alarm_does_not_ring_before_its_time_nor_twice() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() + 5, rung.append, "x")
    clock.jump(4)
    assert rung == []
    clock.jump(1)
    clock.jump(100)
    assert rung == ["x"]


def test_a_time_in_the_past_rings_at_once() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() - 5, rung.append, "x")
    clock.jump(0)
    assert rung == ["x"]


def test_a_cancelled_alarm_is_silent_and_cancelling_it_again_changes_nothing() -> None:
    clock, schedule, rung = made()
    alarm = schedule.at(clock.time() + 5, rung.append, "x")
    schedule.at(clock.time() + 6, rung.append, "y")
    for _ in range(3):
        schedule.cancel(alarm)
    schedule.cancel(None)
    assert len(schedule) == 1
    clock.jump(10)
    assert rung == ["y"]
    schedule.cancel(alarm)
    assert len(schedule) == 0


def test_cancelling_an_alarm_that_rang_changes_nothing() -> None:
    clock, schedule, _ = made()
    alarm = schedule.at(clock.time() + 1, lambda _: None, "x")
    clock.jump(1)
    schedule.cancel(alarm)
    assert len(schedule) == 0
    schedule.at(clock.time() + 1, lambda _: None, "y")
    assert len(schedule) == 1


def test_one_timer_serves_all_alarms_and_none_is_left_when_all_have_rung() -> None:
    clock, schedule, rung = made()
    for seconds in range(50, 0, -1):
        schedule.at(clock.time() + seconds, rung.append, str(seconds))
    assert timers(clock) == 1
    clock.jump(50)
    assert len(rung) == 50
    assert timers(clock) == 0


def test_an_alarm_that_is_set_by_an_alarm_rings() -> None:
    clock, schedule, rung = made()

    def again(name: str) -> None:
        rung.append(name)
        if len(rung) < 4:
            schedule.at(clock.time() + (len(rung) % 2), again, name)

    schedule.at(clock.time() + 1, again, "x")
    clock.jump(10)
    assert rung == ["x"] * 4
    assert timers(clock) == 0


def test_an_alarm_cancelled_by_another_of_the_same_moment_is_silent() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() + 1, lambda _: schedule.cancel(second), None)
    second = schedule.at(clock.time() + 1, rung.append, "x")
    clock.jump(1)
    assert rung == []
    assert len(schedule) == 0


def test_a_wall_clock_that_jumps_is_noticed_within_a_minute() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() + 7200, rung.append, "x")
    clock.set_wall(7200)
    clock.jump(60)
    assert rung == ["x"]


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_duration_passes_whatever_the_wall_clock_does(jump: float) -> None:
    clock, schedule, rung = made()
    alarm = schedule.after(100, rung.append, "x")
    clock.set_wall(jump)
    assert schedule.wall_time(alarm) == pytest.approx(clock.time() + 100)
    clock.jump(99)
    assert rung == []
    clock.jump(1)
    assert rung == ["x"]


def test_a_wall_time_never_comes_before_the_wall_clock_shows_it() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() + 10, rung.append, "x")
    clock.set_wall(-0.01)  # less than what the heap is sorted anew for
    clock.jump(10)
    assert rung == []
    clock.jump(0.01)
    assert rung == ["x"]


def test_what_is_asked_for_after_the_wall_clock_was_set_forward_is_not_late() -> None:
    clock, schedule, rung = made()
    schedule.at(clock.time() + 7200, rung.append, "x")
    clock.set_wall(3600)
    schedule.at(clock.time() + 1, rung.append, "soon")
    clock.jump(1)
    assert rung == ["soon"]


def test_wall_times_and_durations_of_one_moment_come_in_the_order_of_asking() -> None:
    clock, schedule, rung = made()
    for n in range(10):
        schedule.at(clock.time() + 5, rung.append, 2 * n)
        schedule.after(5, rung.append, 2 * n + 1)
    clock.jump(5)
    assert rung == [*range(20)]


def test_an_alarm_that_fails_does_not_silence_the_others() -> None:
    clock, schedule, rung = made()

    def fail(_: object) -> None:
        raise RuntimeError("on purpose")

    schedule.at(clock.time() + 1, fail, None)
    schedule.at(clock.time() + 1, rung.append, "same moment")
    schedule.at(clock.time() + 5, rung.append, "later")
    for _ in range(10):
        try:
            clock.jump(1)
        except RuntimeError:
            pass
    assert rung == ["same moment", "later"]


def test_a_closed_schedule_rings_nothing_and_leaves_no_timer() -> None:
    clock, schedule, rung = made()
    alarm = schedule.at(clock.time() + 1, rung.append, "x")
    schedule.close()
    assert timers(clock) == 0
    clock.jump(10)
    assert rung == []
    schedule.cancel(alarm)
    assert len(schedule) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=300), st.data())
def test_exactly_the_alarms_that_are_due_and_not_cancelled_ring(
    plan: list[tuple[int, bool]], data: st.DataObject
) -> None:
    clock = FakeClock()
    schedule = Schedule(clock)
    rung: list[int] = []
    start = clock.time()
    alarms = [schedule.at(start + seconds, rung.append, number) for number, (seconds, _) in enumerate(plan)]
    for number, (_, cancelled) in enumerate(plan):
        if cancelled:
            schedule.cancel(alarms[number])
    until = data.draw(st.integers(0, 100))
    clock.jump(until)
    expected = [n for n, (seconds, cancelled) in enumerate(plan) if not cancelled and seconds <= until]
    assert rung == sorted(expected, key=lambda n: (plan[n][0], n))
    assert len(schedule) == sum(not cancelled for _, cancelled in plan) - len(rung)
