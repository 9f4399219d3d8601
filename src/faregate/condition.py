"""Conditions on messages: one small language, for selectors of a queue (headers) and filters of a subscription (fields
and headers). A subset of SQL-92, parsed, never evaluated as code.

    condition  := and { OR and }            and     := not { AND not }        not := [NOT] test
    test       := '(' condition ')'
                | name ( = | <> | < | <= | > | >= ) literal
                | name [NOT] IN '(' literal { ',' literal } ')'      all of one kind
                | name [NOT] BETWEEN literal AND literal
                | name [NOT] LIKE text [ESCAPE text]         % is any run of characters, _ any one
                | name IS [NOT] NULL
    name       := letters, digits, '_', '-', '.', or anything in double quotes
    literal    := 'text' ('' is a quote) | number | TRUE | FALSE

What a name stands for is told by whoever parses (`Names`): which kinds of literals it may be compared with, and how its
value is read as one. NULL, or a value of another kind, makes a test unknown; unknown is not a match, and NOT unknown is
unknown, as in SQL.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from faregate.errors import ConfigurationError

Headers = Mapping[str, str]
Test = Callable[[Any, Headers], bool | None]
"""Of a message and its headers."""
Read = Callable[[Any, Headers], Any]
"""The value of a name; None: NULL, or of another kind than is wanted."""
LiteralKind = Literal["text", "number", "boolean"]
KINDS: tuple[LiteralKind, ...] = ("text", "number", "boolean")

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
_TRUTHS = {"true": True, "false": False}


class NoSuchName(Exception):
    """A name stands for nothing; or it cannot be compared like this. The text says what to change."""


class Name(Protocol):
    """What a name stands for."""

    @property
    def read(self) -> Read:
        """Its value, for IS NULL."""

    def as_kind(self, kind: LiteralKind, shown: str) -> Read:
        """How it is read to be compared with a literal of this kind, which is `shown` like this. Raises
        `NoSuchName`."""

    def number(self, text: str) -> Any:
        """The number that such a text is, as it is compared with this name."""


class Names(Protocol):
    """What names mean in one use of the language."""

    what: str
    """What such a condition is called: "selector"."""
    a_name: str
    """What is expected where a name should be: "a header name"."""
    error: type[ConfigurationError]

    def find(self, name: str) -> Name:
        """Raises `NoSuchName`."""


class Header:
    """A header. It is text; compared with a number it is read as a number."""

    def __init__(self, name: str) -> None:
        def text(message: Any, headers: Headers) -> str | None:
            return headers.get(name)

        def number(message: Any, headers: Headers) -> int | float | None:
            value = headers.get(name)
            return to_number(value) if value is not None and _NUMBER.fullmatch(value) else None

        self._name = name
        self.read: Read = text
        self._number: Read = number

    def as_kind(self, kind: LiteralKind, shown: str) -> Read:
        if kind == "boolean":
            raise NoSuchName(f"the header {self._name!r} is text: write '{shown}' in single quotes")
        return self._number if kind == "number" else self.read

    def number(self, text: str) -> int | float:
        return to_number(text)


def to_number(text: str) -> int | float:
    """Whole numbers are compared exactly, however large."""
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def parse(text: str, names: Names) -> Test:
    """The test that a condition is. Raises `names.error`, which says where it is wrong."""
    return _Parser(text, names).parse()


class _Token(NamedTuple):
    kind: str
    value: str
    at: int


class _Literal(NamedTuple):
    kind: LiteralKind
    token: _Token


class _Parser:
    """Recursive descent over the grammar above; each method returns a compiled test."""

    def __init__(self, text: str, names: Names) -> None:
        if len(text) > _LONGEST:
            raise names.error(f"a {names.what} has at most {_LONGEST} characters; this one has {len(text)}")
        self._text = text
        self._names = names
        self._depth = 0
        self._tokens = list(self._scan())
        self._at = 0

    def _scan(self) -> Iterator[_Token]:
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
            yield _Token(kind, value, start)
            position = match.end()
        yield _Token("end", "", end)

    def _error(self, what: str, position: int) -> ConfigurationError:
        return self._names.error(f"{what} at character {position + 1} of the {self._names.what} {self._text!r}")

    def _wrong(self, exc: NoSuchName, position: int) -> ConfigurationError:
        """What is wrong is about names, not about the grammar."""
        what = self._names.what
        return self._names.error(f"{exc} (character {position + 1} of the {what} {self._text!r})")

    def _next(self, kind: str, value: str | None = None) -> _Token | None:
        """Take the next token if it is of this kind (and value)."""
        token = self._tokens[self._at]
        if token.kind != kind or (value is not None and token.value != value):
            return None
        self._at += 1
        return token

    def _expect(self, what: str, kind: str, value: str | None = None) -> _Token:
        taken = self._next(kind, value)
        if taken is None:
            token = self._tokens[self._at]
            raise self._error(f"expected {what}, found {token.value or 'the end'!r}", token.at)
        return taken

    def parse(self) -> Test:
        test = self._condition()
        self._expect("AND, OR or the end", "end")
        return test

    def _condition(self) -> Test:
        tests = [self._and()]
        while self._next("keyword", "OR"):
            tests.append(self._and())
        return _any_of(tests)

    def _and(self) -> Test:
        tests = [self._not()]
        while self._next("keyword", "AND"):
            tests.append(self._not())
        return _all_of(tests)

    def _not(self) -> Test:
        negated = False
        while self._next("keyword", "NOT"):
            negated = not negated
        return _negate(self._test()) if negated else self._test()

    def _test(self) -> Test:
        if self._next("sign", "("):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise self._names.error(f"a {self._names.what} nests at most {_DEEPEST} parentheses")
            test = self._condition()
            self._expect("')'", "sign", ")")
            self._depth -= 1
            return test
        name = self._name()
        if self._next("keyword", "IS"):
            absent = not self._next("keyword", "NOT")
            self._expect("NULL", "keyword", "NULL")
            read = name.read
            return lambda message, headers: (read(message, headers) is None) is absent
        negated = self._next("keyword", "NOT")
        found = self._predicate(name)
        if found is None and negated is None:
            sign = self._expect("a comparison, IN, BETWEEN, LIKE or IS", "sign")
            if sign.value not in _COMPARE:
                raise self._error(f"expected a comparison, found {sign.value!r}", sign.at)
            return self._comparison(name, _COMPARE[sign.value], self._literal())
        if found is None:
            raise self._error("expected IN, BETWEEN or LIKE after NOT", self._tokens[self._at].at)
        return _negate(found) if negated else found

    def _name(self) -> Name:
        token = self._next("quoted") or self._expect(self._names.a_name, "word")
        try:
            return self._names.find(token.value[1:-1] if token.kind == "quoted" else token.value)
        except NoSuchName as exc:
            raise self._wrong(exc, token.at) from None

    def _predicate(self, name: Name) -> Test | None:
        if self._next("keyword", "IN"):
            self._expect("'('", "sign", "(")
            literals = [self._literal()]
            while self._next("sign", ","):
                literals.append(self._literal())
            self._expect("')'", "sign", ")")
            return self._is_one_of(name, literals)
        if self._next("keyword", "BETWEEN"):
            low = self._comparison(name, operator.ge, self._literal())
            self._expect("AND", "keyword", "AND")
            high = self._comparison(name, operator.le, self._literal())
            return _all_of([low, high])
        if self._next("keyword", "LIKE"):
            pattern = self._string()
            read = self._read(name, _Literal("text", pattern))
            escape = self._string() if self._next("keyword", "ESCAPE") else None
            if escape is not None and len(_text(escape)) != 1:
                raise self._error("ESCAPE takes one character", escape.at)
            like = _like(_text(pattern), None if escape is None else _text(escape))

            def is_like(message: Any, headers: Headers) -> bool | None:
                value = read(message, headers)
                return None if value is None else like(value)

            return is_like
        return None

    def _string(self) -> _Token:
        return self._expect("a text in single quotes", "text")

    def _literal(self) -> _Literal:
        number = self._next("number")
        if number is not None:
            return _Literal("number", number)
        token = self._tokens[self._at]
        if token.kind == "word" and token.value.lower() in _TRUTHS:
            self._at += 1
            return _Literal("boolean", token)
        return _Literal("text", self._expect("a number, true, false or a text in single quotes", "text"))

    def _read(self, name: Name, literal: _Literal) -> Read:
        try:
            return name.as_kind(literal.kind, literal.token.value)
        except NoSuchName as exc:
            raise self._wrong(exc, literal.token.at) from None

    def _comparison(self, name: Name, compare: Callable[[Any, Any], bool], literal: _Literal) -> Test:
        read, wanted = self._read(name, literal), _value(name, literal)
        if literal.kind == "boolean" and compare not in (operator.eq, operator.ne):
            raise self._error("true and false are compared with = and <> alone", literal.token.at)

        def compared(message: Any, headers: Headers) -> bool | None:
            value = read(message, headers)
            try:
                return None if value is None else compare(value, wanted)
            except ArithmeticError:  # a Decimal that is no number
                return None

        return compared

    def _is_one_of(self, name: Name, literals: Sequence[_Literal]) -> Test:
        read, *_ = [self._read(name, literal) for literal in literals]
        other = next((literal for literal in literals if literal.kind != literals[0].kind), None)
        if other is not None:
            raise self._error("IN takes values of one kind", other.token.at)
        values = frozenset(_value(name, literal) for literal in literals)

        def is_in(message: Any, headers: Headers) -> bool | None:
            value = read(message, headers)
            return None if value is None else value in values

        return is_in


def _text(token: _Token) -> str:
    return token.value[1:-1].replace("''", "'")


def _value(name: Name, literal: _Literal) -> Any:
    kind, token = literal
    if kind == "text":
        return _text(token)
    return name.number(token.value) if kind == "number" else _TRUTHS[token.value.lower()]


def _like(pattern: str, escape: str | None) -> Callable[[str], bool]:
    """Matching by parts between the `%`, left to right, where one regular expression could backtrack without end."""
    parts: list[list[str | None]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            parts[-1].append(next(characters, escape))
        elif character == "%":
            parts.append([])
        else:
            parts[-1].append(None if character == "_" else character)

    first, *rest = map(_finder, parts)
    sizes = [len(part) for part in parts]

    def like(text: str) -> bool:
        at, end = sizes[0], len(text) - (sizes[-1] if rest else 0)
        if first(text, 0, at) != 0:
            return False
        if not rest:
            return at == end
        if end < at or rest[-1](text, end, len(text)) != end:
            return False
        for find, size in zip(rest[:-1], sizes[1:-1], strict=True):
            found = find(text, at, end)
            if found < 0:
                return False
            at = found + size
        return True

    return like


def _finder(part: list[str | None]) -> Callable[[str, int, int], int]:
    """Where a part stands first in a stretch of a text, or -1; None in it stands for any character."""
    if None not in part:
        whole = "".join(filter(None, part))
        return lambda text, start, end: text.find(whole, start, end)
    search = re.compile("".join("." if each is None else re.escape(each) for each in part), re.DOTALL).search

    def find(text: str, start: int, end: int) -> int:
        found = search(text, start, end)
        return -1 if found is None else found.start()

    return find


def _negate(test: Test) -> Test:
    def negated(message: Any, headers: Headers) -> bool | None:
        result = test(message, headers)
        return None if result is None else not result

    return negated


def _all_of(tests: Sequence[Test]) -> Test:
    """False as soon as one is; else unknown if one is."""

    def all_of(message: Any, headers: Headers) -> bool | None:
        truth: bool | None = True
        for test in tests:
            result = test(message, headers)
            if result is False:
                return False
            if result is None:
                truth = None
        return truth

    return tests[0] if len(tests) == 1 else all_of


def _any_of(tests: Sequence[Test]) -> Test:
    """True as soon as one is; else unknown if one is."""

    def any_of(message: Any, headers: Headers) -> bool | None:
        truth: bool | None = False
        for test in tests:
            result = test(message, headers)
            if result:
                return True
            if result is None:
                truth = None
        return truth

    return tests[0] if len(tests) == 1 else any_of
