"""What a log promises that is more than a source: a part for each capability of `faregate.ports.log`.

Used like `log_suite`, with the same subjects. `capability_cases(type(log))` names what a log has to pass: a log without
a capability need not pass its part.
"""

from collections.abc import Callable
from typing import Any

from faregate.columns import to_batch
from faregate.errors import BatchDiffers
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import HANDLED, REDELIVER, Appendable, Outlined, Settled, Staging, TwoViews, Waits
from faregate.ports.queue import Binding
from faregate.ports.schemes import members
from faregate.testing.cases import Case, Cases, refused, run_case
from faregate.testing.log_suite import LogSubject, MakeLog, message, texts

CAPABILITY_CASES = Cases[LogSubject]()
_NEEDS: dict[str, tuple[type, ...]] = {}
BINDING = Binding(node="reader", type="Noted", kind="event", source="author")


def needs(*capabilities: type) -> Callable[[Case[LogSubject]], Case[LogSubject]]:
    def note(function: Case[LogSubject]) -> Case[LogSubject]:
        _NEEDS[function.__name__] = capabilities
        return CAPABILITY_CASES.add(function)

    return note


def capability_cases(log: type) -> list[str]:
    """The cases of all capabilities that a log has. One that has half a capability lacks it."""
    return [
        name
        for name, capabilities in _NEEDS.items()
        if all(hasattr(log, member) for each in capabilities for member in members(each))
    ]


async def run_capability_case(name: str, make: MakeLog) -> None:
    """Run one case against a fresh subject."""
    await run_case(CAPABILITY_CASES[name], make)


async def _taken_in(log: Any) -> None:
    assert await log.take_in(), "what was appended was not taken in"


def _batch(*found: Envelope) -> Any:
    return to_batch(found, [-1] * len(found), range(len(found)), 0)


# --- skipping ---------------------------------------------------------------------------------------------------


@needs(Outlined)
async def a_stretch_says_nothing_wrong_of_its_messages(subject: LogSubject) -> None:
    log: Any = subject.reader
    for number in range(5):
        named = {"key": f"key-{number}" if number else None, "correlation_id": f"correlation-{number}"}
        subject.append([message(f"{number}", type=f"Type{number % 2}", source=f"node-{number % 3}", **named)] * 3)
        subject.pass_time(1)
    start, end = log.earliest() + 1, log.latest() - 1
    found = list(log.stretches(start, end))
    edges = [edge for each in found for edge in (each.start, each.end)]
    assert edges == sorted(edges) and start <= edges[0] and edges[-1] <= end, f"the stretches are {found}"
    for batch in log.batches(start, end):
        times = batch.column("time").cast("int64").to_pylist()
        names = ("offset", "type", "source", "key", "correlation_id")
        for (offset, type, source, key, correlation), time in zip(_rows(batch, names), times, strict=True):
            there = [each for each in found if each.start <= offset < each.end]
            assert len(there) == 1, f"offset {offset} is in {there}"
            [own] = there
            assert own.types is None or type in own.types, f"{type} at offset {offset} is not in {own}"
            assert own.sources is None or source in own.sources, f"{source} at offset {offset} is not in {own}"
            assert own.keys is None or key is None or own.keys(key), f"{key} at offset {offset} is denied by {own}"
            assert own.correlations is None or own.correlations(correlation), f"{correlation} is denied by {own}"
            assert own.times is None or own.times[0] <= time <= own.times[1], f"{time} at {offset} is not in {own}"


# --- appending --------------------------------------------------------------------------------------------------


@needs(Appendable)
async def a_name_is_appended_once(subject: LogSubject) -> None:
    log: Any = subject.reader
    log.append([message("a"), message("b")], "one")
    await _taken_in(log)
    log.append([message("again")], "one")
    log.append([message("c")], "two")
    await _taken_in(log)
    assert texts(subject) == ["a", "b", "c"], f"the log has {texts(subject)}"


@needs(Appendable)
async def what_has_no_name_is_new(subject: LogSubject) -> None:
    log: Any = subject.reader
    for text in ("a", "b"):
        log.append([message(text)])
    await _taken_in(log)
    assert sorted(texts(subject)) == ["a", "b"], f"the log has {texts(subject)}"


@needs(Appendable)
async def what_was_appended_waits_or_can_be_read(subject: LogSubject) -> None:
    log: Any = subject.reader
    log.append([message("a")])
    found = [*texts(subject), *(envelope.body.decode() for envelope in log.waiting())]
    assert found == ["a"], f"it waits, or is in the log, as {found}"
    await _taken_in(log)
    assert list(log.waiting()) == [], "it was taken in, and waits"
    assert texts(subject) == ["a"]


# --- staging ----------------------------------------------------------------------------------------------------


@needs(Appendable, Staging)
async def a_commit_takes_what_it_names_in_its_order(subject: LogSubject) -> None:
    log: Any = subject.reader
    first = log.stage("query", 0, "000000-1", [_batch(message("a")), _batch(message("b"))])
    second = log.stage("query", 0, "000001-2", [_batch(message("c"))])
    log.stage("query", 0, "000001-3", [_batch(message("an attempt that nobody chose"))])
    nothing = log.stage("query", 0, "000002-4", [])
    assert (first.rows, first.bytes, nothing.rows, nothing.name) == (2, 2, 0, None)
    log.commit("query", 0, [second, nothing, first], once=True)
    await _taken_in(log)
    assert texts(subject) == ["c", "a", "b"], f"the log has {texts(subject)}"


