"""For the cases of the suites: what a backend has to refuse."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(error: type[Exception], otherwise: str, *, naming: str = "") -> Iterator[None]:
    """Fails with this text unless what is done in here raises the error, which names that."""
    try:
        yield
    except error as exc:
        assert naming in str(exc), f"the error does not name {naming}: {exc}"
    except Exception as exc:
        raise AssertionError(f"{otherwise}: it raised {exc!r}, not {error.__name__}") from exc
    else:
        raise AssertionError(otherwise)
