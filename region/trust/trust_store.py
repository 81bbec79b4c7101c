"""What a region must not lose: documents that forbid, the newest residency policy, and whose bundles it believed; in files beside the log.

Brokers read documents from the metadata store, whose administrator could remove one, restore an older one, or exchange one for
another. The documents are signed by the regions, so a broker that has once accepted one keeps a copy in its data folder and
keeps applying it, also after a restart: every revocation, and per place the newest of pauses and resumptions (grant and region)
and of deny entries and liftings (region, pattern, peer) that each policy key of the region signed. So only a newer signed document of the
same region lifts a document that forbids. Only a policy's successors replace it.

Invariants: what stands here was verified before it was kept, so a document that forbids or lifts holds whatever keys its region has now; what
forbids under a key that its region gave up is lifted only by a word under a key that it has now, whose leaf stands behind it; a
policy is verified again. `keep*` returns at once and writes in a thread of its own; what could not be written is said in the log, and is kept in
memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from felix.errors import Code, UnavailableError
from felix.reopening import SOUND_ALONE_MS, Reopening
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.storage.disk import PRIVATE_FILES
from felix.storage.port import Files, is_full
from felix.storage.small_file import TEMPORARY_SUFFIX, read_file, replace_durably
from keys.bundle import RegionBundle
from policy.grant import DenyEntry, Standing, StandingAction
from policy.signed import Purpose, SignatureError, SignedDocument, Trusted, decode_body, verify

log = logging.getLogger("felix.region.governance")

NEWEST_MAX: Final = 100_000
"""Documents: of places another region can make 5,000 by its bridge; more come only through the store's administrator."""
_DOCUMENT: Final = ".document"
_REVOCATION: Final = ".revocation"
"""as version 0.1 named them"""
_POLICY: Final = "policy"
_TRUSTED: Final = "trusted"
"""whose bundles were believed (region.governance.trusted_regions)"""

Key = tuple[str, ...]
Rank = tuple[int, bool, bytes]


def place_of(document: SignedDocument) -> tuple[Key, Rank] | None:
    """Where a document stands among those that forbid: its key, and its rank there; None for one of another kind.

    Of two of one number the one that forbids ranks higher. Raises SignatureError where it cannot be read.
    """
    if document.purpose is Purpose.STANDING:
        standing = decode_body(document, Standing, Purpose.STANDING)
        match standing.action:
            case StandingAction.REVOKE:
                return ("revoke", standing.grant, standing.region), (0, True, b"")
            case StandingAction.PAUSE | StandingAction.RESUME:
                pauses = standing.action is StandingAction.PAUSE
                return ("stand", standing.grant, standing.region), (standing.sequence, pauses, document.body)
        return None
    if document.purpose is Purpose.DENY:
        entry = decode_body(document, DenyEntry, Purpose.DENY)
        return ("deny", entry.region, entry.streams, entry.peer), (
            entry.sequence,
            not entry.lifted,
            document.body,
        )
    return None


def forbids(document: SignedDocument) -> bool:
    """True for a revocation, a pause and a deny entry that is not lifted. Raises SignatureError."""
    found = place_of(document)
    return found is not None and found[1][1]


def same_place(one: SignedDocument, other: SignedDocument) -> bool:
    """Whether two documents that forbid or lift are about the same."""
    found, held = place_of(one), place_of(other)
    return found is not None and held is not None and found[0] == held[0]


def described(document: SignedDocument) -> str:
    """What a document that forbids says, for a sentence to a person."""
    found = place_of(document)
    assert found is not None
    match found[0]:
        case ("deny", _, streams, peer):
            return f"the denial of {streams} to or from {peer}"
        case (kind, grant, _):
            return f"the {'revocation' if kind == 'revoke' else 'pause'} of {grant}"
    raise AssertionError(f"no such place: {found[0]}")


class _Word(NamedTuple):
    rank: Rank
    document: SignedDocument


