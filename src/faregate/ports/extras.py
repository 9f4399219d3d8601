"""Optional drivers: one that is not installed is `MissingExtra`, a sentence that names the extra."""

from collections.abc import Iterator
from contextlib import contextmanager

from faregate.errors import MissingExtra


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Around the import of a driver. Raises `MissingExtra` when it, or a library that it needs, is not there."""
    try:
        yield
    except ImportError as exc:
        package = (exc.name or "").partition(".")[0]
        if package == "faregate":
            raise  # a mistake of ours, not of the environment
        if isinstance(exc, ModuleNotFoundError):
            why = f"{package}, which is not installed"
        else:
            why = f"a driver that can be loaded ({' '.join(str(exc).split())})"
        raise MissingExtra(f"{what} needs {why}: pip install 'faregate[{extra}]'") from exc
