"""Selectors: the grammar, unknown as a third truth value, errors that say where, bounds, and LIKE."""

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faregate.broker.selector import Selector
from faregate.errors import InvalidSelector

ORDER = {"type": "order", "total": "40", "region": "eu-west", "note": "it's", "x-trace.id": "t1", "rate": "-2.5"}


@pytest.mark.parametrize(
    "text",
    [
        "type = 'order'",
        "type='order'",
        "type <> 'refund'",
        "type >= 'a' AND type < 'p'",
        "total = 40",
        "total = 40.0",
        "total > 39.5",
        "total <= +40",
        "rate = -2.5",
        "rate<-2",
        "note = 'it''s'",
        "region IN ('us', 'eu-west')",
        "region NOT IN ('us')",
        "total IN (39, 40.0)",
        "total NOT IN (39, 41)",
        "total BETWEEN 40 AND 41",
        "total NOT BETWEEN 1 AND 39",
        "type BETWEEN 'a' AND 'z'",
        "region LIKE 'eu-%'",
        "region NOT LIKE 'us%'",
        "missing IS NULL",
        "type IS NOT NULL",
        "x-trace.id = 't1'",
        "\"x-trace.id\" = 't1'",
        "NOT type = 'refund'",
        "NOT NOT type = 'order'",
        "not Type is not null or type like 'o%' and total between 1 and 100",
        "(type = 'order')",
        "((type = 'refund') OR (total = 40))",
        "\n type\t= 'order' \n",
    ],
)
def test_a_condition_that_holds_matches(text: str) -> None:
    assert Selector(text).matches(ORDER)


@pytest.mark.parametrize(
    "text",
    [
        "type = 'Order'",
        "type = 'order '",
        "Type = 'order'",
        "total <> 40",
        "total < 40",
        "total > 40",
        "region IN ('us')",
        "total NOT BETWEEN 40 AND 41",
        "total BETWEEN 41 AND 40",
        "region LIKE 'eu'",
        "type IS NULL",
        "missing IS NOT NULL",
        "NOT (type = 'order' OR missing = 'x')",
        "total = '40.0'",
    ],
)
def test_a_condition_that_does_not_hold_does_not_match(text: str) -> None:
    assert not Selector(text).matches(ORDER)


def test_and_binds_closer_than_or_and_not_closer_than_and() -> None:
    assert Selector("a = '1' OR b = '1' AND c = '1'").matches({"a": "1", "b": "0", "c": "0"})
    assert not Selector("(a = '1' OR b = '1') AND c = '1'").matches({"a": "1", "b": "0", "c": "0"})
    assert not Selector("NOT a = '1' AND b = '1'").matches({"a": "0", "b": "0"})
    assert Selector("NOT (a = '1' AND b = '1')").matches({"a": "0", "b": "0"})


def test_keywords_may_be_header_names_in_double_quotes() -> None:
    assert Selector("\"AND\" = 'x' AND \"has space\" = 'y'").matches({"AND": "x", "has space": "y"})


def test_a_selector_shows_its_text() -> None:
    assert repr(Selector("a = 'b'")) == "Selector(\"a = 'b'\")"


# --- three truth values -----------------------------------------------------------------------------------

TRUTH = {"true": True, "false": False, "unknown": None}
SAID = {True: "t = '1'", False: "t = '0'", None: "missing = '1'"}
HEADERS = {"t": "1", "word": "forty"}


def truth(condition: str) -> bool | None:
    """A condition is unknown when neither it nor its negation matches."""
    if Selector(condition).matches(HEADERS):
        return True
    return False if Selector(f"NOT ({condition})").matches(HEADERS) else None


