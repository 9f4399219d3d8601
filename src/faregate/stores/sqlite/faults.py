"""SQLite's errors as Faregate's, by their code and never by their text.

Busy and locked are conflicts: a retry may work. A full or failing disk and a file that cannot be opened
make the store unavailable. Everything else (a constraint, a typo) is the user's business and stays the driver's own.
"""

import sqlite3
from typing import NoReturn

from faregate.errors import CommitUnknown, StoreConflict, StoreUnavailable

_CONFLICTS = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_UNAVAILABLE = {
    sqlite3.SQLITE_FULL: "the disk is full: make room",
    sqlite3.SQLITE_IOERR: "reading or writing the file failed: look at the disk and at the kernel's log",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: look at its folder and at the rights on both",
}


def code_of(exc: sqlite3.Error) -> int:
    """The primary result code; -1 when the error is Python's own."""
    code: int = getattr(exc, "sqlite_errorcode", None) or -1
    return code & 0xFF if code > 0 else code


def is_conflict(exc: sqlite3.Error) -> bool:
    return code_of(exc) in _CONFLICTS


def raise_translated(exc: sqlite3.Error, where: str) -> NoReturn:
    """Raise what this error means to the caller; `where` is the store's URL."""
    code = code_of(exc)
    if code in _CONFLICTS:
        raise StoreConflict(f"{where} is locked by another connection ({exc}); a retry may work") from exc
    if code in _UNAVAILABLE:
        raise StoreUnavailable(f"{where} cannot be used: {_UNAVAILABLE[code]} ({exc})") from exc
    raise exc


def raise_commit_error(exc: sqlite3.Error, where: str) -> NoReturn:
    """As `raise_translated`, for a commit: after a failed write it may or may not be on the disk."""
    if code_of(exc) == sqlite3.SQLITE_IOERR:
        raise CommitUnknown(f"{where}: writing failed in the middle of a commit ({exc})") from exc
    raise_translated(exc, where)
