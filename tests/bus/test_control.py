"""`bus.status()`, and the control socket: who may use it, what it obeys, and that nothing sent to it harms the bus."""

import asyncio
import json
import os
import socket
import stat
import warnings
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.bus import control
from faregate.bus.control import ControlSocket
from faregate.bus.control_place import ControlPlace, address, find, find_all, is_live, listen
from faregate.ports.presence import BusStatus
from faregate.testing import FakeClock
from faregate.testing.clock import rest

LONG = 60.0


class Step(fg.Event, key="account"):
    account: str
    number: int


class Other(fg.Event):
    number: int


class Shop:
    """A node that notes what it sees, and waits at a gate."""

    def __init__(self, order: Any = None) -> None:
        self.author, self.reader = fg.Node("author", publishes=[Step, Other]), fg.Node("reader")
        self.seen: dict[str, list[int]] = defaultdict(list)
        self.begun, self.gate, self.changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.gate.set()

        @self.reader.on(Step, source="author", key="account", order=order or fg.ByKey(lanes=4))
        async def note(step: Step) -> None:
            self.begun.set()
            await self.gate.wait()
            self.seen[step.account].append(step.number)
            self.changed.set()

        @self.reader.on(Other, source="author")
        async def other(other: Other) -> None: ...

    def bus(self, url: str = "memory:", **options: Any) -> fg.Bus:
        return fg.Bus(url, nodes=[self.author, self.reader], **{"store": "memory:", "control": True, **options})

    @property
    def count(self) -> int:
        return sum(map(len, self.seen.values()))

    async def until_seen(self, count: int) -> None:
        async with asyncio.timeout(LONG):
            while self.count < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sockets are, for this test alone."""
    folder = tmp_path / "c"
    monkeypatch.setenv("FAREGATE_CONTROL_DIR", str(folder))
    return folder


async def exchange(path: Path, data: bytes) -> Any:
    """What is answered; None: nothing."""
    with address(path) as short:
        reader, writer = await asyncio.open_unix_connection(short, limit=1 << 24)
    try:
        writer.write(data)
        async with asyncio.timeout(LONG):
            line = await reader.readline()
        return json.loads(line) if line else None
    finally:
        writer.close()


async def ask(bus: fg.Bus, **instruction: Any) -> Any:
    [path] = find(bus.control_place)
    return await exchange(path, json.dumps(instruction).encode() + b"\n")


def paused(bus: fg.Bus) -> dict[str, bool]:
    return {each.type: each.paused for each in bus.counts()}


# --- status -----------------------------------------------------------------------------------------------------


async def test_the_status_tells_of_the_whole_bus_and_is_json() -> None:
    shop = Shop()
    bus = shop.bus("memory:")
    assert (bus.status().state, bus.status().since) == ("new", 0.0)
    async with bus:
        for number in range(3):
            await bus.publish(Step(account="a", number=number))
        await bus.idle(LONG)
        await bus.pause("reader", Other)
        status = bus.status()
        assert msgspec.json.decode(msgspec.json.encode(status), type=BusStatus) == status
        assert (status.instance, status.version, status.state) == (bus.instance, fg.__version__, "running")
        assert status.url == "memory:" and status.since > 0 and status.alarms == {}
        assert [node.node for node in status.nodes] == ["author", "reader"]
        step, other = status.nodes[1].consumes
        assert (step.type, step.source, step.handled, step.dead, step.busy) == ("Step", "author", 3, 0, 0)
        assert (step.paused, step.why, step.queues) == (False, None, ["reader.Step.author"])
        assert (other.paused, other.queues) == (True, []) and other.why
        [outbox] = status.outboxes
        assert (outbox.waiting, outbox.oldest_seconds) == (0, None)
    assert bus.status().state == "stopped"


async def test_the_status_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = fg.Bus("amqp://me:hidden@nowhere/", nodes=[fg.Node("a")], store={"a": "postgresql://me:hidden@nowhere/x"})
    text = msgspec.json.encode(bus.status()).decode()
    assert "hidden" not in text and "me:***@nowhere" in text


async def test_the_status_tells_what_waits_in_an_outbox_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    author, reader = fg.Node("author"), fg.Node("reader", publishes=[Other])

    @reader.on(Step, source="author")
    async def note(step: Step) -> Other:
        return Other(number=step.number)

    bus = fg.Bus("memory:", nodes=[author, reader], store="memory:", clock=clock, stall_seconds=None)
    async with bus:
        real, open_gate, waits = bus.transport.publish, asyncio.Event(), asyncio.Event()

        async def publish(envelopes: Any) -> None:
            if envelopes[0].type == "Other":
                waits.set()
                await open_gate.wait()
            await real(envelopes)

        monkeypatch.setattr(bus.transport, "publish", publish)
        await bus.publish(Step(account="a", number=1), node="author")
        async with asyncio.timeout(LONG):
            await waits.wait()
        await clock.advance(7.5)
        [outbox] = bus.status().outboxes
        assert (outbox.waiting, outbox.oldest_seconds) == (1, 7.5)
        assert bus.status().nodes[1].outbox == outbox
        open_gate.set()
        await bus.idle(LONG)
        assert bus.status().outboxes[0].waiting == 0


async def test_rates_are_of_the_time_since_somebody_looked() -> None:
    clock, shop = FakeClock(), Shop()
    async with shop.bus(clock=clock, control=None, store=None, stall_seconds=None) as bus:
        for number in range(10):
            await bus.publish(Step(account="a", number=number))
        await bus.idle(LONG)
        await clock.advance(5.0)
        assert bus.status().nodes[1].consumes[0].per_second == 2.0
        await clock.advance(5.0)
        assert bus.status().nodes[1].consumes[0].per_second == 0.0


# --- the place of the socket, and its rights --------------------------------------------------------------------


async def test_the_socket_is_its_users_alone_whatever_the_umask_is(folder: Path) -> None:
    before = os.umask(0)
    try:
        async with Shop().bus() as bus:
            [path] = find(bus.control_place)
            assert path.parent == folder
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert list(folder.iterdir()) == []


async def test_a_bus_opens_no_socket_unless_it_is_asked_to(folder: Path) -> None:
    async with Shop().bus(control=None):
        assert not folder.exists()
    allowed = Shop().bus(control=None)
    allowed.allow_control()
    async with allowed:
        assert len(find(allowed.control_place)) == 1
    forbidden = Shop().bus(control=False)
    forbidden.allow_control()
    async with forbidden:
        assert find(forbidden.control_place) == []


async def test_the_socket_of_a_journal_is_in_its_folder_and_is_found_among_all(tmp_path: Path, folder: Path) -> None:
    shop, root = Shop(), tmp_path / "data"
    async with shop.bus(f"journal:{root}") as bus:
        [path] = find(bus.control_place)
        assert path.parent == root / "control"
        [link] = find_all()
        assert link.parent == folder and link.samefile(path)
        assert (await ask(bus, command="status"))["status"]["instance"] == bus.instance
    assert not (root / "control").exists()
    assert find_all() == []
    async with shop.bus(f"journal:{root}"):  # what was there did not make it anything but a journal
        pass


async def test_a_path_that_is_too_long_for_a_socket_is_used_all_the_same(tmp_path: Path) -> None:
    root = tmp_path / ("long-" * 20) / ("longer-" * 20)
    root.parent.mkdir()
    async with Shop().bus(f"journal:{root}") as bus:
        [path] = find(bus.control_place)
        assert len(os.fsencode(path)) > 108 and path.is_socket()
        assert is_live(path)
        [link] = find_all()  # a short way to it
        answer = await exchange(link, b'{"command": "status"}\n')
        assert answer["status"]["instance"] == bus.instance


async def test_two_processes_of_one_bus_have_a_socket_each() -> None:
    one, two, other = Shop().bus(), Shop().bus(), fg.Bus("memory:", nodes=[fg.Node("alone")], control=True)
    async with one, two, other:
        assert one.control_place == two.control_place != other.control_place
        found = {
            (await exchange(path, b'{"command": "status"}\n'))["status"]["instance"] for path in find(one.control_place)
        }
        assert found == {one.instance, two.instance}
        assert len(find_all()) == 3


def dead_socket(path: Path) -> None:
    """As a process that was killed leaves it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


