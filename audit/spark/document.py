"""A report before it is written: verified logs, tables, totals. Pure.

`audit.spark.report` fills it, `audit.spark.page` and `audit.spark.openlineage` show it. Nothing in it depends on
when or where it was made; that stands in `made.json` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from audit.spark.table import Table, iso, json_rows
from audit.verify import Version1

STATEMENT: Final = (
    "This report is evidence drawn from signed audit logs. It is not a statement that any law was complied with: "
    "whether a transfer was lawful is for people to judge, and this is what they can judge it by."
)

TABLES: Final = ("register", "reconciliation", "findings", "exceptions", "volumes", "lineage")
"""The tables that are written as files, in order: each a field of `Report`."""


@dataclass(frozen=True, slots=True)
class Cosigner:
    """A witness whose cosignature holds, how many leaves it covers, and when it was given (POSIX seconds)."""

    name: str
    size: int
    time_s: int | None


@dataclass(frozen=True, slots=True)
class VerifiedLog:
    """One log, and what was checked of it. `root` and `key_sha256` are lower-case hex."""

    origin: str
    side: str
    size: int
    root: str
    key: str
    """the verifier key (vkey) that the checkpoint's signature holds under"""
    key_sha256: str
    """SHA-256 of the raw Ed25519 public key"""
    cosigners: tuple[Cosigner, ...]
    receipts: int
    """receipts whose signatures were checked"""
    steps: tuple[str, ...]
    version_1: Version1 | None = None
    """the leaves of version 1 that records crossed by"""
    unsupported: tuple[str, ...] = ()
    """what it does not show"""
    newest_ms: int | None = None
    """the latest time that any of its leaves says; what it got afterwards is in no report of it"""

    @property
    def is_of_version_1(self) -> bool:
        """Whether it rests on leaves of version 1 that nobody accepted."""
        return self.version_1 is not None and not self.version_1.accepted

    @property
    def checkpoint(self) -> str:
        """Size and root, as the register names it."""
        return f"{self.size} {self.root}"


@dataclass(frozen=True, slots=True)
class Missing:
    """What would have to be given for the report to say more. Sentences for people; nothing is counted by them."""

    counterparts: tuple[str, ...]
    """of each link of which only one side's log was given: which one is missing"""
    region_logs: tuple[str, ...]
    """of each region of a link whose own log was not given: what may stand only there"""
    sources: tuple[str, ...] = ()
    """those of them that records left: what they revoked, paused or denied and an agent kept to itself is not looked for"""
    granted: tuple[str, ...] = ()
    """of each link that a grant in these logs lets records cross by, and of which neither log is among them: which one"""


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums over the register and the reconciliation."""

    records: int
    record_bytes: int
    withheld: int
    denied: int
    acknowledged: int
    delivered: int
    transfers: int
    differences: int
    open: int
    breaches: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the written forms show. Times in ms since the Unix epoch, None: not limited, or nothing there."""

    since_ms: int | None
    until_ms: int | None
    first_ms: int | None
    last_ms: int | None
    logs: tuple[VerifiedLog, ...]
    register: Table
    reconciliation: Table
    findings: Table
    exceptions: Table
    volumes: Table
    lineage: Table
    totals: Totals
    bucket_ms: int
    """width of one bar of the time line"""
    time_line: tuple[tuple[int, str, int, int, int], ...]
    """(start, stream, records, payload bytes, withheld), ascending"""
    missing: Missing
    left_off: Mapping[str, int]
    """by table: rows beyond the limit, which the totals count and no file lists"""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that are written as files, in order."""
        return tuple(getattr(self, name) for name in TABLES)


def as_json(report: Report) -> dict[str, Any]:
    """What report.json holds."""
    return {
        "format": "felix-audit-report/1",
        "statement": STATEMENT,
        "window": {
            "since": iso(report.since_ms),
            "until": iso(report.until_ms),
            "first": iso(report.first_ms),
            "last": iso(report.last_ms),
        },
        "totals": {name: getattr(report.totals, name) for name in Totals.__slots__},
        "logs": [
            {
                "origin": log.origin,
                "side": log.side,
                "size": log.size,
                "root": log.root,
                "key": log.key,
                "key_sha256": log.key_sha256,
                "cosigners": [
                    {
                        "name": cosigner.name,
                        "size": cosigner.size,
                        "time": None if cosigner.time_s is None else iso(cosigner.time_s * 1000),
                    }
                    for cosigner in log.cosigners
                ],
                "newest_leaf": iso(log.newest_ms),
                "receipts_checked": log.receipts,
                "steps": list(log.steps),
                "verification": "verified",
                "version_1": None
                if log.version_1 is None
                else {
                    "leaves": log.version_1.size,
                    "root": log.version_1.root.hex(),
                    "accepted": log.version_1.accepted,
                },
                "does_not_show": list(log.unsupported),
            }
            for log in report.logs
        ],
        "not_given": {
            "counterparts": list(report.missing.counterparts),
            "region_logs": list(report.missing.region_logs),
            "granted": list(report.missing.granted),
        },
        "rows_left_off": dict(report.left_off),
        "tables": {table.name: json_rows(table) for table in report.tables},
    }
