"""A PostgreSQL of the test's own, in a folder of its own, to be stopped and crashed at will.

As in tools/dev/postgres.bash: it never runs as root, and is as durable as in production.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.presence import missing

LONG = 60


class PrivatePostgres:
    def __init__(self, programs: Path, home: Path) -> None:
        self._programs = programs
        self._home = home
        self._user = pwd.getpwuid(home.stat().st_uid)
        self._data = home / "data"
        self._password = secrets.token_hex(16)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://faregate:{self._password}@127.0.0.1:{self._port}/{database}"

    def set_up(self) -> None:
        secret = self._home / "password"
        secret.touch(mode=0o600)
        secret.write_text(self._password)
        os.chown(secret, self._user.pw_uid, self._user.pw_gid)
        self._run("initdb", "--username=faregate", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync")
        with (self._data / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"listen_addresses = '127.0.0.1'\nport = {self._port}\nunix_socket_directories = ''\n")
        self.start()

    def start(self) -> None:
        self._run("pg_ctl", "start", "--wait", f"--log={self._home}/server.log")

    def crash(self) -> None:
        """Every process of the server ends at once, without a checkpoint."""
        self._run("pg_ctl", "stop", "--mode=immediate")

    def restart(self) -> None:
        self._run("pg_ctl", "restart", "--wait", "--mode=immediate", f"--log={self._home}/server.log")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments, f"--pgdata={self._data}"]
        if os.geteuid() == 0:
            user, group = str(self._user.pw_uid), str(self._user.pw_gid)
            command = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--", *command]
        # The output goes nowhere: the server would inherit a pipe, and whoever reads it would wait for its end.
        subprocess.run(
            command,
            check=True,
            timeout=LONG,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def private_postgres() -> Iterator[PrivatePostgres]:
    """Started, and removed afterwards; skips, or fails in CI, where PostgreSQL is not installed."""
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")), shutil.which("initdb")]
    programs = [Path(path).parent for path in found if path]
    if not programs:
        missing("PostgreSQL is not installed: run the tests with ./dev test, which installs it")
    home = Path(tempfile.mkdtemp(prefix="faregate-crash.", dir="/var/tmp"))
    try:
        if os.geteuid() == 0:
            shutil.chown(home, *_unprivileged())
        server = PrivatePostgres(programs[-1], home)
        server.set_up()
        try:
            yield server
        finally:
            if (home / "data/postmaster.pid").exists():
                server.crash()
    finally:
        shutil.rmtree(home)


def _unprivileged() -> tuple[int, int]:
    names = {user.pw_name: user for user in pwd.getpwall()}
    user = names.get("postgres") or names.get("nobody") or missing("there is no user to run PostgreSQL as, but root")
    return user.pw_uid, user.pw_gid
