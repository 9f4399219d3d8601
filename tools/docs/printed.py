"""What commands print, written below them in a page: `./dev docs --printed` does it for docs/capacity.md.

A block of the kind `console` that begins with `$ faregate capacity` is what that command prints, 80 columns wide. A
test runs the same, so that no figure of the page is older than the program or its costs.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
_BLOCK = re.compile(r"^```console\n\$ (faregate capacity[^\n]*)\n.*?^```", re.MULTILINE | re.DOTALL)


def rewritten(text: str) -> str:
    """The page, with what its commands print now."""
    return _BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{_printed(found[1])}```", text)


def _printed(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
