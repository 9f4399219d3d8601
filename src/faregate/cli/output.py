"""What the command line prints: people read the console, programs read JSON. Errors go to standard error.

Nothing in a message may steer the terminal: the consoles show control characters as escapes. A text that must stay on
one line goes through `plain` first. JSON is ASCII.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from faregate.plain import plain


class Screen(Console):
    """A console that shows control characters as escapes; its own styles stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(plain, segment.text.split("\n"))), segment.style)


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

console = Screen(highlight=False)
errors = Screen(stderr=True, highlight=False)


def say(text: str | Text, style: str = "") -> None:
    """A line for people: no markup is read in it, and it is not cut in a pipe."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One line, so that a pipe can read it."""
    sys.stdout.write(json.dumps(value) + "\n")


def answer(result: Any, shown: str | Callable[[], None], *, as_json: bool) -> None:
    """The result of a command: as JSON for a program, otherwise a line, or what prints more, for people."""
    if as_json:
        print_json(result)
    elif isinstance(shown, str):
        say(shown)
    else:
        shown()


def fail(exc: Exception, *, as_json: bool) -> int:
    """Say what went wrong; the exit status."""
    if as_json:
        print_json({"error": type(exc).__name__, "message": str(exc)})
    else:
        errors.print(f"[bold red]error:[/] [bold]{type(exc).__name__}[/]", soft_wrap=True)
        errors.print(str(exc), markup=False, soft_wrap=True)
    return 1
