"""What `faregate run` logs: lines for people, or a JSON object a line for what collects logs.

Rules kept here:
- A record about a message names its node, message id, correlation id, key and lane, in both formats.
- With JSON every line is one: what the command itself says is a record of `faregate.run`, too.
- JSON is ASCII, one line a record, whatever is in it.
"""

import json
import logging
from typing import Any, Literal

from faregate.cli.output import errors, fail
from faregate.core.about import FIELDS, NOTHING
from faregate.observe import LogContext
from faregate.units import iso

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_ABOUT = "[%(node)s %(lane)s message %(message_id)s correlation %(correlation_id)s key %(key)s] "
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", *FIELDS}
_run = logging.getLogger("faregate.run")


def to_people(text: str) -> None:
    errors.print(text, markup=False, soft_wrap=not errors.is_terminal)  # in a file a line stays one


class Log:
    """The log of this process, and what the command says itself."""

    def __init__(self, level: Level, form: Format) -> None:
        self._is_json = form == "json"
        handler = logging.StreamHandler()
        handler.addFilter(LogContext())
        handler.setFormatter(JsonLines() if self._is_json else _Text())
        logging.basicConfig(level=level.upper(), handlers=[handler])

    def tell(self, text: str) -> None:
        if self._is_json:
            _run.info("%s", text)
        else:
            to_people(text)

    def fail(self, exc: Exception, *, as_json: bool) -> int:
        """Say what the command ends with; the exit status."""
        if self._is_json and not as_json:
            _run.error("%s: %s", type(exc).__name__, exc)
            return 1
        return fail(exc, as_json=as_json)


class _Text(logging.Formatter):
    """Names the message that a line is about, where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s", "%H:%M:%S")
        self._named = logging.Formatter(f"%(asctime)s %(levelname)-7s %(name)s {_ABOUT}%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        named = getattr(record, "message_id", NOTHING) != NOTHING
        return self._named.format(record) if named else super().format(record)


class JsonLines(logging.Formatter):
    """A field is null where a record is about no message. What a program gives as `extra=` is added."""

    def format(self, record: logging.LogRecord) -> str:
        known = record.__dict__
        told: dict[str, Any] = {
            "time": iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for field in FIELDS:
            value = known.get(field, NOTHING)
            told[field] = None if value == NOTHING else value
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            told["error"] = record.exc_text
        for name, value in known.items():
            if name not in _OWN:
                told.setdefault(name, value)
        return json.dumps(told, default=str, skipkeys=True)
