"""A disk in memory that remembers every operation, so that every state a power loss can leave behind can be made.

What is assumed, which is what the `Disk` port promises and nothing more:
- What was written to a file before its last `sync` is durable.
- Of the writes and truncations since then any subset may have reached the disk, in any order, and each write may be
  torn: cut at any byte, or with some of its sectors there and others not.
- `create`, `replace`, `rename` and `remove` are durable when they return. A crash in the middle of one shows the old
  state or the new one; in the middle of `create` also an empty file, in the middle of `replace` a hidden leftover.

    disk = SimulatedDisk()
    ...                                        # run something on it
    for moment, after in disk.crash_states():  # many, by rule
        ...                                    # `after` is a disk that holds what survived
    after = disk.crash(choose)                 # one, where `choose(most)` picks a number from 0 to `most`

Faults: `fail("sync", errno.EIO)` makes operations fail, `full` and `read_only` are what they say. Threads may share a
disk.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

Choose = Callable[[int], int]
"""Picks a number from 0 to the given one, that one included. From Hypothesis: `lambda n: data.draw(integers(0, n))`."""

SECTOR = 512


class Step(NamedTuple):
    """One operation that was done, or something that a test noted between operations."""

    operation: str
    """write, truncate, sync, make_folder, create, open, replace, rename, remove or note."""
    path: Path
    at_byte: int = 0
    """Where was written; for truncate and create the size."""
    data: bytes = b""
    target: Path | None = None
    note: object = None


class Fault:
    """Operations that fail until this is lifted."""

    def __init__(self, operation: str, error: int, name: str, times: int | None, partly: int) -> None:
        self.operation = operation
        self.error = error
        self.name = name
        self.times = times
        self.partly = partly
        """How many bytes of a failing write get through nevertheless."""
        self.hits = 0

    def lift(self) -> None:
        self.times = 0

    def strikes(self, operation: str, path: Path) -> bool:
        if operation != self.operation or not fnmatch(path.name, self.name) or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        self.hits += 1
        return True


class _Content:
    """A file's bytes as programs see them, those that are durable, and what lies between."""

    def __init__(self, data: bytes = b"") -> None:
        self.now = bytearray(data)
        self.durable = bytes(data)
        self.pending: list[Step] = []

    def apply(self, step: Step) -> None:
        self.now = _changed(self.now, step)
        self.pending.append(step)

    def sync(self) -> None:
        self.durable = bytes(self.now)
        self.pending.clear()


def _changed(data: bytearray, step: Step) -> bytearray:
    """The bytes after a write or truncation. Within its size a file changes in place: views of it see that."""
    if step.operation == "truncate":
        return data[: step.at_byte] + bytes(max(0, step.at_byte - len(data)))
    end = step.at_byte + len(step.data)
    if end > len(data):
        data = data + bytes(end - len(data))
    data[step.at_byte : end] = step.data
    return data


class SimulatedFile:
    def __init__(self, disk: "SimulatedDisk", path: Path, content: _Content) -> None:
        self._disk = disk
        self._path = path
        self._content: _Content | None = content

    def write(self, at_byte: int, buffers: Sequence[Any]) -> int:
        data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        with self._disk.lock:
            content = self._open()
            grows = at_byte + len(data) > len(content.now)
            partly = self._disk.check("write", self._path, grows=grows)
            if partly is not None:
                if partly[0]:
                    self._disk.do(Step("write", self._path, at_byte, data[: partly[0]]), content)
                raise partly[1]
            self._disk.do(Step("write", self._path, at_byte, data), content)
        return len(data)

    def sync(self) -> None:
        with self._disk.lock:
            content = self._open()
            self._disk.refuse("sync", self._path)
            self._disk.do(Step("sync", self._path), content)

    def truncate(self, size: int) -> None:
        with self._disk.lock:
            content = self._open()
            self._disk.refuse("truncate", self._path)
            self._disk.do(Step("truncate", self._path, size), content)

    def close(self) -> None:
        self._open()
        self._content = None

    def _open(self) -> _Content:
        """A descriptor that was closed may be another file's by now: using it is a mistake, not a disk error."""
        if self._content is None:
            raise AssertionError(f"{self._path} is used after it was closed")
        return self._content


