"""Where the control socket of a bus lies, and how it gets there. Decision 39 says why.

Rules kept here:
- A socket is its user's alone (0600), in a folder that is its user's alone (0700). A folder that is not is refused, not
  mended. One that the user named may be open to others, but not to their writing.
- The bus of a journal has it in the journal's folder; all others in a folder for each user. Names there begin with what
  the bus is (`key`) and end with the instance, so two processes do not want one name. A journal's has a link there, so
  that all that run are found in one place.
- Whatever has a final name listens: it gets that name when it does. So one that refuses connections is of a dead
  process, and is removed; one that takes them never is.
- A path may be longer than a socket's address: then its folder is named by a descriptor.
"""

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple
from weakref import WeakSet

from faregate.errors import ConfigurationError

FOLDER_VARIABLE = "FAREGATE_CONTROL_DIR"
_SUFFIX = ".sock"
_LONGEST_ADDRESS = 107
"""Bytes; behind them is a zero."""
_WAITING = 64
_FOLDER, _SOCKET = 0o700, 0o600
_descriptors = Path("/proc/self/fd")


class ControlPlace(NamedTuple):
    key: str
    """The same for all processes that run this bus."""
    folder: Path | None = None
    """The journal's; None: it has none."""
    path: Path | None = None
    """Exactly there, as the user said."""


def journal_place(root: Path) -> ControlPlace:
    return ControlPlace(_key("journal", os.path.realpath(root)), root / "control")


def bus_place(url: str, stores: Sequence[str], subscriptions: Sequence[str]) -> ControlPlace:
    """Of a bus without a folder of its own; the same names in two programs are two buses when what they do differs."""
    return ControlPlace(_key(url, *stores, *subscriptions))


def _key(*parts: str) -> str:
    return sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:12]


def user_folders() -> list[Path]:
    """Where sockets of this user may lie. They do not depend on how somebody logged in, so that a service and the
    people who look after it agree."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return [Path(given)]
    user = os.geteuid()
    return [Path(f"/run/user/{user}/faregate"), Path(f"/tmp/faregate-{user}")]


# --- for a bus ------------------------------------------------------------------------------------------------


class Listening(NamedTuple):
    socket: socket.socket
    path: Path
    names: list[tuple[Path, int]]
    """What is to be removed, each with its inode: another may have it by then."""
    folder: Path | None
    """What is to be removed when nothing else is in it."""

    def close(self) -> None:
        _open_sockets.discard(self.socket)
        self.socket.close()
        for path, inode in self.names:
            with suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()
        if self.folder is not None:
            with suppress(OSError):
                self.folder.rmdir()


def listen(place: ControlPlace, instance: str) -> Listening:
    """Raises `ConfigurationError` for a folder that others may use, and for a path that is taken; `OSError`."""
    name = f"{place.key}-{'-'.join(instance.rsplit('-', 2)[1:])}{_SUFFIX}"
    if place.path is not None:
        _check_parent(place.path)
        _make_way(place.path)
        return _listening(place.path, exclusive=True)
    if place.folder is not None:
        _check_private(place.folder)
        _remove_dead(place.folder)
        found = _listening(place.folder / name)._replace(folder=place.folder)
        with suppress(OSError, ConfigurationError):  # then it is found by its journal alone
            link = _user_folder() / name
            link.symlink_to(found.path.absolute())
            found.names.append((link, link.lstat().st_ino))
        return found
    return _listening(_user_folder() / name)


def _user_folder() -> Path:
    folders = user_folders()
    folder = next((each for each in folders if each.parent.is_dir()), folders[-1])
    _check_private(folder)
    _remove_dead(folder)
    return folder


def _check_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(_FOLDER)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{folder} is no folder that is this user's alone, so no control socket is opened in it: it belongs to "
            f"user {found.st_uid}, with the rights {stat.filemode(found.st_mode)}. Remove it or give it the rights "
            f"0700, or name another place with {FOLDER_VARIABLE} or fg.Bus(…, control=PATH)"
        )


def _check_parent(path: Path) -> None:
    folder = path.parent
    try:
        found = folder.stat()
    except OSError as exc:
        raise ConfigurationError(f"control={str(path)!r} lies in no folder that is there: {exc.strerror}") from exc
    writable = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (0, os.geteuid()) or writable:
        raise ConfigurationError(
            f"others may put files into {folder} (it belongs to user {found.st_uid}, with the rights "
            f"{stat.filemode(found.st_mode)}), so no control socket is opened there: name a path in a folder that only "
            "this user may write to"
        )


def _make_way(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigurationError(f"control={str(path)!r} is there and is no socket: name another path")
    if is_live(path):
        raise ConfigurationError(
            f"another process listens at control={str(path)!r}: each bus needs a path of its own. control=True finds "
            "one for each process"
        )
    path.unlink(missing_ok=True)


def _listening(path: Path, *, exclusive: bool = False) -> Listening:
    temporary = path.with_name(f".{token_hex(8)}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), _SOCKET)  # on Linux the file has these rights from its first moment
        with address(temporary) as short:
            sock.bind(short)
        try:
            temporary.chmod(_SOCKET)
            sock.listen(_WAITING)
            sock.setblocking(False)
            if exclusive:
                os.link(temporary, path)
            else:
                temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as exc:
        sock.close()
        raise ConfigurationError(f"another process listens at control={str(path)!r} since a moment ago") from exc
    except BaseException:
        sock.close()
        raise
    _open_sockets.add(sock)
    return Listening(sock, path, [(path, path.lstat().st_ino)], None)


def _remove_dead(folder: Path) -> None:
    for path in folder.glob(f"*{_SUFFIX}"):
        if not is_live(path):
            path.unlink(missing_ok=True)


_open_sockets: WeakSet[socket.socket] = WeakSet()


def _in_child() -> None:
    """Of a fork: a copy that is open would take connections for a process that is gone."""
    for each in list(_open_sockets):
        each.close()


os.register_at_fork(after_in_child=_in_child)


# --- for who looks for one ------------------------------------------------------------------------------------


def find(place: ControlPlace) -> list[Path]:
    """The sockets of this bus; some may be of dead processes."""
    if place.path is not None:
        return [place.path]
    folders = [] if place.folder is None else sorted(place.folder.glob(f"*{_SUFFIX}"))
    return _once([*folders, *(path for path in find_all() if path.name.startswith(f"{place.key}-"))])


def find_all() -> list[Path]:
    """The sockets of all buses of this user, but those at paths that their program chose."""
    found: list[Path] = []
    for folder in user_folders():
        with suppress(OSError):
            if folder.lstat().st_uid == os.geteuid():
                found += sorted(folder.glob(f"*{_SUFFIX}"))
    return _once(found)


def key_of(path: Path) -> str:
    """What `find_all` found: the same for all processes of one bus."""
    return path.name.partition("-")[0]


def _once(paths: Sequence[Path]) -> list[Path]:
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            with address(path) as short:
                sock.connect(short)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            pass  # so many wait that it takes no more, or it is somebody else's
    return True


@contextmanager
def address(path: Path) -> Iterator[str]:
    """How a socket call is told where it is. Raises `ConfigurationError` where that is impossible."""
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield str(path)
        return
    if not _descriptors.is_dir() or len(os.fsencode(path.name)) > 64:
        raise ConfigurationError(
            f"the path {path} is longer than the {_LONGEST_ADDRESS} bytes that a socket may have: name a shorter one "
            "with fg.Bus(…, control=PATH)"
        )
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{_descriptors}/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
