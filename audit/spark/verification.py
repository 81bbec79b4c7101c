"""Verifying the logs of a report: the driver's part, and every log whole by `audit.verify.verify_log`.

No check of `felix audit verify` is left out. Where each is made:

- the driver reads the checkpoints (`open_log`) and checks signature, cosignatures, the tiles of level 1 and up, and the
  root. What it read is what everybody else holds the log to, also where the log grows meanwhile;
- one task per log runs `verify_log`, all its steps, over the whole log in order (`verify_all`);
- the source (`audit.spark.source`), which makes the rows that the tables come from, checks in parallel that each
  tile of level 0 hashes to what the driver held to the root (`audit.bundle_roots`), that each leaf hashes to its place in its tile and decodes, and that each
  receipt agrees with its leaf: what is reported is what was verified.

Whether the leaves, authentic as they are, tell a consistent story (steps 7 and 10) is for the report to say: a log that was
faithfully kept by a faulty bridge is authentic, and its report names every rule that it breaks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from audit.bundle_roots import BundleRoots, read_bundle_roots
from audit.checkpoint import Checkpoint, SignedCheckpoint, notes_of
from audit.consistency import continues
from audit.cosigned_notes import COSIGNED_PATHS, notes_at
from audit.errors import RolledBackError
from audit.keys_in_log import KeysInLog, keys_of_log
from audit.merkle import (
    HASH_BYTES,
    TILE_HEIGHT,
    TILE_WIDTH,
    complete_root,
    split_hashes,
)
from audit.note import VerifierKey, parse_note
from audit.spark.document import Cosigner
from audit.spark.files import open_files, read_checkpoint
from audit.spark.frame import frame_of
from audit.tile import (
    CHECKPOINT_PATH,
    Files,
    read_tile,
    read_tree,
    tile_path,
)
from audit.trust import COSIGNATURES_MIN, LogTrust, Trust
from audit.unjudged import Unjudged
from audit.verify import Report as VerificationReport
from audit.verify import verify_log
from felix.errors import CorruptionError, FelixError, TamperError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RULE_BROKEN: Final = "rule-broken"
"""The exception that stands for a finding without a name of its own."""
STORY_STEPS: Final = (7, 10)
"""The steps of `verify_log` that ask whether authentic leaves tell a consistent story: records accounted for once, under a
grant; documents there and signed. What they find stands in the report; what the other steps find means that there is
none."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a log does not verify: which log, which leaf (where one can be named), and in words."""

    log: str
    leaf: int | None
    sentence: str


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log whose checkpoint holds, and the files as they were when it was read: a log may grow meanwhile."""

    path: str
    key: VerifierKey
    checkpoint: Checkpoint
    cosigners: tuple[Cosigner, ...]
    """each with the newest checkpoint that it cosigned; these are not all of one size"""
    bundles: BundleRoots
    """what each entry bundle hashes to, held to the checkpoint's root"""
    notes: Mapping[str, bytes]
    """the checkpoint and those that were cosigned, by path, as they were read"""
    covered: int = 0
    """how many leaves are cosigned as required; all, where nothing is"""
    seen: Mapping[str, int] = field(default_factory=dict)
    """how many of them each region's own witness cosigned at most, whether or not it counts"""

    @property
    def key_sha256(self) -> str:
        """SHA-256 of the raw public key, lower-case hex."""
        return sha256(self.key.public).hexdigest()


def open_log(
    path: str,
    trust: Trust,
    cosignatures_min: int = COSIGNATURES_MIN,
    remembered: Sequence[bytes] = (),
) -> OpenedLog:
    """The driver's part. Raises TamperError or RolledBackError with what does not hold, RequestError without a log.

    `remembered`: checkpoints that witnesses keep; those of other logs are left aside.
    """
    files = open_files(path)
    # In the order of verify_log: what was cosigned first.
    held = {name: found for name in COSIGNED_PATHS if (found := files.read(name)) is not None}
    data = read_checkpoint(files, path)
    origin = parse_note(data).text.partition("\n")[0]
    log = trust.log(origin)
    signed = log.open(data)
    key = signed.signed[0].key
    checkpoint = signed.checkpoint
    check_tree(files, checkpoint)
    bundles = read_bundle_roots(files, checkpoint.size, checkpoint.root)
    # As verify_log counts them: also those that stand on what witnesses remember.
    kept = [log.open_kept(note) for note in notes_of(remembered, origin)]
    cosigned = [note for path, found in held.items() for note in notes_at(path, found).values()]
    before = [*map(log.open_kept, cosigned), *kept]
    cosigners = _cosigners(files, signed, before, log)
    covered = log.covered((*before, signed), cosignatures_min)
    if covered.missing:
        raise TamperError(covered.missing)
    # Those that others cosigned are compared above.
    for note in (*kept, *(each for each in before if not each.signed)):
        _check_prefix(files, checkpoint, note.checkpoint)
    is_required = cosignatures_min > 0 or log.policy is not None
    size = covered.size if is_required else checkpoint.size
    seen: dict[str, int] = {}
    for each in (*before, signed):
        for region in each.seen_by:
            seen[region] = max(seen.get(region, 0), each.checkpoint.size)
    return OpenedLog(path, key, checkpoint, cosigners, bundles, {CHECKPOINT_PATH: data, **held}, size, seen)


