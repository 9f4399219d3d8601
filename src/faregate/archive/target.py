"""Where an archive lies: `file:/path`, or `s3://bucket/prefix`.

Rules kept here:
- A URI may hold credentials. What is shown of it does not, and an error of who parses it is not passed on with it.
- Errors of the storage are `ArchiveUnavailable`. A file that is not there is no error of the storage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from faregate.errors import ArchiveUnavailable, ConfigurationError

FORMS = "s3://BUCKET/PREFIX or file:/PATH"


class Target:
    """A folder, or a prefix within a bucket."""

    def __init__(self, shown: str, files: Any, root: str, folder: Path | None) -> None:
        self.shown = shown
        """For people."""
        self.files = files
        """A `pyarrow.fs.FileSystem`."""
        self.folder = folder
        """None for a bucket."""
        self._root = root

    def place(self, name: str) -> str:
        """How `files` calls it."""
        return f"{self._root}/{name}"

    def names(self, folder: str = "") -> list[str]:
        """What lies in one of its folders, in order; nothing when it is not there."""
        from pyarrow.fs import FileSelector

        wanted = FileSelector(self.place(folder) if folder else self._root, allow_not_found=True)
        with self.available():
            return sorted(found.base_name for found in self.files.get_file_info(wanted))

    def read(self, name: str) -> bytes | None:
        """None when it is not there."""
        with self.available():
            try:
                with self.files.open_input_file(self.place(name)) as file:
                    data: bytes = file.read()
                    return data
            except FileNotFoundError:
                return None

    @contextmanager
    def available(self, name: str = "") -> Iterator[None]:
        """Around what is done with `files`, or with that one of them."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as exc:
            what = f"{name} in {self.shown} cannot be read" if name else f"the archive {self.shown} cannot be used"
            raise ArchiveUnavailable(f"{what}: {exc}") from exc


def absolute(given: str) -> str:
    """A target as it may travel to other processes. Raises `ConfigurationError` for what is none."""
    scheme, colon, rest = given.partition(":")
    if scheme == "s3" and rest.startswith("//") and public(given) != "s3://":
        return given
    parts = urlsplit(given)
    if colon and scheme == "file" and parts.netloc in ("", "localhost") and parts.path.strip("/"):
        return Path(unquote(parts.path)).absolute().as_uri()
    hint = "" if colon else f"; for this folder, file:{Path(given).absolute()}"
    raise ConfigurationError(f"{public(given)!r} is no place for an archive: write {FORMS}{hint}")


def public(given: str) -> str:
    """For people and logs: without user, password and options."""
    scheme, colon, rest = given.partition(":")
    if not colon or scheme == "file":
        return given
    hidden = rest.rpartition("@")[2].partition("?")[0].lstrip("/")
    return f"{scheme}://{hidden}"


def open_target(given: str) -> Target:
    """Nothing is read or written, but S3 may be asked where the bucket is. Raises `ConfigurationError`,
    `ArchiveUnavailable`."""
    from pyarrow.fs import FileSystem, LocalFileSystem

    uri = absolute(given)
    if uri.startswith("file:"):
        folder = Path(unquote(urlsplit(uri).path))
        return Target(f"file:{folder}", LocalFileSystem(), str(folder), folder)
    shown = public(uri)
    try:
        files, root = FileSystem.from_uri(uri)
    except pa.ArrowInvalid as exc:
        why = str(exc).replace(uri, shown)
        raise ConfigurationError(f"{shown!r} is no place for an archive: {why}") from None
    except OSError as exc:
        raise ArchiveUnavailable(f"the archive {shown} cannot be used: {exc}") from None
    return Target(shown, files, root.rstrip("/"), None)
