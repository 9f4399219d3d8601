"""Our records as rows of SQLite: ids are 16 bytes there. And the named queries, loaded once."""

from collections.abc import Sequence
from typing import Any

from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import ClaimRecord, OutboxRow
from faregate.ports.tokens import Token
from faregate.stores.sql import columns
from faregate.stores.sql.columns import id_bytes, id_text
from faregate.stores.sql.files import load_queries

QUERIES = load_queries(__package__)


def dead_letter(row: Sequence[Any]) -> DeadLetter:
    node, message_id, *others = row
    return columns.dead_letter([node, id_text(message_id), *others])


def outbox_row(row: Sequence[Any]) -> OutboxRow:
    seq, node, message_id, *others = row
    return columns.outbox_row([seq, node, None if message_id is None else id_text(message_id), *others])


def claim_record(row: Sequence[Any]) -> ClaimRecord:
    node, message_id, *others = row
    return ClaimRecord(node, id_text(message_id), *others)


def token(row: Sequence[Any]) -> Token:
    attempt_id, message_id, *others = row
    return Token(attempt_id, id_text(message_id), *others)


def token_values(tokens: Sequence[Token], now: float) -> list[tuple[Any, ...]]:
    """The columns of those tokens that may still be created."""
    return [
        (token.attempt_id, id_bytes(token.message_id), *token[2:])
        for token in sorted(tokens, key=lambda token: token.attempt_id)
        if now < token.not_after
    ]
