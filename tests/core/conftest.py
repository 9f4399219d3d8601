"""What the tests of the way through a handler share."""

import pytest

from faregate.core.handling import BATCH_LIMIT, Handling


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are published together share a transaction, however slow the machine is."""
    monkeypatch.setattr(Handling, "batch", BATCH_LIMIT)
