"""A RabbitMQ and a PostgreSQL of one's own, to be killed and started at will.

Rules kept here:
- A folder of its own, free ports on loopback, a generated password; never as root. Nothing is shared with a server of
  the machine.
- However the process ends that started them, they end with it: a shell beside each server waits for that.
"""

import os
import pwd
import random
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

from faregate.errors import ConfigurationError, FaregateError

LONG = 180.0
_DECLARED_SECONDS = 1.5
_WITH_US = '{ "$@"; kill -KILL 0; } & cat >/dev/null; kill -KILL 0'
"""The shell leads the server's process group. Its standard input is a pipe that ends with the process that has the
other end; then the group ends, and also when the server ended."""


class ServerFailed(FaregateError):
    """A server that the demo started did not come up, or did not end."""


class PrivateServer:
    """What both have in common."""

    name: str

    def __init__(self, home: Path) -> None:
        self._home = home
        self._user = pwd.getpwuid(home.stat().st_uid)
        self._password = secrets.token_hex(16)
        self._server: subprocess.Popen[bytes] | None = None

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._home / "server.log").open("ab") as log:
            return subprocess.Popen(
                self._as_user("sh", "-c", _WITH_US, "sh", *command),
                cwd="/",
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self._home), "LANG": "C.UTF-8"}

    def _as_user(self, *command: str) -> list[str]:
        if os.geteuid() != 0:
            return list(command)
        user, group = str(self._user.pw_uid), str(self._user.pw_gid)
        return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--", *command]

    def _write(self, path: str, text: str, mode: int = 0o600) -> None:
        file = self._home / path
        file.touch(mode=0o600)
        file.write_text(text)
        file.chmod(mode)
        os.chown(file, self._user.pw_uid, self._user.pw_gid)

    def _await(self, port: int) -> None:
        """Until the server takes connections."""
        until = time.monotonic() + LONG
        while not self.is_up(port):
            if time.monotonic() > until:
                raise ServerFailed(f"{self.name} did not start within {LONG:g} s:\n{self._last_words()}")
            time.sleep(0.1)

    def is_up(self, port: int) -> bool:
        """Raises `ServerFailed` when it ended."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        if self._server is None or self._server.poll() is not None:
            raise ServerFailed(f"{self.name} ended:\n{self._last_words()}")
        return False

    def _last_words(self) -> str:
        return (self._home / "server.log").read_text(errors="replace")[-2000:]


class PrivateRabbitmq(PrivateServer):
    """With the plugin for streams."""

    name = "RabbitMQ"

    def __init__(self, script: Path, home: Path) -> None:
        super().__init__(home)
        self._script = script
        self._amqp, self._stream, self._distribution, self._epmd = _free_ports(4)
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://faregate:{self._password}@127.0.0.1:{self._amqp}/"

    def stream_url(self, stream: str) -> str:
        at = f"faregate:{self._password}@127.0.0.1:{self._stream}"
        return f"rabbitmq-stream://{at}/?stream={stream}&amqp_port={self._amqp}"

    def set_up(self) -> None:
        self._write(".erlang.cookie", secrets.token_hex(16), 0o400)
        self._write("env.conf", "")
        self._write("enabled_plugins", "[rabbitmq_stream].")
        self._write(
            "rabbitmq.conf",
            f"listeners.tcp.local = 127.0.0.1:{self._amqp}\n"
            f"stream.listeners.tcp.local = 127.0.0.1:{self._stream}\n"
            f"stream.advertised_host = 127.0.0.1\nstream.advertised_port = {self._stream}\n"
            f"default_user = faregate\ndefault_pass = {self._password}\n",
        )
        # A port mapper of its own: the usual one may belong to another Erlang system, and would outlive this server.
        self._mapper = self._spawn("epmd")
        self.begin()

    def begin(self) -> None:
        self._server = self._spawn(str(self._script))

    def start(self) -> None:
        self.begin()
        self.until_ready()

    def is_ready(self) -> bool:
        """The listeners open last, when the node is ready for clients."""
        return self.is_up(self._amqp) and self.is_up(self._stream)

    def until_ready(self) -> None:
        self._await(self._amqp)
        self._await(self._stream)

    def kill(self) -> None:
        """All of it, at once, whatever it is doing. 3.10 forgets a queue that was declared within the last second: its
        log is there, and it finds no leader. So wait for that long before."""
        time.sleep(_DECLARED_SECONDS)
        self._kill()

    def _kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            _end(server)
            while self._is_there():  # the virtual machine is a child of the script
                time.sleep(0.05)

    def _is_there(self) -> bool:
        with suppress(FileNotFoundError):
            return Path("/proc", (self._home / "pid").read_text().strip() or "none").exists()
        return False

    def control(self, *arguments: str) -> None:
        """rabbitmqctl."""
        command = self._as_user(str(self._script.with_name("rabbitmqctl")), *arguments)
        subprocess.run(command, check=True, timeout=LONG, cwd="/", env=self._environment(), capture_output=True)

    def tear_down(self) -> None:
        self._kill()
        if self._mapper is not None:
            _end(self._mapper)

    def _environment(self) -> dict[str, str]:
        home = self._home
        return {
            **super()._environment(),
            "PATH": f"{self._script.parent}:{os.environ['PATH']}",  # a fetched one has its own Erlang there
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd),
            "RABBITMQ_NODENAME": f"faregate-{self._amqp}@localhost",
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


class PrivatePostgres(PrivateServer):
    """Durable as in production; only the making of the empty cluster does without."""

    name = "PostgreSQL"

    def __init__(self, programs: Path, home: Path) -> None:
        super().__init__(home)
        self._programs = programs
        (self._port,) = _free_ports(1)

    @property
    def url(self) -> str:
        return f"postgresql://faregate:{self._password}@127.0.0.1:{self._port}/postgres"

    def set_up(self) -> None:
        data = str(self._home / "data")
        self._write("password", self._password)
        made = subprocess.run(
            self._as_user(
                *(str(self._programs / "initdb"), "--pgdata", data, "--username", "faregate", "--no-sync"),
                *("--pwfile", str(self._home / "password"), "--auth", "scram-sha-256"),
                *("--encoding", "UTF8", "--no-locale"),
            ),
            cwd="/",
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=LONG,
            check=False,
        )
        if made.returncode != 0:
            raise ServerFailed(f"PostgreSQL made no database: {made.stderr}")
        self._write(
            "data/postgresql.auto.conf",
            f"listen_addresses = '127.0.0.1'\nport = {self._port}\nunix_socket_directories = ''\n"
            "max_connections = 200\nshared_buffers = 128MB\n",
        )
        self._server = self._spawn(str(self._programs / "postgres"), "-D", data)
        self._await(self._port)

    def tear_down(self) -> None:
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGQUIT)  # at once, and its sessions with it
            self._await_end()
            _end(self._server)

    def _await_end(self) -> None:
        pid_file, until = self._home / "data/postmaster.pid", time.monotonic() + LONG
        while pid_file.exists() and time.monotonic() < until:  # it removes it last
            time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _free_ports(count: int) -> list[int]:
    """Below the range from which the system gives ports to outgoing connections: a restart needs the same ones."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def find_rabbitmq() -> Path | None:
    """What FAREGATE_RABBITMQ names, or the script behind the distribution's wrapper, which would insist on its own user
    and folders."""
    if chosen := os.environ.get("FAREGATE_RABBITMQ"):
        return Path(chosen)
    folder = Path("/usr/lib/rabbitmq")
    scripts = [folder / "bin/rabbitmq-server", *folder.glob("lib/*/sbin/rabbitmq-server")]
    return next((path for path in scripts if path.exists()), None)


