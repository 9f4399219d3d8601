"""`amqp://…?stream=NAME` as a log: what is appended reaches queues and stream, and views are handed over."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

import faregate as fg
from faregate import ids
from faregate.columns import to_batch
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding
from faregate.ports.schemes import open_log, open_store
from faregate.ports.store import Parked
from faregate.ports.topology import Reading
from faregate.spark.runs.handover import HandedOver, To, hand_over
from faregate.spark.runs.views import bindings_of, take_views
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import Publication
from faregate.transports.rabbitmq.survey import look_at
from faregate.transports.rabbitmq.wire import properties_of
from faregate.transports.rabbitmq_log.exchange import Exchange
from faregate.transports.rabbitmq_log.handover import RabbitmqHandover, _Known
from faregate.transports.rabbitmq_log.log import stream_address
from faregate.transports.rabbitmq_stream.address import Tls
from faregate.transports.rabbitmq_stream.bindings import Bindings, Note
from faregate.transports.rabbitmq_stream.entries import FENCE
from tests.spark import run_shop
from tests.spark.rabbitmq_rig import dead_letters, rabbitmq_shop
from tests.spark.run_rig import Shop

T = TypeVar("T")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with rabbitmq_shop(tmp_path, None) as shop:
        yield shop


def order(shop: Shop, number: int) -> Envelope:
    body = msgspec.json.encode({"order_id": shop.key(number), "number": number, "total": 1})
    return Envelope(f"p{number}", "OrderPlaced", "event", "shop", body, sent_at=time.time())


@pytest.mark.services
def test_what_is_appended_reaches_queues_and_stream_once_by_its_name(shop: Shop) -> None:
    shop.run_bus("billing", "payments")
    log = open_log(shop.url)
    for _ in range(2):
        log.append([order(shop, 0), order(shop, 1)], "a batch")
    log.append([order(shop, 2)])
    assert [envelope.publication_id for _, envelope in log.envelopes()] == ["p0", "p1", "p2"]
    shop.run_bus("billing", "payments")
    shop.check(3)
    shop.check(3, "charges")
    with pytest.raises(fg.Unroutable, match="nobody"):
        log.append([Envelope("c", "ChargeCard", "command", "billing", destination="nobody")], "another")


@pytest.mark.services
def test_what_tasks_staged_is_published_once_with_its_dead_letters(shop: Shop) -> None:
    shop.run_bus("billing", "payments")
    log = open_log(shop.url)
    batches = [to_batch([order(shop, number)], [-1], [0], 0) for number in range(3)]
    letter = DeadLetter.of("counting", order(shop, 7), "permanent", "it is no good", 1.5, queue="counting.x", tries=2)
    staged = [log.stage("query", 0, str(number), [batch]) for number, batch in enumerate(batches)]
    staged.append(log.stage("query", 0, "letters", [[letter]]))
    for _ in range(2):
        open_log(shop.url).commit("query", 0, [staged[2], staged[0], staged[3]], once=True)
    assert [envelope.publication_id for _, envelope in log.envelopes()] == ["p2", "p0"]
    [found] = dead_letters(shop, run_shop.counting)
    assert (found.queue, found.reason, found.error, found.tries, found.at) == (
        "counting.x", "permanent", "it is no good", 2, 1.5,
    )  # fmt: skip
    with pytest.raises(fg.FaregateError, match="was committed before and had 3 messages"):
        log.commit("query", 0, [staged[0]], once=True)


@pytest.mark.services
def test_a_command_to_a_node_that_reads_the_log_is_routable(shop: Shop) -> None:
    shop.run_bus("shop")  # makes the stream
    log = open_log(shop.url)
    command = Envelope("c", "ChargeCard", "command", "billing", b"{}", destination="payments")
    with pytest.raises(fg.Unroutable):
        log.append([command])
    begins = take_views(
        shop.url, bindings_of(run_shop.payments, 1000), has_store=True, handover=False, check=print, check_bound=print
    )
    assert begins == {"payments.ChargeCard": Reading("log", 1, 0, 0)}
    log.append([command])
    [(_, found)] = log.envelopes()
    assert (found.publication_id, found.recipients) == ("c", ("payments",))
    with pytest.raises(fg.ViewTaken, match=r"payments\.ChargeCard is consumed through the log"):
        shop.run_bus("payments")


@pytest.mark.services
def test_a_node_is_handed_over_there_and_back(shop: Shop) -> None:
    def handed_over(to: str) -> tuple[str, int, bool]:
        store = open_store(shop.store, SystemClock())
        [done] = hand_over(run_shop.billing, shop.url, store, to)  # type: ignore[arg-type]
        return done.view, done.epoch, done.changed

    shop.run_bus("billing", "payments")
    shop.place(4)  # they wait in the queue of billing
    assert handed_over("log") == ("log", 1, True)
    assert handed_over("log") == ("log", 1, False)
    with pytest.raises(fg.ViewTaken, match=r"billing\.OrderPlaced\.shop is consumed through the log, the stream log-"):
        shop.run_bus("billing")
    shop.place(2)
    assert handed_over("queue") == ("queue", 2, True)
    shop.place(1)
    shop.run_bus("billing", "payments")
    shop.check(7)
    shop.check(7, "charges")


@pytest.mark.services
async def test_a_node_is_not_handed_over_while_it_is_consumed_or_has_something_parked(shop: Shop) -> None:
    async def refused() -> str:
        with pytest.raises(fg.ConfigurationError) as error:
            await asyncio.to_thread(hand_over, run_shop.billing, shop.url, open_store(shop.store, SystemClock()), "log")
        return str(error.value)

    async with fg.Bus(shop.url, nodes=[run_shop.shop, run_shop.billing, run_shop.payments], store=shop.store):
        assert "somebody consumes billing.OrderPlaced.shop" in await refused()
    store = open_store(shop.store, SystemClock())
    await store.open()
    async with store.transaction() as transaction:
        await transaction.park("billing", [(Parked(ids.root_id(), 0.0, 1, None, 0, order(shop, 0)), None)])
    await store.close()
    assert "1 messages of 'billing' wait in" in await refused()
    assert open_log(shop.url).topology().reading("billing.OrderPlaced.shop").view == "queue"


QUEUE = "billing.OrderPlaced.shop"
PARTITION = f"{QUEUE}.g1-0"


def on_broker(shop: Shop, work: Callable[[RabbitmqQueue], Awaitable[T]]) -> T:
    return Exchange(shop.url).run(work)


def exists(shop: Shop, queue: str) -> bool:
    return on_broker(shop, lambda transport: look_at(transport, queue, "current")).exists


def handed_over(shop: Shop, to: To) -> HandedOver:
    [done] = hand_over(run_shop.billing, shop.url, open_store(shop.store, SystemClock()), to)
    return done


class Killed(BaseException):
    """As if the process had died there."""


def dies_in(monkeypatch: pytest.MonkeyPatch, shop: Shop, to: To, step: str) -> None:
    async def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RabbitmqHandover, step, die)
        handed_over(shop, to)


@pytest.mark.services
def test_a_refused_handover_leaves_the_queue_to_the_bus(shop: Shop) -> None:
    shop.run_bus("billing", "payments")
    stray = Publication("", PARTITION, properties_of(order(shop, 0)), order(shop, 0).body)
    on_broker(shop, lambda transport: transport.put([stray]))  # the stream does not have it
    with pytest.raises(fg.ConfigurationError, match="1 messages wait in billing"):
        handed_over(shop, "log")
    assert not exists(shop, f"{QUEUE}@log")
    shop.run_bus("billing", "payments")
    shop.check(1)


@pytest.mark.services
def test_a_handover_that_died_behind_its_note_is_finished_when_it_is_asked_for_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.run_bus("billing", "payments")
    dies_in(monkeypatch, shop, "log", "_end")
    assert exists(shop, PARTITION)
    shop.place(1)
    assert not handed_over(shop, "log").changed
    assert not exists(shop, PARTITION), "it goes on filling"
    dies_in(monkeypatch, shop, "queue", "_end")
    with pytest.raises(fg.ViewTaken):
        shop.run_bus("billing")
    assert not handed_over(shop, "queue").changed
    shop.run_bus("billing", "payments")
    shop.check(1)


@pytest.mark.services
def test_a_run_finishes_a_handover_that_died(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.run_bus("billing", "payments")
    dies_in(monkeypatch, shop, "log", "_end")
    assert exists(shop, PARTITION)
    bindings = bindings_of(run_shop.billing, 1000)
    take_views(shop.url, bindings, has_store=True, handover=False, check=print, check_bound=print)
    assert not exists(shop, PARTITION)


@pytest.mark.services
def test_a_handover_to_the_queue_brings_what_reaches_the_stream_late(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.run_bus("billing", "payments")
    handed_over(shop, "log")
    put, late = RabbitmqQueue.put, order(shop, 0)

    async def stalled(self: RabbitmqQueue, publications: Sequence[Publication]) -> None:
        """What was routed before the queue was bound is appended only now, before whatever comes next."""
        if publications[0].routing_key == self._stream:
            await put(self, [Publication("", publications[0].routing_key, properties_of(late), late.body)])
        await put(self, publications)

    monkeypatch.setattr(RabbitmqQueue, "put", stalled)
    handed_over(shop, "queue")
    shop.run_bus("billing", "payments")
    shop.check(1)
    log = open_log(shop.url)
    types = [each.type for _, each in log.envelopes()]
    assert (types[0], FENCE in types) == ("OrderPlaced", False), "readers see the fence"
    assert [each for batch in log.batches() for each in batch.column("type").to_pylist()] == types


@pytest.mark.services
def test_a_second_handover_at_the_same_time_is_refused_and_leaves_the_mark(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.run_bus("billing", "payments")
    note = RabbitmqHandover._note
    begun: list[Reading] = []
    said: list[str] = []

    def second(self: RabbitmqHandover, binding: Binding, reading: Reading) -> None:
        begun.append(reading)
        if len(begun) == 1:
            with pytest.raises(fg.ConfigurationError) as error:
                open_log(shop.url).handover().take_log(binding)
            said.append(str(error.value))
        assert exists(shop, f"{QUEUE}@log")
        note(self, binding, reading)

    monkeypatch.setattr(RabbitmqHandover, "_note", second)
    assert handed_over(shop, "log").epoch == 1
    assert said == [f"another process works on {QUEUE} now: wait for it"]


def test_what_a_queue_has_and_the_log_lacks_is_found_by_reading_the_log_once() -> None:
    messages = [Envelope(f"p{number}") for number in range(6)]
    read: list[tuple[int, int]] = []

    class Growing:
        end = 2

        def earliest(self) -> int:
            return 1

        def latest(self) -> int:
            return self.end

        def envelopes(self, start: int, end: int) -> Iterator[tuple[int, Envelope]]:
            read.append((start, end))
            return iter(list(enumerate(messages))[start:end])

    log: Any = Growing()
    known = _Known(log, 0)
    assert known.lacking([messages[1], messages[4], messages[4]]) == [messages[4]]
    log.end = 5
    assert known.lacking([messages[1], messages[4], messages[5]]) == [messages[5]]
    assert read == [(1, 2), (2, 5)]


def test_a_reader_of_the_log_gets_what_is_behind_its_offset_whatever_the_clocks_say() -> None:
    bindings = Bindings("s")
    bindings._apply(50, Note("stock", "OrderPlaced", "event", "shop"))
    reading = Reading("log", 1, 0, 7)
    bindings._apply(100, Note("billing", "OrderPlaced", "event", "shop", reading=reading))
    bindings._apply(101, Note("billing", "OrderPlaced", "event", "shop", reading=Reading("log", 1, 0, 9)))
    message = Envelope("p", "OrderPlaced", "event", "shop")
    assert bindings.topology.reading("billing.OrderPlaced.shop") == reading, "the second of two counts"
    assert bindings.route(message, 90, 6)[1] == ("stock",), "that is its history"
    assert bindings.route(message, 90, 7)[1] == ("stock", "billing"), "appended before the note, by another clock"
    assert bindings.route(message, 100, 8)[1] == ("billing", "stock")
    bindings._apply(200, Note("billing", "OrderPlaced", "event", "shop", bound=False))
    assert bindings.route(message, 200, 9)[1] == ("stock",)


def test_the_address_of_the_stream_follows_from_that_of_the_queues() -> None:
    found = stream_address("amqps://u:p%40@one,two:5673/shop?stream=log&cafile=ca.pem")
    assert (found.host, found.port, found.others) == ("one", 5551, (("two", 5551),))
    assert (found.user, found.password, found.vhost, found.stream) == ("u", "p@", "shop", "log")
    assert found.tls == Tls("ca.pem")
    found = stream_address("amqp://one/?stream=log&stream_port=99")
    assert (found.port, found.amqp_port, found.vhost, found.tls) == (99, 5672, "/", None)
    with pytest.raises(fg.ConfigurationError, match="stream_port=x is no port"):
        stream_address("amqp://one/?stream=log&stream_port=x")
