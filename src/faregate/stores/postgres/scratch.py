"""An empty schema in a database that others use too: for tests and measurements."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex
from urllib.parse import quote

import psycopg


@asynccontextmanager
async def empty_schema(url: str) -> AsyncIterator[str]:
    """The URL of the schema; it is dropped afterwards."""
    name = f"faregate_test_{os.getpid()}_{token_hex(4)}"  # process ids of several machines are alike
    options = quote(f"-csearch_path={name}")
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(f"create schema {name}")
        try:
            yield f"{url}{'&' if '?' in url else '?'}options={options}"
        finally:
            await connection.execute("set client_min_messages = warning")
            await connection.execute(f"drop schema {name} cascade")
