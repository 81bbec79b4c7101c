"""`felix version`: which release this is."""

from __future__ import annotations

from cli.output import out
from felix import __version__


def version() -> None:
    """Show the version, as `felix --version` does."""
    out.print(f"felix {__version__}")
