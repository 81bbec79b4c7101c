"""`run_report`: verify logs, compute the reports in Spark, write them.

Order, and what each step guarantees:

1. the driver verifies signatures, cosignatures and upper tiles (`audit.spark.verification`);
2. executors verify every log as `felix audit verify` does, and read every leaf for the tables (`audit.spark.source`);
3. anything that does not hold ends it here: no report, `REFUSED-verification-failed.json` instead, ReportRefusedError;
4. Spark computes the tables; sorted rows come to the driver;
5. files are written beside and moved into place: Parquet, CSV, JSON, HTML, OpenLineage, SHA256SUMS, made.json.

Same logs and same window: same bytes, but for `made.json`, which alone says when and with what the report was made.
Who may call: `cli`, tests, notebooks. Blocks for as long as Spark runs: never on an event loop.
"""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from audit.origin import Origin
from audit.spark import begun_again, exceptions, lineage, openlineage, page, reconciliation, register, volumes
from audit.spark.agreements import Granted, Signed, read_signed
from audit.spark.arrived_before import unfounded
from audit.spark.comparison import compare_records
from audit.spark.document import TABLES, Cosigner, Missing, Report, Totals, VerifiedLog, as_json
from audit.spark.failure import in_words
from audit.spark.java import Java
from audit.spark.session import default_master, open_session
from audit.spark.table import COUNT_MAX, Table, encode_csv, from_rows, iso, total, write_parquet
from audit.spark.verification import (
    OpenedLog,
    Problem,
    miscounted_of,
    notices_of,
    open_log,
    problem_of,
    problems_of,
    story_of,
    verify_all,
)
from audit.trust import COSIGNATURES_MIN, Trust
from audit.verify import Report as VerificationReport
from felix.errors import Code, CorruptionError, RequestError, TamperError
from felix.visible import visible_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXIT_CLEAN: Final = 0
EXIT_DIFFERENCES: Final = 10
"""The report was made, and says that the logs differ or that something crossed outside its terms."""
EXIT_ONE_SIDE: Final = 11
"""The report was made, and nothing in it differs; but of some link one side's log alone was given, and one side's word is
no reconciliation; or its source's own log was not, and then what arrived against that region's word is not looked for; or an egress log as given does not announce what arrived an hour before
a log of its link ends."""
EXIT_NOT_WHOLE: Final = 12
"""The report was made, and nothing in it differs; but a table has more rows than a report lists. Totals count all of them."""
EXIT_VERSION_1: Final = 13
"""The report was made, and nothing in it differs; but records crossed in leaves of version 1 that nobody said are known to be old. Whoever has the
logs' keys can write them today, and nothing in them was signed by those who answer for the terms."""
EXIT_REFUSED: Final = 20
"""No report: a log does not verify."""

ROWS_MAX: Final = 100_000
"""Rows of one table that a report lists. Totals and the exit code are of all rows; how many a table lacks stands in the report, which then
ends with `EXIT_NOT_WHOLE` at best."""
LINKS_MAX: Final = 1_000
"""Links of which a report says that one side's log was not given."""
PROBLEMS_MAX: Final = 1_000
"""Leaves named in a refusal; who has more has a destroyed log."""
SMALL_LEAVES_MAX: Final = 50_000
"""Up to here, compiling queries takes longer than running them interpreted, and one partition holds all leaves (measured: docs/reports.md)."""

REFUSED_NAME: Final = "REFUSED-verification-failed.json"
PAGE_NAME: Final = "report.html"
JSON_NAME: Final = "report.json"
LINEAGE_NAME: Final = "lineage.ndjson"
SUMS_NAME: Final = "SHA256SUMS"
MADE_NAME: Final = "made.json"
TABLES_FOLDER: Final = "tables"


