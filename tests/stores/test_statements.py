"""`?` in a user's statement, and statements that would end the transaction."""

import pytest

from faregate.errors import TransactionMisused
from faregate.stores.sql.statements import check_statement, to_percent


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("select ?", "select %s"),
        ("select a ?? 'b', ?", "select a ? 'b', %s"),
        ("select '?', 'it''s ?', ?", "select '?', 'it''s ?', %s"),
        ('select "a?" from t where b = ?', 'select "a?" from t where b = %s'),
        ("select ? -- why?\n, ?", "select %s -- why?\n, %s"),
        ("select /* ? ' */ ?", "select /* ? ' */ %s"),
        ("select $$ ? $$, $tag$ ? $$ ? $tag$, ?", "select $$ ? $$, $tag$ ? $$ ? $tag$, %s"),
        (r"select E'\'?', ?", r"select E'\'?', %s"),
        ("select 'a%' like ? and 5 % 2 = 1", "select 'a%%' like %s and 5 %% 2 = 1"),
        ("select 'never closed ? ", "select 'never closed ? "),
    ],
)
def test_a_question_mark_is_translated_where_it_is_a_parameter(given: str, expected: str) -> None:
    assert to_percent(given, True) == expected


def test_without_parameters_only_a_doubled_mark_changes() -> None:
    assert to_percent("select 5 % 2, a ?? 'b'", False) == "select 5 % 2, a ? 'b'"


@pytest.mark.parametrize(
    "sql",
    [
        "commit",
        "  ROLLBACK",
        "-- now\ncommit",
        "/* a */ /* b */ end;",
        "begin immediate",
        "start   transaction",
        "savepoint a",
        "release a",
        "abort",
        "prepare transaction 'x'",
        ";commit",
        "select 1; commit",
        "select ';'; /* ; */ rollback",
    ],
)
def test_a_statement_about_the_transaction_is_refused_with_the_reason(sql: str) -> None:
    with pytest.raises(TransactionMisused, match="commits business data, ledger and outbox together"):
        check_statement(sql)
    with pytest.raises(TransactionMisused):
        to_percent(sql, True)


@pytest.mark.parametrize(
    "sql",
    [
        "select 'commit'",
        "insert into commits values (1)",
        "-- commit\nselect 1",
        "prepare plan as select 1",
        "select 1; -- commit",
        "create trigger t after insert on a begin delete from b; end",
    ],
)
def test_other_statements_pass(sql: str) -> None:
    assert check_statement(sql) == sql