@pytest.mark.parametrize("left", TRUTH)
@pytest.mark.parametrize("right", TRUTH)
def test_and_or_and_not_follow_the_tables_of_sql(left: str, right: str) -> None:
    a, b = TRUTH[left], TRUTH[right]
    both = False if False in (a, b) else None if None in (a, b) else True
    either = True if True in (a, b) else None if None in (a, b) else False
    assert truth(f"{SAID[a]} AND {SAID[b]}") is both
    assert truth(f"{SAID[a]} OR {SAID[b]}") is either
    assert truth(f"NOT {SAID[a]}") is (None if a is None else not a)


@pytest.mark.parametrize(
    "condition",
    [
        "missing = 'x'",
        "missing <> 'x'",
        "missing > 5",
        "missing IN ('x')",
        "missing NOT IN ('x')",
        "missing LIKE '%'",
        "missing NOT LIKE '%'",
        "missing BETWEEN 1 AND 2",
        "word = 40",
        "word <> 40",
        "word BETWEEN 1 AND 50",
    ],
)
def test_a_missing_header_or_one_that_is_no_number_makes_a_test_unknown(condition: str) -> None:
    assert truth(condition) is None


@pytest.mark.parametrize("value", ["nan", "NaN", "", " ", "0x10", "1e", "forty"])
def test_what_is_no_number_is_unknown_to_every_comparison_with_one(value: str) -> None:
    for sign in ("=", "<>", "<", "<=", ">", ">="):
        assert not Selector(f"n {sign} 5").matches({"n": value}), sign
        assert not Selector(f"NOT n {sign} 5").matches({"n": value}), sign


def test_whole_numbers_are_compared_exactly() -> None:
    assert not Selector("id = 9007199254740993").matches({"id": "9007199254740992"})


# --- errors and bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "says"),
    [
        ("", 1, "header name"),
        ("   ", 1, "header name"),
        ("type", 5, "comparison"),
        ("type =", 7, "single quotes"),
        ("type = order", 8, "single quotes"),
        ("type = 'order", 8, "cannot read"),
        ("type == 'order'", 7, "single quotes"),
        ("type = 'a' type = 'b'", 12, "AND, OR or the end"),
        ("type ( 'a'", 6, "comparison"),
        ("AND type = 'a'", 1, "header name"),
        ("type = 'a' AND", 15, "header name"),
        ("(type = 'a'", 12, "')'"),
        ("type = 'a')", 11, "AND, OR or the end"),
        ("type NOT 'a'", 10, "IN, BETWEEN or LIKE"),
        ("type IS 'a'", 9, "NULL"),
        ("type IN 'a'", 9, "'('"),
        ("type IN ()", 10, "single quotes"),
        ("type IN ('a',)", 14, "single quotes"),
        ("type IN (order)", 10, "single quotes"),
        ("type IN ('a', 5)", 15, "of one kind"),
        ("total BETWEEN 1 OR 2", 17, "AND"),
        ("type LIKE 5", 11, "single quotes"),
        ("type LIKE 'a' ESCAPE 'xx'", 22, "one character"),
        ("type LIKE 'a' ESCAPE ''", 22, "one character"),
        ("total = 1e5", 9, "cannot read"),
        ("total = 5x", 9, "cannot read"),
        ("5 = total", 1, "header name"),
        ("a = 'x'; DROP", 8, "cannot read"),
        ("a = 'x' AND $b = 'y'", 13, "cannot read"),
        ("__import__('os')", 11, "comparison"),
        ("a = 'x' and b.__class__() = 'y'", 24, "comparison"),
    ],
)
def test_an_error_says_what_was_expected_and_where(text: str, position: int, says: str) -> None:
    with pytest.raises(InvalidSelector) as caught:
        Selector(text)
    assert says in str(caught.value)
    assert re.search(rf"at character {position} of", str(caught.value)), str(caught.value)


def test_a_selector_has_a_longest_length() -> None:
    longest = "a = '" + "x" * (4096 - 6) + "'"
    assert Selector(longest).matches({"a": "x" * 4090})
    with pytest.raises(InvalidSelector, match="at most 4096 characters; this one has 4097"):
        Selector(longest + " ")


