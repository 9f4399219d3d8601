"""What a reader of the README does first: saves its program, and runs its commands."""

import re
import shlex
import signal
import sqlite3
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from tests.child import Child

README = Path(__file__).parents[2] / "README.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def program() -> str:
    return SNIPPET.findall(README.read_text())[0]


def commands() -> list[list[str]]:
    [told] = COMMANDS.findall(README.read_text())
    return [shlex.split(line.removeprefix("$ faregate ")) for line in told.splitlines()]


def follow(folder: Path, faregate: list[str], environment: Mapping[str, str]) -> list[str]:
    """Run it all in a folder, with this command line of Faregate; the orders that were billed."""
    (folder / "shop.py").write_text(program())
    *published, run = commands()
    for command in published:
        done = subprocess.run(
            [*faregate, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    with Child(
        [*faregate, *run], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "billed order 17\n"
        process.send_signal(signal.SIGTERM)  # draining, it finishes what it began
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, ""), said
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return [order for (order,) in connection.execute("select order_id from invoices")]
