"""Bad input: a dead letter with the reason and the next message goes on; errors at publish are clear."""

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faregate as fg

GOOD = b'{"name": "good", "amount": 1}'


class Job(fg.Command):
    name: str
    amount: int = 0


class Placed(fg.Event):
    name: str


def raw(**changes: Any) -> fg.Envelope:
    """A command to `worker` as a foreign system would send it; `changes` break it."""
    fields: dict[str, Any] = {
        "publication_id": fg.ids.root_id(),
        "type": "Job",
        "kind": "command",
        "source": "abroad",
        "destination": "worker",
        "content_type": "application/json",
        "body": GOOD,
    }
    return fg.Envelope(**{**fields, **changes})


def worker(handled: list[str]) -> fg.Node:
    node = fg.Node("worker")

    @node.on(Job, order=fg.Serial())
    async def work(job: Job) -> None:
        handled.append(job.name)

    return node


async def dead_letter_of(envelope: fg.Envelope) -> Any:
    """The one dead message after `envelope` and a good one; checks that the good one was handled."""
    handled: list[str] = []
    async with asyncio.timeout(30), fg.testing.bench(worker(handled)) as bench:
        start = bench.clock.time()
        await bench.deliver(envelope)
        await bench.deliver(raw())
        await bench.settle()
        assert handled == ["good"]
        assert bench.clock.time() - start < 1, "dead at once, without redelivery"
        outcomes = bench.outcomes()
        assert (outcomes["handled"], outcomes["dead"]) == (1, 1)
        [dead] = bench.dead_letters()
    assert dead.node == "worker"
    return dead


async def test_a_well_formed_foreign_message_is_handled() -> None:
    handled: list[str] = []
    async with fg.testing.bench(worker(handled)) as bench:
        await bench.deliver(raw(body=b'{"name": "abroad", "new_field": [1, 2]}'))
        await bench.settle()
        assert bench.dead_letters() == []
    assert handled == ["abroad"]


async def test_a_foreign_message_without_correlation_is_correlated_by_its_own_id() -> None:
    seen: list[tuple[str, str, str]] = []
    node = fg.Node("worker")

    @node.on(Job)
    async def work(job: Job, ctx: fg.Context) -> None:
        seen.append((ctx.correlation_id, ctx.publication_id, ctx.message_id))

    async with fg.testing.bench(node) as bench:
        await bench.deliver(raw())
        await bench.settle()
    correlation_id, publication_id, message_id = seen[0]
    assert correlation_id in (publication_id, message_id)
    assert correlation_id


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b'{"name": 7}',
        b'{"amount": 1}',
        b'{"name": "x", "amount": "many"}',
        b"[" * 200_000,
        b'{"name": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=[
        "empty",
        "cut off",
        "no json",
        "no text",
        "list",
        "null",
        "wrong type",
        "field missing",
        "wrong number",
        "unclosed depth",
        "depth",
    ],
)
async def test_an_undecodable_body_is_a_dead_letter_and_the_next_message_goes_on(body: bytes) -> None:
    dead = await dead_letter_of(raw(body=body))
    assert dead.reason == "undecodable"
    assert dead.error
    assert bytes(dead.envelope.body) == body


async def test_an_unknown_content_type_is_undecodable() -> None:
    dead = await dead_letter_of(raw(content_type="application/x-pickle"))
    assert dead.reason == "undecodable"
    assert "application/x-pickle" in dead.error


async def test_an_unknown_content_encoding_is_undecodable() -> None:
    dead = await dead_letter_of(raw(content_encoding="middle-out"))
    assert dead.reason == "undecodable"
    assert "middle-out" in dead.error


@pytest.mark.parametrize("encoding", ["gzip", "zlib", "deflate", "zstd"])
async def test_a_body_that_lies_about_its_compression_is_undecodable(encoding: str) -> None:
    dead = await dead_letter_of(raw(content_encoding=encoding))
    assert dead.reason == "undecodable"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zlib", zlib.compress)])
async def test_a_small_body_that_inflates_without_bound_is_refused(encoding: str, pack: Any) -> None:
    bomb = b'{"name": "bomb"' + b" " * 300_000_000 + b"}"  # valid once inflated
    dead = await dead_letter_of(raw(content_encoding=encoding, body=pack(bomb)))
    assert dead.reason == "undecodable"


async def test_an_unknown_type_is_a_dead_letter_by_name() -> None:
    dead = await dead_letter_of(raw(type="NobodyKnows"))
    assert dead.reason == "unknown-type"
    assert "NobodyKnows" in dead.error