def test_parentheses_nest_to_a_bound() -> None:
    assert Selector("(" * 50 + "a = '1'" + ")" * 50).matches({"a": "1"})
    with pytest.raises(InvalidSelector, match="nests at most 50"):
        Selector("(" * 51 + "a = '1'" + ")" * 51)


def test_many_parentheses_side_by_side_are_no_nesting() -> None:
    assert Selector(" AND ".join(["(a = '1')"] * 200)).matches({"a": "1"})


def test_a_long_chain_of_not_is_read_without_recursion() -> None:
    assert Selector("NOT " * 1000 + "a = '1'").matches({"a": "1"})


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("abAND ORNTLIKE()'\"=<>,.5%_-\\$ "), max_size=40))
@example("a = ''''")
@example("'" * 41)
def test_any_text_is_read_or_refused_and_nothing_else_happens(text: str) -> None:
    try:
        selector = Selector(text)
    except InvalidSelector as exc:
        assert "selector" in str(exc)
    else:
        assert selector.matches({}) in (True, False)


# --- LIKE -------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("", "", "a"),
        ("%", "", None),
        ("_", "a", ""),
        ("a%", "a", "ba"),
        ("%a", "ba", "ab"),
        ("%a%", "bab", "bbb"),
        ("a%b%c", "a1b2c", "a1c2b"),
        ("%ab%ab%", "abab", "aab"),
        ("a%a", "aa", "a"),
        ("_%_", "ab", "a"),
        ("%%", "", None),
        ("a.c", "a.c", "abc"),
        ("[ab]", "[ab]", "a"),
        ("a\nb%", "a\nbc", "a b"),
    ],
)
def test_like_matches_the_whole_text(pattern: str, matching: str, other: str | None) -> None:
    selector = Selector(f"a LIKE {quoted(pattern)}")
    assert selector.matches({"a": matching})
    assert other is None or not selector.matches({"a": other})


def test_an_escaped_character_stands_for_itself() -> None:
    selector = Selector("a LIKE '10!%!_!!%' ESCAPE '!'")
    assert selector.matches({"a": "10%_!"})
    assert selector.matches({"a": "10%_! and more"})
    assert not selector.matches({"a": "10xx!"})


def test_without_escape_a_backslash_is_a_character() -> None:
    assert Selector(r"a LIKE 'x\%'").matches({"a": "x\\y"})
    assert not Selector(r"a LIKE 'x\%'").matches({"a": "x%"})


def as_regex(pattern: str, escape: str | None) -> str:
    out, characters = "", iter(pattern)
    for character in characters:
        if character == escape:
            out += re.escape(next(characters, character))
        else:
            out += {"%": ".*", "_": "."}.get(character) or re.escape(character)
    return out


@settings(max_examples=500, deadline=None)
@given(st.text("ab%_!", max_size=10), st.text("ab%_!", max_size=12), st.sampled_from([None, "!", "%", "_", "a"]))
def test_like_agrees_with_a_regular_expression(pattern: str, text: str, escape: str | None) -> None:
    ending = "" if escape is None else f" ESCAPE {quoted(escape)}"
    found = Selector(f"a LIKE {quoted(pattern)}{ending}").matches({"a": text})
    assert found is (re.fullmatch(as_regex(pattern, escape), text, re.DOTALL) is not None)


@settings(max_examples=300, deadline=None)
@given(st.text("ab'c%_", max_size=10), st.text("ab'c", max_size=12))
def test_like_agrees_with_shell_patterns(pattern: str, text: str) -> None:
    found = Selector(f"a LIKE {quoted(pattern)}").matches({"a": text})
    assert found is fnmatchcase(text, pattern.replace("%", "*").replace("_", "?"))


def test_like_does_not_backtrack() -> None:
    """A backtracking matcher would need longer than the universe is old."""
    assert not Selector("a LIKE '" + "%a" * 500 + "%b'").matches({"a": "a" * 5000})
