"""What an error of SQLite means."""

from __future__ import annotations

import sqlite3
from typing import Final

_OF_DISK: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PROTOCOL,
    }
)  # fmt: skip


def result_code(error: sqlite3.Error) -> int:
    """Its primary result code (https://www.sqlite.org/rescode.html); 0 where it is none of SQLite's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def may_be_disk(error: sqlite3.Error) -> bool:
    """True where SQLite calls its file damaged: also where the disk could not read it for a moment (EIO, ENXIO), which it does not tell apart
    (SQLITE_IOERR_CORRUPTFS becomes SQLITE_CORRUPT)."""
    return result_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_full(error: sqlite3.Error) -> bool:
    """True where there was no room for a write, and nothing else is wrong."""
    return result_code(error) == sqlite3.SQLITE_FULL


def is_busy(error: sqlite3.Error) -> bool:
    """True where somebody else has the file, or a part of it, at the moment."""
    return result_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_of_disk(error: sqlite3.Error) -> bool:
    """True where the disk did not do what it was asked to, or looks as if it had not: what a connection knows of its file is not to be trusted."""
    return result_code(error) in _OF_DISK
