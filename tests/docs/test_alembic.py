"""The guide to Alembic: with its `include_name` a migration that is generated leaves Faregate's tables alone."""

import asyncio
from pathlib import Path
from typing import Any

import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

import faregate as fg
from tests.docs.pages import DOCS, blocks


def test_autogenerate_leaves_the_tables_of_faregate_alone(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/shop.db"
    asyncio.run(fg.Bus("memory:", nodes=[fg.Node("shop")], store=url).prepare())
    metadata = sqlalchemy.MetaData()
    sqlalchemy.Table("orders", metadata, sqlalchemy.Column("id", sqlalchemy.Text, primary_key=True))
    names: dict[str, Any] = {}
    [block] = blocks(DOCS / "how-to" / "alembic.md", "python")
    exec(block.text, names)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.connect() as connection:
        bare = MigrationContext.configure(connection)
        assert any(change[0] == "remove_table" for change in compare_metadata(bare, metadata)), "or this shows nothing"
        context = MigrationContext.configure(connection, opts={"include_name": names["include_name"]})
        [(what, table)] = compare_metadata(context, metadata)
    engine.dispose()
    assert (what, table.name) == ("add_table", "orders")
