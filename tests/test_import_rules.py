"""Who may import whom: the table in docs/architecture.md, as contracts in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", str(config)], cwd=folder, capture_output=True, text=True
    )


def test_the_import_rules_hold() -> None:
    result = lint(ROOT, ROOT / "pyproject.toml")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout
