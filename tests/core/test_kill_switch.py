"""The switch itself, without a bus: when it trips, and which errors are the message's own."""

import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

import faregate as fg
from faregate.core.kill_switch import Switch, Trip
from faregate.testing import FakeClock


def work_of(number: int) -> Any:
    """What the switch needs of a message."""
    publication = SimpleNamespace(publication_id=str(number))
    return SimpleNamespace(
        envelope=publication, delivery=publication, counted=False, goes_back=False, handler_failed=False, on_trial=False
    )


class Bank:
    """A switch, and what it is told."""

    def __init__(self, **policy: Any) -> None:
        self.clock = FakeClock()
        self.successes = self.messages = 0
        self.switch = Switch(fg.KillSwitch(**policy), self.clock, lambda: self.successes)
        self.trips: list[Trip] = []
        self.switch.on_trip = self.trips.append

    def fail(self, times: int = 1, error: BaseException | None = None) -> bool:
        """So many messages fail, each at its only try."""
        return [self._fail(error or OSError("down")) for _ in range(times)][-1]

    def _fail(self, error: BaseException) -> bool:
        self.messages += 1
        self.switch.note(work := work_of(self.messages), error)
        return work.goes_back

    def succeed(self, times: int) -> None:
        self.successes += times


def test_it_trips_at_the_share_of_failures_once_there_is_a_sample() -> None:
    bank = Bank(failures=0.5, sample=20)
    assert not bank.fail(9)
    bank.succeed(10)
    assert not bank.switch.is_open, "19 messages are no sample"
    assert bank.fail()
    assert bank.switch.is_open and bank.switch.trips == 1
    assert bank.switch.reason == "10 of 20 messages failed within 30 s; the last: OSError: down"
    assert bank.switch.since == bank.clock.time()
    [trip] = bank.trips
    assert (trip.seconds, trip.store) == (None, False)


def test_below_the_share_it_stays_closed_however_many_fail() -> None:
    bank = Bank(failures=0.5, sample=20)
    for _ in range(1_000):
        bank.fail()
        bank.succeed(2)
    assert not bank.switch.is_open


def test_an_outage_trips_it_after_a_sample_however_many_succeeded_just_before() -> None:
    bank = Bank(sample=20)
    bank.succeed(1_000_000)
    assert not bank.fail(19)
    assert bank.fail()


def test_failures_leave_the_window_and_successes_with_them() -> None:
    bank = Bank(window=30, sample=20)
    for number in range(100):  # one in two seconds: 15 of them are within the window
        bank.clock.jump(2)
        bank.fail()
        bank.succeed(number % 10 == 0)
    assert not bank.switch.is_open
    bank.succeed(1_000)
    bank.clock.jump(31)
    assert not bank.fail(19)
    assert bank.fail(), "what had succeeded is out of the window, too"


def test_failures_in_a_row_trip_it_however_long_they_take() -> None:
    bank = Bank(window=30, sample=20)
    bank.succeed(5)
    for _ in range(19):
        bank.clock.jump(600)
        assert not bank.fail()
    bank.clock.jump(600)
    assert bank.fail()
    assert bank.switch.reason == "20 calls failed in a row; the last: OSError: down"
    bank.switch.close()
    assert not bank.fail(), "what was counted is forgotten"


def test_closing_forgets_what_was_counted() -> None:
    bank = Bank(sample=2)
    assert bank.fail(2)
    bank.switch.close()
    assert (bank.switch.is_open, bank.switch.reason, bank.switch.since) == (False, None, None)
    assert not bank.fail()
    assert bank.fail()
    assert bank.switch.trips == 2


LOCAL = [
    fg.Permanent("never"), fg.Undecodable("?"), fg.ConfigurationError("wrong"), fg.RetryAfter(5),
    fg.StoreConflict("a deadlock"), fg.CommitUnknown("?"), fg.StaleLock("gone"), TypeError("x"), ValueError("x"),
    KeyError("x"), IndexError(1), AttributeError("x"), ZeroDivisionError(), AssertionError(), NameError("x"),
    UnicodeDecodeError("utf-8", b"", 0, 1, "x"), NotImplementedError(), RecursionError(), ImportError("x"),
    sqlite3.IntegrityError("unique"), sqlite3.ProgrammingError("typo"), SystemExit(1),
    ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("", [KeyError("x")])]),
]  # fmt: skip
GLOBAL = [
    OSError("x"), ConnectionResetError("x"), TimeoutError(), RuntimeError("x"), Exception("x"), EOFError(),
    sqlite3.OperationalError("disk"), fg.OutcomeUnknown("?"), fg.Transient("?"), MemoryError(),
    ExceptionGroup("tasks", [ValueError("x"), ConnectionResetError("x")]),
]  # fmt: skip


@pytest.mark.parametrize("error", LOCAL, ids=lambda error: type(error).__name__)
def test_a_failure_of_the_message_itself_never_trips_it(error: BaseException) -> None:
    bank = Bank(sample=1)
    assert not bank.fail(100, error)
    assert not bank.switch.is_open and not bank.switch.blames(error)


@pytest.mark.parametrize("error", GLOBAL, ids=lambda error: type(error).__name__)
def test_any_other_failure_counts(error: BaseException) -> None:
    assert Bank(sample=3).fail(3, error)


