"""How many messages are handled together, by how long they take."""

import pytest

from faregate.core import pace
from faregate.core.pace import BATCH_LIMIT, Pace


class Clocks:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr(pace, "perf_counter", lambda: self.now)
        monkeypatch.setattr(pace, "thread_time", lambda: self.used)

    def batch(self, subject: Pace, seconds: float, *, used: float = 0.0, beside: int = 1) -> int:
        """A full batch whose messages take so long each; how many it had."""
        size = subject.batch
        started = subject.start()
        self.now += size * seconds
        self.used += size * used
        subject.note(started, size, 0.0, beside)
        return size


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def test_the_first_batch_is_one_message_and_fast_ones_fill_a_batch_soon(clocks: Clocks) -> None:
    subject = Pace(0.05)
    sizes = [clocks.batch(subject, seconds) for seconds in (0.003, *[0.0001] * 5)]
    assert sizes[0] == 1 and sizes[-1] == BATCH_LIMIT


def test_slow_messages_come_one_at_a_time(clocks: Clocks) -> None:
    subject = Pace(0.05)
    assert {clocks.batch(subject, 0.04) for _ in range(20)} == {1}


def test_messages_that_became_slow_are_noticed_with_the_next_batch_and_fast_ones_again_soon(clocks: Clocks) -> None:
    subject = Pace(0.05)
    for _ in range(300):
        clocks.batch(subject, 0.0001)
    clocks.batch(subject, 0.01)
    clocks.batch(subject, 0.01)
    assert subject.batch <= 10
    for _ in range(6):
        clocks.batch(subject, 0.0001)
    assert subject.batch == BATCH_LIMIT


def test_the_processor_time_of_several_batches_is_shared_by_them(clocks: Clocks) -> None:
    alone, beside = Pace(0.05), Pace(0.05)
    for _ in range(10):
        clocks.batch(alone, 0.001, used=0.001)
        clocks.batch(beside, 0.001, used=0.001, beside=5)
    assert beside.batch > 4 * alone.batch


def test_of_batches_at_work_together_one_of_so_many_is_measured(clocks: Clocks) -> None:
    subject, measured = Pace(0.05), 0
    for _ in range(1000):
        started = subject.start()
        measured += started[1] is not None
        clocks.now += 0.0015
        subject.note(started, 1, 0.0, 100)
    assert 10 <= measured <= 11
    assert subject.batch == 33