class ReportRefusedError(TamperError):
    """A log does not verify, so there is no report. `path` is the file that says what was found."""

    exit_code: Final = EXIT_REFUSED

    def __init__(self, problems: Sequence[Problem], path: Path) -> None:
        first = problems[0]
        place = "" if first.log in first.sentence else f"{first.log}: "
        more = f" {len(problems) - 1} more are in the file." if problems[1:] else ""
        super().__init__(
            f"No report was made, because a log does not verify: {place}{first.sentence}{more}",
            hint=f"{path} says what was found. Run `felix audit verify` on the log and on a copy of it, and compare.",
        )
        self.problems = tuple(problems)
        self.path = path


@dataclass(frozen=True, slots=True)
class ReportResult:
    """A report that was made, and where it is. `exit_code` is what the command ends with."""

    out: Path
    report: Report
    seconds: float
    leaves: int
    record_entries: int

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.out / PAGE_NAME

    @property
    def exit_code(self) -> int:
        """EXIT_DIFFERENCES where the logs differ or something crossed outside its terms; else EXIT_VERSION_1 where something rests on leaves of
        version 1 that were not accepted; else EXIT_NOT_WHOLE where a table lacks rows; else EXIT_ONE_SIDE where a link's counterpart, or its source's own log, was not given, or an egress log as given lacks
        what it should have; else EXIT_CLEAN."""
        totals = self.report.totals
        statuses = {row["status"] for row in self.report.reconciliation.records()}
        differs = totals.differences or totals.breaches or reconciliation.DIFFERS in statuses
        if differs:
            return EXIT_DIFFERENCES
        if any(log.is_of_version_1 for log in self.report.logs):
            return EXIT_VERSION_1
        if self.report.left_off:
            return EXIT_NOT_WHOLE
        missing = self.report.missing
        if missing.counterparts or missing.sources or self.is_long_open:
            return EXIT_ONE_SIDE
        return EXIT_CLEAN

    @property
    def is_long_open(self) -> bool:
        """Whether something arrived of which the egress log as given should have had the announcement by then."""
        return any(
            row["finding"] == reconciliation.LONG_UNANNOUNCED for row in self.report.findings.records()
        )


def _say_nothing(_: str) -> None:
    return None


def run_report(
    logs: Sequence[str | Path],
    out: str | Path,
    *,
    trust: Trust,
    master: str | None = None,
    since: int | None = None,
    until: int | None = None,
    java: Java | None = None,
    cosignatures_min: int = COSIGNATURES_MIN,
    remembered: Sequence[bytes] = (),
    accept_version_1: Collection[bytes] = (),
    openlineage_url: str | None = None,
    session: SparkSession | None = None,
    tell: Callable[[str], None] = _say_nothing,
    clock: Callable[[], float] = time.time,
) -> ReportResult:
    """Verify `logs` (folders or fsspec URLs, one log each) and write their report into the folder `out`.

    `cosignatures_min`: how many regions or witnesses other than a log's own region must have cosigned it. `remembered`
    are checkpoint notes that cosigners kept, of these logs or of others. `accept_version_1`: as `audit.verify.verify_log` takes it. `since` and `until` are ms since the Unix epoch
    and limit which leaves count (from, and before); verification and reconciliation always take whole logs. `session` is a running Spark session to use instead of one of its own.
    `tell` is given a sentence per step, for progress. An earlier report in `out` is replaced; other files stay.

    Raises ReportRefusedError where a log does not verify; RequestError for a path without a log, the same log twice,
    an empty window, or an output folder that cannot be written; JavaError, SparkMissingError, SparkStartError; ReportFailedError for
    what else Spark ended it with;
    UnavailableError where the report was written and `openlineage_url` did not take the events.
    """
    paths = [str(path) for path in logs]
    target = Path(out)
    if not paths:
        raise RequestError("A report needs at least one audit log.", hint="Name them with --log PATH.")
    if since is not None and until is not None and since >= until:
        raise RequestError(f"The window is empty: it begins at {iso(since)} and ends before {iso(until)}.")
    if openlineage_url is not None:
        openlineage.check_url(openlineage_url)
    # Before anything that takes its time: whoever named a wrong folder is told at once.
    _prepare(target)
    began = clock()
    tell(f"Verifying {len(paths)} checkpoints")
    opened, problems = _open_all(paths, trust, cosignatures_min, remembered)
    leaves_in_all = sum(log.checkpoint.size for log in opened)

    def work(spark: SparkSession) -> ReportResult:
        # Everything that verification can find belongs into one refusal, so the scan runs even if step 1 failed.
        wanted = _Wanted(target, trust, cosignatures_min, remembered, accept_version_1, since, until, master)
        try:
            return _make(spark, opened, problems, wanted, tell, began, clock)
        except ReportRefusedError:
            raise
        except Exception as error:
            told = error if isinstance(error, CorruptionError) else in_words(error)
            if told is None:
                raise
            if isinstance(told, CorruptionError):
                # A log that was verified, and is read otherwise now.
                raise _refuse([*problems, Problem("", None, told.sentence)], target) from error
            raise told from error

    if session is not None:
        result = work(session)
    elif problems and not opened:
        raise _refuse(problems, target)
    else:
        tell("Starting Spark")
        small = leaves_in_all <= SMALL_LEAVES_MAX
        with open_session(master, java=java, small=small) as spark:
            result = work(spark)
    if openlineage_url is not None:
        tell("Posting lineage")
        openlineage.post(openlineage.events(result.report), openlineage_url)
    return result


