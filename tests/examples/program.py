"""A program of an example in a process of its own, as its README starts it; and what is in its database."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests.child import Child

ROOT = Path(__file__).parents[2]


class Program(Child):
    """Runs `python ARGUMENTS` on a folder; what it writes is read line by line."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        super().__init__(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "WEB_DATA": str(folder), "PYTHONUNBUFFERED": "1", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []

    def line(self, pattern: str) -> re.Match[str]:
        """Waits for a line in which this is found; the time limit of the test bounds it."""
        assert self.stdout is not None
        for line in self.stdout:
            self.said.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{self.args!r} ended without a line with {pattern!r}:\n{''.join(self.said)}")

    def drain(self) -> None:
        """What has begun is finished, and the process ends well. It is read to its end: it may still write."""
        self.terminate()
        rest, _ = self.communicate()
        self.said.append(rest)
        assert self.returncode == 0, "".join(self.said)


def faregate(folder: Path, *arguments: str, **more: str) -> str:
    """What a command of the command line prints, when it has ended well."""
    with Program(folder, "-m", "faregate", *arguments, **more) as program:
        printed, _ = program.communicate()
    assert program.returncode == 0, printed
    return printed


def count(database: Path, rows: str) -> int:
    with closing(sqlite3.connect(database, timeout=10)) as connection:
        found: int = connection.execute(f"select count(*) from {rows}").fetchone()[0]
    return found
