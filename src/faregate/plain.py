"""Text from outside, as log lines, errors and terminals may show it.

Keys, types, headers and error texts come with messages, from whoever sends them. A line break in one would forge a line
of a log, an escape sequence would steer a terminal, a lone surrogate could not be written at all. So:
- `plain` writes every character that cannot be printed as its escape; whatever names a message for people uses it.
- What Faregate's loggers record is made plain, whatever goes into it: one line, and below it, indented, a traceback.
"""

import logging
from typing import Any

LOGGERS = (
    "faregate.broker",
    "faregate.bus",
    "faregate.journal",
    "faregate.rabbitmq",
    "faregate.run",
    "faregate.spark",
    "faregate.stores",
)
_TRACE = logging.Formatter()


def plain(text: str) -> str:
    """The same text on one line, with an escape such as `\\n` or `\\x1b` for each character that is not printable."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class _Plain:
    """An argument of a record: made plain when, and if, it is written."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __str__(self) -> str:
        return plain(str(self._value))

    def __repr__(self) -> str:
        return plain(repr(self._value))


def _make_plain(record: logging.LogRecord) -> bool:
    # The template and the number of its arguments stay: whatever groups records by them still can.
    if isinstance(record.args, tuple):
        record.args = tuple(each if isinstance(each, int | float) else _Plain(each) for each in record.args)
    if record.exc_info and record.exc_text is None:
        lines = _TRACE.formatException(record.exc_info).split("\n")
        record.exc_text = "\n".join(f"    {plain(line)}" for line in lines)
    return True


# A filter of a logger sees the records made with it, and not those of loggers below it: each has its own.
for _name in LOGGERS:
    logging.getLogger(_name).addFilter(_make_plain)
