"""Who may import whom: the table in docs/architecture.md, as contracts in pyproject.toml."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", str(config)], cwd=folder, capture_output=True, text=True
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
