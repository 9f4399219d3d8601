"""The same source and sink over Spark Connect, with a local server that Spark starts itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.rig import empty_journal, journal, run_bus

pytestmark = [pytest.mark.services, pytest.mark.full]


def test_reading_and_writing_over_connect(tmp_path: Path) -> None:
    for module in ("grpc", "grpc_status", "google.rpc", "zstandard"):
        pytest.importorskip(module, reason="Spark Connect needs pip install 'pyspark[connect]'")
    journal(tmp_path / "from", 30)
    empty_journal(tmp_path / "to")
    script = Path(__file__).with_name("connect_session.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "counted 30 30" in done.stdout
    assert sorted(map(int, run_bus(tmp_path / "to"))) == list(range(30))
