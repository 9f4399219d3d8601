"""What the command line prints: people read the console, programs read JSON. Errors go to standard error."""

import json
import sys
from typing import Any

from rich.console import Console

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One line, so that a pipe can read it."""
    sys.stdout.write(json.dumps(value) + "\n")


def printable(text: str) -> str:
    """Nothing in a message may steer the terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)


def fail(exc: Exception, *, as_json: bool) -> int:
    """Say what went wrong; the exit status to leave with."""
    if as_json:
        print_json({"error": type(exc).__name__, "message": str(exc)})
    else:
        errors.print(f"[bold red]error:[/] [bold]{type(exc).__name__}[/]", soft_wrap=True)
        errors.print(str(exc), markup=False, soft_wrap=True)
    return 1
