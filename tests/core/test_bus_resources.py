"""Resources that live as long as the bus, and the functions that a node starts and stops with."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.core import life


class OrderPlaced(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


class Settings:
    pass


class Client:
    def __init__(self, name: str = "client") -> None:
        self.name = name


class Session:
    pass


def bus_of(*nodes: fg.Node) -> fg.Bus:
    return fg.Bus("memory:", nodes=[fg.Node("shop"), *nodes], store="memory:")


def living_node(log: list[str], name: str = "billing") -> fg.Node:
    """A node with a client of the bus that is made from settings of the bus; `log` tells their lives."""
    billing = fg.Node(name)

    @billing.provides(scope="bus")
    async def client(settings: Settings) -> AsyncIterator[Client]:
        log.append(f"{name}: make client")
        yield Client(name)
        log.append(f"{name}: release client")

    @billing.provides(scope="bus")
    def settings() -> Iterator[Settings]:
        log.append(f"{name}: make settings")
        yield Settings()
        log.append(f"{name}: release settings")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, client: Client) -> Any:
        log.append(f"{name}: handle {order.order_id} with {client.name}")

    return billing


async def test_made_once_at_the_start_and_released_in_reverse_when_handlers_have_drained() -> None:
    log: list[str] = []
    billing = living_node(log)
    running, finish = asyncio.Event(), asyncio.Event()

    @billing.on(OrderPlaced, source="slow-shop")
    async def wait(order: OrderPlaced, client: Client) -> None:
        running.set()
        await finish.wait()
        log.append("slow handler is done")

    bus = fg.Bus("memory:", nodes=[fg.Node("shop"), fg.Node("slow-shop"), billing], store="memory:")
    async with bus:
        assert log == ["billing: make settings", "billing: make client"]
        for number in ("1", "2"):
            await bus.publish(OrderPlaced(order_id=number), node="shop")
            await bus.idle(10)
        await bus.publish(OrderPlaced(order_id="3"), node="slow-shop")
        await running.wait()
        stopping = asyncio.create_task(bus.stop())
        await asyncio.sleep(0)
        finish.set()
        await stopping
    assert log[2:] == [
        "billing: handle 1 with billing",
        "billing: handle 2 with billing",
        "slow handler is done",
        "billing: release client",
        "billing: release settings",
    ]


@pytest.mark.parametrize("scope", ["message", "bus"])
async def test_every_kind_of_function_provides(scope: Any) -> None:
    class A: ...

    class B: ...

    class C: ...

    class D: ...

    node, released, threads = fg.Node("billing"), list[str](), list[threading.Thread]()

    @node.provides(scope=scope)
    async def a() -> AsyncIterator[A]:
        yield A()
        released.append("a")

    @node.provides(scope=scope)
    def b(a: A) -> Iterator[B]:
        threads.append(threading.current_thread())
        yield B()
        released.append("b")

    @node.provides(scope=scope)
    async def c(b: B) -> C:
        return C()

    @node.provides(scope=scope)
    def d(c: C) -> D:
        threads.append(threading.current_thread())
        return D()

    @node.on(OrderPlaced, source="shop")
    async def handle(order: OrderPlaced, ctx: fg.Context, a: A, b: B, c: C, d: D) -> Any:
        kinds = [type(each).__name__ for each in (a, b, c, d)]
        return Noted(text=" ".join([ctx.type, *kinds]))

    async with fg.testing.bench(node) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="OrderPlaced A B C D")]
        assert (released == ["b", "a"]) is (scope == "message")
    assert released == ["b", "a"]
    assert threading.main_thread() not in threads and len(threads) == 2


async def test_a_plain_generator_of_a_message_is_told_of_the_failure() -> None:
    billing, log = fg.Node("billing"), list[str]()

    @billing.provides
    def session() -> Iterator[Session]:
        try:
            yield Session()
        except OSError as exc:
            log.append(f"failed: {exc}")  # what it swallows here fails all the same

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    def bill(order: OrderPlaced, session: Session) -> None:
        raise OSError("no luck")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert log == ["failed: no luck"]


async def test_every_part_of_a_node_may_take_them_and_a_message_resource_is_made_from_them() -> None:
    log: list[str] = []
    billing = living_node([])

    class Effect: ...

    @billing.provides
    async def session(client: Client) -> AsyncIterator[Session]:
        log.append(f"session from {client.name}")
        yield Session()

    async def before(ctx: fg.Context, call_next: Any, client: Client) -> None:
        log.append(f"before {client.name}")
        await call_next()

    async def after(ctx: fg.Context, call_next: Any, client: Client) -> None:
        log.append(f"after {client.name}")
        await call_next()

    async def outgoing(out: Any, call_next: Any, client: Client) -> None:
        log.append(f"outgoing {client.name}")
        await call_next()

    billing.use(before)
    billing.use(after, after=True)
    billing.use_outgoing(outgoing)

    @billing.interprets(Effect)
    def interpret(effect: Effect, client: Client) -> Any:
        return Noted(text=client.name)

    @billing.on(Noted, source="shop")
    def note(noted: Noted, session: Session, client: Client) -> Any:
        log.append(f"handler {client.name}")
        return Effect()

    async with fg.testing.bench(billing) as bench:
        await bench.publish(Noted(text="in"))
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="billing")]
    assert log == [
        "session from billing",
        "before billing",
        "handler billing",
        "outgoing billing",
        "after billing",
    ]


async def test_two_nodes_that_provide_the_same_class_have_one_each() -> None:
    log: list[str] = []
    async with fg.testing.bench(living_node(log, "billing"), living_node(log, "audit")) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
    assert log[:4] == [
        "billing: make settings",
        "billing: make client",
        "audit: make settings",
        "audit: make client",
    ]
    assert sorted(log[4:6]) == ["audit: handle 1 with audit", "billing: handle 1 with billing"]
    assert log[6:] == [
        "audit: release client",
        "audit: release settings",
        "billing: release client",
        "billing: release settings",
    ]


async def test_what_nobody_asks_for_is_not_made() -> None:
    billing = fg.Node("billing")

    @billing.provides(scope="bus")
    async def client() -> Client:
        raise AssertionError("nobody asked")

    async with bus_of(billing):
        pass


# --- starting ------------------------------------------------------------------------------------------------


async def test_functions_that_a_node_starts_and_stops_with_run_in_order() -> None:
    log: list[str] = []
    billing = living_node(log)

    @billing.on_start
    async def first(client: Client) -> None:
        log.append(f"first, with {client.name}")

    @billing.on_start
    def second() -> None:
        log.append("second")

    @billing.on_stop
    def last(client: Client) -> None:
        log.append(f"last, with {client.name}")

    @billing.on_stop
    async def failing() -> None:
        log.append("failing")
        raise OSError("cannot stop")

    bus = bus_of(billing)
    async with bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.idle(10)
    assert log == [
        "billing: make settings",
        "billing: make client",
        "first, with billing",
        "second",
        "billing: handle 1 with billing",
        "failing",
        "last, with billing",
        "billing: release client",
        "billing: release settings",
    ]


async def test_what_fails_or_hangs_at_the_end_is_logged_and_keeps_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_SECONDS", 1.0)
    log: list[str] = []
    billing = living_node(log)

    @billing.provides(scope="bus")
    async def session(client: Client) -> AsyncIterator[Session]:
        yield Session()
        await asyncio.Event().wait()

    class Twice: ...

    @billing.provides(scope="bus")
    async def twice(session: Session) -> AsyncIterator[Twice]:
        yield Twice()
        yield Twice()

    @billing.on_stop
    async def failing(twice: Twice) -> None:
        raise OSError("cannot stop")

    with caplog.at_level(logging.ERROR):
        async with bus_of(billing):
            pass
    told = [record.getMessage() for record in caplog.records]
    assert [each.partition(" failed at the end")[0] for each in told] == [
        "the function 'failing' that node 'billing' stops with",
        "the provider 'twice' of node 'billing', which makes a Twice for as long as the bus runs,",
        "the provider 'session' of node 'billing', which makes a Session for as long as the bus runs,",
    ]
    assert "cannot stop" in told[0] and "more than once" in told[1] and "TimeoutError" in told[2]
    assert log[-2:] == ["billing: release client", "billing: release settings"]


@pytest.mark.parametrize("what", ["provider", "hook", "nothing", "cancels itself"])
async def test_a_start_that_fails_names_who_failed_and_releases_what_was_made(what: str) -> None:
    log: list[str] = []
    billing = living_node(log)

    @billing.provides(scope="bus")
    async def session(client: Client) -> AsyncIterator[Session]:
        if what == "provider":
            raise ConnectionError("nobody listens")
        if what == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        if what != "nothing":
            yield Session()

    @billing.on_start
    async def warm_up(session: Session) -> None:
        raise ConnectionError("nobody listens")

    @billing.on_stop
    def never() -> None:
        log.append("stopped")

    bus = bus_of(billing)
    with pytest.raises(fg.ResourceFailed) as caught:
        await bus.start()
    who = "the function 'warm_up' that node 'billing' starts" if what == "hook" else "the provider 'session' of node"
    why = {"nothing": "yielded nothing", "cancels itself": "cancelled the task"}.get(what, "nobody listens")
    assert who in str(caught.value) and why in str(caught.value) and caught.value.__cause__ is not None
    assert log == [
        "billing: make settings",
        "billing: make client",
        "billing: release client",
        "billing: release settings",
    ]
    await bus.stop()
    async with bus_of(living_node([])):  # nothing of it is left in the way
        pass


async def test_a_start_that_is_cancelled_releases_what_was_made() -> None:
    log: list[str] = []
    billing = living_node(log)
    making = asyncio.Event()

    @billing.on_start
    async def hang(client: Client) -> None:
        making.set()
        try:
            await asyncio.Event().wait()
        finally:
            log.append("hook ends")

    starting = asyncio.create_task(bus_of(billing).start())
    await making.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert log[2:] == ["hook ends", "billing: release client", "billing: release settings"]
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_when_a_later_step_of_the_start_fails_resources_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    bus = bus_of(living_node(log))

    async def fail() -> None:
        raise OSError("no consumer")

    monkeypatch.setattr(bus._workers[0], "start", fail)
    with pytest.raises(OSError, match="no consumer"):
        await bus.start()
    assert log[2:] == ["billing: release client", "billing: release settings"]


async def test_the_task_that_stops_the_bus_may_be_another_one_than_the_one_that_starts_it() -> None:
    billing, log = fg.Node("billing"), list[str]()

    @billing.provides(scope="bus")
    async def group() -> AsyncIterator[asyncio.TaskGroup]:
        async with asyncio.TaskGroup() as group:
            yield group
        log.append("left")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, group: asyncio.TaskGroup) -> None:
        group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: log.append("ran"))

    bus = bus_of(billing)
    await asyncio.create_task(bus.start())
    await bus.publish(OrderPlaced(order_id="1"), node="shop")
    await bus.idle(10)
    await asyncio.create_task(bus.stop())
    assert log == ["ran", "left"]


async def test_a_resource_that_is_lost_while_the_bus_runs_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    billing, break_it = fg.Node("billing"), asyncio.Event()

    async def background() -> None:
        await break_it.wait()
        raise OSError("the background task failed")

    @billing.provides(scope="bus")
    async def group() -> AsyncIterator[asyncio.TaskGroup]:
        async with asyncio.TaskGroup() as group:
            group.create_task(background())
            yield group

    @billing.on_start
    def use(group: asyncio.TaskGroup) -> None: ...

    async with bus_of(billing) as bus:
        failing = asyncio.create_task(bus.failed())
        break_it.set()
        assert isinstance(await failing, fg.ResourceFailed)
    assert "the background task failed" in caplog.text


async def test_a_handler_that_runs_on_finds_out_that_the_bus_has_stopped() -> None:
    billing = living_node([])
    bus = bus_of(billing)
    async with bus:
        pass
    held = bus._resources["billing"].held[Client]
    with pytest.raises(fg.ConfigurationError, match="'client' of node 'billing' makes it when the bus starts"):
        held.value  # noqa: B018


# --- what is refused -----------------------------------------------------------------------------------------


def test_a_scope_that_is_none() -> None:
    with pytest.raises(fg.ConfigurationError, match="scope is 'message' or 'bus'; got 'process'"):

        @fg.Node("billing").provides(scope="process")  # type: ignore[call-overload, untyped-decorator]
        async def client() -> Client:
            return Client()


def test_a_resource_of_the_bus_takes_no_context() -> None:
    with pytest.raises(fg.WrongSignature, match="outlives every message"):

        @fg.Node("billing").provides(scope="bus")
        async def client(ctx: fg.Context) -> Client:
            return Client()


def test_a_resource_of_the_bus_is_not_made_from_one_of_a_message() -> None:
    billing = fg.Node("billing")

    @billing.provides
    async def session() -> Session:
        return Session()

    @billing.provides(scope="bus")
    async def client(session: Session) -> Client:
        return Client()

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, client: Client) -> None: ...

    with pytest.raises(fg.ConfigurationError, match="as long as the bus from a Session, which is made for each"):
        bus_of(billing)


@pytest.mark.parametrize("which", ["on_start", "on_stop", "after"])
def test_what_runs_outside_of_messages_takes_no_resource_of_a_message(which: str) -> None:
    billing = fg.Node("billing")

    @billing.provides
    async def session() -> Session:
        return Session()

    async def hook(session: Session) -> None: ...
    async def after(ctx: fg.Context, call_next: Any, session: Session) -> None: ...

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None: ...

    if which == "after":
        billing.use(after, after=True)
    else:
        getattr(billing, which)(hook)
    with pytest.raises(fg.WrongSignature, match="asks for a Session, which node 'billing' makes for each message"):
        bus_of(billing)


def test_resources_that_need_each_other() -> None:
    billing = fg.Node("billing")

    @billing.provides(scope="bus")
    async def client(settings: Settings) -> Client:
        return Client()

    @billing.provides(scope="bus")
    async def settings(client: Client) -> Settings:
        return Settings()

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, client: Client) -> None: ...

    with pytest.raises(fg.ConfigurationError, match="need each other: Client -> Settings -> Client"):
        bus_of(billing)


def test_functions_that_a_node_cannot_start_with() -> None:
    billing = fg.Node("billing")

    async def of_a_message(ctx: fg.Context) -> None: ...

    def yielding() -> Iterator[int]:
        yield 1

    with pytest.raises(fg.WrongSignature, match="runs for none"):
        billing.on_start(of_a_message)
    with pytest.raises(fg.WrongSignature, match="make it a resource"):
        billing.on_stop(yielding)


def test_a_provider_without_an_annotation() -> None:
    with pytest.raises(fg.WrongSignature, match="annotated with the class"):

        @fg.Node("billing").provides
        def client():  # type: ignore[no-untyped-def]
            return Client()


async def test_a_stop_that_is_cancelled_while_a_resource_is_released_closes_the_journal(tmp_path: Path) -> None:
    releasing, released = asyncio.Event(), asyncio.Event()
    node = fg.Node("billing")

    @node.provides(scope="bus")
    async def client() -> AsyncIterator[Client]:
        yield Client()
        releasing.set()
        await released.wait()

    @node.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, client: Client) -> None:
        pass

    url = f"journal:{tmp_path}/journal"
    bus = fg.Bus(url, nodes=[node], store=f"sqlite:{tmp_path}/s.db")
    async with asyncio.timeout(30):
        await bus.start()
        stopping = asyncio.create_task(bus.stop())
        await releasing.wait()
        stopping.cancel()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await bus.stop()
        await fg.Bus(url, nodes=[fg.Node("shop")]).prepare()


async def test_a_step_of_closing_that_fails_does_not_keep_the_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    url = f"journal:{tmp_path}/journal"
    bus = fg.Bus(url, nodes=[living_node(log)], store=f"sqlite:{tmp_path}/s.db")
    await bus.start()
    stop = bus._stores.stop

    async def fail(deadline: float) -> None:
        await stop(deadline)
        raise OSError("the store does not end")

    monkeypatch.setattr(bus._stores, "stop", fail)
    with pytest.raises(OSError, match="the store does not end"):
        await bus.stop()
    assert log[-2:] == ["billing: release client", "billing: release settings"]
    await fg.Bus(url, nodes=[fg.Node("shop")]).prepare()
