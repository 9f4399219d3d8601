"""What a user's statement may look like: `?` for a parameter on every store, and no end of the transaction.

Rules kept here:
- `?` outside of strings, quoted identifiers, comments and dollar quotes is a parameter. `??` is one question mark, in
  strings too, so that a statement reads the same wherever it stands.
- A statement that begins or ends a transaction, or makes a savepoint, is refused, whatever stands before it: without
  one commit for business data, ledger and outbox there are no exactly-once effects.

Both are cached by the text: a handler runs the same few statements again and again.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

from faregate.errors import TransactionMisused

# What can hide a question mark or a semicolon. A string with a backslash escape is PostgreSQL's E'…'.
_TOKEN = re.compile(
    r"""
    (?P<comment> --[^\n]* | /\*.*?(?:\*/|\Z) )
  | (?P<quoted> (?<![A-Za-z0-9_$])[eE]'(?:\\.|''|[^'\\])*(?:'|\Z) | '(?:''|[^'])*(?:'|\Z) | "(?:""|[^"])*(?:"|\Z)
              | `[^`]*(?:`|\Z) | (?<![A-Za-z0-9_$])\$(?P<tag>(?:[A-Za-z_]\w*)?)\$.*?(?:\$(?P=tag)\$|\Z) )
  | (?P<question> \?\?? )
  | (?P<percent> % )
  | (?P<end> ; )
    """,
    re.VERBOSE | re.DOTALL,
)
_REFUSED = {
    "ABORT": "ends",
    "BEGIN": "begins",
    "COMMIT": "ends",
    "END": "ends",
    "PREPARE TRANSACTION": "ends",
    "RELEASE": "moves a savepoint of",
    "ROLLBACK": "ends",
    "SAVEPOINT": "moves a savepoint of",
    "START TRANSACTION": "begins",
}
_FIRST_WORDS = re.compile(r"\s*([A-Za-z]+)(?:\s+([A-Za-z]+))?")


def _tokens(sql: str) -> Iterator[tuple[str, str]]:
    """The statement in pieces, each with what it is: `plain` or a name of `_TOKEN`."""
    start = 0
    for match in _TOKEN.finditer(sql):
        if match.start() > start:
            yield "plain", sql[start : match.start()]
        # A dollar quote's tag is a group inside the quote.
        yield ("quoted" if match.lastgroup == "tag" else match.lastgroup or "plain"), match[0]
        start = match.end()
    if start < len(sql):
        yield "plain", sql[start:]


@lru_cache(maxsize=2048)
def check_statement(sql: str) -> str:
    """The same text. Raises `TransactionMisused` when it is about the transaction itself."""
    parts = [""]
    for kind, text in _tokens(sql):
        if kind == "end":
            parts.append("")
        else:
            parts[-1] += " " if kind == "comment" else text
    for part in parts:
        words = _FIRST_WORDS.match(part)
        if words is None:
            continue
        first = words[1].upper()
        both = f"{first} {(words[2] or '').upper()}"
        verb = _REFUSED.get(first) or _REFUSED.get(both)
        if verb is not None:
            raise TransactionMisused(
                f"{sql.strip()[:80]!r} {verb} the transaction. The unit of work does that: it commits business data, "
                "ledger and outbox together, when the handler is done; raise an error to have all of it rolled back"
            )
        if first == "CREATE":
            break  # the body of a trigger has statements of its own, and an END
    return sql


@lru_cache(maxsize=2048)
def to_question(sql: str) -> str:
    """The statement for a driver that takes `?` itself: only `??` in strings changes."""
    check_statement(sql)
    if "??" not in sql:
        return sql
    return "".join(text.replace("??", "?") if kind == "quoted" else text for kind, text in _tokens(sql))


@lru_cache(maxsize=2048)
def to_percent(sql: str, with_parameters: bool) -> str:
    """The statement for a driver that takes `%s`: `?` becomes it, `??` becomes `?`, `%` is doubled.

    Without parameters such a driver leaves the text alone, so then only `??` changes.
    """
    check_statement(sql)
    out = []
    for kind, text in _tokens(sql):
        if kind == "question":
            out.append("?" if text == "??" else "%s" if with_parameters else "?")
        else:
            text = text.replace("??", "?") if kind == "quoted" else text
            out.append(text.replace("%", "%%") if with_parameters else text)
    return "".join(out)
