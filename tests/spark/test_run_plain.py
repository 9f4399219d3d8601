"""The short way through a handler sends what the pipeline sends, field by field."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest.mock import patch

import msgspec
import pyarrow as pa
import pytest

import faregate as fg
from faregate import ids
from faregate.columns import to_batch, to_envelopes
from faregate.message import REPLY_TO, Envelope
from faregate.node.subscription import Subscription
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.topology import Reading
from faregate.spark import id_columns
from faregate.spark.runs import stateless as run_stateless
from faregate.spark.runs.plain import Plain, is_plain
from faregate.spark.runs.rows import Places
from faregate.spark.runs.spec import RunSpec, provide
from faregate.spark.runs.stateless import HandlerFailed, Task


class Asked(fg.Event):
    number: int


class Answered(fg.Event):
    number: int


class Doubted(fg.Event):
    number: int


class Effect:
    """What an interpreter is called with."""


class Note(fg.Command):
    number: int


calls: list[int] = []


def answer(asked: Asked) -> Any:
    calls.append(asked.number)
    kind = asked.number % 10
    if kind == 1:
        return None
    if kind == 2:
        return [Answered(number=asked.number), fg.publish(Doubted(number=asked.number), headers={"why": "unsure"})]
    if kind == 3:
        return fg.send(Note(number=asked.number), to="notes", id_key="note")
    if asked.number == 57:
        return "no message"
    if kind == 4:
        return Doubted(number=asked.number)
    if kind == 5:
        raise fg.Permanent("a five")
    if kind == 6 and calls.count(asked.number) == 1:
        raise RuntimeError("the first try fails")
    return Answered(number=asked.number)


def node(shape: str, **options: Any) -> fg.Node:
    made = fg.Node("answers")

    async def later(asked: Asked) -> Any:
        await asyncio.sleep(0)
        return answer(asked)

    def at_once(asked: Asked) -> Any:
        return answer(asked)

    made.on(Asked, source="asking", retry=fg.Retry(1, delay=0.001), **options)(later if shape == "async" else at_once)
    return made


def asked(number: int, **more: Any) -> Envelope:
    given = {
        "publication_id": ids.root_id(1_000_000 + number),
        "type": "Asked",
        "source": "asking",
        "body": msgspec.json.encode(Asked(number=number)),
        "recipients": ("answers",),
        "correlation_id": ids.root_id(5),
        "depth": number,
        **more,
    }
    return Envelope(**given)


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    calls.clear()
    yield


def handled(made: fg.Node, envelopes: list[Envelope], *, plain: bool) -> tuple[list[Envelope], list[DeadLetter], Any]:
    """What is sent and who is dead, with the short way open or closed."""
    calls.clear()
    spec = RunSpec("run", "answers", "", None, None, "json", 100_000, {"answers.Asked.asking": Reading()})
    provide(spec, made)
    batch = to_batch(envelopes, [0] * len(envelopes), range(len(envelopes)), 7_000_000)
    with (
        ThreadPoolExecutor(2) as pool,
        closing(asyncio.new_event_loop()) as loop,
        patch.object(run_stateless, "is_plain", lambda *_: plain),
    ):
        task = Task(spec, pool)
        pieces = run_stateless.runner(loop)(task.handle_batch(0, Places(spec).taken(0, batch)))
    dead = [each for piece in pieces if isinstance(piece, list) for each in piece]
    sent = [each for piece in pieces if not isinstance(piece, list) for each in to_envelopes(piece)]
    return sent, dead, task.counts


def facts(sent: list[Envelope]) -> dict[str, Envelope]:
    return {each.publication_id: msgspec.structs.replace(each, sent_at=0.0) for each in sent}


@pytest.mark.parametrize("shape", ["async", "def"])
def test_both_ways_send_the_same(shape: str) -> None:
    envelopes = [asked(number) for number in range(20)]
    envelopes[8] = asked(8, correlation_id="")
    short = handled(node(shape), envelopes, plain=True)
    assert calls.count(6) == 2, "a failed try counts: the pipeline makes the others"
    assert calls.count(5) == 1
    long = handled(node(shape), envelopes, plain=False)
    assert facts(short[0]) == facts(long[0]) and len(short[0]) == len(facts(short[0])) == 18
    assert {each.envelope.body for each in short[1]} == {each.envelope.body for each in long[1]}
    assert [(each.reason, each.queue) for each in short[1]] == [("permanent", "answers.Asked.asking")] * 2
    assert short[2] == long[2] == {"handled": 18, "filtered": 0, "dead": 2, "sent": 18}


@pytest.mark.parametrize("where", ["number > 3 and number <> 8", "header.wanted = 'yes' or number = 5"])
def test_both_ways_filter_the_same(where: str) -> None:
    envelopes = [asked(number, headers={"wanted": "yes"} if number % 2 else {}) for number in range(20)]
    short = handled(node("async", where=where), envelopes, plain=is_plain(*_first(node("async", where=where))))
    called = set(calls)
    long = handled(node("async", where=where), envelopes, plain=False)
    assert set(calls) == called and len(called) == 20 - short[2]["filtered"]
    assert facts(short[0]) == facts(long[0]) and short[2] == long[2]
    assert {each.envelope.body for each in short[1]} == {each.envelope.body for each in long[1]}
    assert short[2]["filtered"] == {"n": 5, "h": 10}[where[0]]
    assert sum(short[2][name] for name in ("handled", "filtered", "dead")) == 20


def _first(made: fg.Node) -> tuple[Subscription, fg.Node]:
    return next(iter(made.subscriptions.values())), made


@pytest.mark.parametrize("headers", [{}, {"tracestate": "vendor=1"}])
def test_both_ways_hand_on_the_trace_of_the_cause(headers: dict[str, str]) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    envelopes = [asked(8, traceparent=trace, headers=headers), asked(9), asked(12, traceparent=trace, headers=headers)]
    short, long = (handled(node("async"), envelopes, plain=plain)[0] for plain in (True, False))
    assert facts(short) == facts(long)
    assert sorted(str(each.traceparent) for each in short) == [trace] * 3 + ["None"]
    assert sum(each.headers.get("tracestate") == "vendor=1" for each in short) == (3 if headers else 0)


def test_a_result_that_is_no_message_is_judged_as_everywhere() -> None:
    for plain in (True, False):
        sent, [letter], counts = handled(node("async"), [asked(57), asked(8)], plain=plain)
        assert ([each.body for each in sent], counts["handled"], counts["dead"]) == ([b'{"number":8}'], 1, 1)
        assert "which is neither a message nor an effect" in letter.error


def test_a_body_that_cannot_be_read_is_dead_and_the_others_are_not() -> None:
    sent, [letter], _ = handled(node("async"), [asked(7), asked(8, body=b"{"), asked(9)], plain=True)
    assert [each.body for each in sent] == [b'{"number":7}', b'{"number":9}']
    assert (letter.reason, letter.envelope.body) == ("undecodable", b"{")


@pytest.mark.parametrize(
    "unusual",
    [
        {"content_type": "application/msgpack", "body": msgspec.msgpack.encode(Asked(number=7))},
        {"publication_id": "order-7"},
        {"headers": {"a": "b"}, "key_id": None, "expires_at": 4e9},
    ],
)
def test_what_is_unusual_is_handled_too(unusual: dict[str, Any]) -> None:
    sent, dead, _ = handled(node("async"), [asked(7, **unusual), asked(8)], plain=True)
    assert ([each.body for each in sent], dead) == ([b'{"number":7}', b'{"number":8}'], [])


def test_only_what_is_for_the_node_is_taken() -> None:
    others = [
        asked(1, recipients=("else",)),
        asked(2, recipients=()),
        asked(3, source="else"),
        asked(4, type="Answered"),
        asked(5, kind="command", destination="answers"),
    ]
    ours = [asked(0, recipients=("else", "answers")), asked(8)]
    sent, dead, counts = handled(node("async"), [ours[0], *others, ours[1]], plain=True)
    assert ([each.body for each in sent], dead, counts["handled"]) == ([b'{"number":0}', b'{"number":8}'], [], 2)


def test_a_subscription_takes_what_went_to_its_node_and_what_was_there_before_it() -> None:
    made = node("async")
    spec = RunSpec(
        "run", "answers", "", None, None, "json", 100_000, {"answers.Asked.asking": Reading(offset=5, history=10)}
    )
    provide(spec, made)
    envelopes = [
        asked(number, recipients=recipients, replay=replay, source=source)
        for number, (recipients, replay, source) in enumerate(
            (recipients, replay, source)
            for recipients in ((), ("answers",), ("a", "b"), ("a", "answers", "answers"))
            for replay in (0, 1)
            for source in ("asking", "else")
        )
    ]
    batch = to_batch(envelopes, [0] * len(envelopes), range(len(envelopes)), 7_000_000)
    # 4 came before the view began; 8 went to others before the node was known, and 10 is the like, replayed.
    assert Places(spec).taken(0, batch).column("offset").to_pylist() == [6, 8, 12, 14]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_a_handler_that_cancels_the_task_it_runs_in_has_failed_and_no_other(waits: bool, plain: bool) -> None:
    made = fg.Node("answers")

    @made.on(Asked, source="asking", retry=None)
    async def reply(asked: Asked) -> Answered:
        if asked.number == 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        if waits:
            await asyncio.sleep(0)
        return Answered(number=asked.number)

    sent, [letter], counts = handled(made, [asked(number) for number in range(5)], plain=plain)
    assert sorted(each.body for each in sent) == [b'{"number":%d}' % number for number in (0, 1, 3, 4)]
    assert letter.envelope.body == asked(2).body
    assert "cancelled the task that it runs in" in letter.error
    assert counts == {"handled": 4, "filtered": 0, "dead": 1, "sent": 4}


@pytest.mark.parametrize("plain", [True, False], ids=["short", "long"])
@pytest.mark.parametrize("where", ["async", "function", "interpreter"])
def test_a_handler_that_leaves_the_program_makes_a_dead_letter(plain: bool, where: str) -> None:
    made = fg.Node("answers")

    def leave(asked: Asked) -> Any:
        if asked.number == 2 and where != "interpreter":
            sys.exit(4)
        return Answered(number=asked.number) if asked.number != 2 else Effect()

    async def leave_later(asked: Asked) -> Any:
        return leave(asked)

    made.on(Asked, source="asking", retry=None)(leave_later if where == "async" else leave)

    @made.interprets(Effect)
    def interpret(effect: Effect) -> None:
        sys.exit(4)

    sent, [letter], counts = handled(made, [asked(number) for number in range(5)], plain=plain)
    assert sorted(each.body for each in sent) == [b'{"number":%d}' % number for number in (0, 1, 3, 4)]
    assert letter.envelope.body == asked(2).body
    assert "left with SystemExit: 4" in letter.error
    assert counts == {"handled": 4, "filtered": 0, "dead": 1, "sent": 4}


@pytest.mark.parametrize("plain", [True, False], ids=["short", "long"])
def test_a_reply_goes_nowhere_on_spark(plain: bool) -> None:
    made = fg.Node("answers")

    @made.on(Asked, source="asking", retry=None)
    async def reply(asked: Asked) -> list[Any]:
        return [fg.reply(Answered(number=0)), Answered(number=asked.number)]

    sent, dead, counts = handled(made, [asked(1), asked(2, headers={REPLY_TO: "somebody"})], plain=plain)
    assert sorted(each.body for each in sent) == [b'{"number":1}', b'{"number":2}']
    assert not dead and counts == {"handled": 2, "filtered": 0, "dead": 0, "sent": 2}


def test_very_many_failures_are_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stateless, "MOST_DEAD", 3)
    with pytest.raises(HandlerFailed, match=r"3 messages of one task failed, the last is Asked .* more than bad"):
        handled(node("async"), [asked(10 * number + 5) for number in range(4)], plain=True)


def test_very_many_that_expired_are_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_stateless, "MOST_DEAD", 3)
    _, dead, counts = handled(node("async", expires=60), [asked(10 * n) for n in range(8)], plain=False)
    assert [each.reason for each in dead] == ["expired"] * 8 and not calls
    assert counts == {"handled": 0, "filtered": 0, "dead": 8, "sent": 0}


@pytest.mark.parametrize("plain", [True, False], ids=["short", "long"])
@pytest.mark.parametrize("error", [RuntimeError, fg.Permanent])
def test_a_dead_letter_says_that_its_message_was_tried(error: type[Exception], plain: bool) -> None:
    made = fg.Node("answers")

    @made.on(Asked, source="asking", retry=fg.Retry(2, delay=0.001))
    async def fail(asked: Asked) -> None:
        calls.append(asked.number)
        raise error("always")

    _, [letter], _ = handled(made, [asked(1)], plain=plain)
    assert letter.tries == 1, "one delivery, however often its handler ran in it"
    assert len(calls) == (3 if error is RuntimeError else 1)


class NoDoubts:
    """JSON for all but one class."""

    content_type = "application/json"

    def encoder(self, cls: type) -> Any:
        if cls is Doubted:
            raise LookupError("there is no schema for Doubted")
        return msgspec.json.encode

    def decoder(self, cls: type) -> Any:
        return msgspec.json.Decoder(cls).decode


def test_an_event_that_cannot_be_encoded_takes_no_other_events_place() -> None:
    """A codec that has no encoder for a class fails for each of its events, not for the first alone."""
    made = fg.Node("answers")

    @made.on(Asked, source="asking", retry=fg.Retry(0))
    def answer(asked: Asked) -> object:
        return Answered(number=asked.number) if asked.number in (0, 3) else Doubted(number=asked.number)

    [subscription] = made.subscriptions.values()
    plain = Plain(subscription, NoDoubts(), 1 << 20, {})
    batch = to_batch([asked(number) for number in range(4)], [-1] * 4, range(4), 0)
    decode = plain.decoder(batch)
    assert decode is not None
    done = asyncio.run(plain.handle(batch, decode, 1.0))
    assert [row for row, _ in done.failed] == [1, 2]
    assert done.batch.column("type").to_pylist() == ["Answered", "Answered"]


ROOT = "01a1e26d-faf0-7f87-b677-4a779ce498ef"


def test_ids_made_for_many_are_those_made_for_one() -> None:
    for publication in (ids.root_id(), "order-7", ids.idempotent_id("a", "B", "c"), "é" * 40):
        assert ids.message_ids("answers")(publication) == ids.message_id(publication, "answers")


def test_ids_of_columns_are_those_of_messages() -> None:
    roots = [ids.root_id(1_000_000 + number) for number in range(300)]
    causes = [ids.message_id(root, "é-node") for root in roots]
    column = pa.array(["no id at all", *roots, ""], pa.string()).slice(1, 300)
    assert id_columns.are_ids(column)
    made = id_columns.message_ids(id_columns.from_arrow(column), "é-node")
    assert id_columns.to_arrow(made).to_pylist() == causes
    place: dict[str, Any] = {"node": "n", "handler": "hé", "type": "T", "slot": 3}
    made = id_columns.publication_ids(id_columns.from_arrow(column), made, **place)
    assert id_columns.to_arrow(made).to_pylist() == [
        ids.publication_id(correlation_id=root, causation_id=cause, **place)
        for root, cause in zip(roots, causes, strict=True)
    ]


@pytest.mark.parametrize("odd", [None, "", "x" * 36, "G" + ROOT[1:], "-" + ROOT[1:]])
def test_what_is_no_id_is_no_row_of_a_column(odd: str | None) -> None:
    assert not id_columns.are_ids(pa.array([ids.root_id(), odd], pa.string()))
