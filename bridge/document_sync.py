"""Document synchronization: the agent carries signed documents from one region to the other. Carrying proves nothing.

Each region's brokers verify what they are brought; so does the agent, before it plans by it. A document goes from the
region that signed it to the other one, where that one does not hold it yet: export grants and the source's standings
and deny entries to the destination, import grants and the destination's own back.

Each way (who signed, who is to have it) has a task of its own, at most one at a time: a region that does not answer delays
what is on its way to it, and nothing else.

`missing` is pure; `list_documents` and `DocumentSync` ask regions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple

from felix.connection import RegionConnection
from felix.errors import Code, FelixError, UnavailableError
from felix.messages import PutDocument
from felix.page import document_pages
from felix.tasks import end_tasks
from policy.approval import Approval, Document, parse_document, require_size
from policy.grant import EVERYWHERE, DenyEntry, ExportGrant, ImportGrant, Standing, half_rank
from policy.signed import Purpose, SignatureError, SignedDocument, Trusted, decode_body, verify

log = logging.getLogger("felix.bridge.document_sync")

KINDS: Final = ("export", "import", "approval", "standing", "deny")
"""In the order in which they are brought: a grant before what is said about it."""
DOCUMENTS_MAX: Final = 10_000
"""Of one kind that one region signed, in one list: a bridge has its own grants only."""
LISTED_BYTES_MAX: Final = 64 << 20
"""Of what one region signed, in one list: as much as a broker keeps of another's, and ten thousand grants with both halves are some 50 MB."""
SAID_MAX: Final = 1_000
"""Unreadable documents that were logged and are not logged again."""
REFUSED_AGAIN_MS: Final = 30_000
"""How long a document that was refused is not brought again."""

_FULL: Final = (Code.LIMIT_MEMORY, Code.LIMIT_RATE)

Documents = Mapping[str, Mapping[str, bytes]]
"""Kind to id to the document's bytes."""


async def list_documents(
    connection: RegionConnection,
    kinds: tuple[str, ...] = KINDS,
    regions: Collection[str] = (),
    is_own: bool = False,
) -> tuple[dict[str, dict[str, bytes]], bytes]:
    """All of these kinds that the region shows this bridge, and the revision of all that it showed when it was first asked (empty
    where its broker gives none). Raises what the region refuses it with, UnavailableError, and RequestError where its pages
    do not go on: another region's broker says what stands in them.

    What each of `regions` signed is bounded by itself, and what anybody else did together: none takes the room of another. Another
    region's list that is longer than that is not read to its end: whoever shows more is not an honest broker. That of the own region
    (`is_own`) is, since what any number of other regions signed may stand in it before its own words."""
    found: dict[str, dict[str, bytes]] = {kind: {} for kind in kinds}
    revision: bytes | None = None
    room = _Room(regions)
    size = 0
    for kind in kinds:
        listed_of_kind = 0
        async for page in document_pages(connection, kind):
            revision = page.revision if revision is None else revision
            found[kind].update(await asyncio.to_thread(room.taken, kind, page.documents))
            size += sum(map(len, page.documents.values()))
            listed_of_kind += len(page.documents)
            is_long = listed_of_kind >= room.shares * DOCUMENTS_MAX or size >= room.shares * LISTED_BYTES_MAX
            if is_long and not is_own:
                break
    return found, revision or b""