def keys_of(log: OpenedLog, trust: Trust) -> KeysInLog:
    """Under which keys what stands in the log verifies, as `verify_log` has it: whatever is read here, it is held to the root that was verified."""
    return keys_of_log(trust, log.checkpoint, open_files(log.path), log.seen, log.covered)


def verify_whole(
    log: OpenedLog,
    trust: Trust,
    cosignatures_min: int,
    remembered: Sequence[bytes],
    accept_version_1: Collection[bytes] = (),
) -> VerificationReport:
    """All steps of `audit.verify.verify_log`. Memory is one entry bundle and the state of the link shards."""
    return verify_log(
        open_files(log.path),
        trust,
        origin=log.checkpoint.origin,
        cosignatures_min=cosignatures_min,
        remembered=remembered,
        accept_version_1=accept_version_1,
        notes=log.notes,
    )


def _verify_or_tell(
    log: OpenedLog,
    trust: Trust,
    cosignatures_min: int,
    notes: Sequence[bytes],
    accept_version_1: Collection[bytes],
) -> VerificationReport:
    """A log of which nobody foresaw how its verification fails: the refusal names it, and what is wrong with the others."""
    try:
        return verify_whole(log, trust, cosignatures_min, notes, accept_version_1)
    except (FelixError, OSError):
        raise
    except Exception as error:
        origin = log.checkpoint.origin
        report = VerificationReport(origin)
        report.find(6, Unjudged(origin).sentence(error, "The log"))
        return report


def verify_all(
    spark: SparkSession,
    logs: Sequence[OpenedLog],
    trust: Trust,
    cosignatures_min: int,
    remembered: Sequence[bytes],
    accept_version_1: Collection[bytes] = (),
) -> list[VerificationReport]:
    """Every log by `verify_whole`, each in a task of its own, all at once; the longest first. In the order of `logs`.

    The order of leaves is part of what is verified, so one log is one task: a million records a second and core.
    """
    import pyarrow as pa
    from pyspark.serializers import CPickleSerializer

    encoded, policy = trust.encode(), trust.policy
    pickled: Any = CPickleSerializer()  # PySpark leaves it untyped
    order = sorted(range(len(logs)), key=lambda at: -logs[at].checkpoint.size)
    work = [(at, logs[at], notes_of(remembered, logs[at].checkpoint.origin)) for at in order]

    def verify(log: OpenedLog, notes: tuple[bytes, ...]) -> VerificationReport:
        trusted = Trust.decode(encoded)
        trusted = trusted if policy is None else trusted.under(policy)
        return _verify_or_tell(log, trusted, cosignatures_min, notes, accept_version_1)

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                at, log, notes = work[number]
                found = pickled.dumps(verify(log, notes))
                yield pa.RecordBatch.from_pydict({"at": [at], "found": [found]})

    # As the rows are read (audit.spark.source), and so by the same processes: Spark starts others for an RDD.
    tasks = spark.range(0, len(work), 1, len(work)).mapInArrow(run, "at bigint, found binary")
    found = {row["at"]: pickled.loads(bytes(row["found"])) for row in tasks.collect()}
    return [found[at] for at in range(len(logs))]


