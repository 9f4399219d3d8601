"""What the crash tests share: a private server, and short waits while a store is away."""

from collections.abc import Iterator

import pytest

from faregate.bus import housekeeping
from faregate.core import last_resort, verdict
from faregate.errors import Unavailable
from tests.crash.server import PrivatePostgres, private_postgres


@pytest.fixture(scope="package")
def server() -> Iterator[PrivatePostgres]:
    with private_postgres() as started:
        yield started


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that waits for its store waits a fifth of a second, not ten."""
    monkeypatch.setitem(Unavailable.__init__.__kwdefaults__, "retry_after", 0.2)
    monkeypatch.setattr(last_resort, "_STORE_DOWN_SECONDS", 0.2)
    monkeypatch.setattr(verdict, "_UNKNOWN_SECONDS", 0.2)
    monkeypatch.setattr(housekeeping, "_STORE_DOWN_SECONDS", 0.2)
