"""The reference: a page for each public module, of the names in its `__all__`, and one for the command line.

Nothing is listed by hand, so a new name, command or option is there without anybody thinking of it. What is said of it
is its docstring, or its help.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import typer
from typer.testing import CliRunner

import faregate
from faregate.cli import app

_PLAIN = {"TERMINAL_WIDTH": "100", "NO_COLOR": "1", "TERM": "dumb"}


def reference_pages() -> dict[str, str]:
    """The text of each page, by its place in the site."""
    own = [name for name in faregate.__all__ if not inspect.ismodule(getattr(faregate, name))]
    errors = [name for name in own if _is_error(getattr(faregate, name))]
    pages = {
        "reference/faregate.md": _page("faregate", faregate, [name for name in own if name not in errors]),
        "reference/errors.md": _page("Errors", faregate, errors, is_part=True),
        "reference/command-line.md": _command_line(),
    }
    for name in faregate.__all__:
        module = getattr(faregate, name)
        if inspect.ismodule(module):
            pages[f"reference/{name}.md"] = _page(f"faregate.{name}", module, _public(module))
    return pages


def _public(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", [])) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, faregate.FaregateError)


def _page(title: str, module: ModuleType, names: Iterable[str], is_part: bool = False) -> str:
    """`is_part`: of a module that has a page of its own."""
    said = inspect.cleandoc(module.__doc__ or "")
    intro = "" if is_part else re.sub(r":\n- ", ":\n\n- ", f"{said}\n\n")  # a list needs an empty line before it
    # What errors have in common would stand there with each of them.
    options = "" if is_part else "    options:\n      inherited_members: true\n"
    parts = "".join(f"::: {_path(module, name)}\n{options}\n" for name in sorted(names, key=str.lower))
    return f"# {title}\n\n{intro}{parts}"


def _path(module: ModuleType, name: str) -> str:
    """Where it is imported from; but where a module of that name hides it, where it is defined."""
    path, value = f"{module.__name__}.{name}", getattr(module, name)
    return f"{value.__module__}.{value.__qualname__}" if path in sys.modules else path


def _command_line() -> str:
    text = "# Command line\n\nA failure that was foreseen is one sentence on standard error, and the exit status 1.\n\n"
    return text + "".join(_helps(typer.main.get_command(app), ()))


def _helps(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    """What `--help` shows, of a command and of those below it."""
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="faregate", env=_PLAIN)
    if shown.exit_code != 0:
        raise RuntimeError(f"faregate {' '.join(path)} --help failed: {shown.output}") from shown.exception
    lines = "\n".join(line.rstrip() for line in shown.output.strip("\n").splitlines())
    yield f"## {' '.join(('faregate', *path))}\n\n```text\n{lines}\n```\n\n"
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _helps(below, (*path, name))
