"""A RabbitMQ of the test's own, in a folder of its own, to be killed and started at will.

As in tools/dev/rabbitmq.bash: it never runs as root, listens on loopback alone, and has a port mapper of its own.
"""

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

LONG = 90.0
_DECLARED_SECONDS = 1.5


class PrivateRabbitmq:
    def __init__(self, script: Path, home: Path) -> None:
        self._script = script
        self._home = home
        self._user = pwd.getpwuid(home.stat().st_uid)
        self._password = secrets.token_hex(16)
        self._amqp, self._distribution, self._epmd = (_free_port() for _ in range(3))
        self._server: subprocess.Popen[bytes] | None = None
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://faregate:{self._password}@127.0.0.1:{self._amqp}/"

    def set_up(self) -> None:
        self._write(".erlang.cookie", secrets.token_hex(16), 0o400)
        self._write("env.conf", "")
        self._write("enabled_plugins", "[].")
        self._write(
            "rabbitmq.conf",
            f"listeners.tcp.local = 127.0.0.1:{self._amqp}\ndefault_user = faregate\ndefault_pass = {self._password}\n",
        )
        self._mapper = self._popen("epmd")
        self.start()

    def start(self) -> None:
        self._server = self._popen(str(self._script))
        until = time.monotonic() + LONG
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._amqp), 1):
                return
            assert self._server.poll() is None, (self._home / "server.log").read_text()[-2000:]
            time.sleep(0.1)
        raise AssertionError(f"RabbitMQ did not start within {LONG:g} s")

    def kill(self) -> None:
        """All of it, at once, whatever it is doing. 3.10 forgets a queue that was declared within the last second: its
        log is there, and it finds no leader. So wait for that long before."""
        time.sleep(_DECLARED_SECONDS)
        assert self._server is not None
        with suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        while self._is_there():  # the virtual machine is a child of the script
            time.sleep(0.05)

    def _is_there(self) -> bool:
        return Path("/proc", (self._home / "pid").read_text().strip()).exists()

    def control(self, *arguments: str) -> None:
        """rabbitmqctl."""
        command = self._as_user([str(self._script.with_name("rabbitmqctl")), *arguments])
        subprocess.run(command, check=True, timeout=LONG, cwd="/", env=self._environment(), capture_output=True)

    def tear_down(self) -> None:
        if self._server is not None:
            self.kill()
        if self._mapper is not None:
            self._mapper.kill()
            self._mapper.wait()

    def _popen(self, program: str) -> subprocess.Popen[bytes]:
        with (self._home / "server.log").open("ab") as log:
            return subprocess.Popen(
                self._as_user([program]),
                cwd="/",
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _as_user(self, command: list[str]) -> list[str]:
        if os.geteuid() != 0:
            return command
        user, group = str(self._user.pw_uid), str(self._user.pw_gid)
        return ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--", *command]

    def _environment(self) -> dict[str, str]:
        home = self._home
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "LANG": "C.UTF-8",
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

    def _write(self, name: str, text: str, mode: int = 0o600) -> None:
        path = self._home / name
        path.touch(mode=0o600)
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, self._user.pw_uid, self._user.pw_gid)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def private_rabbitmq() -> Iterator[PrivateRabbitmq]:
    """Started, and removed afterwards; skips, or fails in CI, where RabbitMQ is not installed."""
    found = [
        Path("/usr/lib/rabbitmq/bin/rabbitmq-server"),
        *Path("/usr/lib/rabbitmq/lib").glob("*/sbin/rabbitmq-server"),
    ]
    scripts = [path for path in found if path.exists()]
    if not scripts:
        missing("RabbitMQ is not installed: run the tests with ./dev test, which installs it")
    home = Path(tempfile.mkdtemp(prefix="faregate-rabbitmq.", dir="/var/tmp"))
    if os.geteuid() == 0:
        user = pwd.getpwnam("rabbitmq")
        os.chown(home, user.pw_uid, user.pw_gid)
    server = PrivateRabbitmq(scripts[0], home)
    try:
        server.set_up()
        yield server
    finally:
        server.tear_down()
        shutil.rmtree(home)