class _Wanted(NamedTuple):
    """What was asked for."""

    target: Path
    trust: Trust
    cosignatures_min: int
    remembered: Sequence[bytes]
    accept_version_1: Collection[bytes]
    since: int | None
    until: int | None
    master: str | None


def _open_all(
    paths: Sequence[str], trust: Trust, cosignatures_min: int, remembered: Sequence[bytes]
) -> tuple[list[OpenedLog], list[Problem]]:
    opened: list[OpenedLog] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            log = open_log(path, trust, cosignatures_min, remembered)
        except CorruptionError as error:
            problems.append(problem_of(path, error))
            continue
        for other in opened:
            if other.checkpoint.origin == log.checkpoint.origin:
                raise RequestError(
                    f"{path} and {other.path} are both the log {log.checkpoint.origin}.",
                    code=Code.CONFLICT,
                    hint="Give each log once; a copy adds nothing and every record would count twice.",
                )
        opened.append(log)
    return opened, problems


def _read(spark: SparkSession, opened: Sequence[OpenedLog]) -> DataFrame:
    from audit.spark.source import BUNDLES_PER_PARTITION, Settings, read_rows

    logs = [
        (
            log.checkpoint,
            Settings(
                log.path,
                entries=False,
                as_rows=True,
                size=log.checkpoint.size,
                bundles=BUNDLES_PER_PARTITION,
                roots=log.bundles.roots,
                trust=None,
            ),
        )
        for log in opened
    ]
    return read_rows(spark, logs)


