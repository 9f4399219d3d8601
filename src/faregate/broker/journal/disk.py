"""The disk as a port: the journal touches files only through here, so that tests can lose, tear and reorder writes.

What is promised: `sync` makes the writes to that file durable; `replace` and `create` and `remove` are durable when
they return, the folder's entry included. Nothing else is.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

PRIVATE_FILE = 0o600
PRIVATE_FOLDER = 0o700
UNFINISHED = ".new"


class File(Protocol):
    def write(self, at_byte: int, buffers: Sequence[Any]) -> int:
        """Write the buffers one behind the other; returns how many bytes that were. Not durable before `sync`."""

    def sync(self) -> None: ...
    def truncate(self, size: int) -> None:
        """Cut or extend with zeros. Not durable before `sync`."""

    def close(self) -> None: ...


class Disk(Protocol):
    def make_folder(self, path: Path) -> None: ...
    def list(self, path: Path) -> list[str]:
        """Names of the files in a folder; none when it is not there."""

    def size(self, path: Path) -> int: ...
    def is_file(self, path: Path) -> bool:
        """Whether it is a plain file: no folder, link or pipe, which cannot be read like one."""

    def create(self, path: Path, size: int) -> File:
        """A new file of zeros with its space reserved; raises OSError (ENOSPC) and leaves nothing otherwise."""

    def open(self, path: Path) -> File: ...
    def read(self, path: Path, at_byte: int = 0, length: int = -1) -> bytes: ...
    def view(self, path: Path) -> Any:
        """The file's bytes as they are now, without reading them all."""

    def replace(self, path: Path, data: bytes) -> None:
        """Give the file this content: afterwards, and after any crash, it has the old or the new one."""

    def rename(self, path: Path, target: Path) -> None: ...
    def remove(self, path: Path, *others: Path) -> None:
        """`others` go behind it, as far as they can; after a crash they may be there again."""


class RealFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, at_byte: int, buffers: Sequence[Any]) -> int:
        total = sum([memoryview(buffer).nbytes for buffer in buffers])
        written = os.pwritev(self._descriptor, buffers, at_byte)
        while written < total:
            rest = b"".join(buffers)[written:]
            count = os.pwrite(self._descriptor, rest, at_byte + written)
            if not count:
                raise OSError(errno.EIO, "the disk took no more bytes")
            written += count
        return total

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Closing twice does nothing; a closed descriptor's number may be another file's by then."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RealDisk:
    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            give_to_owner(path, path.parent)
            sync_path(path.parent)

    def list(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 (several times faster, and called all the time)
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def is_file(self, path: Path) -> bool:
        return stat.S_ISREG(path.lstat().st_mode)

    def create(self, path: Path, size: int) -> RealFile:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            give_to_owner(descriptor, path.parent)
            if size:
                os.posix_fallocate(descriptor, 0, size)
            os.fsync(descriptor)
            sync_path(path.parent)
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return RealFile(descriptor)

    def open(self, path: Path) -> RealFile:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        give_to_owner(descriptor, path.parent)
        return RealFile(descriptor)

    def read(self, path: Path, at_byte: int = 0, length: int = -1) -> bytes:
        with path.open("rb") as file:
            file.seek(at_byte)
            return file.read(length)

    def view(self, path: Path) -> Any:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def replace(self, path: Path, data: bytes) -> None:
        with replacing(path) as file:
            file.write(data)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)
        sync_path(target.parent)
        if path.parent != target.parent:
            sync_path(path.parent)

    def remove(self, path: Path, *others: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_path(path.parent)
        for other in others:
            with contextlib.suppress(OSError):
                other.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that is in its place once it is written and synced; if that fails, nothing is left of it."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{UNFINISHED}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            give_to_owner(descriptor, path.parent)
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)


def size_of(path: Path, disk: Disk) -> int:
    """Nothing, when it is not there (any more)."""
    try:
        return disk.size(path)
    except FileNotFoundError:
        return 0


def is_full(error: OSError) -> bool:
    """Whether the disk has no room, or none for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def sync_path(path: Path) -> None:
    """Make the bytes of a file durable, or the entries of a folder."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def give_to_owner(file: int | Path, folder: Path) -> None:
    """What root writes (`sudo faregate publish`, `repair`) belongs to whom the folder belongs to: he has to read it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        if owner.st_uid:
            with contextlib.suppress(PermissionError):  # a root of a container, who may not
                os.chown(file, owner.st_uid, owner.st_gid, follow_symlinks=isinstance(file, int))
