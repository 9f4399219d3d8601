"""The messages that a load consists of: from a file, from a function, or made up from the schema of their class.

All of a file is read and checked before anything is sent; what is wrong is told with its line and field.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgspec

from faregate.cli.load import load_named, parsed_body
from faregate.codec.samples import Samples
from faregate.codec.schema import json_schemas
from faregate.errors import ConfigurationError, Undecodable

MADE_UP = 1000
"""So many different ones are made up, before the beginning; then they are sent again and again."""
_TRIES = 20
_EXAMPLE = "for example loads:next_order"


def from_file(path: Path, cls: type | None) -> Iterator[Any]:
    """The messages of a file, again and again. `cls` is None for messages that nobody here has a class for: then they
    are any JSON objects."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"--payload {path} cannot be read: {exc}") from exc
    if path.suffix in (".jsonl", ".ndjson"):
        lines = text.splitlines()
        found = [_read(line, cls, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    else:
        found = _whole(text, cls, path)
    if not found:
        raise ConfigurationError(f"--payload {path} holds no message")
    return cycle(found)


def _whole(text: str, cls: type | None, path: Path) -> list[Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(
            f"--payload {path} is not JSON: {exc}. A file with a message on each line is called .jsonl"
        ) from exc
    if not isinstance(value, list):
        return [_read(text, cls, str(path))]
    return [_read(json.dumps(each), cls, f"{path}, message {number}") for number, each in enumerate(value, 1)]


def _read(text: str, cls: type | None, where: str) -> Any:
    if cls is not None:
        try:
            return parsed_body(text, cls)
        except Undecodable as exc:
            raise ConfigurationError(f"{where}: {exc}") from exc
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise ConfigurationError(f"{where}: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: a message is a JSON object; got {text[:40]}")
    return msgspec.Raw(msgspec.json.encode(value))


def from_function(target: str, cls: type) -> Iterator[Any]:
    """What a function returns: a message, or a dict of its fields. It may take the number of the message, from 0."""
    function = load_named(target, "function", _EXAMPLE)
    try:
        takes_number = len(inspect.signature(function).parameters) > 0
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"--generate {target} is no function of a message's number: {exc}") from exc
    return _generated(function, takes_number, cls, target)


def _generated(function: Callable[..., Any], takes_number: bool, cls: type, target: str) -> Iterator[Any]:
    for number in count():
        try:
            made = function(number) if takes_number else function()
        except Exception as exc:
            raise ConfigurationError(
                f"--generate {target} failed for message {number}: {type(exc).__name__}: {exc}"
            ) from exc
        if isinstance(made, dict):
            made = _read(msgspec.json.encode(made).decode(), cls, f"--generate {target}, message {number}")
        if not isinstance(made, cls):
            raise ConfigurationError(
                f"--generate {target} returned a {type(made).__name__} for message {number}; it shall return a "
                f"{cls.__name__}, or a dict of its fields"
            )
        yield made


def made_up(cls: type) -> Iterator[Any]:
    schemas = json_schemas([cls])
    samples = Samples(schemas.of[cls], schemas.shared)
    return cycle([_made(samples, cls) for _ in range(MADE_UP)])


def _made(samples: Samples, cls: type) -> Any:
    for _ in range(_TRIES):
        try:
            return parsed_body(json.dumps(samples.make()), cls)
        except Undecodable as exc:
            reason = exc
    raise ConfigurationError(
        f"no made-up values fit {cls.__name__} ({reason}): give messages with --payload FILE, or --generate "
        "module:function"
    )