async def test_the_socket_of_a_dead_process_is_replaced_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    dead_socket(path)
    async with Shop().bus(control=path) as bus:
        assert (await exchange(path, b'{"command": "status"}\n'))["status"]["instance"] == bus.instance
        with pytest.raises(fg.errors.ConfigurationError, match="another process listens at control="):
            await Shop().bus(control=path).start()
        assert (await exchange(path, b'{"command": "status"}\n'))["status"]["instance"] == bus.instance
    assert not path.exists()


async def test_what_dead_processes_left_is_removed_and_what_lives_stays(folder: Path) -> None:
    async with Shop().bus() as bus:
        dead_socket(folder / "0123456789ab-1-aa.sock")
        (folder / "0123456789ab-2-bb.sock").symlink_to(folder / "gone.sock")
        async with fg.Bus("memory:", nodes=[fg.Node("alone")], control=True):
            assert len(list(folder.iterdir())) == 2
            assert (await ask(bus, command="status"))["status"]["instance"] == bus.instance


async def test_a_file_that_is_no_socket_is_never_touched(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("mine")
    with pytest.raises(fg.errors.ConfigurationError, match="is there and is no socket"):
        await Shop().bus(control=path).start()
    assert path.read_text() == "mine"


async def test_stopping_leaves_a_socket_that_another_put_there(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with Shop().bus(control=path):
        path.unlink()
        dead_socket(path)
    assert path.is_socket()


@pytest.mark.parametrize("rights", [0o755, 0o770, 0o707])
async def test_a_folder_that_others_may_use_is_refused_and_a_bus_that_need_not_have_a_socket_runs(
    folder: Path, rights: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(rights)
    with pytest.raises(fg.errors.ConfigurationError, match="is no folder that is this user's alone"):
        await Shop().bus().start()
    allowed = Shop().bus(control=None)
    allowed.allow_control()
    async with allowed:
        assert "do not reach this process" in caplog.text
    assert stat.S_IMODE(folder.stat().st_mode) == rights and list(folder.iterdir()) == []


async def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "elsewhere").mkdir(0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(fg.errors.ConfigurationError, match="this user's alone"):
        await Shop().bus().start()


async def test_a_path_in_a_folder_that_others_write_to_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(fg.errors.ConfigurationError, match="others may put files into"):
        await Shop().bus(control=open_to_all / "c.sock").start()
    with pytest.raises(fg.errors.ConfigurationError, match="lies in no folder that is there"):
        await Shop().bus(control=tmp_path / "nowhere" / "c.sock").start()


@pytest.mark.parametrize("given", [3, "", b"x", ["x"], "\0", Path("a\0b"), "\ud800"], ids=ascii)
def test_control_that_is_no_path_fails_where_it_is_declared(given: Any) -> None:
    with pytest.raises(fg.errors.ConfigurationError, match="control takes True, False or the path"):
        Shop().bus(control=given)


def test_a_forked_child_does_not_keep_the_socket_alive(folder: Path) -> None:
    listening = listen(ControlPlace("0123456789ab"), "host-1-aa")
    ready, is_ready = os.pipe()
    waits, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.write(is_ready, b"x")
        os.read(waits, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert is_live(listening.path)
        listening.socket.close()  # as when this process dies
        assert not is_live(listening.path)
    finally:
        for each in (ready, is_ready, waits, go_on):
            os.close(each)
        os.waitpid(child, 0)


def told_to(user: int, path: Path) -> str:
    """What another user is told who asks for a pause; he may not be able to run this Python, hence a fork."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads: the child only talks to the socket
        child = os.fork()
    if not child:
        try:
            os.setgid(user)
            os.setuid(user)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(LONG)
                sock.connect(str(path))
                sock.sendall(b'{"command": "pause"}\n')
                os.write(writing, sock.recv(4096))
        except BaseException as exc:
            os.write(writing, repr(exc).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_is_not_obeyed_even_if_the_rights_of_the_file_let_him_in() -> None:
    with TemporaryDirectory() as given:  # not below pytest's own folder, into which nobody else may go
        Path(given).chmod(0o755)
        path = Path(given, "c.sock")
        async with Shop().bus(control=path) as bus:
            assert "PermissionError" in await asyncio.to_thread(told_to, 65534, path)
            path.chmod(0o666)
            assert "this bus is not user 65534's" in await asyncio.to_thread(told_to, 65534, path)
            assert not any(paused(bus).values())


# --- what is asked ----------------------------------------------------------------------------------------------


async def test_pausing_and_resuming_over_the_socket() -> None:
    async with Shop().bus() as bus:
        answer = await ask(bus, command="pause", node="reader", type="Step")
        assert paused(bus) == {"Step": True, "Other": False}
        assert [each["paused"] for each in answer["status"]["nodes"][1]["consumes"]] == [True, False]
        await ask(bus, command="pause", node="reader")
        assert paused(bus) == {"Step": True, "Other": True}
        await ask(bus, command="resume", type="Other")
        assert paused(bus) == {"Step": True, "Other": False}
        await ask(bus, command="resume")
        assert not any(paused(bus).values())


async def test_a_pause_over_the_socket_ends_by_itself_after_its_seconds() -> None:
    clock = FakeClock()
    async with Shop().bus(clock=clock, stall_seconds=None) as bus:
        await ask(bus, command="pause", node="reader", type="Step", seconds=30)
        await clock.advance(29.9)
        assert paused(bus)["Step"]
        await clock.advance(0.2)
        assert not paused(bus)["Step"]


@pytest.mark.parametrize(
    ("instruction_", "told"),
    [
        ({"command": "pause", "node": "nobody"}, "there are: reader Step, reader Other"),
        ({"command": "pause", "node": "reader", "type": "Nope"}, "no subscription to Nope on this bus"),
        ({"command": "resume", "type": "No\npe"}, "a subscription to No\\npe on this bus"),
        ({"command": "stop"}, "there is no command 'stop'; there are status, pause, resume and cancel"),
        ({"command": "x" * 1000}, "there is no command 'xxx"),
        ({"command": "pause", "seconds": -1}, "seconds must be seconds >= 0"),
        ({"command": "pause", "seconds": 1e300}, "seconds are at most a year's"),
        ({"command": "pause", "seconds": "5"}, "Expected `float | null`, got `str` - at `$.seconds`"),
        ({"command": "resume", "seconds": 5}, "seconds are for pause"),
        ({"command": 5}, "Expected `str`, got `int`"),
        ({}, "missing required field `command`"),
    ],
)
async def test_a_wrong_instruction_is_answered_with_one_clear_sentence(instruction_: dict[str, Any], told: str) -> None:
    async with Shop().bus() as bus:
        answer = await ask(bus, **instruction_)
        assert answer["error"] == "ConfigurationError"
        assert told in answer["message"] and "\n" not in answer["message"]
        assert not any(paused(bus).values())


GARBAGE = [
    b"\n",
    b"\x00\xff\xfe\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"[" * 60_000 + b"\n",
    b'{"command": "status"\n',
    b'"status"\n',
    b'{"command": "\xff"}\n',
    b'{"command": "stat\\ud800us"}\n',
]


async def test_garbage_is_answered_or_passed_over_and_the_bus_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    async with shop.bus() as bus:
        [path] = find(bus.control_place)
        for data in GARBAGE:
            answer = await exchange(path, data)
            assert answer is None or answer["error"] == "ConfigurationError", data
        await bus.publish(Step(account="a", number=1))
        await bus.idle(LONG)
        assert (await ask(bus, command="status"))["status"]["nodes"][1]["consumes"][0]["handled"] == 1
    assert "Traceback" not in caplog.text


async def test_a_line_that_is_too_long_is_refused_and_ten_megabytes_are_not_read() -> None:
    async with Shop().bus() as bus:
        [path] = find(bus.control_place)
        answer = await exchange(path, b'{"command": "' + b"x" * 70_000)
        assert answer["message"] == "an instruction has at most 65,536 bytes"
        with pytest.raises(OSError):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"x" * 10_000_000)
            await writer.drain()
            raise AssertionError("all of it was taken")
        writer.close()
        assert (await ask(bus, command="status"))["status"]["state"] == "running"


async def test_clients_that_say_nothing_hold_up_the_others_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_READ_SECONDS", 0.05)
    async with Shop().bus() as bus:
        [path] = find(bus.control_place)
        silent = [await asyncio.open_unix_connection(path) for _ in range(12)]
        assert (await ask(bus, command="status"))["status"]["state"] == "running"
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()


class Huge:
    """A bus whose status is more than a socket takes at once."""

    def status(self) -> BusStatus:
        return BusStatus("i", "v", "x" * 8_000_000, 0.0, 0.0, "running", [], [], {})

    async def pause(self, node: object, message: object, seconds: object) -> None:
        raise RuntimeError("nobody\nforesaw this")

    async def resume(self, node: object, message: object) -> None:
        await asyncio.Event().wait()


async def test_clients_that_never_read_hold_up_the_others_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_WRITE_SECONDS", 0.05)
    huge = ControlSocket(ControlPlace("0123456789ab"), "host-1-aa", Huge())
    huge.open()
    [path] = find(huge.place)
    deaf = [socket.socket(socket.AF_UNIX) for _ in range(12)]
    for each in deaf:
        each.connect(str(path))
        each.sendall(b'{"command": "status"}\n')
    answer = await exchange(path, b'{"command": "pause"}\n')
    assert (answer["error"], answer["message"]) == ("RuntimeError", "nobody\\nforesaw this")
    await huge.close()
    for each in deaf:
        each.close()


async def test_a_command_that_takes_long_is_told_of_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_OBEY_SECONDS", 0.01)
    monkeypatch.setattr(control, "_CLOSE_SECONDS", 0.01)
    huge = ControlSocket(ControlPlace("0123456789ab"), "host-1-aa", Huge())
    huge.open()
    [path] = find(huge.place)
    answer = await exchange(path, b'{"command": "resume"}\n')
    assert "it is not done after 0.01 s, and goes on" in answer["message"]
    [left] = huge._tasks
    assert not left.done()
    await huge.close()
    left.cancel()


async def test_several_clients_at_once_are_all_answered() -> None:
    async with Shop().bus() as bus:
        commands = [{"command": "status"}, {"command": "pause", "node": "reader"}, {"command": "resume"}]
        answers = await asyncio.gather(*(ask(bus, **commands[number % 3]) for number in range(30)))
        assert all(answer["status"]["instance"] == bus.instance for answer in answers)


async def test_a_bus_that_drains_says_so_and_takes_no_more_orders() -> None:
    shop = Shop()
    shop.gate.clear()
    bus = shop.bus()
    await bus.start()
    await bus.publish(Step(account="a", number=1))
    async with asyncio.timeout(LONG):
        await shop.begun.wait()
    stopping = asyncio.create_task(bus.stop())
    await rest()
    answer = await ask(bus, command="status")
    assert (answer["status"]["state"], answer["status"]["nodes"][1]["consumes"][0]["busy"]) == ("stopping", 1)
    assert "the bus is stopping" in (await ask(bus, command="resume"))["message"]
    shop.gate.set()
    await stopping
    assert find(bus.control_place) == []


# --- what a pause does ------------------------------------------------------------------------------------------


async def test_when_a_pause_is_answered_nothing_begins_any_more_and_what_was_fetched_is_handled_later() -> None:
    shop = Shop(fg.Serial())
    shop.gate.clear()
    async with shop.bus() as bus:
        for number in range(20):
            await bus.publish(Step(account="a", number=number))
        async with asyncio.timeout(LONG):
            await shop.begun.wait()
        await ask(bus, command="pause", node="reader", type="Step")
        shop.gate.set()
        await shop.until_seen(1)
        await rest()
        assert shop.seen["a"] == [0]
        await ask(bus, command="resume", node="reader", type="Step")
        await bus.idle(LONG)
        assert shop.seen["a"] == list(range(20))


@pytest.mark.parametrize("url", ["memory:", "journal:"])
async def test_the_order_of_a_key_holds_over_many_pauses(url: str, tmp_path: Path) -> None:
    shop = Shop()
    async with shop.bus(url if url == "memory:" else f"journal:{tmp_path}/data") as bus:
        for number in range(400):
            await bus.publish(Step(account=str(number % 5), number=number))
            if number % 40 == 0:
                await ask(bus, command="pause", node="reader", type="Step")
                await ask(bus, command="resume", node="reader", type="Step")
        for _ in range(20):
            await ask(bus, command="pause")
            await ask(bus, command="resume")
        await bus.idle(LONG)
        assert shop.seen == {str(key): list(range(key, 400, 5)) for key in range(5)}