class _Room:
    """What is held of one list, by who signed it."""

    def __init__(self, regions: Collection[str]) -> None:
        self._regions = frozenset(regions)
        self._bytes: Counter[str] = Counter()
        self._numbers: Counter[tuple[str, str]] = Counter()

    @property
    def shares(self) -> int:
        return len(self._regions) + 1

    def taken(self, kind: str, documents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those that there is room for. Whom a document is of is what it claims: a list that lies about it fills its own room."""
        held = {}
        for name, data in documents.items():
            if not _has_size(kind, name, data):
                continue
            try:
                signer = parse_document(data).region
            except SignatureError:
                signer = ""
            signer = signer if signer in self._regions else ""
            if self._numbers[signer, kind] >= DOCUMENTS_MAX or self._bytes[signer] >= LISTED_BYTES_MAX:
                _say_full(signer or "others")
                continue
            self._numbers[signer, kind] += 1
            self._bytes[signer] += len(data)
            held[name] = data
        return held


@lru_cache(maxsize=SAID_MAX)
def _say_full(signer: str) -> None:
    log.error(
        "a region lists more than %d documents of one kind, or %d MiB, that %s signed: the rest of those is not read",
        DOCUMENTS_MAX, LISTED_BYTES_MAX >> 20, signer,
    )  # fmt: skip


def _has_size(kind: str, name: str, data: bytes) -> bool:
    """Whether a document of this kind may be so long; what is longer is neither held nor read."""
    if kind == "policy":
        # One of before the limit may be in force (decision 0109); what a page carried is short enough.
        return True
    try:
        require_size(kind, data)
    except SignatureError as error:
        _say_unreadable(name, str(error))
        return False
    return True


def parse_documents(documents: Documents) -> list[Document]:
    """Those that parse; that they hold is the book's to say."""
    parsed: list[Document] = []
    for held in documents.values():
        for name, data in held.items():
            try:
                parsed.append(parse_document(data))
            except SignatureError as error:
                _say_unreadable(name, str(error))
    return parsed


@lru_cache(maxsize=SAID_MAX)
def _say_unreadable(name: str, sentence: str) -> None:
    """Once each: a region may list as many as it likes, and lists them at each change."""
    log.error("document %s: %s", name, sentence)


def missing(
    giver: Documents, taker: Documents, from_region: str, to_region: str, trusted: Trusted
) -> list[tuple[str, str]]:
    """Kind and id of what `from_region` signed, concerns `to_region`, and is not there, or not as that region has it. `trusted`: the
    policy keys of now."""
    own: dict[str, str] = {}
    wanted = []
    for kind in KINDS:
        held = taker.get(kind, {})
        for name, data in sorted(giver.get(kind, {}).items()):
            try:
                document = parse_document(data)
                if document.region != from_region:
                    continue
                if not _concerns(document, to_region, own):
                    continue
                # A half that was signed again takes the place of the one before; the rest is never replaced.
                if name not in held or (held[name] != data and _outranks(document, held[name], trusted)):
                    wanted.append((kind, name))
            except SignatureError:
                continue
    return wanted


class _Missing(NamedTuple):
    """What is missing between these documents of two regions: kind, id, and the hash that its leaf has."""

    giver: Documents
    taker: Documents
    trusted: Trusted
    found: tuple[tuple[str, str, bytes], ...]


def _missing_with_hashes(
    giver: Documents, taker: Documents, from_region: str, to_region: str, trusted: Trusted
) -> tuple[tuple[str, str, bytes], ...]:
    return tuple(
        (kind, name, sha256(parse_document(giver[kind][name]).encode_file()).digest())
        for kind, name in missing(giver, taker, from_region, to_region, trusted)
    )


def _outranks(document: Document, held: bytes, trusted: Trusted) -> bool:
    """Whether a half takes the place of the one that a region holds, which takes no other. What cannot be read is replaced, and so is what
    no key of now signed, whatever time it states: the region would take one under a key of now in its place."""
    rank = _rank_of(document, trusted)
    if rank is None:
        return False
    try:
        before = _rank_of(parse_document(held), trusted)
    except SignatureError:
        return True
    return before is None or rank > before


def _rank_of(document: Document, trusted: Trusted) -> tuple[bool, tuple[int, bytes]] | None:
    """None where it is no half. Raises SignatureError where it cannot be read."""
    half: ExportGrant | ImportGrant
    match document.purpose:
        case Purpose.EXPORT:
            assert isinstance(document, SignedDocument)
            half = decode_body(document, ExportGrant, Purpose.EXPORT)
        case Purpose.IMPORT:
            assert isinstance(document, SignedDocument)
            half = decode_body(document, ImportGrant, Purpose.IMPORT)
        case _:
            return None
    return _is_of_now(document, trusted), half_rank(half)


def _is_of_now(document: SignedDocument, trusted: Trusted) -> bool:
    try:
        verify(document, trusted)
    except SignatureError:
        return False
    return True


def _concerns(document: Document, region: str, own: dict[str, str]) -> bool:
    """`own` collects the other region of each grant, so that standings find theirs; grants come first."""
    if isinstance(document, Approval):
        return own.get(document.claim.grant, region) == region
    match document.purpose:
        case Purpose.EXPORT:
            export = decode_body(document, ExportGrant, Purpose.EXPORT)
            own[export.grant] = export.terms.to_region
            return export.terms.to_region == region
        case Purpose.IMPORT:
            accepted = decode_body(document, ImportGrant, Purpose.IMPORT)
            own[accepted.grant] = accepted.from_region
            return accepted.from_region == region
        case Purpose.STANDING:
            grant = decode_body(document, Standing, Purpose.STANDING).grant
            return own.get(grant, region) == region
        case Purpose.DENY:
            return decode_body(document, DenyEntry, Purpose.DENY).peer in (EVERYWHERE, region)
    return False


class DocumentSync:
    """Carries between regions, and remembers what was brought or refused.

    `is_logged`: whether the leaf of the document with this hash stands in the egress log; without it, it is brought nowhere.
    `on_brought` is called after each journey with how many documents were taken.
    """

    def __init__(
        self,
        clock_ms: Callable[[], int],
        is_logged: Callable[[bytes], bool],
        on_brought: Callable[[int], None],
    ) -> None:
        self._clock_ms = clock_ms
        self._is_logged = is_logged
        self._on_brought = on_brought
        self._refused: dict[tuple[str, str, str], int] = {}
        self._ways: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._missing: dict[tuple[str, str], _Missing] = {}
        """by way"""

    def send(
        self, giver: Documents, taker: Documents, from_region: str, to: RegionConnection, trusted: Trusted
    ) -> None:
        """Begin to bring what is missing. Where the last journey of this way has not ended, a later call brings it. `trusted`: the policy
        keys of now, which a region may change while its documents stay."""
        way = (from_region, to.profile.region)
        if way in self._ways:
            return
        looked_at = self._missing.get(way)
        # What a region said is never changed: it says something else.
        if (
            looked_at is None
            or looked_at.giver is not giver
            or looked_at.taker is not taker
            or looked_at.trusted != trusted
        ):
            self._ways[way] = asyncio.ensure_future(self._look(giver, taker, from_region, to, trusted))
        elif wanted := self._wanted(looked_at, to.profile.region):
            self._ways[way] = asyncio.ensure_future(self._journey(wanted, from_region, to))

    def _wanted(self, looked_at: _Missing, to_region: str) -> list[tuple[str, str, bytes]]:
        """Of what is missing all that may be brought now."""
        now_ms = self._clock_ms()
        self._refused = {key: until for key, until in self._refused.items() if until > now_ms}
        return [
            (kind, name, looked_at.giver[kind][name])
            for kind, name, digest in looked_at.found
            if (to_region, kind, name) not in self._refused and self._is_logged(digest)
        ]

    async def _look(
        self, giver: Documents, taker: Documents, from_region: str, to: RegionConnection, trusted: Trusted
    ) -> None:
        """Find what is missing, in a thread: both regions may list ten thousand documents. Then bring it."""
        to_region = to.profile.region
        wanted: list[tuple[str, str, bytes]] = []
        try:
            found = await asyncio.to_thread(
                _missing_with_hashes, giver, taker, from_region, to_region, trusted
            )
            self._missing[from_region, to_region] = looked_at = _Missing(giver, taker, trusted, found)
            wanted = self._wanted(looked_at, to_region)
        finally:
            if not wanted:
                del self._ways[from_region, to_region]
        if wanted:
            await self._journey(wanted, from_region, to)

    def is_between(self, one: str, other: str) -> bool:
        """Whether something is on its way from one of the two regions to the other."""
        return (one, other) in self._ways or (other, one) in self._ways

    async def close(self) -> None:
        """Stop bringing; what is on its way may or may not arrive."""
        await end_tasks(*self._ways.values())

    async def _journey(
        self, wanted: list[tuple[str, str, bytes]], from_region: str, to: RegionConnection
    ) -> None:
        to_region, taken = to.profile.region, 0
        try:
            for kind, name, data in wanted:
                taken += await self._carry(kind, name, data, to)
        except UnavailableError as error:
            log.info("documents of %s for %s wait: %s", from_region, to_region, error)
        except Exception:
            log.exception("bringing the documents of %s to %s failed", from_region, to_region)
        finally:
            del self._ways[from_region, to_region]
        self._on_brought(taken)

    async def _carry(self, kind: str, name: str, data: bytes, to: RegionConnection) -> bool:
        """Whether it was taken. A refusal is logged, and tried again later. Raises UnavailableError."""
        to_region = to.profile.region
        taken = False
        try:
            await to.request(PutDocument(kind, data))
            taken = True
            log.info("brought the %s document %s to %s", kind, name, to_region)
        except FelixError as error:
            if isinstance(error, UnavailableError) and error.code not in _FULL:
                raise
            # Of one kind no more may be taken there; a revocation behind it still is.
            log.warning("%s refused the %s document %s: %s", to_region, kind, name, error)
        # Taken, or there already under another name, or refused: it is not brought again at once.
        self._refused[to_region, kind, name] = self._clock_ms() + REFUSED_AGAIN_MS
        return taken