def problems_of(report: VerificationReport) -> list[Problem]:
    """What refuses a report: every finding but those about the log's story, which the report itself tells.

    The verifier lists `FINDINGS_MAX` findings and counts the rest. A step whose findings were all crowded out of the list
    refuses the report as well: nobody hides a forged receipt behind a thousand other findings.
    """
    found = [finding for finding in report.findings if finding.step not in STORY_STEPS]
    listed = {finding.step for finding in found}
    return [Problem(report.origin, finding.leaf, finding.sentence) for finding in found] + [
        Problem(report.origin, None, f"{step.title}: {step.findings} findings, none of them listed.")
        for step in report.steps
        if step.findings and step.number not in listed and step.number not in STORY_STEPS
    ]


def story_of(
    spark: SparkSession, reports: Sequence[VerificationReport], more: Sequence[tuple[str, int, str]] = ()
) -> DataFrame | None:
    """What these steps found, and `more` of the kind, as rows: log, leaf_index, sentence, and what an exception of it is called; None: nothing."""
    found = (
        (report.origin, finding.leaf, finding.sentence, finding.name or RULE_BROKEN)
        for report in reports
        for finding in report.findings
        if finding.step in STORY_STEPS
    )
    rows = [*found, *((*each, RULE_BROKEN) for each in more)]
    columns = "log string, leaf_index bigint, sentence string, exception string"
    return frame_of(spark, rows, columns) if rows else None


def notices_of(spark: SparkSession, reports: Sequence[VerificationReport]) -> DataFrame | None:
    """What breaks no rule and should be seen, as rows: log, leaf_index, notice, sentence, records; None: nothing."""
    rows = [(report.origin, *each[:3], each.records) for report in reports for each in report.notices]
    return (
        frame_of(spark, rows, "log string, leaf_index bigint, notice string, sentence string, records bigint")
        if rows
        else None
    )


def miscounted_of(spark: SparkSession, reports: Sequence[VerificationReport]) -> DataFrame:
    """The leaves with which source offsets are not accounted for once, as rows: log, leaf_index."""
    rows = [(report.origin, leaf) for report in reports for leaf in report.miscounted]
    return frame_of(spark, rows, "log string, leaf_index bigint")


def _cosigners(
    files: Files, signed: SignedCheckpoint, before: Sequence[SignedCheckpoint], log: LogTrust
) -> tuple[Cosigner, ...]:
    furthest: dict[str, Cosigner] = {}
    for note in (*before, signed):
        if not note.cosigned and not note.seen_by:
            continue
        _check_prefix(files, signed.checkpoint, note.checkpoint)
        counted = log.cosigners(note.cosigned)
        for by in note.cosigned:
            party = log.witnesses[by.key]
            if party not in counted:
                continue
            now = Cosigner(party, note.checkpoint.size, by.time_s)
            held = furthest.get(party, now)
            if (held.size, held.time_s) <= (now.size, now.time_s):
                furthest[party] = now
    return tuple(furthest[name] for name in sorted(furthest))


def _check_prefix(files: Files, whole: Checkpoint, cosigned: Checkpoint) -> None:
    if cosigned.size > whole.size:
        raise RolledBackError(
            f"The log {whole.origin} was rolled back: {cosigned.size} leaves were cosigned, its checkpoint has "
            f"{whole.size}."
        )
    if not continues(files, whole, cosigned.size, cosigned.root):
        raise RolledBackError(
            f"The log {whole.origin} is not the one that was cosigned: its first {cosigned.size} leaves have "
            "another root."
        )


def check_tree(files: Files, checkpoint: Checkpoint) -> None:
    """Step 2. Memory is one tile; reads a 256th of the level-0 tiles' bytes. Raises TamperError."""
    if read_tree(files, checkpoint.size).root() != checkpoint.root:
        raise TamperError(
            f"The tiles of {checkpoint.origin} do not hash to the root in its checkpoint of {checkpoint.size} leaves."
        )
    level = 1
    while (hashes := checkpoint.size >> TILE_HEIGHT * level) >= TILE_WIDTH:
        for index in range(hashes // TILE_WIDTH):
            tile = read_tile(files, level, index, checkpoint.size)
            above = read_tile(files, level + 1, index // TILE_WIDTH, checkpoint.size)
            at = index % TILE_WIDTH * HASH_BYTES
            if complete_root(split_hashes(tile)) != above[at : at + HASH_BYTES]:
                raise TamperError(
                    f"The tile {tile_path(level, index)} of {checkpoint.origin} does not hash to its place in level "
                    f"{level + 1}."
                )
        level += 1


def problem_of(path: str, error: CorruptionError) -> Problem:
    """The problem that an error of `open_log` stands for."""
    return Problem(path, None, error.sentence)