class SimulatedDisk:
    def __init__(self) -> None:
        self.history: list[Step] = []
        self.full = False
        """No file can be made or grow; what was reserved can still be written."""
        self.read_only = False
        self.lock = threading.RLock()
        self._start: tuple[dict[Path, bytes], frozenset[Path]] = ({}, frozenset())
        self._files: dict[Path, _Content] = {}
        self._folders: set[Path] = set()
        self._faults: list[Fault] = []

    @classmethod
    def holding(cls, files: dict[Path, bytes], folders: frozenset[Path] = frozenset()) -> "SimulatedDisk":
        """A disk on which these files are, durable."""
        disk = cls()
        disk._files = {path: _Content(data) for path, data in files.items()}
        disk._folders = {*folders, *(parent for path in files for parent in path.parents)}
        disk._start = (dict(files), frozenset(disk._folders))
        return disk

    def files(self) -> dict[Path, bytes]:
        """What programs see now, by path."""
        with self.lock:
            return {path: bytes(content.now) for path, content in self._files.items()}

    def copy(self) -> "SimulatedDisk":
        """A disk with the same files, all durable, and no history: what a restart without a power loss finds."""
        return SimulatedDisk.holding(self.files(), frozenset(self._folders))

    def note(self, note: object) -> None:
        """Put something of the test's own between the operations, for example that a message was confirmed."""
        with self.lock:
            self.history.append(Step("note", Path(), note=note))

    # --- faults -------------------------------------------------------------------------------------------

    def fail(self, operation: str, error: int, *, name: str = "*", times: int | None = None, partly: int = 0) -> Fault:
        """Make an operation on files of that name (a pattern) fail, `times` times or until the fault is lifted."""
        fault = Fault(operation, error, name, times, partly)
        self._faults.append(fault)
        return fault

    def check(self, operation: str, path: Path, *, grows: bool = False) -> tuple[int, OSError] | None:
        """Whether the operation fails: how much of a write gets through, and the error."""
        if self.read_only and operation != "read":
            return 0, _error(errno.EROFS, path)
        for fault in self._faults:
            if fault.strikes(operation, path):
                return fault.partly, _error(fault.error, path)
        if self.full and grows:
            return 0, _error(errno.ENOSPC, path)
        return None

    def refuse(self, operation: str, path: Path, *, grows: bool = False) -> None:
        failed = self.check(operation, path, grows=grows)
        if failed is not None:
            raise failed[1]

    # --- the Disk port ------------------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        with self.lock:
            if path not in self._folders:
                self.refuse("make_folder", path)
                self.do(Step("make_folder", path))

    def list(self, path: Path) -> list[str]:
        with self.lock:
            return sorted(entry.name for entry in {*self._files, *self._folders} if entry.parent == path != entry)

    def size(self, path: Path) -> int:
        return len(self._content(path).now)

    def is_file(self, path: Path) -> bool:
        return path not in self._folders and self._content(path) is not None

    def create(self, path: Path, size: int) -> SimulatedFile:
        with self.lock:
            if path in self._files:
                raise _error(errno.EEXIST, path)
            self.refuse("create", path, grows=True)
            self.do(Step("create", path, size))
            return SimulatedFile(self, path, self._files[path])

    def open(self, path: Path) -> SimulatedFile:
        with self.lock:
            if path not in self._files or self.read_only:
                self.refuse("open", path)
                self.do(Step("open", path))
            return SimulatedFile(self, path, self._files[path])

    def read(self, path: Path, at_byte: int = 0, length: int = -1) -> bytes:
        self.refuse("read", path)
        now = self._content(path).now
        return bytes(now[at_byte:] if length < 0 else now[at_byte : at_byte + length])

    def view(self, path: Path) -> Any:
        return memoryview(self._content(path).now).toreadonly()

    def replace(self, path: Path, data: bytes) -> None:
        with self.lock:
            self.refuse("replace", path, grows=True)
            self.do(Step("replace", path, data=bytes(data)))

    def rename(self, path: Path, target: Path) -> None:
        with self.lock:
            self._content(path)
            self.refuse("rename", path)
            self.do(Step("rename", path, target=target))

    def remove(self, path: Path, *others: Path) -> None:
        with self.lock:
            for each in (path, *others):
                if each in self._files:
                    self.refuse("remove", each)
                    self.do(Step("remove", each))

    def _content(self, path: Path) -> _Content:
        with self.lock:
            if path not in self._files:
                raise _error(errno.ENOENT, path)
            return self._files[path]

    def do(self, step: Step, content: _Content | None = None) -> None:
        """Carry a step out and remember it. `content` is the file behind an open descriptor, whatever its name is."""
        self.history.append(step)
        if step.operation in ("write", "truncate", "sync"):
            content = self._files[step.path] if content is None else content
            if step.operation == "sync":
                content.sync()
            else:
                content.apply(step)
        elif step.operation == "make_folder":
            self._folders.update((step.path, *step.path.parents))
        elif step.operation == "create":
            self._files[step.path] = _Content(bytes(step.at_byte))
        elif step.operation == "open":
            self._files[step.path] = _Content()
        elif step.operation == "replace":
            self._files[step.path] = _Content(step.data)
        elif step.operation == "rename":
            assert step.target is not None
            self._files[step.target] = self._files.pop(step.path)
        elif step.operation == "remove":
            del self._files[step.path]

    # --- power losses -------------------------------------------------------------------------------------

    def at(self, moment: int) -> "SimulatedDisk":
        """This disk as it was before the step of that number: with unsynced writes still unsynced."""
        disk = SimulatedDisk.holding(*self._start)
        for step in self.history[:moment]:
            if step.path in disk._files or step.operation not in ("write", "truncate", "sync"):
                disk.do(step)
        return disk

    def crash(self, choose: Choose, moment: int | None = None) -> "SimulatedDisk":
        """What a power loss leaves, at a moment that is chosen, too, unless it is given."""
        if moment is None:
            moment = choose(len(self.history))
        disk = self.at(moment)
        left = {path: _chosen(content, choose) for path, content in disk._files.items()}
        if moment < len(self.history) and choose(1):
            _half_done(left, self.history[moment], choose)
        return SimulatedDisk.holding(left, frozenset(disk._folders))

    def crash_states(self, moments: Sequence[int] | None = None) -> Iterator[tuple[int, "SimulatedDisk"]]:
        """(moment, what is left) by rule, at each moment: nothing unsynced is there; all of it is; every prefix; all
        but one; only one; the last write, or any write before others, cut short or with a sector missing."""
        for moment in range(len(self.history) + 1) if moments is None else moments:
            disk = self.at(moment)
            seen = set()
            for plan in _plans([(path, c.pending) for path, c in disk._files.items() if c.pending]):
                left = {
                    path: _rebuilt(content, [plan.get((path, n), b"") for n in range(len(content.pending))])
                    if content.pending
                    else content.durable
                    for path, content in disk._files.items()
                }
                key = hash(tuple(left.values()))
                if key not in seen:
                    seen.add(key)
                    yield moment, SimulatedDisk.holding(left, frozenset(disk._folders))