def _make(
    spark: SparkSession,
    opened: Sequence[OpenedLog],
    problems: list[Problem],
    wanted: _Wanted,
    tell: Callable[[str], None],
    began: float,
    clock: Callable[[], float],
) -> ReportResult:
    if not opened:
        raise _refuse(problems, wanted.target)
    tell(f"Reading and verifying {sum(log.checkpoint.size for log in opened):,} leaves")
    with ThreadPoolExecutor(1) as aside:
        # Both jobs at once: where one log is longer than the others, its task does not leave the cores idle.
        verifying = aside.submit(
            verify_all,
            spark,
            opened,
            wanted.trust,
            wanted.cosignatures_min,
            wanted.remembered,
            wanted.accept_version_1,
        )
        # Checkpointed, not cached: what was verified is what is reported, and no query reads the files again. Signed documents
        # and receipts are left out, which no table shows and every cache would hold.
        read = _read(spark, opened).selectExpr(
            "* EXCEPT (receipt, document)", "receipt IS NOT NULL AS has_receipt"
        )
        leaves = read.localCheckpoint()
        if sum(log.checkpoint.size for log in opened) <= SMALL_LEAVES_MAX:
            # In one partition: no query has to bring together what belongs together.
            leaves = leaves.coalesce(1)
        verified = verifying.result()
    found = (
        leaves.where("problem IS NOT NULL")
        .select("log", "leaf_index", "problem")
        .orderBy("log", "leaf_index")
        .limit(PROBLEMS_MAX)
        .collect()
    )
    problems += [Problem(row["log"], row["leaf_index"], row["problem"]) for row in found]
    named = {(problem.log, problem.leaf) for problem in problems}
    problems += [each for one in verified for each in problems_of(one) if (each.log, each.leaf) not in named]
    counted = {row["log"]: row for row in _sizes(leaves).collect()}
    problems += _short(opened, counted, problems)
    if problems:
        raise _refuse(problems, wanted.target)
    signed = read_signed(spark, leaves, opened, wanted.trust, wanted.since, wanted.until)
    if problems := _served_otherwise(signed.doubted, verified):
        raise _refuse(problems, wanted.target)
    leaves = begun_again.mark(register.prepare(leaves, signed.terms), verified).localCheckpoint()
    report = _compute(spark, leaves, signed, opened, verified, counted, wanted.since, wanted.until, tell)
    tell("Writing the report")
    seconds = clock() - began
    made = _made(spark, clock(), seconds, wanted.master)
    _write(report, wanted.target, made)
    return ReportResult(
        wanted.target,
        report,
        seconds,
        sum(log.size for log in report.logs),
        sum(row["entries"] for row in counted.values()),
    )


def _served_otherwise(doubted: Mapping[str, bytes], verified: Iterable[VerificationReport]) -> list[Problem]:
    """Logs of which the register's reading did not believe the same documents as the verification: who serves the files gave them to the one alone."""
    return [
        Problem(
            report.origin,
            None,
            "Other documents held as the log was verified than hold as the register is made: the files changed meanwhile, or are served differently.",
        )
        for report in verified
        if doubted.get(report.origin, report.doubted) != report.doubted
    ]


def _sizes(leaves: DataFrame) -> DataFrame:
    return leaves.sparkSession.sql(
        """
        SELECT log, count(*) AS leaves, max(time_ms) AS time_ms, array_join(array_sort(collect_set(side)), ' and ') AS side, count_if(has_receipt) AS receipts,
               coalesce(sum(records) FILTER (WHERE entries_sha256 IS NOT NULL), 0) AS entries
        FROM {leaves} GROUP BY log
        """,
        leaves=leaves,
    )


def _short(
    opened: Sequence[OpenedLog], counted: Mapping[str, Any], problems: Sequence[Problem]
) -> list[Problem]:
    """Every leaf of a checkpoint was read, or a problem says why not. A guard against our own mistakes."""
    explained = {problem.log for problem in problems}
    return [
        Problem(origin, None, f"{origin}: {read} leaves were read where the checkpoint has {size}.")
        for origin, size, read in (
            (
                log.checkpoint.origin,
                log.checkpoint.size,
                counted[log.checkpoint.origin]["leaves"] if log.checkpoint.origin in counted else 0,
            )
            for log in opened
        )
        if size != read and origin not in explained
    ]


class _Listed:
    """The rows of a report's tables as they come to the driver, and how many more each has."""

    def __init__(self) -> None:
        self.left_off: dict[str, int] = {}

    def rows(self, table: str, frame: DataFrame, worth: Sequence[str] = ()) -> list[Any]:
        """At most ROWS_MAX rows, in the frame's order. Where there are more, the first by `worth`, SQL expressions: so rows that somebody
        makes up by the thousand, under terms that nobody signed, leave off none that the regions agreed on."""
        rows = frame.limit(ROWS_MAX + 1).collect()
        if len(rows) <= ROWS_MAX:
            return rows
        self.left_off[table] = frame.count() - ROWS_MAX
        if not worth:
            return rows[:ROWS_MAX]
        return frame.sparkSession.sql(
            f"SELECT * FROM {{frame}} ORDER BY {', '.join(worth)} LIMIT {ROWS_MAX}",  # noqa: S608  # of this module
            frame=frame,
        ).collect()


