"""`faregate run --reload`: runs the bus in a child process and starts it again when a Python file changes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from faregate.cli.output import errors

RELOAD = "FAREGATE_RELOAD"
"""The variable that asks for it: not handed on, or the child would watch, too."""
_POLL_SECONDS = 0.4
_SKIPPED = {".venv", "venv", "node_modules", "__pycache__", ".git"}


def snapshot(folder: Path) -> dict[Path, int]:
    """When each Python file below the folder was written last."""
    found: dict[Path, int] = {}
    for path in folder.rglob("*.py"):
        if _SKIPPED.isdisjoint(path.parts):
            try:
                found[path] = path.stat().st_mtime_ns
            except FileNotFoundError:
                continue
    return found


def run_reloading(arguments: list[str]) -> int:
    """Run until Ctrl-C or SIGTERM; the child drains before it is replaced. Returns the last child's status."""
    folder = Path.cwd()
    signal.signal(signal.SIGTERM, _interrupt)
    before = snapshot(folder)
    child = _start(arguments)
    told = False
    try:
        while True:
            time.sleep(_POLL_SECONDS)
            now = snapshot(folder)
            if now != before:
                changed = sorted(str(path.relative_to(folder)) for path, _ in now.items() ^ before.items())
                errors.print(f"{changed[0]} changed; starting again", markup=False)
                before, told = now, False
                _stop(child)
                child = _start(arguments)
            elif child.poll() is not None and not told:
                told = True
                errors.print(f"it ended with status {child.returncode}; waiting for a change")
    except KeyboardInterrupt:
        return _stop(child)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches this process, which then tells the child to drain.
    environment = {name: value for name, value in os.environ.items() if name != RELOAD}
    command = [sys.executable, "-m", "faregate", "run", *arguments]
    return subprocess.Popen(command, start_new_session=True, env=environment)


def _stop(child: subprocess.Popen[bytes]) -> int:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        return child.wait()
