"""Selectors: a consumer takes only messages whose headers match. The language is in `condition.py`; its names are
headers, and so are text: compared with a number they are read as a number.
"""

from faregate.condition import Header, Headers, parse
from faregate.errors import ConfigurationError, InvalidSelector


class Selector:
    """A parsed selector."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._test = parse(text, _HeaderNames())

    def matches(self, headers: Headers) -> bool:
        return self._test(None, headers) is True

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"


class _HeaderNames:
    what = "selector"
    a_name = "a header name"
    error: type[ConfigurationError] = InvalidSelector

    def find(self, name: str) -> Header:
        return Header(name)
