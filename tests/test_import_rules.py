"""Who may import whom: the table in docs/architecture.md, as contracts in pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(folder: Path, config: Path, source: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", str(config)],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )


def test_only_the_stores_name_our_tables() -> None:
    source = ROOT / "src" / "faregate"
    schemas = [path.read_text() for path in source.glob("stores/*/schema.sql")]
    tables = {name for schema in schemas for name in re.findall(r"create table (\w+)", schema)}
    assert "faregate_ledger" in tables and len(schemas) == 2
    named = re.compile("|".join(tables))
    others = [path for path in source.rglob("*.py") if "stores" not in path.relative_to(source).parts]
    assert [str(path) for path in others if named.search(path.read_text())] == []


def test_the_import_rules_hold() -> None:
    result = lint(ROOT, ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_each_rule_is_broken_by_an_import_against_it(tmp_path: Path) -> None:
    against = {
        "The bus and the stores know the broker only through the ports": ("node/key.py", "faregate.broker.queue"),
        "A declaration knows nothing of how it is run": ("node/key.py", "faregate.core.handling"),
        "Transports and stores know nothing of handlers": ("transports/memory.py", "faregate.node.node"),
        "Spark knows logs only through the ports": ("spark/logs.py", "faregate.transports.journal"),
        "Spark is an engine of its own, beside the bus": ("spark/logs.py", "faregate.bus.worker"),
        "The suites know ports and public API": ("testing/codec_suite.py", "faregate.core.handling"),
    }
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for file, module in against.values():
        with (tmp_path / "src" / "faregate" / file).open("a") as code:
            code.write(f"\nimport {module}\n")
    told = " ".join(lint(tmp_path, ROOT / "pyproject.toml", tmp_path / "src").stdout.split())
    for name in against:
        assert re.search(re.escape(name) + r"[^.]*? BROKEN", told), f"{name}: {told}"