def _totals(transfers: DataFrame, daily: DataFrame, findings: DataFrame, unusual: DataFrame) -> Totals:
    """The sums over all rows, listed or not."""

    def sums(frame: DataFrame, **what: str) -> list[int]:
        row = frame.selectExpr(*(f"coalesce({each}, 0) AS {name}" for name, each in what.items())).first()
        assert row is not None
        return list(row)

    names = ("records", "record_bytes", "withheld", "acknowledged", "delivered")
    moved = sums(
        transfers,
        **{name: total(name, "true") for name in names},
        transfers="count_if(terms_hash IS NOT NULL)",
    )
    (denied,) = sums(daily, denied=total("denied", "true"))
    differences, is_open = sums(
        findings,
        differences=f"count_if(status = '{reconciliation.DIFFERS}')",
        open=f"count_if(status = '{reconciliation.OPEN}')",
    )
    (breaches,) = sums(unusual, breaches=total("events", f"severity = '{exceptions.BREACH}'"))
    records, record_bytes, withheld, acknowledged, delivered, count = moved
    return Totals(
        records=records,
        record_bytes=record_bytes,
        withheld=withheld,
        denied=denied,
        acknowledged=acknowledged,
        delivered=delivered,
        transfers=count,
        differences=differences,
        open=is_open,
        breaches=breaches,
    )


def _compute(
    spark: SparkSession,
    leaves: DataFrame,
    signed: Signed,
    opened: Sequence[OpenedLog],
    verified: Sequence[VerificationReport],
    counted: Mapping[str, Any],
    since: int | None,
    until: int | None,
    tell: Callable[[str], None],
) -> Report:
    window = register.within(leaves, since, until)
    terms = signed.terms
    tell("Transfer register, volumes, lineage, exceptions")
    transfers = register.transfers(window, terms).localCheckpoint()
    listed = _Listed()
    moved = listed.rows("register", transfers, register.WORTH)
    by_day = volumes.by_day(window, terms)
    daily = listed.rows("volumes", by_day, volumes.WORTH)
    fields = listed.rows("lineage", lineage.fields(transfers))
    story = story_of(spark, verified, signed.unjudged)
    noticed = exceptions.listed(window, leaves, signed, story, notices_of(spark, verified))
    unusual = listed.rows("exceptions", noticed)
    untold = sum(one.left_off + one.notices_left_off for one in verified) + signed.unasked
    if untold:
        listed.left_off["exceptions"] = listed.left_off.get("exceptions", 0) + untold

    tell("Reconciling egress with ingress")
    given = reconciliation.Given(_end(log, counted.get(log.checkpoint.origin)) for log in opened)
    sides = reconciliation.envelopes(leaves, given).localCheckpoint()
    found = reconciliation.envelope_findings(sides).unionByName(reconciliation.coverage_findings(leaves))
    unlike = reconciliation.unlike_envelopes(sides).localCheckpoint()
    places = {log.checkpoint.origin: (log.path, log.bundles) for log in opened}
    trusting = leaves.where(f"{reconciliation.TAKEN_ON_TRUST} AND {given.ingress}")
    if not trusting.isEmpty():
        tell("Looking in the ingress logs for what had arrived before")
        lately = reconciliation.perhaps_before(leaves, trusting, sides, given)
        found = found.unionByName(unfounded(leaves, lately, places, signed.derived))
    if not unlike.isEmpty():
        tell("Comparing records where the digests differ")
        found = found.unionByName(compare_records(reconciliation.places(leaves, unlike), places))
    found = found.localCheckpoint()
    differing = listed.rows("findings", reconciliation.in_order(found))
    version_1 = [one.origin for one in verified if one.version_1 is not None and not one.version_1.accepted]
    uncounted = {one.origin: one.uncounted_from for one in verified if one.uncounted_from is not None}
    shards = reconciliation.shards(leaves, found, miscounted_of(spark, verified), given, version_1, uncounted)
    by_shard = listed.rows("reconciliation", shards, reconciliation.WORTH)

    times = [row for row in moved if row["records"] or row["delivered"] or row["withheld"]]
    first = min((row["first_seen"] for row in times), default=None)
    last = max((row["last_seen"] for row in times), default=None)
    width = volumes.bucket_ms(first, last) if first is not None and last is not None else volumes.DAY_MS
    line = volumes.time_line(window, width, volumes.pictured(moved)).collect()

    logs = tuple(
        sorted(
            (
                _verified(log, found_in, counted.get(log.checkpoint.origin))
                for log, found_in in zip(opened, verified, strict=True)
            ),
            key=lambda log: log.origin,
        )
    )
    reconciled = from_rows("reconciliation", "Reconciliation", reconciliation.COLUMNS, by_shard)
    filled = _fill(moved, {log.origin: log for log in logs}, reconciled)
    table = from_rows("register", "Transfer register", register.COLUMNS, filled)
    unusual_table = from_rows("exceptions", "Exceptions", exceptions.COLUMNS, unusual)
    if listed.left_off:
        totals = _totals(transfers, by_day, found, noticed)
        links = _links(shards)
    else:
        differences = [row["status"] for row in differing]
        totals = Totals(
            records=table.total("records"),
            record_bytes=table.total("record_bytes"),
            withheld=table.total("withheld"),
            denied=min(COUNT_MAX, sum(row["denied"] for row in daily)),
            acknowledged=table.total("acknowledged"),
            delivered=table.total("delivered"),
            transfers=sum(1 for row in filled if row["terms_hash"]),
            differences=differences.count(reconciliation.DIFFERS),
            open=differences.count(reconciliation.OPEN),
            breaches=min(
                COUNT_MAX, sum(row["events"] for row in unusual if row["severity"] == exceptions.BREACH)
            ),
        )
        links = by_shard
    return Report(
        since, until, first, last, logs, table, reconciled,
        from_rows("findings", "Reconciliation findings", reconciliation.FINDING_COLUMNS, differing),
        unusual_table,
        from_rows("volumes", "Volumes", volumes.COLUMNS, daily),
        from_rows("lineage", "Lineage", lineage.COLUMNS, fields),
        totals, width,
        tuple(
            (row["start_ms"], row["stream"], row["records"], row["record_bytes"], row["withheld"]) for row in line
        ),
        _missing(logs, table, links, given, signed.granted),
        listed.left_off,
    )  # fmt: skip


