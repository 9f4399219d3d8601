"""The same source and sink over Spark Connect, with a local server that Spark starts itself. Handlers are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faregate.broker.journal import JournalReader
from tests.spark.rig import empty_journal, journal, run_bus

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.services, pytest.mark.full]


def test_reading_and_writing_over_connect_and_no_handlers(tmp_path: Path) -> None:
    for module in ("grpc", "grpc_status", "google.rpc", "zstandard"):
        pytest.importorskip(module, reason="Spark Connect needs pip install 'pyspark[connect]'")
    journal(tmp_path / "from", 30)
    empty_journal(tmp_path / "to")
    script = Path(__file__).with_name("connect_session.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "counted 30 30" in done.stdout
    assert f"typed {sum(range(30))}\nwrong 30\nstreamed 30" in done.stdout
    assert "refused node 'reader' cannot run over Spark Connect" in done.stdout
    assert "or faregate spark run" in done.stdout
    assert JournalReader(tmp_path / "from").topology().queues == []  # no view was taken
    assert sorted(map(int, run_bus(tmp_path / "to"))) == list(range(30))
