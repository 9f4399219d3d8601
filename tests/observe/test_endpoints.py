"""`/metrics`, `/live` and `/ready`: what they answer, and what they refuse."""

import asyncio
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import faregate as fg
from faregate.cli.run import _serve_to_the_end, parse_listen
from faregate.observe import endpoints
from faregate.observe.endpoints import Endpoints
from faregate.testing.clock import FakeClock
from faregate.transports.memory import MemoryTransport
from tests.observe.rig import LONG, OrderPlaced, until

START = 150  # seconds that a new process may take


async def ask(port: int, request: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = (await asyncio.wait_for(reader.read(), LONG)).decode()
    finally:
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def nodes() -> list[fg.Node]:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        pass

    return [shop, billing]


@pytest.mark.parametrize("observed", [True, False], ids=["observed", "not observed"])
async def test_metrics_are_a_page_that_prometheus_reads(observed: bool) -> None:
    observe = fg.observe.Prometheus(CollectorRegistry()) if observed else None
    async with (
        fg.Bus("memory:", nodes=nodes(), observe=observe) as bus,
        fg.observe.serve(bus, port=0) as served,
    ):
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        status, headers, body = await ask(served.port, get("/metrics?x=1"))
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    handled = [s.value for s in families["faregate_messages"].samples if s.labels["outcome"] == "handled"]
    assert handled == [1]
    assert bool(families["faregate_try_seconds"].samples) is observed


async def test_a_process_is_alive_before_it_is_ready_and_while_it_stops() -> None:
    bus = fg.Bus("memory:", nodes=nodes(), store="memory:")
    async with fg.observe.serve(bus, port=0) as served:
        assert (await ask(served.port, get("/live")))[0] == 200
        assert (await ask(served.port, get("/ready")))[::2] == (503, "the bus is new\n")
        async with bus:
            assert (await ask(served.port, get("/ready")))[::2] == (200, "ready\n")
        assert (await ask(served.port, get("/ready")))[::2] == (503, "the bus is stopped\n")
        assert (await ask(served.port, get("/live")))[0] == 200


async def test_a_store_that_does_not_answer_is_not_ready() -> None:
    async with fg.Bus("memory:", nodes=nodes(), store="memory:") as bus, fg.observe.serve(bus, port=0) as served:
        [store] = bus.stores.values()
        with mock.patch.object(type(store), "floor", side_effect=fg.StoreUnavailable("the disk is gone")):
            status, _, body = await ask(served.port, get("/ready"))
    assert status == 503 and "does not answer: StoreUnavailable: the disk is gone" in body


async def test_a_store_is_named_without_folder_and_user(tmp_path: Path) -> None:
    async with fg.Bus("memory:", nodes=nodes(), store=f"sqlite:{tmp_path / 'shop.db'}") as bus:
        [store] = bus.stores.values()
        for url, name in {store.url: "sqlite:shop.db", "postgresql://zoe:***@db/shop": "postgresql://db/shop"}.items():
            error = fg.StoreUnavailable(f"{url} cannot be used")
            floor = mock.patch.object(type(store), "floor", side_effect=error)
            with floor, mock.patch.object(type(store), "url", url):
                assert await bus.unready() == [
                    f"the store {name} does not answer: StoreUnavailable: {name} cannot be used"
                ]


async def test_stores_are_asked_at_the_same_time() -> None:
    asked = 0
    all_asked = asyncio.Event()

    async def floor(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            all_asked.set()
        await all_asked.wait()

    stores = {"shop": "memory:one", "billing": "memory:two"}
    async with fg.Bus("memory:", nodes=nodes(), store=stores) as bus:
        with mock.patch.object(type(next(iter(bus.stores.values()))), "floor", floor):
            assert await bus.unready() == []


async def test_a_connection_that_is_lost_is_not_ready() -> None:
    class Remote(MemoryTransport):
        is_connected = True

    transport = Remote()
    async with fg.Bus(transport, nodes=nodes()) as bus, fg.observe.serve(bus, port=0) as served:
        assert (await ask(served.port, get("/ready")))[0] == 200
        transport.is_connected = False
        assert (await ask(served.port, get("/ready")))[::2] == (503, "there is no connection to Remote\n")
        with mock.patch.object(bus, "url", "amqp://zoe:***@broker/shop"):
            assert await bus.unready() == ["there is no connection to amqp://broker/shop"]


async def test_work_that_stands_still_is_not_ready() -> None:
    clock = FakeClock()
    shop, billing = fg.Node("shop"), fg.Node("billing")
    begun, go_on = asyncio.Event(), asyncio.Event()

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        begun.set()
        await go_on.wait()

    transport = MemoryTransport(clock=clock)
    bus = fg.Bus(transport, nodes=[shop, billing], clock=clock, stall_seconds=60)
    async with bus, fg.observe.serve(bus, port=0) as served:
        await bus.publish(OrderPlaced(order_id="17"))
        await asyncio.wait_for(begun.wait(), LONG)
        assert (await ask(served.port, get("/ready")))[0] == 200
        await clock.advance(120)
        status, _, body = await ask(served.port, get("/ready"))
        assert status == 503 and "1 pieces of work make no progress" in body
        go_on.set()
        await bus.idle(LONG)
        await clock.advance(60)
        assert (await ask(served.port, get("/ready")))[0] == 200


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/"), 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"HEAD /live HTTP/1.1\r\n\r\n", 200),
        (b"\r\n\r\n", 405),
        (b"GET /live HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", 400),
        (b"\xff\xfe" * 40 + b"\r\n\r\n", 405),
    ],
    ids=["another path", "POST", "HEAD", "nothing", "too long", "no text"],
)
async def test_other_requests_are_refused(request_: bytes, status: int) -> None:
    async with fg.observe.serve(fg.Bus("memory:", nodes=nodes()), port=0) as served:
        found, headers, body = await ask(served.port, request_)
        assert found == status
        assert headers["connection"] == "close"
        assert (body == "") is (request_[:4] == b"HEAD")
        assert (await ask(served.port, get("/live")))[0] == 200  # it goes on


