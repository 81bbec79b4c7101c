"""Verifying a log from its files alone, offline. Streaming: one entry bundle in memory at a time.

The steps are those of docs/audit.md, in the same order; every finding names its step, and where it can the leaf and
the file. Nothing here trusts the writer: tiles, roots and the order of leaves are all computed anew. Each statement is
held to the keys of the region that makes it (audit.trust). Where judging a leaf fails in a way that nobody foresaw, that is a finding of the
leaf (audit.unjudged). `Files` may block. Callers: cli, audit.spark, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final, NamedTuple

from audit import unclean_leaf
from audit.accounting import AnnouncedAgain, Skipped
from audit.agreement import VERSION_1_UNSUPPORTED, Agreements
from audit.allowance import Allowances, Faster, crosses
from audit.checkpoint import Checkpoint, SignedCheckpoint, notes_of
from audit.consistency import continues
from audit.continuity import Continuity
from audit.cosigned_notes import COSIGNED_PATHS, notes_at
from audit.cosigned_times import DatedLate, TimesOfCosignatures
from audit.crossed import CROSSED_BEFORE
from audit.document_leaf import read_document
from audit.keys_in_log import KeysInLog, keys_of_log
from audit.largest import Largest
from audit.leaf import DOCUMENT_KINDS, Header, Kind, Leaf, Side, decode_leaf, leaf_version
from audit.merkle import HASH_BYTES, TILE_HEIGHT, TILE_WIDTH, Tile, Tree, leaf_hash
from audit.pin_leaf import is_pinned
from audit.receipt import WITHOUT_ENTRIES_UNSUPPORTED, WITHOUT_PATH_UNSUPPORTED, differences
from audit.tile import (
    CHECKPOINT_PATH,
    COPIED_PATH,
    WAL_FOLDER,
    Files,
    bundle_path,
    decode_bundle,
    partial_widths,
    read_bundle,
    read_tile,
    read_tree,
    tile_path,
)
from audit.trust import COSIGNATURES_MIN, LogTrust, Trust
from audit.unjudged import Unjudged
from audit.wal_disk import Torn, read_segment, segment_first
from felix.errors import CorruptionError, TamperError
from policy.truncation import TRUNCATIONS_MAX

FINDINGS_MAX: Final = 1_000
"""A log that is all wrong does not fill memory; further findings are counted, but for the first in each kind of leaf about a link shard or a
grant."""
MISSING_BUNDLES_MAX: Final = 64
"""Bundles of which neither entries nor tile is there, after which the rest is not gone through. A log states its size itself, and may
state 2^62 leaves. What seems to be there need not have cost its owner much (links to one file, or a server's one answer): see the threat model."""
NO_WAL: Final = "there is none (a copy of a log has none)"
WAL_FINDINGS_MAX: Final = 64
"""After which the rest of the write-ahead files is not looked at: damaged ones may be many, and long, and nothing on their owner's disk."""
PARTIAL_FINDINGS_MAX: Final = 64
"""After which no more partial files that were left behind are looked at: each may be as long as a full bundle, and nothing on its owner's disk."""
PARTIAL_BUNDLES_READ: Final = 4
"""Partial bundles beside one bundle that are compared with it, the widest: a log keeps the newest two, and after a crash some more. Nothing is read from them
once a wider one is there."""
NOTICES_MAX: Final = 1_000
"""Times that run back, told one by one, the farthest."""
ELSEWHERE_MAX: Final = 8
"""Things told of one grant about countries: whoever signs a policy may name another one in each."""
TIME_BACK_MS: Final = 60_000
"""Leaves are made by several writers and take their times before they are appended, a revocation's as long before as what was on its way
takes. A leaf whose time is more than this before the latest one so far tells of a clock that was set back, or of a time that was made up."""
PLACES_MAX: Final = 1 << 17
"""Grants, in each kind of leaf, whose first finding is listed behind so many others: a log may name any number. Link shards have
places of their own (`audit.places`)."""

TITLES: Final = (
    "The checkpoint is signed by the log, and cosigned",
    "Nothing that was cosigned is missing",
    "Every entry is there",
    "Every tile follows from the entries",
    "The tree has the checkpoint's root",
    "Every leaf is whole, and in its place",
    "Every record is accounted for once, under a grant",
    "Every delivery has its receipt",
    "The write-ahead file says the same",
    "Every document is there, and signed by the region that it speaks for",
)
"""Step 1 is the first."""


_MOVES: Final = frozenset((Kind.INTENT, Kind.ACK, Kind.WITHHELD, Kind.GAP))
"""Leaves about records."""


SKIPPED: Final = "skipped"
TIME_BACK: Final = "time-back"
TAKEN_LATE: Final = "taken-after-revocation"
APPROVED_LATE: Final = "approved-after-certificate"
FASTER: Final = "faster-than-rate"
UNCOSIGNED: Final = "not-cosigned"
DATED_LATE: Final = "dated-after-cosignature"
OUTLAWED: Final = "crossed-though-outlawed"
PLACED_OTHERWISE: Final = "country-differs"
"""Kinds of notices."""
OVER_BUDGET: Final = "crossed-over-budget"
PIN_FAILS: Final = "pin-does-not-hold"
BEFORE_CHANGE: Final = "before-change-of-keys"
"""Kinds of findings that have a name."""


class Finding(NamedTuple):
    """Something that does not hold."""

    step: int
    leaf: int | None
    path: str
    sentence: str
    name: str = ""
    """of the kinds that have one"""


class Place(NamedTuple):
    """What a finding is about: no number of findings about one thing hides another's."""

    about: tuple[object, ...]
    is_limited: bool
    """whether a log may have any number of such things: PLACES_MAX of them have a place"""


class _Outlawed(NamedTuple):
    """Crossings under one grant that a policy in the log does not allow any more."""

    leaf: int
    """the first"""
    why: str
    leaves: int
    records: int


class _Crossed(NamedTuple):
    """Crossings under one grant."""

    leaf: int
    """the first"""
    records: int


class Version1(NamedTuple):
    """The leaves of version 1 that a log begins with, where records crossed by them. Nothing in them was signed but the log itself, and
    they may have been written today: they count where the verifier was told of them, by the root of just these leaves."""

    size: int
    """how many leaves stand before the first of version 2, or in all"""
    root: bytes
    """of the tree at that size"""
    accepted: bool


class Notice(NamedTuple):
    """Something that breaks no rule, and that who relies on the log should see. `records`: source offsets that it is about."""

    leaf: int
    name: str
    sentence: str
    records: int = 0


@dataclass(slots=True)
class Step:
    """One step's outcome: how many things were checked, how many findings, and what was left out, if anything."""

    number: int
    title: str
    checked: int = 0
    findings: int = 0
    note: str = ""


@dataclass(slots=True)
class Report:
    """What verification found. `ok` only where every step went through without a finding, and nothing crossed in leaves of version 1 that
    the verifier was not told of."""

    origin: str
    """what the checkpoint says, once a trusted key is known for it"""
    size: int = 0
    root: bytes = b""
    cosigned_by: tuple[str, ...] = ()
    """regions and outside witnesses whose cosignatures stand on the checkpoint itself; the log's own region never does"""
    cosigned_size: int = 0
    """leaves of the largest checkpoint that was cosigned as required (or by anybody, where nothing is)"""
    cosigners: dict[str, int] = field(default_factory=dict)
    """regions and outside witnesses that cosigned, and how many leaves at most; not all of them one checkpoint"""
    steps: list[Step] = field(default_factory=lambda: [Step(n + 1, title) for n, title in enumerate(TITLES)])
    findings: list[Finding] = field(default_factory=list)
    left_off: int = 0
    leaves: dict[str, int] = field(default_factory=dict)
    """by kind"""
    records: dict[str, int] = field(default_factory=dict)
    """by kind; see audit.continuity"""
    documents: int = 0
    """signed documents that were verified"""
    doubted: bytes = b""
    """of the leaves whose document was not believed: SHA-256 of their indexes, each in eight bytes"""
    unsupported: tuple[str, ...] = ()
    """what the log does not show, because crossings in it stand in leaves of version 1"""
    version_1: Version1 | None = None
    """None: nothing crossed in leaves of version 1"""
    unanswered: int = 0
    """batches with an INTENT and without an ACK"""
    skipped: int = 0
    notices: tuple[Notice, ...] = ()
    """of each kind the largest, so many as are told one by one"""
    notices_left_off: int = 0
    announced_again: tuple[AnnouncedAgain, ...] = ()
    """leaves that count no more, since another grant announced their offsets again"""
    followed: tuple[int, ...] = ()
    """see `audit.accounting.Accounts`"""
    miscounted: tuple[int, ...] = ()
    """leaves with which source offsets are not accounted for as they must be"""
    uncounted_from: int | None = None
    """the first leaf about a link shard that is not counted, since the log has too many: what such shards' leaves add up to is not known"""
    places: set[tuple[object, ...]] = field(default_factory=set, repr=False)
    """what findings are about, step by step: of each the first is listed"""
    places_limited: int = 0
    """how many of them share PLACES_MAX"""
    uncovered: int = 0
    """leaves in the write-ahead file that no checkpoint covers yet"""

    @property
    def ok(self) -> bool:
        """True where nothing was found, and all of it is of version 2 or was accepted."""
        return not self.findings and (self.version_1 is None or self.version_1.accepted)

    def find(
        self,
        step: int,
        sentence: str,
        leaf: int | None = None,
        path: str = "",
        place: Place | None = None,
        name: str = "",
    ) -> None:
        """Note a finding. `place`: what it is about; None: the log."""
        self.steps[step - 1].findings += 1
        first = place is not None and self._takes_place(step, place)
        if first or len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(step, leaf, path, sentence, name))
        else:
            self.left_off += 1

    def _takes_place(self, step: int, place: Place) -> bool:
        """Whether this is the first finding of a step about that, and there is room to remember that there was one."""
        key = (step, *place.about)
        if key in self.places or (place.is_limited and self.places_limited >= PLACES_MAX):
            return False
        self.places.add(key)
        self.places_limited += place.is_limited
        return True


