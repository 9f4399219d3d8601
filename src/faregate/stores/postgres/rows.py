"""The named queries of PostgreSQL, loaded once, and rows as the columns of one statement."""

from collections.abc import Sequence
from typing import Any

from faregate.ports.tokens import Token
from faregate.stores.sql.files import load_queries

QUERIES = load_queries(__package__)


def token_columns(tokens: Sequence[Token]) -> list[list[Any]]:
    return [list(column) for column in zip(*tokens, strict=True)]