def _verified(log: OpenedLog, found: VerificationReport, said: Mapping[str, Any] | None) -> VerifiedLog:
    return VerifiedLog(
        log.checkpoint.origin,
        (said["side"] if said else None) or "",
        log.checkpoint.size,
        log.checkpoint.root.hex(),
        str(log.key),
        log.key_sha256,
        log.cosigners,
        found.steps[7].checked,
        tuple(
            f"{step.title}: {step.checked} checked"
            + (f", {step.findings} findings, see the exceptions" if step.findings else "")
            + (f" ({step.note})" if step.note else "")
            for step in found.steps
        ),
        found.version_1,
        found.unsupported,
        said["time_ms"] if said else None,
    )


def _links(shards: DataFrame) -> list[Any]:
    """The links of a reconciliation that is too long to list, those of which one side's log is missing first."""
    return shards.sparkSession.sql(
        f"""
        SELECT DISTINCT status <> '{reconciliation.ONE_SIDE}' AS both, source_region, destination_region, bridge, status FROM {{shards}}
        ORDER BY both, source_region, destination_region, bridge, status LIMIT {LINKS_MAX}
        """,  # noqa: S608  # of this module
        shards=shards,
    ).collect()


def _end(log: OpenedLog, said: Mapping[str, Any] | None) -> reconciliation.LogEnd:
    return reconciliation.LogEnd(
        log.checkpoint.origin, log.checkpoint.size, (said["time_ms"] if said else None) or 0
    )


