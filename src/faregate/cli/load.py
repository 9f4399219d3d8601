"""What a command line names: a bus as `module:attribute`, and the body of a message."""

import sys
from importlib import import_module
from pathlib import Path
from traceback import print_exception
from typing import Annotated, Any

import typer

from faregate.bus.bus import Bus
from faregate.codec import BodyReader
from faregate.errors import ConfigurationError, FaregateError
from faregate.message import Envelope

BusName = Annotated[str, typer.Argument(help="The bus, as module:attribute.", metavar="MODULE:BUS")]
EXAMPLE = "for example examples.shop.app:bus"
_CALLERS = (__name__, "importlib")
_LONGEST_BODY = 64 * 1024 * 1024


def load_bus(target: str) -> Bus:
    """Import the module (from the current folder, too) and take the bus; a function that makes one is called."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(f"{target!r} does not name a bus: write module:attribute, {EXAMPLE}")
    module = _module(module_name, EXAMPLE)
    if not hasattr(module, name):
        buses = [key for key, value in vars(module).items() if isinstance(value, Bus)]
        told = f"it has: {', '.join(buses)}" if buses else "it has no fg.Bus at all"
        raise ConfigurationError(f"the module {module_name} has no {name!r}; {told}")
    found = getattr(module, name)
    bus = found() if callable(found) and not isinstance(found, Bus) else found
    if not isinstance(bus, Bus):
        raise ConfigurationError(f"{target} is a {type(bus).__name__}, not an fg.Bus or a function that makes one")
    return bus


def load_named(target: str, what: str, example: str) -> Any:
    """What a module has by that name. Raises `ConfigurationError`; `what` is a word for it, such as "class"."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(f"{target!r} does not name a {what}: write module:{what}, {example}")
    module = _module(module_name, example)
    if not hasattr(module, name):
        raise ConfigurationError(f"the module {module_name} has no {name!r}")
    return getattr(module, name)


def _module(name: str, example: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return import_module(name)
    except FaregateError:
        raise
    except Exception as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name is not None and name.startswith(exc.name):
            raise ConfigurationError(
                f"there is no module {exc.name!r}: write the module as you would import it from this folder, {example}"
            ) from exc
        frame = exc.__traceback__  # from the module on: what called it says nothing to its author
        while frame is not None and (frame.tb_frame.f_globals.get("__name__") or "").startswith(_CALLERS):
            frame = frame.tb_next
        print_exception(exc.with_traceback(frame))
        raise typer.Exit(1) from exc


def given_body(text: str) -> str:
    """A body as it is given, or `-` for what comes on standard input."""
    return sys.stdin.read(_LONGEST_BODY) if text == "-" else text


def parsed_body(text: str, cls: type) -> Any:
    """The message in a body of JSON. Raises `Undecodable`."""
    return BodyReader(cls, limit=_LONGEST_BODY).read(Envelope(body=text.encode(errors="surrogateescape")))
