"""What mypy and pyright tell users about the functions that they give to a node. (basedpyright is pyright as a package
that brings its own Node.js.)"""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import faregate as fg

ROOT = Path(__file__).parents[2]
MISTAKES = """
from collections.abc import AsyncIterator, Awaitable, Callable
import faregate as fg

class Placed(fg.Event):
    order_id: str

class Paid(fg.Event):
    order_id: str

class Effect:
    pass

node = fg.Node("typed")

@node.on(Placed, source="a")  # wrong
async def another_class(paid: Paid) -> None: ...

@node.on(Placed, source="b")  # wrong
def another_class_in_a_thread(paid: Paid, ctx: fg.BlockingContext) -> None: ...

@node.on(Placed, source="c")  # wrong
async def another_class_that_is_yielded(paid: Paid, ctx: fg.Context) -> AsyncIterator[Paid]:
    yield paid

@node.on(Placed, source="d")  # wrong
async def nothing() -> None: ...

@node.on(Placed, source="e")  # wrong
async def context_first(ctx: fg.Context, placed: Placed) -> None: ...

@node.on(Placed, source="f")
@node.on(Paid, source="f")  # wrong
async def one_of_two(placed: Placed) -> None: ...

@node.on("Placed", source="g")  # wrong
async def by_name(placed: Placed) -> None: ...

@node.interprets(Effect)  # wrong
async def interpret(placed: Placed) -> None: ...

@node.provides(scope="forever")  # wrong
async def no_scope() -> Effect:
    return Effect()

@node.use  # wrong
def in_a_thread(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None: ...

@node.escalates  # wrong
async def escalate(placed: Placed) -> None: ...

@node.on(Placed, source="h")
async def awaits(placed: Placed, ctx: fg.AsyncContext) -> int:
    await ctx.session.comit()  # wrong
    return ctx.db.execute("select 1")  # wrong

@node.on(Placed, source="i")
async def of_rows(placed: Placed, ctx: fg.AsyncContext) -> None:
    rows: list[int] = await ctx.db.fetchall("select 1")  # wrong
    ctx.session.execute(1)  # wrong

@node.on(Placed, source="j")
def waits(placed: Placed, ctx: fg.BlockingContext) -> str:
    ctx.session.execute(1)  # wrong
    return ctx.db.execute("select 1")  # wrong

@node.on(Paid, source="k")
async def right(paid: Paid) -> Paid:
    return paid

async def call() -> None:
    placed: Placed = await right(Paid(order_id="1"))  # wrong

def misspelled(option: fg.Opitons) -> None: ...  # wrong

observer = fg.observe.Promtheus()  # wrong
"""
UNTYPED = """
import faregate as fg

class Placed(fg.Event):
    order_id: str

node = fg.Node("typed")

@node.on(Placed, source="a")
async def awaited(placed, ctx):
    await ctx.db.execute("select 1")

@node.on(Placed, source="b")
def plain(placed):
    yield placed

@node.use
async def around(ctx, call_next):
    await call_next()
"""


def mypy(file: Path, *options: str) -> list[int]:
    """The lines that it finds wrong, with the settings of this repository (strict)."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *options, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.stderr == ""
    return sorted({int(line) for line in re.findall(rf"{file.name}:(\d+): error", done.stdout)})


def pyright(file: Path, mode: str = "strict") -> list[int]:
    config = file.parent / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": mode, "include": [file.name], "pythonVersion": "3.11"}))
    program = Path(sys.executable).with_name("basedpyright")
    command = [str(program), "--outputjson", "--pythonpath", sys.executable, "--project", str(config)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=170, check=False)
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1, done
    found = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    return sorted({each["range"]["start"]["line"] + 1 for each in found})


CHECKERS = pytest.mark.parametrize("check", [mypy, pyright])
Check = Callable[..., list[int]]


@CHECKERS
def test_every_legal_shape_passes(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(Path(__file__).with_name("typed_handlers.py").read_text())
    assert check(file) == []


def test_every_legal_shape_can_be_declared() -> None:
    declared: fg.Node = importlib.import_module("tests.node.typed_handlers").node
    assert len(declared.subscriptions) == 16


@CHECKERS
def test_a_function_for_another_class_is_told(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(MISTAKES)
    wrong = [number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# wrong")]
    assert check(file) == wrong


def test_functions_without_annotations_pass(tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(UNTYPED)
    assert mypy(file, "--allow-untyped-defs", "--check-untyped-defs") == []
    assert pyright(file, "standard") == []


@pytest.mark.parametrize(("kind", "annotated"), [("def", fg.AsyncContext), ("async def", fg.BlockingContext)])
def test_a_context_of_the_other_kind_is_refused_at_declaration(kind: str, annotated: type) -> None:
    class Placed(fg.Event):
        pass

    async def awaited(placed: Placed, ctx: annotated) -> None: ...  # type: ignore[valid-type]

    def plain(placed: Placed, ctx: annotated) -> None: ...  # type: ignore[valid-type]

    right = "fg.BlockingContext" if kind == "def" else "fg.AsyncContext"
    with pytest.raises(fg.WrongSignature, match=f"{annotated.__name__}: annotate it with {right}"):
        fg.Node("a").on(Placed, source="b")(plain if kind == "def" else awaited)
