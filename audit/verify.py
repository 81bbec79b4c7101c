"""Verifying a log from its files alone, offline. Streaming: one entry bundle in memory at a time.

The steps are those of docs/audit.md, in the same order; every finding names its step, and where it can the leaf and
the file. Nothing here trusts the writer: tiles, roots and the order of leaves are all computed anew. Each statement is
held to the keys of the region that makes it (audit.trust). `Files` may block. Callers: cli, audit.spark, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from audit.accounting import AnnouncedAgain
from audit.agreement import VERSION_1_UNSUPPORTED, Agreements
from audit.checkpoint import Checkpoint, SignedCheckpoint
from audit.continuity import Continuity
from audit.crossed import CROSSED_BEFORE
from audit.document_leaf import read_document
from audit.leaf import DOCUMENT_KINDS, Header, Kind, Leaf, Side, decode_leaf
from audit.merkle import HASH_BYTES, TILE_HEIGHT, TILE_WIDTH, Tile, Tree, leaf_hash
from audit.receipt import WITHOUT_ENTRIES_UNSUPPORTED, differences
from audit.tile import (
    CHECKPOINT_PATH,
    COSIGNED_PATH,
    WAL_FOLDER,
    WITNESSED_PATH,
    Files,
    bundle_path,
    decode_bundle,
    partial_widths,
    read_bundle,
    read_tile,
    tile_path,
)
from audit.trust import COSIGNATURES_MIN, LogTrust, Trust
from audit.wal_disk import Torn, read_segment, segment_first
from felix.errors import CorruptionError, TamperError

FINDINGS_MAX: Final = 1_000
"""A log that is all wrong does not fill memory; further findings are counted."""

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


class Finding(NamedTuple):
    """Something that does not hold."""

    step: int
    leaf: int | None
    path: str
    sentence: str


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
    """What verification found. `ok` only where every step went through without a finding."""

    origin: str
    """what the checkpoint says, once a trusted key is known for it"""
    size: int = 0
    root: bytes = b""
    cosigned_by: tuple[str, ...] = ()
    """regions and outside witnesses whose cosignatures stand on the checkpoint itself; the log's own region never does"""
    cosigned_size: int = 0
    """leaves covered by a cosigned checkpoint"""
    cosigners: dict[str, int] = field(default_factory=dict)
    """regions and outside witnesses that cosigned, and how many leaves at most"""
    steps: list[Step] = field(default_factory=lambda: [Step(n + 1, title) for n, title in enumerate(TITLES)])
    findings: list[Finding] = field(default_factory=list)
    left_off: int = 0
    leaves: dict[str, int] = field(default_factory=dict)
    """by kind"""
    records: dict[str, int] = field(default_factory=dict)
    """by kind; see audit.continuity"""
    documents: int = 0
    """signed documents that were verified"""
    unsupported: tuple[str, ...] = ()
    """what the log does not show, because crossings in it stand in leaves of version 1"""
    unanswered: int = 0
    """batches with an INTENT and without an ACK"""
    skipped: int = 0
    announced_again: tuple[AnnouncedAgain, ...] = ()
    """leaves that count no more, since another grant announced their offsets again"""
    followed: tuple[int, ...] = ()
    """see `audit.accounting.Accounts`"""
    miscounted: tuple[int, ...] = ()
    """leaves with which source offsets are not accounted for as they must be"""
    uncovered: int = 0
    """leaves in the write-ahead file that no checkpoint covers yet"""

    @property
    def ok(self) -> bool:
        """True where nothing was found."""
        return not self.findings

    def find(self, step: int, sentence: str, leaf: int | None = None, path: str = "") -> None:
        """Note a finding."""
        self.steps[step - 1].findings += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(Finding(step, leaf, path, sentence))
        else:
            self.left_off += 1


