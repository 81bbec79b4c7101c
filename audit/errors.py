"""Errors of the audit log, below the families of felix.errors."""

from __future__ import annotations

from typing import Final

from felix.errors import Code, CorruptionError, UnavailableError


class RolledBackError(CorruptionError):
    """A log is shorter than, or differs from, what was signed or cosigned before."""

    default_code = Code.ROLLED_BACK


class AuditUnavailableError(UnavailableError):
    """The audit log takes no leaves now, so nothing may cross."""

    default_code = Code.AUDIT_UNAVAILABLE


VERIFY_HINT: Final = "Run `felix audit verify` on this log and on a copy of it, and compare."