def find_postgres() -> Path | None:
    """The folder of its programs, of the newest version."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    on_path = shutil.which("initdb")
    return max(found, key=lambda path: float(path.parent.name), default=Path(on_path).parent if on_path else None)


def _user(name: str) -> pwd.struct_passwd:
    """A RabbitMQ that FAREGATE_RABBITMQ names may have brought no user along."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def _home(user: str) -> Iterator[Path]:
    """A folder that the user of a package owns; below /var/tmp, where it can be reached by it."""
    home = Path(tempfile.mkdtemp(prefix=f"faregate-{os.getpid()}-{user}.", dir="/var/tmp"))
    try:
        if os.geteuid() == 0:
            found = _user(user)
            os.chown(home, found.pw_uid, found.pw_gid)
        yield home
    finally:
        shutil.rmtree(home)


@contextmanager
def private_rabbitmq() -> Iterator[PrivateRabbitmq]:
    """Started, but not ready yet; removed afterwards. Raises `ConfigurationError` where it is not installed."""
    script = find_rabbitmq()
    if script is None:
        raise ConfigurationError(f"RabbitMQ is not installed: {_INSTALL.format('rabbitmq-server')}")
    with _home("rabbitmq") as home:
        server = PrivateRabbitmq(script, home)
        try:
            server.set_up()
            yield server
        finally:
            server.tear_down()


@contextmanager
def private_postgres() -> Iterator[PrivatePostgres]:
    """Started, and removed afterwards. Raises `ConfigurationError` where it is not installed."""
    programs = find_postgres()
    if programs is None:
        raise ConfigurationError(f"PostgreSQL is not installed: {_INSTALL.format('postgresql')}")
    with _home("postgres") as home:
        server = PrivatePostgres(programs, home)
        try:
            server.set_up()
            yield server
        finally:
            server.tear_down()


_INSTALL = "apt-get install {}; in a checkout ./dev demo --rabbitmq does that"
