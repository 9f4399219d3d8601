"""What a type checker tells users about `ctx.db`, in both kinds of handlers."""

import subprocess
import sys
from pathlib import Path

import faregate as fg
from faregate.core.database import BlockingDatabase, Database
from faregate.ports.schemes import members

ROOT = Path(__file__).parents[2]
HANDLERS = """
import faregate as fg

class Placed(fg.Event):
    order_id: str

billing = fg.Node("billing")

async def insert(db: fg.HandlerDatabase, order: Placed) -> None:
    await db.execute("insert into bills(id) values (?)", (order.order_id,))

@billing.on(Placed, source="shop")
async def bill(order: Placed, ctx: fg.Context) -> None:
    await insert(ctx.db, order)
    changed: int = await ctx.db.executemany("insert into bills(id) values (?)", [(order.order_id,)])
    rows: list[tuple[str]] = await ctx.db.fetchall("select id from bills limit ?", [changed])
    ctx.db.raw.cursor()

def note(order: Placed, ctx: fg.Context) -> str | None:
    changed: int = ctx.db.execute("insert into bills(id) values (?)", (order.order_id,))
    row: tuple[str] | None = ctx.db.fetchone("select id from bills limit ?", [changed])
    return None if row is None else row[0]
"""
MISTAKES = """
import faregate as fg

async def bill(ctx: fg.Context) -> None:
    await ctx.db.exceute("select 1")
    await ctx.db.execute(1)
    await ctx.db.fetchall("select ?", 17)
    await ctx.db.commit()
"""


def mypy(tmp_path: Path, code: str) -> list[str]:
    """What it says about a file of a user, by line, with the settings of this repository."""
    file = tmp_path / "user_code.py"
    file.write_text(code)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.stderr == ""
    return [line.partition("user_code.py:")[2] for line in done.stdout.splitlines() if "user_code.py:" in line]


def test_ctx_db_is_awaited_in_async_handlers_and_called_plainly_in_others(tmp_path: Path) -> None:
    assert mypy(tmp_path, HANDLERS) == []


def test_a_wrong_name_or_parameter_at_ctx_db_is_told(tmp_path: Path) -> None:
    told = [line for line in mypy(tmp_path, MISTAKES) if ": error: " in line]
    assert [line.partition(":")[0] for line in told] == ["5", "6", "7", "8"]
    assert '"HandlerDatabase" has no attribute "exceute"' in told[0]


def test_the_type_has_what_ctx_db_has() -> None:
    """That their parameters agree, mypy tells where `ctx.db` is returned."""
    ending = {"commit", "rollback", "close"}  # which a handler must not call
    for kind in (Database, BlockingDatabase):
        has = {name for name in vars(kind) if not name.startswith("_")} - ending
        assert has == set(members(fg.HandlerDatabase))