_WHOLE = None
"""Of a write: all of it is there. Otherwise a mask of the bytes that are (1) or are not (0)."""
Plan = dict[tuple[Path, int], bytes | None]


def _plans(pending: list[tuple[Path, list[Step]]]) -> Iterator[Plan]:
    """Which of the unsynced writes are there, by (file, number); those that are not named are lost."""
    every = [(path, n) for path, steps in pending for n in range(len(steps))]
    yield {}
    yield dict.fromkeys(every, _WHOLE)
    for path, steps in pending:
        mine = [(path, n) for n in range(len(steps))]
        others = dict.fromkeys((one for one in every if one[0] != path), _WHOLE)
        for n, step in enumerate(steps):
            yield {**others, **dict.fromkeys(mine[:n], _WHOLE)}
            yield {**dict.fromkeys(one for one in every if one != (path, n))}
            yield {(path, n): _WHOLE}
            for mask in _masks(len(step.data)):
                yield {**others, **dict.fromkeys(mine[:n], _WHOLE), (path, n): mask}
                yield {**others, **dict.fromkeys(mine, _WHOLE), (path, n): mask}


def _masks(length: int) -> Iterator[bytes]:
    """Some ways in which a write of that length can be torn."""
    for cut in sorted({1, 8, 63, 64, 65, length // 2, length - 8, length - 1}):
        if 0 < cut < length:
            yield b"\1" * cut + b"\0" * (length - cut)
    for start in range(0, length, SECTOR):
        if length > SECTOR:
            yield b"\1" * start + b"\0" * min(SECTOR, length - start) + b"\1" * max(0, length - start - SECTOR)


def _chosen(content: _Content, choose: Choose) -> bytes:
    """A file after a power loss, one choice for each unsynced change."""
    masks: list[bytes | None] = []
    for step in content.pending:
        length = len(step.data)
        fate = choose(3)
        if fate == 0:
            masks.append(_WHOLE)
        elif fate == 1 or step.operation == "truncate":
            masks.append(b"")
        elif fate == 2:
            cut = choose(length)
            masks.append(b"\1" * cut + b"\0" * (length - cut))
        else:
            sectors = range(step.at_byte // SECTOR, (step.at_byte + length - 1) // SECTOR + 1)
            there = {sector for sector in sectors if choose(1)}
            masks.append(bytes((step.at_byte + n) // SECTOR in there for n in range(length)))
    return _rebuilt(content, masks)


def _rebuilt(content: _Content, masks: Sequence[bytes | None]) -> bytes:
    """The durable bytes with what the masks let through of the unsynced changes."""
    data = bytearray(content.durable)
    for step, mask in zip(content.pending, masks, strict=True):
        if mask is _WHOLE:
            data = _changed(data, step)
        elif step.operation == "write" and any(mask):
            end = step.at_byte + mask.rfind(1) + 1
            data += bytes(max(0, end - len(data)))
            for n, there in enumerate(mask):
                if there:
                    data[step.at_byte + n] = step.data[n]
    return bytes(data)


def _half_done(left: dict[Path, bytes], step: Step, choose: Choose) -> None:
    """What a crash in the middle of an operation may show beyond its old and its new state."""
    if step.operation == "create":
        left[step.path] = b""
    elif step.operation == "replace":
        left[step.path.with_name(f".{step.path.name}.1.new")] = step.data[: choose(len(step.data))]


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