def verify_log(
    files: Files,
    trust: Trust,
    *,
    origin: str = "",
    cosignatures_min: int = COSIGNATURES_MIN,
    remembered: Iterable[bytes] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Verify one log. Damage makes findings, never an exception; only `files` itself may raise OSError.

    `trust`: the bundles of the log's region, of the region that its receipts are from, and of its witnesses. `origin`:
    which log it must be; without it, the one that its checkpoint names. `cosignatures_min` regions or outside witnesses
    other than the log's own region must have cosigned the checkpoint or the newest cosigned one. `remembered`:
    checkpoint notes that cosigners kept of this log. `progress(leaves done, leaves)` is called per bundle.
    """
    return _Run(files, trust, origin).verify(cosignatures_min, tuple(remembered), progress)


class _Run:
    def __init__(self, files: Files, trust: Trust, origin: str) -> None:
        self._files, self._trust = files, trust
        self._log: LogTrust
        self._report = Report(origin)
        self._continuity = Continuity()
        self._agreements: Agreements
        self._version = 1
        self._tree = Tree()
        self._roots_due: list[tuple[Checkpoint, str]] = []

    def verify(
        self,
        cosignatures_min: int,
        remembered: tuple[bytes, ...],
        progress: Callable[[int, int], None] | None,
    ) -> Report:
        report = self._report
        # 1. The checkpoint is signed by the log, and cosigned.
        signed = self._checkpoint()
        if signed is None:
            for step in report.steps[1:]:
                step.note = "not checked: there is no checkpoint to check against"
            return report
        self._agreements = Agreements(self._trust, self._log.origin)
        # 2. Nothing that was cosigned is missing.
        self._remembered(signed, remembered, cosignatures_min)
        # 3. to 8. and 10. in one pass over the entries.
        bundles = -(-report.size // TILE_WIDTH)
        for number in range(bundles):
            self._bundle(number)
            if progress is not None:
                progress(min((number + 1) * TILE_WIDTH, report.size), report.size)
        self._edge()
        # 5. The tree has the checkpoint's root.
        self._root(signed)
        # 9. The write-ahead file says the same.
        self._wal()
        continuity = self._continuity
        report.leaves, report.records = dict(continuity.leaves), dict(continuity.records)
        accounts = continuity.accounts
        report.unanswered, report.skipped = accounts.unanswered, accounts.skipped
        report.announced_again, report.followed = tuple(accounts.announced_again), tuple(accounts.followed)
        report.miscounted = tuple(continuity.miscounted)
        report.documents = self._agreements.documents
        return report

    # Step 1

    def _checkpoint(self) -> SignedCheckpoint | None:
        report = self._report
        report.steps[0].checked = 1
        data = self._files.read(CHECKPOINT_PATH)
        if data is None:
            report.find(1, "The checkpoint is missing.", path=CHECKPOINT_PATH)
            return None
        try:
            self._log = self._trust.log(report.origin) if report.origin else self._trust.log_of(data)
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
        self._count(signed)
        missing, quorum_size = self._log.missing(signed.cosigned, cosignatures_min), 0
        if not missing:
            quorum_size = signed.checkpoint.size
        own, witnessed = self._files.read(COSIGNED_PATH), self._files.read(WITNESSED_PATH)
        notes = [(data, f"remembered checkpoint {at + 1}") for at, data in enumerate(remembered)]
        if own is not None:
            notes.append((own, COSIGNED_PATH))
        if witnessed is not None:
            notes.append((witnessed, WITNESSED_PATH))
        for data, path in notes:
            report.steps[1].checked += 1
            try:
                before = self._log.open(data)
            except TamperError as error:
                report.find(2, error.sentence, path=path)
                continue
            expected = cosignatures_min and self._log.witnesses and self._log.policy is None
            if path == COSIGNED_PATH and expected and not before.cosigned:
                report.find(2, "It carries no cosignature of a known witness.", path=path)
            if before.checkpoint.size > report.size:
                report.find(
                    2,
                    f"The log was rolled back: {before.checkpoint.size} leaves were signed before, "
                    f"now there are {report.size}.",
                    path=path,
                )
                continue
            self._count(before)
            if not self._log.missing(before.cosigned, cosignatures_min):
                quorum_size = max(quorum_size, before.checkpoint.size)
            self._roots_due.append((before.checkpoint, path))
        if self._log.policy is not None:
            report.cosigned_size = quorum_size
            if not quorum_size and missing:
                report.find(1, f"No checkpoint of the log has a quorum: {missing}.", path=CHECKPOINT_PATH)
        elif len(report.cosigners) < cosignatures_min:
            report.find(
                1,
                f"{len(report.cosigners)} trusted regions or witnesses other than {self._log.region} cosigned, {cosignatures_min} are "
                "required.",
                path=CHECKPOINT_PATH,
            )
        if not notes:
            report.steps[1].note = "no cosigned checkpoint is known"
        self._roots_due.sort(key=lambda due: due[0].size)
        self._check_roots()

    def _count(self, signed: SignedCheckpoint) -> None:
        """Who cosigned this checkpoint, whose root is compared in its turn."""
        report, size = self._report, signed.checkpoint.size
        for party in self._log.cosigners(signed.cosigned):
            report.cosigners[party] = max(report.cosigners.get(party, 0), size)
            report.cosigned_size = max(report.cosigned_size, size)

    def _check_roots(self) -> None:
        """At every size that somebody remembers, the tree must have had that root."""
        while self._roots_due and self._roots_due[0][0].size == self._tree.size:
            before, path = self._roots_due.pop(0)
            if self._tree.root() != before.root:
                self._report.find(
                    2, f"The first {before.size} leaves are not those that were signed before.", path=path
                )

    # Steps 3, 4, 6, 7, 8, 10

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
            full = self._tree.add(found or bytes(HASH_BYTES))
            self._check_roots()
            if full:
                self._full(full)
        report.steps[3].checked += width
        self._partials("entries", number, width, path)
        for at, data in enumerate(leaves):
            self._leaf(start + at, data, path)

    def _leaf(self, index: int, data: memoryview, path: str) -> None:
        report = self._report
        # 6. Every leaf is whole, and in its place.
        report.steps[5].checked += 1
        try:
            leaf = decode_leaf(data)
        except CorruptionError as error:
            report.find(6, error.sentence, leaf=index, path=path)
            self._continuity.forget()
            return
        self._place(index, leaf, path)
        # 10. Every document is there, and signed by the region that it speaks for.
        if leaf.header.kind in DOCUMENT_KINDS:
            report.steps[9].checked += leaf.version > 1
            for sentence in self._agreements.take(index, leaf, self._document):
                report.find(10, sentence, leaf=index, path=path)
        # 7. Every record is accounted for once, under a grant.
        if leaf.header.kind is not Kind.ACK or leaf.header.side is not Side.EGRESS:
            # A receipt is about records that their INTENT counts already.
            report.steps[6].checked += leaf.header.records
        continued = self._continuity.apply(leaf, index, lambda: not self._agreements.named(leaf.header))
        for sentence in (*self._granted(leaf), *continued, *self._again(leaf)):
            report.find(7, sentence, leaf=index, path=path)
        # 8. Every delivery has its receipt.
        if leaf.header.kind is Kind.ACK and leaf.header.side is Side.EGRESS:
            self._receipt(index, leaf, path)

    def _place(self, index: int, leaf: Leaf, path: str) -> None:
        """Step 6, for a leaf that was read: it is of this log, and versions do not go back."""
        if misplaced := self._log.origin.misplaced(leaf.header):
            self._report.find(6, misplaced, leaf=index, path=path)
        if leaf.version < self._version:
            self._report.find(
                6,
                f"A leaf of version {leaf.version} stands behind one of version {self._version}.",
                index,
                path,
            )
        self._version = max(self._version, leaf.version)

    def _document(self, header: Header) -> bytes | None:
        return read_document(header, self._files)

    def _granted(self, leaf: Leaf) -> list[str]:
        """Step 7, the grant: what the documents before a crossing of version 2 say about it."""
        kind, side = leaf.header.kind, leaf.header.side
        if kind in (Kind.WITHHELD, Kind.GAP) and leaf.version > 1:
            return self._agreements.named(leaf.header)
        if (kind, side) not in ((Kind.INTENT, Side.EGRESS), (Kind.ACK, Side.INGRESS)):
            return []
        if leaf.version == 1:
            # Its own GRANT leaf is all there is; audit.continuity asks it.
            self._does_not_show(VERSION_1_UNSUPPORTED)
            return []
        return self._agreements.judge(leaf.header)

    def _does_not_show(self, what: tuple[str, ...]) -> None:
        known = self._report.unsupported
        if not set(what) <= set(known):
            self._report.unsupported = (*known, *what)

    def _again(self, leaf: Leaf) -> list[str]:
        """Step 7, after a resend: what crossed before does not cross again; and without one nothing is passed by as if it had."""
        crossed, header = self._agreements.crossed, leaf.header
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

    def _receipt(self, index: int, leaf: Leaf, path: str) -> None:
        report, header = self._report, leaf.header
        report.steps[7].checked += 1
        if not header.receipt:
            report.find(8, "The ACK carries no receipt.", leaf=index, path=path)
            return
        try:
            receipt = self._trust.open_receipt(header.receipt)
        except TamperError as error:
            report.find(8, error.sentence, leaf=index, path=path)
            return
        if not receipt.entries_sha256:
            self._does_not_show(WITHOUT_ENTRIES_UNSUPPORTED)
        differing = differences(receipt, header)
        if differing:
            report.find(8, f"Receipt and ACK differ in {', '.join(differing)}.", leaf=index, path=path)

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
        """Partial files that were left behind must be prefixes of what is checked; wider ones must not be there."""
        held = [found for found in partial_widths(self._files, kind, number) if found != width]
        if not held:
            return
        whole = self._files.read(path)
        for found in held:
            base = path.partition(".p/")[0]
            data = self._files.read(f"{base}.p/{found}") or b""
            where = f"{base}.p/{found}"
            if found > width:
                # A checkpoint was put back, or is about to be written by a process that is still running.
                continue
            if whole is None:
                continue
            prefix = whole[: found * HASH_BYTES] if kind != "entries" else whole[: len(data)]
            short = kind == "entries" and not _holds_entries(data, found)
            if data != prefix or short:
                self._report.find(4, f"The partial file {where} is not a part of {path}.", path=where)

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
        report, step = self._report, self._report.steps[8]
        names = [name for name in self._files.names(WAL_FOLDER) if segment_first(name) is not None]
        if not names:
            step.note = "there is none (an exported copy has none)"
            return
        following: int | None = None
        for at, name in enumerate(names):
            path, first = f"{WAL_FOLDER}/{name}", segment_first(name)
            assert first is not None
            if following is not None and first != following:
                report.find(9, f"Leaves {following}..{first - 1} are missing.", leaf=following, path=path)
            elif following is None and first > report.size:
                report.find(9, f"Leaves {report.size}..{first - 1} are missing.", leaf=report.size, path=path)
            following = self._segment(name, first, at == len(names) - 1)
        assert following is not None
        if following < report.size:
            report.find(
                9,
                f"It ends at leaf {following}, the checkpoint covers {report.size}.",
                leaf=following,
                path=WAL_FOLDER,
            )
        report.uncovered = max(0, following - report.size)

    def _segment(self, name: str, first: int, last_segment: bool) -> int:
        report, path, following = self._report, f"{WAL_FOLDER}/{name}", first
        tile_number, tile = -1, b""
        try:
            for found in read_segment(self._files.read(path) or b"", name, first, last_segment):
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
                if leaf_hash(found.leaf) != tile[at : at + HASH_BYTES]:
                    report.find(
                        9, f"Leaf {found.number} is not the one in the tree.", leaf=found.number, path=path
                    )
        except CorruptionError as error:
            report.find(9, error.sentence, leaf=following, path=path)
        return following


def _holds_entries(data: bytes, width: int) -> bool:
    try:
        decode_bundle(data, width)
    except TamperError:
        return False
    return True