def test_permanent_and_wrong_configuration_never_count_even_if_asked_for() -> None:
    bank = Bank(sample=1, counts=(Exception,))
    for error in (fg.Permanent("x"), fg.Expired("x"), fg.ConfigurationError("x"), fg.RetryAfter(1)):
        assert not bank.fail(5, error)
    assert bank.fail(1, ValueError("counts now"))


def test_the_subscription_says_which_errors_count() -> None:
    by_class = Bank(sample=1, counts=ConnectionError)
    assert not by_class.fail(9, TimeoutError())
    assert by_class.fail(1, ExceptionGroup("tasks", [ConnectionResetError(), ConnectionResetError()]))
    by_function = Bank(sample=1, counts=lambda exc: "503" in str(exc))
    assert not by_function.fail(9, RuntimeError("404"))
    assert by_function.fail(1, RuntimeError("503"))


def test_a_filter_that_fails_counts_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def counts(exc: Exception) -> bool:
        raise KeyError("no")

    bank = Bank(sample=1, counts=counts)
    assert not bank.fail(1)
    assert "KillSwitch(counts) failed at OSError" in caplog.text


@pytest.mark.parametrize("share", [0.5, None])
def test_unavailable_trips_it_at_once_and_says_when_to_ask(share: float | None) -> None:
    bank = Bank(failures=share, sample=1_000)
    assert bank.fail(1, fg.Unavailable("the bank is closed", retry_after=7))
    assert bank.trips == [Trip("Unavailable: the bank is closed", 7.0)]
    assert bank.fail(1, OSError("in flight")), "what fails meanwhile goes back, too"
    assert not bank.fail(1, ValueError("its own"))
    assert len(bank.trips) == 1


def test_without_a_share_no_number_of_failures_trips_it() -> None:
    bank = Bank(failures=None, sample=1)
    assert not bank.fail(10_000)


def test_a_store_that_is_away_comes_before_every_other_reason() -> None:
    bank = Bank()
    bank.fail(1, fg.Unavailable("the bank is closed"))
    assert bank.fail(1, fg.StoreUnavailable("the database is gone"))
    assert bank.switch.reason == "StoreUnavailable: the database is gone"
    bank.fail(1, fg.Unavailable("the bank is closed"))
    assert [trip.store for trip in bank.trips] == [False, True]
    assert bank.switch.trips == 1


async def probe() -> bool:
    return True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"failures": 0}, "share"),
        ({"failures": 1.5}, "share"),
        ({"failures": True}, "share"),
        ({"failures": "half"}, "share"),
        ({"sample": 0}, "sample"),
        ({"window": 0}, "window"),
        ({"window": float("inf")}, "window"),
        ({"every": 0}, "every"),
        ({"timeout": -1}, "timeout"),
        ({"counts": "OSError"}, "exception class"),
        ({"counts": ()}, "exception class"),
        ({"counts": int}, "exception class"),
        ({"probe": lambda: True}, "async def"),
        ({"probe": "http://"}, "async def"),
        ({"probe": probe()}, "async def"),
        ({"probe": Bank.__init__}, "async def"),
        ({"probe": type("Probe", (), {"__call__": probe})}, "async def"),
    ],
)
def test_a_switch_that_cannot_work_is_refused_where_it_is_declared(options: dict[str, Any], text: str) -> None:
    try:
        with pytest.raises(fg.ConfigurationError, match=text):
            fg.KillSwitch(**options)
    finally:
        if hasattr(options.get("probe"), "close"):
            options["probe"].close()


def test_a_probe_takes_no_arguments() -> None:
    async def ask(url: str) -> bool:
        return True

    with pytest.raises(fg.ConfigurationError, match=r"without arguments.*url"):
        fg.KillSwitch(probe=ask)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [True, 5, "off", object()])
def test_what_is_no_switch_is_refused_at_the_node_and_at_the_subscription(given: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="node 'shop': kill_switch takes"):
        fg.Node("shop", kill_switch=given)

    class Job(fg.Command):
        n: int

    with pytest.raises(fg.ConfigurationError, match="node 'shop', Job: kill_switch takes"):
        fg.Node("shop").on(Job, kill_switch=given)


def test_a_subscription_has_the_switch_of_its_node_unless_it_has_its_own() -> None:
    class Plain(fg.Command):
        n: int

    class Own(fg.Command):
        n: int

    class Off(fg.Command):
        n: int

    at_node, own = fg.KillSwitch(sample=7, every=3), fg.KillSwitch(sample=9)
    node = fg.Node("shop", kill_switch=at_node)

    def handle(message: Any) -> None: ...

    node.on(Plain)(handle)
    node.on(Own, kill_switch=own)(handle)
    node.on(Off, kill_switch=False)(handle)
    found = {wire: each.kill_switch for (wire, _), each in node.subscriptions.items()}
    assert (found["Plain"], found["Own"]) == (at_node, own)
    assert found["Off"] == fg.KillSwitch(failures=None, every=3)
    assert fg.Node("other").kill_switch == fg.KillSwitch()
    assert fg.Node("third", kill_switch=False).kill_switch.failures is None
