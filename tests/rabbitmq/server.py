"""RabbitMQ of the test's own, one node or a cluster, in a folder of its own, to be killed and started at will.

As in tools/dev/rabbitmq.bash: it never runs as root, listens on loopback alone, and has a port mapper of its own.
"""

import json
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.presence import missing

LONG = 180.0
_DECLARED_SECONDS = 1.5
_STREAMS = """stream.listeners.tcp.local = 127.0.0.1:{0}
stream.advertised_host = 127.0.0.1
stream.advertised_port = {0}
"""


class Ground:
    """What the nodes of a cluster share: a folder, a user of the system, the secrets and the port mapper."""

    def __init__(self, script: Path, home: Path) -> None:
        self.script = script
        self.home = home
        self.password, self.cookie = secrets.token_hex(16), secrets.token_hex(16)
        self._user = pwd.getpwuid(home.stat().st_uid)
        self._epmd = free_port()
        self._mapper = self.popen("epmd", home, self.environment(home))

    def environment(self, home: Path) -> dict[str, str]:
        return {
            "PATH": f"{self.script.parent}:{os.environ['PATH']}",  # a fetched one has its own Erlang there
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd),
        }

    def popen(self, program: str, home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (home / "server.log").open("ab") as log:
            return subprocess.Popen(
                self.as_user([program]),
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def as_user(self, command: list[str]) -> list[str]:
        if os.geteuid() != 0:
            return command
        user, group = str(self._user.pw_uid), str(self._user.pw_gid)
        return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--", *command]

    def own(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def close(self) -> None:
        self._mapper.kill()
        self._mapper.wait()


class PrivateRabbitmq:
    """One node."""

    def __init__(self, ground: Ground, first: "PrivateRabbitmq | None" = None, *, streams: bool = False) -> None:
        """`first`: the node whose cluster it joins when it starts for the first time. `streams`: with that plugin."""
        self._ground = ground
        self._amqp, self._distribution = free_port(), free_port()
        self._stream = free_port() if streams else None
        self.name = f"faregate-{self._amqp}@localhost"
        self._home = ground.home / str(self._amqp)
        self._home.mkdir()
        ground.own(self._home, 0o700)
        self._server: subprocess.Popen[bytes] | None = None
        peers = [] if first is None else [first.name, self.name]
        self._write(".erlang.cookie", ground.cookie, 0o400)
        self._write("env.conf", "")
        self._write("enabled_plugins", "[rabbitmq_stream]." if streams else "[].")
        self._write(
            "rabbitmq.conf",
            f"listeners.tcp.local = 127.0.0.1:{self._amqp}\n"
            f"default_user = faregate\ndefault_pass = {ground.password}\n"
            + (_STREAMS.format(self._stream) if streams else "")
            + "".join(f"cluster_formation.classic_config.nodes.{at} = {peer}\n" for at, peer in enumerate(peers, 1)),
        )

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._amqp}"

    @property
    def url(self) -> str:
        return f"amqp://faregate:{self._ground.password}@{self.host}/"

    @property
    def stream_url(self) -> str:
        return f"rabbitmq-stream://faregate:{self._ground.password}@127.0.0.1:{self._stream}/"

    def start(self) -> None:
        self._server = self._ground.popen(str(self._ground.script), self._home, self._environment())
        last = self._stream or self._amqp  # plugins come after the broker
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", last), 1):
                return
            assert self._server.poll() is None, (self._home / "server.log").read_text()[-2000:]
            time.sleep(0.1)
        raise AssertionError(f"RabbitMQ did not start within {LONG:g} s")

    def kill(self) -> None:
        """All of it, at once, whatever it is doing. 3.10 forgets a queue that was declared within the last second: its
        log is there, and it finds no leader. So wait for that long before."""
        time.sleep(_DECLARED_SECONDS)
        self.remove()

    def remove(self) -> None:
        """Kill it, if it runs, and never mind its queues."""
        if self._server is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None
        while self._is_there():  # the virtual machine is a child of the script
            time.sleep(0.05)

    @property
    def is_running(self) -> bool:
        return self._server is not None

    def _is_there(self) -> bool:
        file = self._home / "pid"
        return file.exists() and Path("/proc", file.read_text().strip()).exists()

    def control(self, *arguments: str) -> str:
        """rabbitmqctl."""
        command = self._ground.as_user([str(self._ground.script.with_name("rabbitmqctl")), "--quiet", *arguments])
        done = subprocess.run(
            command, check=False, timeout=LONG, cwd="/", env=self._environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"rabbitmqctl {arguments[0]}: {done.stdout}{done.stderr}"
        return done.stdout

    def _environment(self) -> dict[str, str]:
        home = self._home
        return self._ground.environment(home) | {
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CONF_ENV_FILE": f"{home}/env.conf",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_CONFIG_FILES": f"{home}/conf.d",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{home}/mnesia",
            "RABBITMQ_LOG_BASE": f"{home}/log",
            "RABBITMQ_PID_FILE": f"{home}/pid",
        }

    def _write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self._home / name
        path.touch(mode=0o600)
        path.write_text(text)
        self._ground.own(path, mode)


class Cluster:
    """Several nodes, each with a copy of every quorum queue."""

    def __init__(self, ground: Ground, size: int, *, streams: bool = False) -> None:
        first = PrivateRabbitmq(ground, streams=streams)
        self.nodes = [first, *(PrivateRabbitmq(ground, first) for _ in range(size - 1))]

    @property
    def url(self) -> str:
        """With the hosts of all nodes."""
        first = self.nodes[0]
        return first.url.replace(first.host, ",".join(node.host for node in self.nodes))

    def leader_of(self, queue: str) -> PrivateRabbitmq:
        found = json.loads(self._any().control("list_queues", "name", "leader", "--formatter", "json"))
        [leader] = [each["leader"] for each in found if each["name"] == queue]
        return next(node for node in self.nodes if node.name == leader)

    def wait_for_all_copies(self) -> None:
        """Every queue can lose a node again."""
        told = self._any().control("eval", f"rabbit_upgrade_preparation:await_online_quorum_plus_one({LONG:.0f}000).")
        assert told.strip() == "true", told

    def _any(self) -> PrivateRabbitmq:
        return next(node for node in self.nodes if node.is_running)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _find_script() -> Path:
    """The one that ./dev was asked for, or the distribution's."""
    if chosen := os.environ.get("FAREGATE_RABBITMQ"):
        return Path(chosen)
    found = [
        Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),
        *Path("/usr/lib/rabbitmq/lib").glob("*/sbin/rabbitmq-server"),
    ]
    scripts = [path for path in found if path.exists()]
    if not scripts:
        missing("RabbitMQ is not installed: run the tests with ./dev test, which installs it")
    return scripts[0]


def _service_user() -> pwd.struct_passwd:
    """A fetched RabbitMQ brings no user along."""
    try:
        return pwd.getpwnam("rabbitmq")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def private_cluster(size: int = 3, script: Path | None = None, *, streams: bool = False) -> Iterator[Cluster]:
    """Started, and removed afterwards; skips, or fails in CI, where RabbitMQ is not installed."""
    script = script or _find_script()
    home = Path(tempfile.mkdtemp(prefix="faregate-rabbitmq.", dir="/var/tmp"))
    if os.geteuid() == 0:
        user = _service_user()
        os.chown(home, user.pw_uid, user.pw_gid)
    ground = Ground(script, home)
    cluster = Cluster(ground, size, streams=streams)
    try:
        for node in cluster.nodes:
            node.start()
        yield cluster
    finally:
        for node in cluster.nodes:
            node.remove()
        ground.close()
        shutil.rmtree(home)


@contextmanager
def private_rabbitmq(script: Path | None = None, *, streams: bool = False) -> Iterator[PrivateRabbitmq]:
    """As above, one node."""
    with private_cluster(1, script, streams=streams) as cluster:
        yield cluster.nodes[0]