async def test_whoever_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_REQUEST_SECONDS", 0.01)
    async with fg.observe.serve(fg.Bus("memory:", nodes=nodes()), port=0) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /live HT")
        assert await asyncio.wait_for(reader.read(), LONG) == b""
        writer.close()


async def test_a_port_that_is_taken_is_a_sentence() -> None:
    bus = fg.Bus("memory:", nodes=nodes())
    async with fg.observe.serve(bus, port=0) as served:
        with pytest.raises(fg.ConfigurationError, match=f"nothing can listen at 127.0.0.1:{served.port}"):
            async with fg.observe.serve(bus, port=served.port):
                pass


@pytest.mark.parametrize(
    "place",
    [{"host": 5}, {"host": None}, {"host": "127.0.0.1\0"}, {"host": "x" * 80}, {"port": "9464"}, {"port": -1}],
    ids=["number", "none", "nul", "too long", "text", "negative"],
)
async def test_a_place_that_there_cannot_be_is_a_sentence(place: dict[str, Any]) -> None:
    with pytest.raises(fg.ConfigurationError) as raised:
        async with fg.observe.serve(fg.Bus("memory:", nodes=nodes()), **{"port": 0, **place}):
            pass
    assert str(raised.value).isprintable()


async def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    async with fg.observe.serve(fg.Bus("memory:", nodes=nodes()), port=0) as served:
        assert served.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
        (":80", ("127.0.0.1", 80)),
    ],
)
def test_where_the_command_line_listens(text: str, found: tuple[str, int]) -> None:
    assert parse_listen(text) == found


async def test_the_command_line_prints_a_host_of_ipv6_as_a_url_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def enter(self: Endpoints) -> Endpoints:
        return self

    monkeypatch.setattr(Endpoints, "__aenter__", enter)  # not every machine has such an address
    monkeypatch.setattr(Endpoints, "__aexit__", mock.AsyncMock(return_value=None))
    monkeypatch.setitem(_serve_to_the_end.__globals__, "serve", mock.AsyncMock())
    await _serve_to_the_end(fg.Bus("memory:", nodes=nodes()), False, ("fe80::1", 9464))
    assert "are at http://[fe80::1]:9464\n" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "x", "127.0.0.1:", "1:99999", "1:²"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(fg.ConfigurationError, match="--http takes a port, or host:port"):
        parse_listen(text)


