"""What the jobs read stores through: nobody ever sees a password."""

from pathlib import Path

import pytest

from faregate.cli.spark.jobs import stores_of
from faregate.errors import FaregateError
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import hide_password, open_store
from faregate.ports.store import Readable
from faregate.spark.jobs.stores import JobStore, open_stores

URLS = [
    "postgresql://u:SECRET@127.0.0.1:1/db",
    "postgresql://u:SECRET%zz@127.0.0.1:1/db",
    "postgresql://u:SEC/RET@127.0.0.1:1/db",
    "postgresql://u:SEC RET@127.0.0.1:1/db?foo=bar",
    "postgresql://u@127.0.0.1:1/db?password=SECRET",
    "postgresql://127.0.0.1:1/db?user=u&password=SECRET&bogus=1",
    "postgresql://127.0.0.1:1/db?p%61ssword=SECRET",
    "postgres://u:SE@CRET@127.0.0.1:1/db",
    "postgresql://u:a:SECRET@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?password=SECRET@x",
    "postgresql://127.0.0.1:1/db?password=x@SECRET",
    "postgresql://127.0.0.1:1/db?password=x y=SECRET",
    "host=127.0.0.1 password = 'SEC RET' dbname=x",
]


@pytest.mark.parametrize("url", URLS)
def test_no_password_is_in_an_error(url: str) -> None:
    with pytest.raises(FaregateError) as caught:
        open_stores(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert not {part for part in ("SEC", "RET", "CRET") if part in str(error)}, str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    with pytest.raises(FaregateError) as caught:
        stores_of([url if "//" in url else f"x:{url}", "x=sqlite:y"])
    assert "SEC" not in str(caught.value) and "RET" not in str(caught.value)


def test_no_password_is_in_what_travels_to_tasks_when_it_is_shown() -> None:
    store = open_store(URLS[0], SystemClock())
    assert isinstance(store, Readable)
    assert "127.0.0.1" in repr(store.reader()) and "SECRET" not in repr(JobStore(store.reader()))


def test_what_is_no_password_is_shown() -> None:
    for url in (
        "postgresql://u@h:5432/db?options=-csearch_path%3Dx",
        "sqlite:/a/b@c:d.db",
        "journal:./data?retain=7d",
    ):
        assert hide_password(url) == url
    assert hide_password("postgresql://u:x@h:5432/db?a=b") == "postgresql://u:***@h:5432/db?a=b"
    assert hide_password("postgresql://h/db?a=b&password=x&c=d") == "postgresql://h/db?a=b&password=***&c=d"


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(FaregateError, match=r"cannot reach postgresql://u:\*\*\*@127\.0\.0\.1:1/db: .*refused"):
        open_stores("postgresql://u:SECRET@127.0.0.1:1/db")
