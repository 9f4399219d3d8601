"""Selectors: a consumer takes only messages whose headers match. A subset of SQL-92, parsed, never evaluated.

    condition  := and { OR and }            and     := not { AND not }        not := [NOT] test
    test       := '(' condition ')'
                | header ( = | <> | < | <= | > | >= ) literal
                | header [NOT] IN '(' text { ',' text } ')'
                | header [NOT] BETWEEN literal AND literal
                | header [NOT] LIKE text [ESCAPE text]       % is any run of characters, _ any one
                | header IS [NOT] NULL
    header     := a name of letters, digits, '_', '-', '.', or any name in double quotes
    literal    := 'text' ('' is a quote) | number

Headers are text; compared with a number they are read as a number. A missing header, or one that is no number
where one is needed, makes a test unknown; unknown is not a match, and NOT unknown is unknown, as in SQL.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from faregate.errors import InvalidSelector

Headers = Mapping[str, str]
Test = Callable[[Headers], bool | None]

_LONGEST = 4096
_DEEPEST = 50
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>[+-]?\d{1,30}(?:\.\d{1,30})?(?![\w.-]))|(?P<text>'(?:[^']|'')*')|(?P<quoted>"[^"]+")"""
    r"""|(?P<word>[A-Za-z_][\w.-]*)|(?P<sign><>|<=|>=|[=<>(),]))"""
)
_NUMBER = re.compile(r"[+-]?\d{1,30}(?:\.\d{1,30})?", re.ASCII)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_KEYWORDS = {"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "IS", "NULL"}


class Selector:
    """A parsed selector."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._test = _Parser(text).parse()

    def matches(self, headers: Headers) -> bool:
        return self._test(headers) is True

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"


class _Parser:
    """Recursive descent over the grammar above; each method returns a compiled test."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise InvalidSelector(f"a selector has at most {_LONGEST} characters; this one has {len(text)}")
        self._text = text
        self._depth = 0
        self._tokens = list(self._scan())
        self._at = 0

    def _scan(self) -> Any:
        position = 0
        end = len(self._text.rstrip())
        while position < end:
            match = _TOKEN.match(self._text, position)
            if match is None:
                position += len(self._text[position:]) - len(self._text[position:].lstrip())
                raise self._error(f"cannot read {self._text[position : position + 10]!r}", position)
            kind = str(match.lastgroup)
            value, start = match[kind], match.start(kind)
            if kind == "word" and value.upper() in _KEYWORDS:
                kind, value = "keyword", value.upper()
            yield kind, value, start
            position = match.end()
        yield "end", "", end

    def _error(self, what: str, position: int) -> InvalidSelector:
        return InvalidSelector(f"{what} at character {position + 1} of the selector {self._text!r}")

    def _next(self, kind: str, value: str | None = None) -> str | None:
        """Take the next token if it is of this kind (and value)."""
        found, text, _ = self._tokens[self._at]
        if found != kind or (value is not None and text != value):
            return None
        self._at += 1
        return str(text)

    def _expect(self, what: str, kind: str, value: str | None = None) -> str:
        taken = self._next(kind, value)
        if taken is None:
            _, text, position = self._tokens[self._at]
            raise self._error(f"expected {what}, found {text or 'the end'!r}", position)
        return taken

    def parse(self) -> Test:
        test = self._condition()
        self._expect("AND, OR or the end", "end")
        return test

    def _condition(self) -> Test:
        tests = [self._and()]
        while self._next("keyword", "OR"):
            tests.append(self._and())
        return tests[0] if len(tests) == 1 else lambda headers: _any(test(headers) for test in tests)

    def _and(self) -> Test:
        tests = [self._not()]
        while self._next("keyword", "AND"):
            tests.append(self._not())
        return tests[0] if len(tests) == 1 else lambda headers: _all(test(headers) for test in tests)

    def _not(self) -> Test:
        negated = False
        while self._next("keyword", "NOT"):
            negated = not negated
        return _negate(self._test()) if negated else self._test()

    def _test(self) -> Test:
        if self._next("sign", "("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise InvalidSelector(f"a selector nests at most {_DEEPEST} parentheses")
            test = self._condition()
            self._expect("')'", "sign", ")")
            self._depth -= 1
            return test
        quoted = self._next("quoted")
        name = quoted[1:-1] if quoted else self._expect("a header name", "word")
        if self._next("keyword", "IS"):
            absent = not self._next("keyword", "NOT")
            self._expect("NULL", "keyword", "NULL")
            return lambda headers: (name not in headers) is absent
        negated = self._next("keyword", "NOT")
        found = self._predicate(name)
        if found is None and negated is None:
            sign = self._expect("a comparison, IN, BETWEEN, LIKE or IS", "sign")
            if sign not in _COMPARE:
                raise self._error(f"expected a comparison, found {sign!r}", self._tokens[self._at - 1][2])
            return _comparison(name, _COMPARE[sign], self._literal())
        if found is None:
            raise self._error("expected IN, BETWEEN or LIKE after NOT", self._tokens[self._at][2])
        return _negate(found) if negated else found

    def _predicate(self, name: str) -> Test | None:
        if self._next("keyword", "IN"):
            self._expect("'('", "sign", "(")
            values = {self._string()}
            while self._next("sign", ","):
                values.add(self._string())
            self._expect("')'", "sign", ")")
            return lambda headers: headers[name] in values if name in headers else None
        if self._next("keyword", "BETWEEN"):
            low = _comparison(name, operator.ge, self._literal())
            self._expect("AND", "keyword", "AND")
            high = _comparison(name, operator.le, self._literal())
            return lambda headers: _all((low(headers), high(headers)))
        if self._next("keyword", "LIKE"):
            pattern = self._string()
            escape = self._string() if self._next("keyword", "ESCAPE") else None
            if escape is not None and len(escape) != 1:
                raise self._error("ESCAPE takes one character", self._tokens[self._at - 1][2])
            like = _like(pattern, escape)
            return lambda headers: like(headers[name]) if name in headers else None
        return None

    def _string(self) -> str:
        return self._expect("a text in single quotes", "text")[1:-1].replace("''", "'")

    def _literal(self) -> str | int | float:
        number = self._next("number")
        return _number(number) if number is not None else self._string()


def _comparison(name: str, compare: Callable[[Any, Any], bool], literal: str | int | float) -> Test:
    if isinstance(literal, str):
        return lambda headers: compare(headers[name], literal) if name in headers else None

    def numeric(headers: Headers) -> bool | None:
        value = headers.get(name)
        return compare(_number(value), literal) if value is not None and _NUMBER.fullmatch(value) else None

    return numeric


def _number(text: str) -> int | float:
    """Whole numbers are compared exactly, however large."""
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _like(pattern: str, escape: str | None) -> Callable[[str], bool]:
    """Matching by parts between the `%`, left to right: linear, where a regular expression could backtrack."""
    parts: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            parts[-1].append(next(characters, escape))
        elif character == "%":
            parts.append([])
        else:
            parts[-1].append(None if character == "_" else character)

    def fits(part: list[str | None], text: str, start: int) -> bool:
        return all(want is None or want == text[start + i] for i, want in enumerate(part))

    def like(text: str) -> bool:
        first, *rest = parts
        if len(first) > len(text) or not fits(first, text, 0):
            return False
        if not rest:
            return len(first) == len(text)
        *middle, last = rest
        at, end = len(first), len(text) - len(last)
        if end < at or not fits(last, text, end):
            return False
        for part in middle:
            at = next((i for i in range(at, end - len(part) + 1) if fits(part, text, i)), -1) + len(part)
            if at < len(part):
                return False
        return True

    return like


def _negate(test: Test) -> Test:
    def negated(headers: Headers) -> bool | None:
        result = test(headers)
        return None if result is None else not result

    return negated


def _all(results: Iterable[bool | None]) -> bool | None:
    found = set(results)
    return False if False in found else None if None in found else True


def _any(results: Iterable[bool | None]) -> bool | None:
    found = set(results)
    return True if True in found else None if None in found else False