def _missing(
    logs: Sequence[VerifiedLog],
    transfers: Table,
    reconciled: Sequence[Any],
    given: reconciliation.Given,
    granted: Mapping[Granted, str] = MappingProxyType({}),
) -> Missing:
    """What was not given, by the links that the logs are about. `granted`: links that documents in them let records cross by, whether or not a log
    of what crossed there is among them."""
    links: dict[tuple[str, str], set[str]] = {}
    for row in reconciled:
        source, destination, bridge = row["source_region"], row["destination_region"], row["bridge"]
        absent = links.setdefault((source, destination), set())
        if row["status"] == reconciliation.ONE_SIDE:
            theirs = given.has_egress_of(bridge)
            absent.add(f"the log of {destination}" if theirs else f"the egress log of {bridge}")
    for row in transfers.records():
        links.setdefault((row["source_region"], row["destination_region"]), set())
    own = {
        origin.region for log in logs if (origin := Origin.parse(log.origin)).bridge is None
    }  # destinations keep their ingress log there
    counterparts = [
        f"{source} to {destination}: {each} was not given, so this link rests on one side's word."
        for (source, destination), absent in sorted(links.items())
        for each in sorted(absent)
    ]
    regions = sorted({region for link in links for region in link} - own)
    sources = {source for source, _ in links} - own
    return Missing(
        _first(counterparts, "Of {:,} further links one side's log was not given."),
        _first(
            [
                f"{region}: its own log was not given. Grants, revocations, pauses and refusals that stand only there are "
                "not in this report."
                + (
                    " Whether records crossed against its word, which its bridge may keep to itself, was not looked for."
                    if region in sources
                    else ""
                )
                for region in regions
            ],
            "Of {:,} further regions the own log was not given.",
        ),
        tuple(sorted(sources)),
        _granted_elsewhere(granted, given, own),
    )


def _granted_elsewhere(
    granted: Mapping[Granted, str], given: reconciliation.Given, own: Collection[str]
) -> tuple[str, ...]:
    """Links that are granted, and of which neither side's log of what crossed was given: these logs do not show that nothing did."""
    unseen = sorted(
        link
        for link in granted
        if not given.has_egress_of(link.bridge) and link.destination_region not in own
    )
    found = [
        f"{link.source_region} to {link.destination_region}: {link.bridge} may carry records, by {granted[link]} and perhaps other grants; neither its egress log nor the log of "
        f"{link.destination_region} was given, so what crossed there is not in this report."
        for link in unseen[:LINKS_MAX]
    ]
    more = len(unseen) - len(found)
    return (*found, *([f"Of {more:,} further links that are granted no log was given."] if more else []))


def _first(sentences: Sequence[str], more: str) -> tuple[str, ...]:
    """As many as a report says, and how many more there are: who writes a log may name any number of regions and bridges in it."""
    left = len(sentences) - LINKS_MAX
    return (*sentences[:LINKS_MAX], *([more.format(left)] if left > 0 else []))


def _fill(moved: Sequence[Any], logs: Mapping[str, VerifiedLog], reconciled: Table) -> list[dict[str, Any]]:
    """The register's rows with what is known of whole logs: checkpoints, cosigners, reconciliation."""
    states = reconciliation.states_by_stream(reconciled.records())
    filled = []
    for spark_row in moved:
        row = spark_row.asDict(recursive=True)
        for side in ("egress", "ingress"):
            log = logs.get(row[f"{side}_log"] or "")
            first, last = row[f"{side}_first_leaf"], row[f"{side}_last_leaf"]
            row[f"{side}_leaves"] = None if first is None else f"{first}-{last}"
            row[f"{side}_checkpoint"] = None if log is None else log.checkpoint
            row[f"{side}_cosigners"] = [] if log is None else [_covers(by, last) for by in log.cosigners]
        row["not_before"] = row["not_before_ms"] or None
        row["expires"] = row["expires_ms"] or None
        held = [logs.get(row[f"{side}_log"] or "") for side in ("egress", "ingress")]
        is_old = row["version_1"] and any(log is not None and log.is_of_version_1 for log in held)
        row["verification"] = reconciliation.VERSION_1 if is_old else "verified"
        moved_any = row["records"] or row["delivered"] or row["withheld"]
        row["reconciliation"] = reconciliation.worst_state(row, states) if moved_any else None
        filled.append(row)
    return filled