def verify_log(
    files: Files,
    trust: Trust,
    *,
    origin: str = "",
    cosignatures_min: int = COSIGNATURES_MIN,
    remembered: Iterable[bytes] = (),
    accept_version_1: Collection[bytes] = (),
    progress: Callable[[int, int], None] | None = None,
    notes: Mapping[str, bytes] | None = None,
) -> Report:
    """Verify one log. Damage makes findings, never an exception; only `files` itself may raise OSError.

    `trust`: the bundles of the log's region, of the region that its receipts are from, and of its witnesses. `origin`:
    which log it must be; without it, the one that its checkpoint names. `cosignatures_min` regions or outside witnesses
    other than the log's own region must have cosigned one and the same checkpoint; what is behind it is a notice. `remembered`:
    checkpoint notes that cosigners kept of this log. `accept_version_1`: root hashes of leaves of version 1 that are taken for what
    they are (`Version1`). `progress(leaves done, leaves)` is called per bundle. `notes`: the log's checkpoint and those that were
    cosigned, by path, where they were read before; a log may go on meanwhile, and is verified as of its checkpoint.
    """
    run = _Run(files, trust, origin, accept_version_1, notes)
    return run.verify(cosignatures_min, tuple(remembered), progress)


class _Run:
    def __init__(
        self,
        files: Files,
        trust: Trust,
        origin: str,
        accept_version_1: Collection[bytes],
        notes: Mapping[str, bytes] | None,
    ) -> None:
        self._files, self._trust, self._notes = files, trust, notes
        self._held: list[tuple[str, bytes]] = []
        """what was cosigned, by path"""
        self._seen: dict[str, int] = {}
        """how many leaves each region's own witness cosigned at most, whether or not it counts"""
        self._accept_version_1 = accept_version_1
        self._before_version_2: tuple[int, bytes] | None = None
        self._crossed_by_version_1 = False
        self._latest_ms: int | None = None
        """the latest time of a leaf since the last one that ran back"""
        self._back = Largest[Notice](NOTICES_MAX)
        self._late = Largest[Notice](NOTICES_MAX)
        self._approved_late = Largest[Notice](NOTICES_MAX)
        self._allowances = Allowances()
        self._cosigned_times = TimesOfCosignatures()
        self._dated_late = Largest[Notice](NOTICES_MAX)
        self._outlawed: dict[str, _Outlawed] = {}
        """by grant"""
        self._elsewhere: dict[str, dict[str, _Crossed]] = {}
        """by grant, no more than may have documents, and by what is to be told, ELSEWHERE_MAX of it"""
        self._elsewhere_left_off: set[str] = set()
        """grants of which there is more"""
        self._uncosigned_from: int | None = None
        """the first leaf behind what is cosigned as required; None: nothing is, or nothing has to be"""
        self._uncosigned_crossings = self._uncosigned_records = 0
        self._partial_findings = self._partials_unread = 0
        self._log: LogTrust
        self._report = Report(origin)
        self._continuity = Continuity()
        self._keys: KeysInLog
        self._agreements: Agreements
        self._version = 1
        self._unjudged = Unjudged(origin or "a log")
        self._storage_failed: OSError | None = None
        self._tree = Tree()
        self._roots_due: list[tuple[Checkpoint, str]] = []
        self._missing = 0
        self._replayed: Tree | None = None
        """the tree as the write-ahead file has it"""

    def verify(
        self,
        cosignatures_min: int,
        remembered: tuple[bytes, ...],
        progress: Callable[[int, int], None] | None,
    ) -> Report:
        report = self._report
        # What was cosigned is read before the checkpoint: of an honest log that goes on meanwhile it is never the larger one. And the newest
        # before the one that it may replace.
        unreadable = [finding for path in COSIGNED_PATHS if (finding := self._hold(path))]
        # 1. The checkpoint is signed by the log, and cosigned.
        signed = self._checkpoint()
        if signed is None:
            for step in report.steps[1:]:
                step.note = "not checked: there is no checkpoint to check against"
            return report
        # 2. Nothing that was cosigned is missing.
        for sentence, path in unreadable:
            report.find(2, sentence, path=path)
        self._remembered(signed, remembered, cosignatures_min)
        self._keys = self._keys_of_log(signed.checkpoint, cosignatures_min)
        self._agreements = Agreements(self._trust, self._log.origin, self._keys)
        self._doubted = sha256()
        # 3. to 8. and 10. in one pass over the entries.
        bundles = -(-report.size // TILE_WIDTH)
        missing = self._end_missing(bundles)
        if missing:
            report.find(5, missing, path=CHECKPOINT_PATH)
            for step in (*report.steps[2:4], *report.steps[5:]):
                step.note = "not checked: the log's end is missing"
            return report
        for number in range(bundles):
            self._bundle(number)
            if progress is not None:
                progress(min((number + 1) * TILE_WIDTH, report.size), report.size)
            if self._missing >= MISSING_BUNDLES_MAX and number + 1 < bundles:
                following = (number + 1) * TILE_WIDTH
                report.find(
                    3,
                    f"{self._missing} bundles and their tiles are missing by here; the {report.size - following} leaves from {following} "
                    "on were not gone through.",
                    leaf=following,
                )
                break
        else:
            self._edge()
        if self._partials_unread:
            report.steps[
                3
            ].note = (
                f"{self._partials_unread} partial files that wider ones replaced were not compared with them"
            )
        # 5. The tree has the checkpoint's root.
        self._root(signed)
        # 9. The write-ahead file says the same.
        self._wal()
        continuity = self._continuity
        report.leaves, report.records = dict(continuity.leaves), dict(continuity.records)
        accounts = continuity.accounts
        report.unanswered, report.skipped = accounts.unanswered, accounts.skipped
        faster = Largest[Notice](NOTICES_MAX)
        for each in self._allowances.faster():
            faster.add(each.size, _faster(each))
        if (last := self._cosigned_times.end()) is not None:
            self._dated_late.add(last.by_ms, _dated_late(last))
        outlawed = Largest[Notice](NOTICES_MAX)
        for grant, found in self._outlawed.items():
            outlawed.add(found.records, _outlawed(grant, found))
        elsewhere = Largest[Notice](NOTICES_MAX)
        for grant, sentences in self._elsewhere.items():
            for sentence, crossed in sentences.items():
                told = f"Under {grant} {sentence}: one of the two is not right, or it has moved since."
                elsewhere.add(crossed.records, Notice(crossed.leaf, PLACED_OTHERWISE, told, crossed.records))
        times = (self._back, self._late, self._approved_late, self._dated_late, outlawed, faster, elsewhere)
        notices = (notice for largest in times for notice in largest.in_order())
        report.notices = (*self._uncosigned(), *map(_skipped, accounts.skips.in_order()), *notices)
        report.notices_left_off = (
            accounts.skips.left_off
            + sum(largest.left_off for largest in times)
            + len(self._elsewhere_left_off)
        )
        report.announced_again, report.followed = tuple(accounts.announced_again), tuple(accounts.followed)
        report.miscounted, report.uncounted_from = tuple(continuity.miscounted), continuity.uncounted_from
        report.documents, report.doubted = self._agreements.documents, self._doubted.digest()
        if self._crossed_by_version_1:
            size, root = self._before_version_2 or (report.size, self._tree.root())
            report.version_1 = Version1(size, root, root in self._accept_version_1)
        return report

    def _note(self, path: str) -> bytes | None:
        return self._files.read(path) if self._notes is None else self._notes.get(path)

    def _hold(self, path: str) -> tuple[str, str] | None:
        """Read what was cosigned; what does not hold, and where, if it cannot be read."""
        try:
            held = self._note(path)
            if held is not None:
                self._held += [(name, note) for name, note in notes_at(path, held).items()]
        except TamperError as error:
            return error.sentence, path
        return None

    # Step 1

    def _checkpoint(self) -> SignedCheckpoint | None:
        report = self._report
        report.steps[0].checked = 1
        try:
            data = self._note(CHECKPOINT_PATH)
            if data is None:
                report.find(1, "The checkpoint is missing.", path=CHECKPOINT_PATH)
                return None
            self._log = self._trust.log_of(data)
            if report.origin not in ("", self._log.name):
                raise TamperError(
                    f"The checkpoint is of the log {self._log.name!r}, expected {report.origin!r}."
                )
            report.origin = self._log.name
            signed = self._log.open(data)
        except TamperError as error:
            report.find(1, error.sentence, path=CHECKPOINT_PATH)
            return None
        report.size, report.root = signed.checkpoint.size, signed.checkpoint.root
        report.cosigned_by = self._log.cosigners(signed.cosigned)
        return signed

    # Step 2

    def _remembered(
        self, signed: SignedCheckpoint, remembered: tuple[bytes, ...], cosignatures_min: int
    ) -> None:
        report = self._report
        if size_min := self._log.size_min:
            report.steps[1].checked += 1
            if report.size < size_min:
                report.find(
                    2,
                    f"The log was rolled back, or this is a copy of before: its region's bundle says that keys changed at {size_min} leaves of it, "
                    f"now there are {report.size}.",
                    path=CHECKPOINT_PATH,
                    name=BEFORE_CHANGE,
                )
        self._count(signed)
        counted = [signed]
        of_log = notes_of(remembered, signed.checkpoint.origin)
        notes = [(data, f"remembered checkpoint {at + 1}") for at, data in enumerate(of_log)]
        notes += [(held, path) for path, held in self._held]
        for data, path in notes:
            report.steps[1].checked += 1
            try:
                before = self._log.open_kept(data)
            except TamperError as error:
                report.find(2, error.sentence, path=path)
                continue
            if before.checkpoint.size > report.size:
                report.find(
                    2,
                    f"The log was rolled back: {before.checkpoint.size} leaves were signed before, "
                    f"now there are {report.size}.",
                    path=path,
                )
                continue
            self._count(before)
            counted.append(before)
            self._roots_due.append((before.checkpoint, path))
        covered = self._log.covered(counted, cosignatures_min)
        report.cosigned_size = covered.size
        if covered.missing:
            report.find(1, covered.missing, path=CHECKPOINT_PATH)
        elif cosignatures_min or self._log.policy is not None:
            self._uncosigned_from = covered.size
        if not notes:
            report.steps[1].note = "no cosigned checkpoint is known"
        self._roots_due.sort(key=lambda due: due[0].size)
        self._check_roots()

    def _keys_of_log(self, checkpoint: Checkpoint, cosignatures_min: int) -> KeysInLog:
        """They are held to the checkpoint's root, and that to the entries in step 5."""
        report = self._report
        is_required = cosignatures_min > 0 or self._log.policy is not None
        covered = report.cosigned_size if is_required else report.size
        return keys_of_log(self._trust, checkpoint, self._files, self._seen, covered)

    def _count(self, signed: SignedCheckpoint) -> None:
        """Who cosigned this checkpoint, whose root is compared in its turn."""
        report, size = self._report, signed.checkpoint.size
        report.steps[0].note = report.steps[0].note or signed.told()
        for party in self._log.cosigners(signed.cosigned):
            report.cosigners[party] = max(report.cosigners.get(party, 0), size)
        for region in signed.seen_by:
            self._seen[region] = max(self._seen.get(region, 0), size)
        for by in signed.cosigned:
            if by.time_s and by.key in self._log.witnesses:
                self._cosigned_times.add(size, by.time_s * 1000, self._log.witnesses[by.key])

    def _uncosigned(self) -> Iterable[Notice]:
        """What no checkpoint covers that is cosigned as required."""
        start, size = self._uncosigned_from, self._report.size
        if start is None or start >= size:
            return ()
        crossings, records = self._uncosigned_crossings, self._uncosigned_records
        return (
            Notice(
                start,
                UNCOSIGNED,
                f"The last {size - start:,} of {size:,} leaves are in no checkpoint that is cosigned as required; by {crossings:,} of them {records:,} "
                "records crossed. A holder of the log's key may still write them anew.",
                records,
            ),
        )

    def _check_roots(self) -> None:
        """At every size that somebody remembers, the tree must have had that root."""
        while self._roots_due and self._roots_due[0][0].size == self._tree.size:
            before, path = self._roots_due.pop(0)
            if self._tree.root() != before.root:
                self._report.find(
                    2, f"The first {before.size} leaves are not those that were signed before.", path=path
                )

    # Steps 3, 4, 6, 7, 8, 10

    def _end_missing(self, bundles: int) -> str:
        """Of a log too long to be gone through whatever is missing: that neither the edge of its tree nor its last bundle is there, if so."""
        size = self._report.size
        if bundles <= MISSING_BUNDLES_MAX:
            return ""
        try:
            read_tree(self._files, size)
        except TamperError as error:
            try:
                read_bundle(self._files, bundles - 1, size)
            except TamperError:
                return (
                    f"The log does not reach to the {size} leaves that its checkpoint signs. {error.sentence}"
                )
        return ""

    def _bundle(self, number: int) -> None:
        report, size = self._report, self._report.size
        start = number * TILE_WIDTH
        width = min(TILE_WIDTH, size - start)
        path = bundle_path(number, width)
        try:
            tile = read_tile(self._files, 0, number, size)
        except TamperError as error:
            report.find(4, error.sentence, path=tile_path(0, number, width))
            tile = b""
        # 3. Every entry is there.
        report.steps[2].checked += 1
        leaves: list[memoryview] = []
        try:
            leaves = read_bundle(self._files, number, size)
        except TamperError as error:
            report.find(3, error.sentence, leaf=start, path=path)
            self._continuity.forget()
            self._missing += not tile
        # 4. Every tile follows from the entries.
        for at in range(width):
            expected = tile[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            found = leaf_hash(leaves[at]) if leaves else expected
            if found != expected and expected:
                report.find(
                    4,
                    f"Leaf {start + at} has not the hash that its tile has.",
                    leaf=start + at,
                    path=tile_path(0, number, width),
                )
            if self._before_version_2 is None and leaves and leaf_version(leaves[at]) != 1:
                self._before_version_2 = self._tree.size, self._tree.root()
            full = self._tree.add(found or bytes(HASH_BYTES))
            self._check_roots()
            if full:
                self._full(full)
        report.steps[3].checked += width
        self._partials("entries", number, width, path)
        for at, data in enumerate(leaves):
            self._leaf(start + at, data, path)

    def _leaf(self, index: int, data: memoryview, path: str) -> None:
        """Every question about one leaf, each asked by itself: one that cannot be answered is a finding, and the others are asked."""
        # 6. Every leaf is whole, and in its place.
        self._report.steps[5].checked += 1
        try:
            leaf = decode_leaf(data)
        except Exception as error:
            sentence = (
                error.sentence
                if isinstance(error, CorruptionError)
                else self._unjudged.sentence(error, f"Leaf {index}")
            )
            self._report.find(6, sentence, leaf=index, path=path)
            self._continuity.forget()
            return
        header = leaf.header
        is_receipt = header.kind is Kind.ACK and header.side is Side.EGRESS
        if self._uncosigned_from is not None and index >= self._uncosigned_from and crosses(header):
            self._uncosigned_crossings += 1
            self._uncosigned_records += header.records
        self._report.steps[9].checked += leaf.version > 1 and (
            header.kind in DOCUMENT_KINDS or is_pinned(header)
        )
        # A receipt is about records that their INTENT counts already.
        self._report.steps[6].checked += 0 if is_receipt else header.records
        self._report.steps[7].checked += is_receipt
        self._look_at_time(index, header)
        self._crossed_by_version_1 |= leaf.version == 1 and header.kind in _MOVES
        questions: tuple[tuple[int, Callable[[], Iterable[str]]], ...] = (
            (6, lambda: self._place(leaf)),
            # 10. Every document is there, and signed by the region that it speaks for.
            (10, lambda: self._agreements.take(index, leaf, self._document)),
            # 7. Every record is accounted for once, under a grant.
            (7, lambda: self._granted(index, leaf)),
            (7, lambda: self._accounted(index, leaf)),
            (7, lambda: self._again(leaf)),
            # 8. Every delivery has its receipt.
            (8, lambda: self._receipt(index, leaf) if is_receipt else ()),
        )
        for step, question in questions:
            sentences = list(self._ask(index, question))
            if sentences and step == 10:
                self._doubted.update(index.to_bytes(8))
            for sentence in sentences:
                self._report.find(step, sentence, leaf=index, path=path, place=self._place_of(index, header))
        for sentence in self._ask(index, lambda: self._over_budget(index, leaf)):
            place = Place((OVER_BUDGET, header.grant_id), is_limited=True)
            self._report.find(7, sentence, leaf=index, path=path, place=place, name=OVER_BUDGET)
        for sentence in self._ask(index, lambda: self._agreements.pinned(index, leaf, self._document)):
            place = Place((PIN_FAILS, header.key_id), is_limited=True)
            self._report.find(10, sentence, leaf=index, path=path, place=place, name=PIN_FAILS)
        if header.kind is Kind.REVOKE and (by_ms := self._agreements.taken_late(header)):
            self._late.add(by_ms, _taken_late(index, by_ms))
        if header.kind is Kind.APPROVE and (by_ms := self._agreements.late_ms):
            self._approved_late.add(by_ms, _approved_late(index, header.grant_id, by_ms))

    def _look_at_time(self, index: int, header: Header) -> None:
        ended = self._cosigned_times.take(index, header.time_ms, header.records if crosses(header) else 0)
        if ended is not None:
            self._dated_late.add(ended.by_ms, _dated_late(ended))
        latest = header.time_ms if self._latest_ms is None else self._latest_ms
        self._latest_ms = max(latest, header.time_ms)
        by_ms = latest - header.time_ms
        if by_ms <= TIME_BACK_MS:
            return
        # Told once: from here on the leaves behind it are held to its time.
        self._latest_ms = header.time_ms
        self._back.add(by_ms, _ran_back(index, by_ms))

    def _ask(self, index: int, question: Callable[[], Iterable[str]]) -> Iterable[str]:
        """What does not hold; where nobody foresaw how asking fails, that it failed. Raises what the storage raises, and nothing else."""
        try:
            return question()
        except Exception as error:
            if error is self._storage_failed:
                raise
            return [self._unjudged.sentence(error, f"Leaf {index}")]

    def _accounted(self, index: int, leaf: Leaf) -> list[str]:
        try:
            return self._continuity.apply(leaf, index, lambda: not self._agreements.named(leaf.header))
        except Exception:
            if leaf.header.kind in _MOVES:
                self._continuity.miscount(leaf.header, index)
            # Of what it had counted by then nobody knows how much.
            self._continuity.forget_shard(leaf.header)
            raise

    def _place_of(self, index: int, header: Header) -> Place:
        """What a finding about this leaf is about. All link shards that are not counted share one place."""
        if header.kind in _MOVES:
            return Place((header.side, self._continuity.place(header, index), header.kind), is_limited=False)
        return Place((header.kind, header.grant_id), is_limited=True)

    def _place(self, leaf: Leaf) -> list[str]:
        """Step 6, for a leaf that was read: it is of this log, says what its statement does, and versions do not go back."""
        found = []
        if misplaced := self._log.origin.misplaced(leaf.header):
            found.append(misplaced)
        if leaf.header.kind is Kind.UNCLEAN and (differing := unclean_leaf.mistake(leaf.header)):
            found.append(differing)
        if leaf.version < self._version:
            found.append(f"A leaf of version {leaf.version} stands behind one of version {self._version}.")
        self._version = max(self._version, leaf.version)
        return found

    def _document(self, header: Header) -> bytes | None:
        try:
            return read_document(header, self._files)
        except OSError as error:
            self._storage_failed = error
            raise

    def _granted(self, index: int, leaf: Leaf) -> list[str]:
        """Step 7, the grant: what the documents before a crossing of version 2 say about it."""
        kind, side = leaf.header.kind, leaf.header.side
        if kind in (Kind.WITHHELD, Kind.GAP) and leaf.version > 1:
            return self._agreements.named(leaf.header)
        if (kind, side) == (Kind.ACK, Side.EGRESS) and leaf.version > 1:
            return self._agreements.strayed(leaf.header)
        if (kind, side) not in ((Kind.INTENT, Side.EGRESS), (Kind.ACK, Side.INGRESS)):
            return []
        if leaf.version == 1:
            # Its own GRANT leaf is all there is; audit.continuity asks it.
            self._does_not_show(VERSION_1_UNSUPPORTED)
            return []
        if leaf.header.records and not leaf.header.path:
            self._does_not_show(WITHOUT_PATH_UNSUPPORTED)
        found = self._agreements.judge(leaf.header)
        if not found:
            self._note_elsewhere(index, leaf.header)
        if not found and (why := self._agreements.outlawed(leaf.header)):
            grant, records = leaf.header.grant_id, leaf.header.records
            outlawed = self._outlawed.get(grant)
            self._outlawed[grant] = (
                _Outlawed(index, why, 1, records)
                if outlawed is None
                else outlawed._replace(leaves=outlawed.leaves + 1, records=outlawed.records + records)
            )
        return found

    def _note_elsewhere(self, index: int, header: Header) -> None:
        """Where one of the two regions says itself that it is elsewhere than a policy says by which this crossing stands."""
        for sentence in self._agreements.placed_otherwise(header):
            told = self._elsewhere.setdefault(header.grant_id, {})
            if sentence not in told and len(told) >= ELSEWHERE_MAX:
                self._elsewhere_left_off.add(header.grant_id)
                continue
            before = told.get(sentence, _Crossed(index, 0))
            told[sentence] = before._replace(records=before.records + header.records)

    def _over_budget(self, index: int, leaf: Leaf) -> list[str]:
        """Step 7, the grant: what its terms allow altogether."""
        header = leaf.header
        if not crosses(header):
            return []
        terms = self._continuity if leaf.version == 1 else self._agreements
        allowed = terms.allowed(header)
        sentence = "" if allowed is None else self._allowances.take(index, header, allowed, leaf.version)
        return [sentence] if sentence else []

    def _does_not_show(self, what: tuple[str, ...]) -> None:
        known = self._report.unsupported
        if not set(what) <= set(known):
            self._report.unsupported = (*known, *what)

    def _again(self, leaf: Leaf) -> list[str]:
        """Step 7, after a resend: what crossed before does not cross again; and without one nothing is passed by as if it had."""
        crossed, header = self._agreements.crossed, leaf.header
        if header.kind in _MOVES and crossed.is_too_long(header.incarnation):
            return [
                f"{header.kind.name} of {header.stream}, shard {header.shard}: its incarnation goes on from more than {TRUNCATIONS_MAX} "
                "others, more than any link does."
            ]
        passed_by = header.kind is Kind.WITHHELD and header.reason == CROSSED_BEFORE
        if passed_by and not crossed.is_resent(header.incarnation):
            return [
                f"WITHHELD of {header.stream}, shard {header.shard}: {header.records} records of {header.first_offset}.."
                f"{header.last_offset} are said to have crossed before a resend, and none was asked for."
            ]
        twice = crossed.take(leaf)
        return (
            [
                f"{header.kind.name} of {header.stream}, shard {header.shard}: {twice} records of {header.first_offset}.."
                f"{header.last_offset} had crossed before the resend."
            ]
            if twice
            else []
        )

    def _receipt(self, index: int, leaf: Leaf) -> list[str]:
        header = leaf.header
        if not header.receipt:
            return ["The ACK carries no receipt."]
        try:
            receipt = self._keys.open_receipt(header.receipt, index)
        except TamperError as error:
            return [error.sentence]
        if not receipt.entries_sha256:
            self._does_not_show(WITHOUT_ENTRIES_UNSUPPORTED)
        if receipt.records and not receipt.path_sha256:
            self._does_not_show(WITHOUT_PATH_UNSUPPORTED)
        differing = differences(receipt, header)
        return [f"Receipt and ACK differ in {', '.join(differing)}."] if differing else []

    def _full(self, full: list[Tile]) -> None:
        """Tiles that the entries just filled. Level 0 was compared hash by hash already."""
        for tile in full:
            path = tile_path(tile.level, tile.number)
            if tile.level:
                self._compare_tile(tile, path)
            self._partials(str(tile.level), tile.number, TILE_WIDTH, path)

    def _compare_tile(self, tile: Tile, path: str) -> None:
        self._report.steps[3].checked += 1
        try:
            stored = read_tile(self._files, tile.level, tile.number, self._report.size)
        except TamperError as error:
            self._report.find(4, error.sentence, path=path)
            return
        if stored != tile.hashes:
            self._report.find(4, f"The tile {path} does not follow from the tiles below it.", path=path)

    def _partials(self, kind: str, number: int, width: int, path: str) -> None:
        """Partial files that were left behind must be prefixes of what is checked. A wider one is of a checkpoint that was put back, or that a
        process which is still running is about to write."""
        held = [found for found in partial_widths(self._files, kind, number) if found < width]
        if not held or self._partial_findings >= PARTIAL_FINDINGS_MAX:
            self._partials_unread += len(held)
            return
        if kind == "entries":
            self._partials_unread += len(held[:-PARTIAL_BUNDLES_READ])
            held = held[-PARTIAL_BUNDLES_READ:]
        before = self._report.steps[3].findings
        try:
            whole = self._files.read(path)
        except TamperError:
            # Told where it was read before.
            return
        if whole is None:
            return
        for found in held:
            where = f"{path.partition('.p/')[0]}.p/{found}"
            try:
                data = self._files.read(where)
            except TamperError as error:
                self._report.find(4, error.sentence, path=where)
                continue
            if data is None:
                if found not in partial_widths(self._files, kind, number):
                    # The log goes on, and removed it since it was listed.
                    continue
                data = b""
            prefix = whole[: found * HASH_BYTES] if kind != "entries" else whole[: len(data)]
            short = kind == "entries" and not _holds_entries(data, found)
            if data != prefix or short:
                self._report.find(4, f"The partial file {where} is not a part of {path}.", path=where)
        self._partial_findings += self._report.steps[3].findings - before

    def _edge(self) -> None:
        """The partial tiles of the tree's right edge."""
        for tile in self._tree.partial_tiles():
            path = tile_path(tile.level, tile.number, tile.width)
            if tile.level:
                self._compare_tile(tile, path)
            self._partials(str(tile.level), tile.number, tile.width, path)

    # Step 5

    def _root(self, signed: SignedCheckpoint) -> None:
        self._report.steps[4].checked = 1
        if self._tree.root() != signed.checkpoint.root:
            self._report.find(
                5,
                f"The {self._report.size} leaves do not have the root that the checkpoint signs.",
                path=CHECKPOINT_PATH,
            )

    # Step 9

    def _wal(self) -> None:
        report = self._report
        segments = self._segments()
        if not segments:
            report.steps[8].note = NO_WAL
            return
        first, following = 0, None
        while segments:
            (first, name), *rest = segments
            path = f"{WAL_FOLDER}/{name}"
            expected = report.size if following is None else following
            # Of what the log removed, and where the first one begins, its checkpoint of now is asked.
            is_replaced = following is None and (first <= expected or self._goes_on_behind(first))
            if first != expected and not is_replaced:
                report.find(9, f"Leaves {expected}..{first - 1} are missing.", leaf=expected, path=path)
            following = self._segment(name, first, not rest)
            if report.steps[8].findings >= WAL_FINDINGS_MAX:
                report.find(9, "What follows was not looked at.", leaf=following, path=path)
                break
            if following is None:
                rest = [each for each in self._segments() if each[0] > first]
            segments = rest
        if following is None:
            if self._files.read(COPIED_PATH) is not None:
                # It became a copy, all of which is in bundles, since the segments were listed.
                report.steps[8].note = NO_WAL
                return
            following = first
        if following < report.size:
            report.find(
                9,
                f"It ends at leaf {following}, the checkpoint covers {report.size}.",
                leaf=following,
                path=WAL_FOLDER,
            )
        report.uncovered = max(0, following - report.size)
        try:
            self._check_replayed()
        except TamperError as error:
            report.find(9, error.sentence, path=WAL_FOLDER)

    def _check_replayed(self) -> None:
        """The leaves were compared with tiles that nothing held to the root; where nothing was found, their tree says whether these were those of step 4."""
        tree, report = self._replayed, self._report
        if tree is None or any(report.steps[at].findings for at in (2, 3, 4, 8)):
            return
        checkpoint = Checkpoint(report.origin, report.size, report.root)
        if not continues(self._files, checkpoint, tree.size, tree.root()):
            report.find(
                9,
                "Its leaves are not those under the checkpoint: the log changed meanwhile, or is served differently.",
                path=WAL_FOLDER,
            )

    def _segments(self) -> list[tuple[int, str]]:
        """The write-ahead segments by their first leaf."""
        names = self._files.names(WAL_FOLDER)
        return [(first, name) for name in names if (first := segment_first(name)) is not None]

    def _goes_on_behind(self, leaf: int) -> bool:
        """Whether the log went on since its checkpoint was read, and has every leaf before this one in full bundles now: it removed the segments
        that held them."""
        report = self._report
        try:
            now = self._log.open(self._files.read(CHECKPOINT_PATH) or b"").checkpoint
            is_whole = read_tree(self._files, now.size).root() == now.root
            if not is_whole or now.size // TILE_WIDTH * TILE_WIDTH < leaf:
                return False
            return continues(self._files, now, report.size, report.root)
        except TamperError:
            return False

    def _segment(self, name: str, first: int, last_segment: bool) -> int | None:
        """The leaf behind the segment's last one; None: the log removed the segment since it was listed."""
        report, path, following = self._report, f"{WAL_FOLDER}/{name}", first
        tile_number, tile = -1, b""
        try:
            data = self._files.read(path)
            if data is None and (first, name) not in self._segments():
                return None
            for found in read_segment(data or b"", name, first, last_segment):
                if isinstance(found, Torn):
                    report.steps[8].note = f"{found.bytes} bytes of an unfinished append at the end of {name}"
                    continue
                following = found.number + 1
                report.steps[8].checked += 1
                if found.number >= report.size:
                    continue
                if found.number >> TILE_HEIGHT != tile_number:
                    tile_number = found.number >> TILE_HEIGHT
                    tile = read_tile(self._files, 0, tile_number, report.size)
                at = found.number % TILE_WIDTH * HASH_BYTES
                hash_ = leaf_hash(found.leaf)
                if self._replayed is None or self._replayed.size != found.number:
                    # Those between were removed meanwhile.
                    self._check_replayed()
                    self._replayed = read_tree(self._files, found.number)
                self._replayed.add(hash_)
                if hash_ != tile[at : at + HASH_BYTES]:
                    report.find(
                        9, f"Leaf {found.number} is not the one in the tree.", leaf=found.number, path=path
                    )
        except CorruptionError as error:
            report.find(9, error.sentence, leaf=following, path=path)
        return following


def _skipped(found: Skipped) -> Notice:
    return Notice(
        found.leaf,
        SKIPPED,
        f"Source offsets {found.first} to {found.last} are in no leaf: under another grant the link began behind them.",
        found.last - found.first + 1,
    )


def _ran_back(leaf: int, by_ms: int) -> Notice:
    return Notice(leaf, TIME_BACK, f"Its time is {by_ms // 1000:,} s before that of a leaf before it: the order of leaves is sure, the time is the writer's word.")  # fmt: skip


def _dated_late(found: DatedLate) -> Notice:
    more = f" So are {found.leaves - 1:,} behind it." if found.leaves > 1 else ""
    return Notice(found.leaf, DATED_LATE, f"Its time is {found.by_ms // 1000:,} s after {found.party} cosigned it: one of the two clocks was wrong, or the time is made up.{more}", found.records)  # fmt: skip


def _outlawed(grant: str, found: _Outlawed) -> Notice:
    more = f", and so did {found.leaves - 1:,} leaves behind it" if found.leaves > 1 else ""
    return Notice(found.leaf, OUTLAWED, f"It crossed under {grant}{more}, more than 10 s after the log had it that {found.why}: brokers refuse that, and what was read before may have been announced.", found.records)  # fmt: skip


def _faster(found: Faster) -> Notice:
    return Notice(
        found.leaf,
        FASTER,
        f"{found.size:,} bytes crossed under grant {found.grant_id} within {found.span_ms / 1000:,.0f} s, by the times of their leaves: its terms allow "
        f"{found.rate_bytes:,} a second.",
    )


def _taken_late(leaf: int, by_ms: int) -> Notice:
    return Notice(leaf, TAKEN_LATE, f"A crossing before it was taken {by_ms:,} ms after the revocation had come in force and what was on its way had ended, by the times of the two leaves: this one was put off, or a clock was set back.")  # fmt: skip


def _approved_late(leaf: int, grant: str, by_ms: int) -> Notice:
    return Notice(leaf, APPROVED_LATE, f"The approval of {grant} came {by_ms // 1000:,} s after the approver's certificate had ended, by the leaf's time: it may have been signed after that, and dated back.")  # fmt: skip


def _holds_entries(data: bytes, width: int) -> bool:
    try:
        decode_bundle(data, width)
    except TamperError:
        return False
    return True