class Newest:
    """What regions said in each place: of each policy key that signed there the newest word. Each was verified by the caller that added it.

    Of one key's words the highest number counts, and so of those under the keys that the region has now. A word that forbids under a key that
    it gave up stays in force beside them, until one under a key of now lifts it: one whose leaf stands behind its own in this region's log.
    No number says that, for whoever had the former key chose it; and what lifts under a former key lifts nothing of another one.
    """

    def __init__(self) -> None:
        self._held: dict[Key, dict[str, _Word]] = {}
        """by place, and by the key that signed; a revocation holds whoever signed it first"""
        self._count = 0

    def in_force(
        self, trusted: Trusted, leaf_of: Callable[[SignedDocument], int | None]
    ) -> Iterator[SignedDocument]:
        """Of each place the word that counts. `trusted`: the policy keys that regions have now. `leaf_of`: the index of a document's leaf."""
        for words in self._held.values():
            if len(words) == 1:
                yield next(iter(words.values())).document
            else:
                yield _in_force(words, trusted, leaf_of)

    def __iter__(self) -> Iterator[SignedDocument]:
        """Of each key that signed in a place the newest word."""
        return (word.document for words in self._held.values() for word in words.values())

    def has(self, document: SignedDocument) -> bool:
        """Whether something is held in this document's place, be it this one or another."""
        found = place_of(document)
        return found is not None and found[0] in self._held

    def is_of_several_keys(self, document: SignedDocument) -> bool:
        """Whether words under several keys stand in its place."""
        found = place_of(document)
        return found is not None and len(self._held.get(found[0], ())) > 1

    def outranks(self, document: SignedDocument, trusted: Trusted) -> bool:
        """Whether a later word of the same region stands in this document's place: nothing comes of it any more, as long as its region has these keys."""
        found = place_of(document)
        if found is None:
            return False
        key, rank = found
        words = self._held.get(key, {})
        signer = _signer(key, document)
        if signer in words and words[signer].rank > rank:
            return True
        later = [word.document for name, word in words.items() if name != signer and word.rank > rank]
        return (
            bool(later) and _is_present(document, trusted) and any(_is_present(one, trusted) for one in later)
        )

    def take(
        self,
        document: SignedDocument,
        gives_way: Callable[[SignedDocument], bool] = lambda document: False,
    ) -> Key | None:
        """Take a document that has a place; what to keep it under where it is now the newest of its key there, None where it is not. `gives_way`: whether
        one that is held lets another one take its place, though that ranks no higher."""
        found = place_of(document)
        assert found is not None
        key, rank = found
        signer = _signer(key, document)
        words = self._held.get(key, {})
        # Of several revocations the first holds: it ranks as high as any.
        held = words.get(signer)
        if held is not None and held.rank >= rank and (not gives_way(held.document) or gives_way(document)):
            return None
        if signer not in words:
            if self._count >= NEWEST_MAX:
                log.error("%d documents that forbid are kept, the most; %s is not", NEWEST_MAX, "/".join(key))
                return None
            self._count += 1
        self._held.setdefault(key, words)[signer] = _Word(rank, document)
        return (*key, signer) if signer else key


def _signer(key: Key, document: SignedDocument) -> str:
    return "" if key[0] == "revoke" else document.key


def _is_present(document: SignedDocument, trusted: Trusted) -> bool:
    """Whether a key that its region has now signed it."""
    try:
        verify(document, trusted)
    except SignatureError:
        return False
    return True


def _in_force(
    words: Mapping[str, _Word], trusted: Trusted, leaf_of: Callable[[SignedDocument], int | None]
) -> SignedDocument:
    """Of the words of several keys in one place the one that counts."""
    present = [word for word in words.values() if _is_present(word.document, trusted)]
    newest = max(present, key=lambda word: word.rank, default=None)
    if newest is not None and newest.rank[1]:
        return newest.document
    lifted_at = None if newest is None else leaf_of(newest.document)

    def is_lifted(word: _Word) -> bool:
        said_at = leaf_of(word.document)
        return lifted_at is not None and said_at is not None and said_at < lifted_at

    former = [word for word in words.values() if word not in present]
    forbids = [word for word in former if word.rank[1] and not is_lifted(word)]
    if forbids:
        return max(forbids, key=lambda word: word.rank).document
    return (newest or max(former, key=lambda word: word.rank)).document


class Remembered(NamedTuple):
    """Signed documents as they came: those that forbid or lift, and the newest policy. `trusted`: what was kept of the regions that were
    believed; None where a release that kept nothing of them has served here."""

    documents: list[bytes]
    policy: bytes | None
    trusted: bytes | None = b""

    def every(self) -> list[bytes]:
        """All of them."""
        return [*self.documents, *([self.policy] if self.policy is not None else [])]


class _KeptBundle(msgspec.Struct):
    """Of what is kept of a region that is believed (region.governance.trusted_regions), the bundle."""

    bundle: RegionBundle


_kept_bundles: Final = msgspec.json.Decoder(dict[str, _KeptBundle])


def believed_bundles(folder: Path) -> dict[str, RegionBundle]:
    """The other regions' bundles that a broker believed last, by region; none where it kept nothing, or nothing that can be read. Blocks."""
    path = folder / _TRUSTED
    try:
        kept = _kept_bundles.decode(path.read_bytes() or b"{}")
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {region: held.bundle for region, held in kept.items()}