def _covers(by: Cosigner, last_leaf: int | None) -> str:
    """A cosigner, and how far it covers the leaves of a row whose last one this is."""
    if last_leaf is None or by.size > last_leaf:
        return by.name
    return f"{by.name} up to leaf {by.size - 1}" if by.size else f"{by.name}, no leaf yet"


# Writing


def _java_version(spark: SparkSession) -> str | None:
    jvm: Any = spark._jvm
    return None if jvm is None else str(jvm.System.getProperty("java.version"))


def _made(spark: SparkSession, now: float, seconds: float, master: str | None) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "made_at": iso(int(now * 1000)),
        "seconds": round(seconds, 3),
        "master": master or default_master(),
        "felix": installed("felix-mesh"),
        "spark": spark.version,
        "java": _java_version(spark),
        "pyarrow": installed("pyarrow"),
        "python": platform.python_version(),
    }


def _json(value: Any) -> bytes:
    return visible_json((json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())


def _prepare(target: Path) -> None:
    """Make the folder, and see whether a file can be written into it. Raises RequestError."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass
    except OSError as error:
        raise RequestError(
            f"The report cannot be written to {target}: {error.strerror or error}.",
            hint="Name a folder that can be written to.",
        ) from error


def _clear(target: Path) -> None:
    """Remove an earlier report (or refusal), so that no file of it can be taken for part of this one."""
    for name in (REFUSED_NAME, PAGE_NAME, JSON_NAME, LINEAGE_NAME, SUMS_NAME, MADE_NAME):
        (target / name).unlink(missing_ok=True)
    tables = target / TABLES_FOLDER
    for name in TABLES:
        for kind in ("csv", "parquet"):
            (tables / f"{name}.{kind}").unlink(missing_ok=True)
    with suppress(OSError):  # not there, or somebody else's files are in it
        tables.rmdir()


def _write(report: Report, target: Path, made: Mapping[str, Any]) -> None:
    _prepare(target)
    with tempfile.TemporaryDirectory(prefix=".report-", dir=target) as name:
        folder = Path(name)
        (folder / TABLES_FOLDER).mkdir()
        for table in report.tables:
            write_parquet(table, folder / TABLES_FOLDER / f"{table.name}.parquet")
            (folder / TABLES_FOLDER / f"{table.name}.csv").write_text(encode_csv(table), "utf-8", newline="")
        (folder / JSON_NAME).write_bytes(_json(as_json(report)))
        (folder / LINEAGE_NAME).write_bytes(openlineage.encode(openlineage.events(report)))
        (folder / PAGE_NAME).write_text(page.render(report), "utf-8")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = [
            f"{sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
            for path in files
        ]
        (folder / SUMS_NAME).write_text("".join(sums), "utf-8")
        (folder / MADE_NAME).write_bytes(_json(made))
        _clear(target)
        (target / TABLES_FOLDER).mkdir(exist_ok=True)
        # The page comes last: whoever sees it sees the report whole.
        last = (PAGE_NAME,)
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name in last, path.as_posix())):
            if path.is_file():
                shutil.move(path, target / path.relative_to(folder))


def _refuse(problems: Sequence[Problem], target: Path) -> ReportRefusedError:
    """Write what was found under a name that nobody takes for a report, and remove an earlier report."""
    _prepare(target)
    _clear(target)
    path = target / REFUSED_NAME
    path.write_bytes(
        _json(
            {
                "format": "felix-audit-refusal/1",
                "refused": True,
                "sentence": "No report was made: a log does not verify. This file is not a report.",
                "problems": [
                    {"log": problem.log, "leaf": problem.leaf, "sentence": problem.sentence}
                    for problem in problems[:PROBLEMS_MAX]
                ],
            }
        )
    )
    return ReportRefusedError(problems, path)
