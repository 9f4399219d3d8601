"""Where the crash tests keep journal, stores and tokens: the five forms, how each is made, and how it is read.

Reading goes around Faregate, by the databases' own drivers, so that it cannot share a mistake with it.
"""

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psycopg

from faregate.broker.journal import JournalReader
from faregate.testing.store_subjects import postgres_schema
from tests.crash.line import KEYS, Records
from tests.presence import address

NODES = ("shop", "first", "second")

LEDGER_POINTS = (
    "bus.before-handler",
    "bus.after-handler",
    "unit.before-commit",
    "unit.after-commit",
    "bus.before-settle",
    "bus.after-settle",
    "bus.before-publish",
    "bus.after-publish",
    "dispatch.before-remove",
)
MERGED_POINTS = (*LEDGER_POINTS, "tokens.resolved")
SEPARATE_POINTS = (
    *MERGED_POINTS,
    "tokens.registered",
    "tokens.created",
    "tokens.chosen",
    "tokens.claim-recorded",
    "tokens.claimed",
    "tokens.deleted",
    "tokens.forgotten",
)
TICK_POINTS = ("ticks.before-commit", "ticks.after-commit")
"""Those of schedules, of which the line has none (`test_ticks.py`)."""
POINTS_OF = {
    "ledger-sqlite": LEDGER_POINTS,
    "ledger-postgres": LEDGER_POINTS,
    "tokens-merged-sqlite": MERGED_POINTS,
    "tokens-apart-sqlite": SEPARATE_POINTS,
    "tokens-apart-postgres": SEPARATE_POINTS,
}
"""The fault points that a run of the line reaches in each form."""


@dataclass(frozen=True)
class Place:
    folder: Path
    dedup: Literal["ledger", "tokens"]
    stores: dict[str, str]
    """Node to URL."""
    tokens: str | None = None

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def records(self) -> Records:
        """Everything that is there now."""
        found = Records()
        for node, url in self.stores.items():
            rows = query(url, f"select message_id, number from {node}_effects")
            found.effects += [(node, message_id, number) for message_id, number in rows]
        arrived = query(self.stores["second"], "select number from second_effects where type = 'Passed' order by place")
        for (number,) in arrived:
            found.arrived.setdefault(number % KEYS, []).append(number)
        for url in {*self.stores.values(), *([self.tokens] if self.tokens else [])}:
            found.ledger += [(n, text_of(m)) for n, m in query(url, "select node, message_id from faregate_ledger")]
            dead = query(url, "select node, message_id, status from faregate_dead")
            found.dead += [(node, text_of(message_id), status) for node, message_id, status in dead]
            for table in ("outbox", "tokens", "claims"):
                [(count,)] = query(url, f"select count(*) from faregate_{table}")
                setattr(found, table, getattr(found, table) + count)
        if self.journal.exists():
            found.log += [envelope.publication_id for _, envelope in JournalReader(self.journal).envelopes()]
        return found.tidy()


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    if url.startswith("sqlite:"):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:"))) as connection:
            return connection.execute(sql).fetchall()
    with psycopg.connect(url, autocommit=True) as server:
        return server.execute(sql).fetchall()


def text_of(message_id: Any) -> str:
    return str(UUID(bytes=message_id)) if isinstance(message_id, bytes) else str(message_id)


@asynccontextmanager
async def place(form: str, folder: Path) -> AsyncIterator[Place]:
    """An empty place of this form; skips, or fails in CI, when its server is not there."""
    one_file = dict.fromkeys(NODES, f"sqlite:{folder}/all.db")
    if form == "ledger-sqlite":
        yield Place(folder, "ledger", one_file)
    elif form == "tokens-merged-sqlite":
        yield Place(folder, "tokens", one_file)
    elif form == "tokens-apart-sqlite":
        files = {node: f"sqlite:{folder}/{node}.db" for node in NODES}
        yield Place(folder, "tokens", files, f"sqlite:{folder}/tokens.db")
    elif form == "ledger-postgres":
        async with postgres_schema(address("FAREGATE_TEST_POSTGRES")) as url:
            yield Place(folder, "ledger", dict.fromkeys(NODES, url))
    elif form == "tokens-apart-postgres":
        server = address("FAREGATE_TEST_POSTGRES")
        async with postgres_schema(server) as url, postgres_schema(server) as tokens:
            yield Place(folder, "tokens", dict.fromkeys(NODES, url), tokens)
    else:
        raise ValueError(form)