def kept_words(folder: Path) -> list[SignedDocument]:
    """What a broker keeps of documents that forbid or lift; what cannot be read is left aside. Blocks."""
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    found = []
    for path in names:
        if path.name.endswith((_REVOCATION, _DOCUMENT)):
            with suppress(SignatureError):
                found.append(SignedDocument.parse(path.read_bytes()))
    return found


class Memory:
    """One broker's copies. `folder` is made with the first."""

    def __init__(self, folder: Path, runtime: Runtime = REAL, files: Files = PRIVATE_FILES) -> None:
        self.folder = folder
        self._files = files
        self._writer = runtime.pool(1, "governance")
        self._clock_ms = runtime.clock.boot_ms
        self._unkept: dict[str, bytes] = {}
        """what could not be written, by name"""
        self._why = ""
        self._reopening = Reopening(sound_ms=SOUND_ALONE_MS)

    def load(self) -> Remembered:
        """What is kept. Blocking. Raises UnavailableError where this is the first start and the disk does not take that it was."""
        files, folder = self._files, self.folder
        names = files.names(folder) if files.is_folder(folder) else []
        found = (read_file(files, folder / name) for name in names if name.endswith((_REVOCATION, _DOCUMENT)))
        documents = [data for data in found if data is not None]
        trusted = read_file(files, folder / _TRUSTED)
        if trusted is None and all(name.endswith(TEMPORARY_SUFFIX) for name in names):
            # From its first start on, a broker believes no region because the store has it. Without this file the next start
            # would take what this one keeps for copies of a release from before.
            trusted = b""
            try:
                self._put(_TRUSTED, trusted)
            except OSError as error:
                raise UnavailableError(
                    f"The broker cannot begin: its first file, {folder / _TRUSTED}, could not be written: {error.strerror or error}.",
                    code=Code.DISK_FULL if is_full(error) else Code.UNAVAILABLE,
                    hint="Make room on the disk, or look after the folder and its permissions, then start the broker again.",
                ) from error
        return Remembered(documents, read_file(files, folder / _POLICY), trusted)

    def keep(self, key: Key, document: bytes) -> None:
        """Keep a document under what `Newest.take` says, in place of the one before."""
        # Named by what it is about: what the store calls it is the store's administrator's choice.
        name = hashlib.sha256("\0".join(key).encode()).hexdigest() + _DOCUMENT
        self._writer.submit(self._write, name, document)

    def keep_policy(self, document: bytes) -> None:
        """Keep the policy that is in force, in place of the one before."""
        self._writer.submit(self._write, _POLICY, document)

    def keep_trusted(self, believed: bytes) -> None:
        """Keep whose bundles are believed, in place of what was kept before."""
        self._writer.submit(self._write, _TRUSTED, believed)

    def _put(self, name: str, document: bytes) -> None:
        self._files.make_folder(self.folder)
        self._files.sync_folder(self.folder.parent)
        replace_durably(self._files, self.folder / name, document)

    def _write(self, name: str, document: bytes) -> None:
        try:
            self._put(name, document)
        except OSError as error:
            self._why = str(error)
            if not self._unkept:
                self._reopening.failed(self._clock_ms())
                log.error(
                    "%s could not be kept in %s, and is tried again in %d s: %s",
                    name, self.folder, self._reopening.pause_ms // 1_000, error,
                )  # fmt: skip
            self._unkept[name] = document
        else:
            self._unkept.pop(name, None)

    def trouble(self) -> str:
        """That something could not be kept, with what to do; empty where all is. From any thread."""
        if not (count := len(self._unkept)):
            return ""
        return (
            f"{count} of the signed documents that this broker goes by could not be kept in {self.folder} ({self._why}): they are in force, and a start would not know them "
            "from there. They are tried again by itself; look at the disk."
        )

    def look(self) -> None:
        """Try again what could not be kept, where that is due. Waits for nothing."""
        if self._unkept and self._reopening.is_due(self._clock_ms()):
            # Not again before it is done.
            self._reopening.failed(self._clock_ms())
            self._writer.submit(self._write_again)

    def _write_again(self) -> None:
        for name, document in list(self._unkept.items()):
            self._write(name, document)
        if not self._unkept:
            self._reopening.opened(self._clock_ms())
            log.warning("what could not be kept in %s is kept now", self.folder)

    def close(self) -> None:
        """Finish what is being written, and try once more what could not be. Blocking."""
        if self._unkept:
            self._writer.submit(self._write_again)
        self._writer.shutdown()