@needs(Appendable, Staging)
async def a_batch_is_committed_once(subject: LogSubject) -> None:
    log: Any = subject.reader
    for _ in range(2):
        log.commit("query", 7, [log.stage("query", 7, "000000-1", [_batch(message("a"))])], once=True)
        await _taken_in(log)
    log.commit("query", 8, [log.stage("query", 8, "000000-2", [_batch(message("b"))])], once=True)
    log.commit("other", 7, [log.stage("other", 7, "000000-3", [_batch(message("c"))])], once=True)
    await _taken_in(log)
    assert sorted(texts(subject)) == ["a", "b", "c"], f"the log has {texts(subject)}"


@needs(Appendable, Staging)
async def another_batch_of_the_same_number_is_refused(subject: LogSubject) -> None:
    log: Any = subject.reader
    log.commit("query", 0, [log.stage("query", 0, "000000-1", [_batch(message("a"))])], once=True)
    with refused(BatchDiffers, "another batch of that number was passed over: its messages are lost"):
        log.commit("query", 0, [log.stage("query", 0, "000000-2", [_batch(message("longer"))])], once=True)


@needs(Appendable, Staging)
async def what_is_discarded_is_never_read(subject: LogSubject) -> None:
    log: Any = subject.reader
    kept = log.stage("query", 0, "000000-1", [_batch(message("a"))])
    log.discard("query", 0, [log.stage("query", 0, "000000-2", [_batch(message("b"))])])
    log.commit("query", 0, [kept], once=False)
    await _taken_in(log)
    assert texts(subject) == ["a"], f"the log has {texts(subject)}"


@needs(Appendable, Staging, Settled)
async def dead_letters_are_staged_with_the_messages(subject: LogSubject) -> None:
    log: Any = subject.reader
    letter = DeadLetter.of("reader", message("bad"), "failed", "it is bad", 5.0, queue=BINDING.queue, tries=3)
    staged = log.stage("query", 0, "000000-1", [_batch(message("a")), [letter]])
    log.commit("query", 0, [staged], once=True)
    await _taken_in(log)
    found = [each for letters in log.dead_letters(log.earliest()) for each in letters]
    assert [(each.node, each.error, each.envelope.body) for each in found] == [("reader", "it is bad", b"bad")]
    assert texts(subject) == ["a"]


# --- subscriptions ----------------------------------------------------------------------------------------------


async def _bound(subject: LogSubject, *found: str) -> Any:
    log: Any = subject.reader
    with log.handover() as held:
        held.bind(BINDING)
    log.append([message(text) for text in found])
    await _taken_in(log)
    return log


@needs(Appendable, TwoViews)
async def a_subscription_that_is_new_reads_the_log_from_its_beginning(subject: LogSubject) -> None:
    log: Any = subject.reader
    log.append([message("a"), message("b")])
    await _taken_in(log)
    assert log.topology().reading(BINDING.queue).view == "queue", "nobody took the log view"
    with log.handover() as held:
        expected = held.log_reading(BINDING)
        assert held.take_log(BINDING) == expected, "it begins elsewhere than was said"
    reading = log.topology().reading(BINDING.queue)
    assert (reading.view, reading.epoch, reading.offset, reading.history) == ("log", 1, 0, 2), f"it is {reading}"


@needs(Appendable, TwoViews)
async def a_log_view_begins_with_what_waits_in_the_queue(subject: LogSubject) -> None:
    log = await _bound(subject, "a", "b")
    with log.handover() as held:
        assert held.waiting(BINDING) == [0, 1]
        assert held.count(BINDING, 1) == 1
        reading = held.take_log(BINDING)
    assert (reading.view, reading.offset, reading.history) == ("log", 0, 0), f"it is {reading}"
    with log.handover() as held:
        assert held.waiting(BINDING) == [], "both views have the messages"


@needs(Appendable, TwoViews)
async def a_queue_gets_back_what_is_not_done(subject: LogSubject) -> None:
    log = await _bound(subject, "a", "b", "c")
    with log.handover() as held:
        held.take_log(BINDING)
        told: list[int] = []

        def done(messages: Any) -> dict[int, str]:
            told.extend(offset for offset, _ in messages)
            return {1: "handled"}

        reading = held.take_queue(BINDING, 0, done)
    assert told == [0, 1, 2], f"it was asked about {told}"
    assert (reading.view, reading.epoch) == ("queue", 2), f"it is {reading}"
    with log.handover() as held:
        assert held.waiting(BINDING) == [0, 2], f"in the queue waits {held.waiting(BINDING)}"


# --- what became of messages ------------------------------------------------------------------------------------


@needs(Appendable, TwoViews, Settled)
async def what_became_of_messages_is_told(subject: LogSubject) -> None:
    log = await _bound(subject, "a", "b", "c")
    [queue] = [each.number for each in log.topology().queues if each.name == BINDING.queue]
    before = log.parts()
    with log.handover() as held:
        held.take_log(BINDING)
        held.take_queue(BINDING, 0, lambda messages: {0: "handled"}, [Waits(2, 4, 9.5)])
    columns = ("offset", "queue", "outcome", "redeliveries", "time")
    found = [row for part in log.parts() for row in _rows(log.settlements(part), columns)]
    expected = [(0, queue, HANDLED, 0), (2, queue, REDELIVER, 4)]
    assert [row[:4] for row in found] == expected, f"it tells {found}"
    assert found[1][4] == 9.5, "when it is due is not told"
    later = [row for part in before for row in _rows(log.settlements(part), columns)]
    assert later == [], "what was settled after a part was made is told with it"


def _rows(batch: Any, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    return list(zip(*(batch.column(name).to_pylist() for name in columns), strict=True))
