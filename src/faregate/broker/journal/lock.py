"""One writer per journal: a lock on its folder, which ends with the process that took it.

Rules kept here:
- What is locked is the folder itself (`flock`): a file in it could be removed and made again while it is held. The
  file `lock` only says who holds it.
- A forked child closes its copy of the lock at once, so the lock never outlives the process that took it. What the
  child has of that journal is not its own: `on_fork` tells it so.
- Nothing is forked while a lock is half taken or looked at, so no child holds one that it does not know of.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from faregate.broker.journal.disk import PRIVATE_FILE, give_to_owner
from faregate.errors import JournalFailed, JournalLocked

_TRIES, _PAUSE = 10, 0.03
_held: "set[WriterLock]" = set()
_no_fork = threading.RLock()


class WriterLock:
    def __init__(self, root: Path, advice: str, on_fork: Callable[[], None] | None = None) -> None:
        """Take it. Raises `JournalLocked`, with the advice, while another process (or another journal here) has it."""
        self._on_fork = on_fork
        with _no_fork:
            self._descriptor = _open(root)
            _held.add(self)
        try:
            self._take(root, advice)
            _name_holder(root)
        except BaseException:
            self.release()
            raise

    def _take(self, root: Path, advice: str) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not tries_left:
                    raise JournalLocked(
                        f"the journal {root} is written by process {_named_holder(root)}: {advice}"
                    ) from None
                time.sleep(_PAUSE)  # `lock_holder` of another process may hold it for a moment
            except OSError as exc:
                raise JournalFailed(
                    f"the folder {root} cannot be locked ({exc.strerror}): keep a journal on a disk of this machine"
                ) from exc

    def release(self) -> None:
        """Let it go. Releasing twice does nothing."""
        with _no_fork:
            self._close()

    def _close(self) -> None:
        """Closing never unlocks for the others that have a copy; an explicit unlock in a child would."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forked(self) -> None:
        """This is a child of the process that took it."""
        self._close()
        if self._on_fork is not None:
            self._on_fork()


def lock_holder(root: Path) -> str | None:
    """The id of the process that writes to the journal now; None when nobody does."""
    with _no_fork:
        try:
            descriptor = _open(root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named_holder(root)
        except OSError:
            return None  # a folder that cannot be locked has no writer
        finally:
            os.close(descriptor)
    return None


def _open(root: Path) -> int:
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _name_holder(root: Path) -> None:
    descriptor = os.open(root / "lock", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        give_to_owner(descriptor, root)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    finally:
        os.close(descriptor)


def _named_holder(root: Path) -> str:
    try:
        return (root / "lock").read_bytes()[:32].decode(errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _in_child() -> None:
    _no_fork.release()
    for lock in list(_held):
        lock.forked()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_in_child)