async def test_a_message_without_an_id_is_a_dead_letter() -> None:
    dead = await dead_letter_of(raw(publication_id=""))
    assert dead.reason == "missing-properties"
    assert "id" in dead.error


async def test_a_message_without_a_type_is_a_dead_letter() -> None:
    dead = await dead_letter_of(raw(type=""))
    assert dead.reason in ("missing-properties", "unknown-type")


@settings(max_examples=50, deadline=None)
@given(bodies=st.lists(st.binary(max_size=60), max_size=5))
def test_whatever_the_bodies_are_every_message_is_accounted_for(bodies: list[bytes]) -> None:
    async def scenario() -> None:
        handled: list[str] = []
        async with asyncio.timeout(30), fg.testing.bench(worker(handled)) as bench:
            for body in bodies:
                await bench.deliver(raw(body=body))
            await bench.deliver(raw())
            await bench.settle()
            outcomes = bench.outcomes()
            assert handled[-1] == "good"
            assert outcomes["handled"] + outcomes["dead"] == len(bodies) + 1
            assert outcomes["dead"] == len(bench.dead_letters())

    asyncio.run(scenario())


@pytest.mark.parametrize("target", ["worker", "nowhere"])
async def test_a_command_nobody_handles_is_unroutable_at_publish(target: str) -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), fg.Node("worker")]) as bus:
        with pytest.raises(fg.Unroutable) as caught:
            await bus.send(Job(name="x"), to=target, node="boss")
        await bus.idle(timeout=30)
        assert await bus.dead_letters() == []
    assert "Job" in str(caught.value)
    assert target in str(caught.value)


async def test_an_event_without_subscribers_is_fine() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss")]) as bus:
        assert await bus.publish(Placed(name="x"), node="boss")
        await bus.idle(timeout=30)
        assert await bus.dead_letters() == []


async def test_an_oversize_message_is_refused_at_publish_and_the_bus_goes_on() -> None:
    handled: list[str] = []
    nodes = [fg.Node("boss"), worker(handled)]
    async with fg.Bus("memory:", nodes=nodes, max_message_bytes=1_000) as bus:
        with pytest.raises(fg.MessageTooLarge) as caught:
            await bus.send(Job(name="x" * 2_000), to="worker", node="boss")
        await bus.send(Job(name="small"), to="worker", node="boss")
        await bus.idle(timeout=30)
    assert handled == ["small"]
    assert "Job" in str(caught.value)
    assert "1000" in str(caught.value).replace(",", "").replace("_", "")


async def test_an_oversize_message_among_many_publishes_none_of_them() -> None:
    handled: list[str] = []
    node = fg.Node("worker")

    @node.on(Placed, source="boss")
    async def work(placed: Placed) -> None:
        handled.append(placed.name)

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], max_message_bytes=1_000) as bus:
        with pytest.raises(fg.MessageTooLarge):
            await bus.publish_many([Placed(name="a"), Placed(name="x" * 2_000)], node="boss")
        await bus.idle(timeout=30)
    assert handled == []


async def test_an_oversize_output_is_not_lost_in_silence() -> None:
    node = fg.Node("worker")

    @node.on(Placed, source="boss", retry=None, redeliver=None)
    async def work(placed: Placed) -> Any:
        return Placed(name="x" * 2_000)

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], max_message_bytes=1_000) as bus:
        await bus.publish(Placed(name="a"), node="boss")
        await bus.idle(timeout=30)
        [dead] = await bus.dead_letters()
    assert "MessageTooLarge" in dead.error


@pytest.mark.parametrize("thing", [42, "text", {"name": "x"}, None, Placed, Job(name="x")])
async def test_what_is_no_event_cannot_be_published(thing: Any) -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss")]) as bus:
        with pytest.raises(fg.FaregateError):
            await bus.publish(thing, node="boss")


async def test_an_event_cannot_be_sent() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), worker([])]) as bus:
        with pytest.raises(fg.FaregateError):
            await bus.send(Placed(name="x"), to="worker", node="boss")  # type: ignore[arg-type]


async def test_publishing_for_a_node_that_is_not_on_the_bus_is_refused_by_name() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss")]) as bus:
        with pytest.raises(fg.FaregateError, match="stranger"):
            await bus.publish(Placed(name="x"), node="stranger")


async def test_the_publishing_node_must_be_named_when_there_are_several() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), fg.Node("clerk")]) as bus:
        with pytest.raises(fg.ConfigurationError, match="node"):
            await bus.publish(Placed(name="x"))
