"""A driver that is not installed is `MissingExtra`, wherever it is asked for, and one sentence on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[2])

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in asked["missing"] or name.partition(".")[0] in asked["missing"]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name in asked["broken"]:
            raise ImportError("no library found")

asked = json.loads(sys.argv[1])
sys.meta_path.insert(0, Missing())
import faregate as fg
from faregate.cli import main
found = []
for code in asked["code"]:
    try:
        exec(code)
        found.append(["nothing", ""])
    except Exception as exc:
        found.append([type(exc).__name__, str(exc)])
for arguments in asked["commands"]:
    sys.argv = ["faregate", *arguments]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main()
    found.append([None, said.getvalue()])
print(json.dumps(found))
"""

URL = "postgresql://shop:secret@db/shop"
STORE_CODE = [
    f"fg.Bus('memory:', nodes=[fg.Node('a')], store='{URL}')",
    f"from faregate.ports.schemes import open_token_store; open_token_store('{URL}', None)",
    "from faregate.ports.schemes import open_insertion; open_insertion('postgresql')",
]
SPARK_CODE = ["fg.spark.run", "fg.spark.audit", "fg.spark.rates", "fg.spark.replay", "fg.spark.settlements"]
STORE_COMMANDS = [["store", "info", URL], ["store", "migrate", URL], ["dead", "list", URL]]
SPARK_COMMANDS = [
    ["spark", "audit", "journal"],
    ["spark", "rates", "journal"],
    ["spark", "drain", "table", "--store", "sqlite:a.db"],
    ["spark", "replay", "journal"],
    ["spark", "run", "app:node", "--journal", "journal", "--checkpoint", "checkpoint"],
]
READ_STORE = f"from faregate.spark.jobs.stores import open_stores; open_stores('{URL}')"
CONNECTION = """
class Connection:
    pass
Connection.__module__ = "psycopg"
class Placed(fg.Event):
    pass
fg.outbox(Connection(), node="shop").publish(Placed())
"""


def ask(folder: Path, code: list[str], commands: list[list[str]], missing: str = "", broken: str = "") -> list[str]:
    """What the code and the commands say in a process that cannot import this."""
    asked = {"missing": [missing], "broken": [broken], "code": code, "commands": commands}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked), str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {kind for kind, _ in found} <= {"MissingExtra", None}, found
    told = [" ".join(text.split()) for _, text in found]
    assert not any("Traceback" in text or "secret" in text for text in told), told
    return told


@pytest.mark.parametrize("missing", ["psycopg", "psycopg_pool"])
def test_without_the_driver_of_postgresql(tmp_path: Path, missing: str) -> None:
    for told in ask(tmp_path, [*STORE_CODE, CONNECTION], STORE_COMMANDS, missing=missing):
        assert f"needs {missing}, which is not installed: pip install 'faregate[postgres]'" in told


def test_without_the_library_of_the_driver_of_postgresql(tmp_path: Path) -> None:
    for told in ask(tmp_path, STORE_CODE, STORE_COMMANDS, broken="psycopg.pq"):
        assert "needs a driver that can be loaded (no library found): pip install 'faregate[postgres]'" in told


@pytest.mark.parametrize("missing", ["sqlalchemy", "greenlet"])
def test_without_sqlalchemy(tmp_path: Path, missing: str) -> None:
    code = "from faregate.stores.sqlite import MemoryStore; MemoryStore().session(None)"
    [told] = ask(tmp_path, [code], [], missing=missing)
    assert told == f"ctx.session needs {missing}, which is not installed: pip install 'faregate[sqlalchemy]'"


def test_without_the_driver_of_streams(tmp_path: Path) -> None:
    open_it = "from faregate.ports.schemes import open_log; open_log('rabbitmq-stream://u:secret@host/?stream=orders')"
    [told] = ask(tmp_path, [open_it], [], missing="rstream")
    assert "needs rstream, which is not installed: pip install 'faregate[rabbitmq]'" in told


@pytest.mark.parametrize("missing", ["pyspark", "numpy"])
def test_without_spark(tmp_path: Path, missing: str) -> None:
    for told in ask(tmp_path, SPARK_CODE, SPARK_COMMANDS, missing=missing):
        assert f"needs {missing}, which is not installed: pip install 'faregate[spark]'" in told


def test_jobs_on_spark_without_the_driver_of_postgresql(tmp_path: Path) -> None:
    [told] = ask(tmp_path, [READ_STORE], [], missing="psycopg")
    assert "needs psycopg, which is not installed: pip install 'faregate[postgres]'" in told


def test_a_mistake_of_our_own_is_not_called_a_missing_extra(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"No module named 'faregate\.stores\.postgres\.server'"):
        ask(tmp_path, STORE_CODE[:1], [], missing="faregate.stores.postgres.server")
