"""What commands print, written below them in a page: `./dev docs --printed` does it for docs/capacity.md.

A block of the kind `console` that begins with `$ faregate capacity` is what that command prints, 80 columns wide. A
test runs the same, so that no figure of the page is older than the program or its costs.
"""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from faregate.cli import app
from faregate.cli.output import console

PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
_WIDTH = 80
_BLOCK = re.compile(r"^```console\n\$ (faregate capacity[^\n]*)\n.*?^```", re.MULTILINE | re.DOTALL)


def rewritten(text: str) -> str:
    """The page, with what its commands print now."""
    return _BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{_printed(found[1])}```", text)


def _printed(command: str) -> str:
    width = console.width
    console.width = _WIDTH
    try:
        done = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": str(_WIDTH)})
    finally:
        console.width = width
    if done.exit_code != 0:
        raise RuntimeError(f"{command} failed: {done.output}") from done.exception
    return done.output


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
