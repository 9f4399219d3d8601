"""Processor time of this process, of those below it, and of a server on this machine. Linux alone says it.

It suffers less from other work on the machine than the clock. What a process used that has ended counts for its parent.
"""

import os
from collections import defaultdict
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"


def processor_of(pid: int) -> float:
    """Seconds, of the process and of all below it."""
    children = defaultdict(list)
    used = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and (fields := _stat(folder)) is not None:
            children[int(fields[1])].append(int(folder.name))
            used[int(folder.name)] = sum(map(int, fields[11:15]))  # its own and its ended children's, user and system
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        total += used.get(one, 0)
        waiting += children[one]
    return total / os.sysconf("SC_CLK_TCK")


def _stat(folder: Path) -> list[str] | None:
    """The fields behind the name; None where it has ended meanwhile."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def server_at(host: str | None, port: int) -> int | None:
    """The process on this machine that listens there; None where that is not known."""
    if host not in (None, "", "localhost", "127.0.0.1", "::1") or not _PROC.joinpath("net/tcp").exists():
        return None
    sockets = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(_PROC / "net" / name, port)}
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and not sockets.isdisjoint(_links(folder / "fd")):
            return _first(int(folder.name), sockets)
    return None


def _first(pid: int, sockets: set[str]) -> int:
    """The eldest that has it: a server's children have the socket, too."""
    while (fields := _stat(_PROC / str(pid))) is not None and not sockets.isdisjoint(_links(_PROC / fields[1] / "fd")):
        pid = int(fields[1])
    return pid


def _listening(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]


def _links(folder: Path) -> list[str]:
    try:
        return [str(each.readlink()) for each in folder.iterdir()]
    except OSError:  # another user's, or it has ended
        return []
