"""The `journal:` transport keeps every promise of the queue port."""

from functools import partial
from pathlib import Path

import pytest

from faregate.testing import QUEUE_CASES, journal_subject, run_queue_case


@pytest.mark.parametrize("name", QUEUE_CASES)
async def test_the_journal_transport(name: str, tmp_path: Path) -> None:
    await run_queue_case(name, partial(journal_subject, tmp_path / "journal"))
