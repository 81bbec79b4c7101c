"""What an error of SQLite means."""

from __future__ import annotations

import sqlite3


def result_code(error: sqlite3.Error) -> int:
    """Its primary result code (https://www.sqlite.org/rescode.html); 0 where it is none of SQLite's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def is_full(error: sqlite3.Error) -> bool:
    """True where there was no room for a write, and nothing else is wrong."""
    return result_code(error) == sqlite3.SQLITE_FULL
