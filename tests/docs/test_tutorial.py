"""The tutorial is followed to the letter: its files are written, its commands run in a shell, and what they print is
compared. `…` in the text stands for anything.

Commands that only look are repeated until they show what the text says, as a reader would.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from types import TracebackType

import pytest

from tests.child import Child
from tests.docs.pages import DOCS, blocks

PAGE = DOCS / "tutorial.md"
LOOKING = ("cat ", "grep ", "tail ", "python look.py", "faregate dead list")
INSTALLING = ("mkdir shop", "python3 -m venv", "pip install")
END = "--- done ---"
LONG = 90  # seconds until somebody who looks again and again gives up


class Shell(Child):
    def __init__(self, folder: Path) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        super().__init__(
            ["bash"],
            cwd=folder,
            # The reader has pytest alone, without the plugins that are installed here.
            env={**os.environ, "PATH": path, "COLUMNS": "120", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the shell's own: that a process was killed
            text=True,
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            os.killpg(self.pid, signal.SIGKILL)  # the shell, and the bus that it runs
        super().__exit__(kind, error, trace)

    def run(self, command: str) -> str:
        assert self.stdin is not None and self.stdout is not None
        if command.endswith("&") or command.startswith("kill "):
            line = f"{command}\necho {shlex.quote(END)}\n"
        else:
            line = f"{{ {command}\n}} 2>&1\necho {shlex.quote(END)}\n"
        self.stdin.write(line)
        self.stdin.flush()
        printed = []
        for text in self.stdout:
            if text.strip() == END:
                return "".join(printed)
            printed.append(text)
        raise AssertionError(f"the shell ended at {command!r}: {''.join(printed)}")


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block, with what it prints."""
    found: list[tuple[str, str]] = []
    for line in block.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        else:
            command, printed = found.pop()
            found.append((command, printed + line))
    return found


def fits(printed: str, expected: str) -> bool:
    def normal(text: str) -> str:
        return "\n".join(re.sub(r"\s+", " ", line).strip() for line in text.strip().splitlines())

    return re.fullmatch(".*?".join(map(re.escape, normal(expected).split("…"))), normal(printed)) is not None


@pytest.mark.timeout(300)
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    found = blocks(PAGE, "python", "console")
    assert len(found) > 10
    with Shell(tmp_path) as shell:
        for language, title, text in found:
            if language == "python":
                (tmp_path / title).write_text(text)
                continue
            for command, expected in commands(text):
                if not command.startswith(INSTALLING):
                    follow(shell, command, expected)
        shell.communicate()


def follow(shell: Shell, command: str, expected: str) -> None:
    until = monotonic() + LONG
    while not fits(printed := shell.run(command), expected):
        if not command.startswith(LOOKING) or monotonic() > until:
            log = shell.run("cat bus.log")
            raise AssertionError(f"$ {command}\n{printed}\nthe tutorial says:\n{expected}\nbus.log:\n{log}")


@pytest.mark.parametrize(
    ("printed", "expected", "is_fit"),
    [("a 17 b\n", "a … b\n", True), ("a 17 c\n", "a … b\n", False), ("a\n", "", False), ("", "", True)],
)
def test_what_is_printed_is_compared(printed: str, expected: str, is_fit: bool) -> None:
    assert fits(printed, expected) is is_fit
