"""The place where letters are decided about."""

from pathlib import Path

import pytest

from tests.dead_letters.rig import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