APP = """
import logging
import faregate as fg
from tests.observe.rig import OrderPlaced
shop, billing = fg.Node("shop"), fg.Node("billing")

@billing.on(OrderPlaced, source="shop", key="order_id")
def bill(order: OrderPlaced) -> None:
    logging.getLogger("shop.app").info("billing it")

bus = fg.Bus("journal:./data", nodes=[shop, billing], observe=fg.observe.Prometheus())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_faregate_run_serves_them_and_names_messages_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "observed_app.py").write_text(APP)
    root = Path(__file__).resolve().parents[2]
    start = partial(asyncio.create_subprocess_exec, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    command = [sys.executable, "-m", "faregate"]
    run = await start(*command, "run", "observed_app:bus", "--http", "0", stderr=asyncio.subprocess.PIPE)
    assert run.stderr is not None
    said = ""
    try:
        while "Ctrl-C drains" not in said:
            line = await asyncio.wait_for(run.stderr.readline(), START)
            assert line, said
            said += line.decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert found is not None, said
        port = int(found[1])
        assert (await ask(port, get("/ready")))[0] == 200
        body = '{"order_id": "17"}'
        publish = await start(*command, "publish", "observed_app:bus", "OrderPlaced", body, "--node", "shop")
        assert await publish.wait() == 0
        while "billing it" not in said:
            line = await asyncio.wait_for(run.stderr.readline(), START)
            assert line, said
            said += line.decode()
        assert re.search(r"shop\.app \[billing lane-0 message \S+ correlation \S+ key 17\] billing it", said), said
        assert "faregate_messages_total" in (await ask(port, get("/metrics")))[2]
    finally:
        run.send_signal(signal.SIGTERM)
        await asyncio.wait_for(run.communicate(), START)
    assert run.returncode == 0


async def test_one_that_asks_and_does_not_read_keeps_nobody_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_REQUEST_SECONDS", 0.2)
    bus = fg.Bus("memory:", nodes=nodes())
    more = mock.AsyncMock(return_value=["x" * (64 << 20)])  # than any buffer on the way holds
    with mock.patch.object(bus, "unready", more):
        async with fg.observe.serve(bus, port=0) as served:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
            writer.write(get("/ready"))
            await reader.readexactly(8)
            await until(lambda: not served._open)
    got = 0
    try:
        while chunk := await asyncio.wait_for(reader.read(1 << 20), LONG):
            got += len(chunk)
    except ConnectionResetError:
        pass
    assert got < 64 << 20  # it was broken off; to close it would have sent it all, at the reader's pace
    writer.close()


async def test_an_answer_that_takes_long_is_still_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_REQUEST_SECONDS", 0.2)
    bus = fg.Bus("memory:", nodes=nodes())

    async def several_stores_that_do_not_answer() -> list[str]:
        await asyncio.sleep(0.5)
        return ["no store answers"]

    with mock.patch.object(bus, "unready", several_stores_that_do_not_answer):
        async with fg.observe.serve(bus, port=0) as served:
            assert (await ask(served.port, get("/ready")))[::2] == (503, "no store answers\n")


async def test_more_connections_than_are_served_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_MOST_CONNECTIONS", 1)
    async with fg.observe.serve(fg.Bus("memory:", nodes=nodes()), port=0) as served:
        _, first = await asyncio.open_connection("127.0.0.1", served.port)
        await until(lambda: served._open)
        reader, second = await asyncio.open_connection("127.0.0.1", served.port)
        with pytest.raises(ConnectionResetError):
            if not await asyncio.wait_for(reader.read(), LONG):
                raise ConnectionResetError
        second.close()
        first.close()
        await until(lambda: not served._open)
        assert (await ask(served.port, get("/live")))[0] == 200
