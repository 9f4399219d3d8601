"""The SQL of a backend, read from its folder: `queries.sql` with named queries, and numbered migrations.

A query is a line `-- name: its_name`, then a comment line with its purpose, then one statement. A migration is a file
`NNNN_what_it_does.sql`; its number is the version of the schema that it leads to. Released ones never change.
"""

import re
from importlib.resources import files
from typing import NamedTuple

_NAME = re.compile(r"^-- name: *(\w+) *\n-- (.+)\n", re.MULTILINE)


class Migration(NamedTuple):
    version: int
    name: str
    sql: str


def load_queries(package: str, parameter: str = "?") -> dict[str, str]:
    """The named queries of a backend and those of `sql`, with what its driver writes for a parameter."""
    shared = {name: sql.replace("?", parameter) for name, sql in _queries(__package__).items()}
    return {**shared, **_queries(package)}


def _queries(package: str) -> dict[str, str]:
    """The named queries of one file, without their comments' first lines."""
    text = (files(package) / "queries.sql").read_text("utf-8")
    found = list(_NAME.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    queries = {match[1]: text[match.end() : end].strip().rstrip(";") for match, end in zip(found, ends, strict=True)}
    named = text.count("-- name:")
    if len(queries) != named:
        raise ValueError(f"{package}/queries.sql: a name is used twice, or a query has no purpose line after its name")
    return queries


def load_migrations(package: str) -> list[Migration]:
    """The migrations of a backend, versions 1, 2, 3, …"""
    found = []
    for file in (files(package) / "migrations").iterdir():
        number, underscore, name = file.name.removesuffix(".sql").partition("_")
        if file.name.endswith(".sql") and underscore and number.isdigit():
            found.append(Migration(int(number), name, file.read_text("utf-8")))
    found.sort()
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"{package}/migrations: the numbers have a gap, or one is used twice")
    return found


def load_schema(package: str) -> str:
    """What all migrations together make, as one script for people to read."""
    return (files(package) / "schema.sql").read_text("utf-8")


def too_new(where: str, found: int, ours: int) -> str:
    """What to say of a database that a newer version of Faregate has set up."""
    return (
        f"{where} has the tables of schema version {found}, and this version of Faregate knows versions up to {ours}: "
        f"a newer Faregate has set it up. Upgrade this one (pip install --upgrade faregate), or use another database. "
        f"`faregate store info {where}` shows what is in it."
    )
