"""The terms of a crossing: what two regions agree on, as one value with canonical bytes and one hash.

Invariants of `GrantTerms`, asserted whenever one is made or decoded:
- the stream is one exact name unless `wildcard` is set, and then the destination's name is the same pattern;
- the two regions differ; the bridge is an identity of kind `bridge` in the source region;
- it expires, after it begins; it was drawn up by an operator of the source region, of the bridge's mesh;
- neither name can be one of the reserved tenant's streams;
- every legal basis but `not-personal` and `same-jurisdiction` has a reference;
- texts have no control characters and are bounded; numbers fit 2^53: so the canonical bytes are RFC 8785.

The terms hash is the plain SHA-256 of the canonical bytes, and the grant's id is its first 80 bits: anyone who holds the
document can check both with common tools.
"""

from __future__ import annotations

import hashlib
from base64 import b32encode
from enum import StrEnum
from typing import Annotated, Final, Literal

import msgspec

from felix.errors import RequestError
from felix.names import RESERVED_TENANT, NamePattern, SpiffeId, StreamName, parse_region
from policy.pattern import overlap
from policy.signed import NUMBER_MAX, canonical
from policy.transform import TransformSpec

TEXT_CHARS_MAX: Final = 256
"""A purpose, a reference, a name of an entity: one line in a register."""
CATEGORIES_MAX: Final = 32

Line = Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_CHARS_MAX, pattern=r"\A[^\x00-\x1f\x7f]+\Z")]
OptionalLine = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
Hash = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
GrantId = Annotated[str, msgspec.Meta(pattern=r"\Ag-[a-z2-7]{16}\Z")]


class Basis(StrEnum):
    """On what a transfer rests. Article numbers are those of the GDPR (Regulation (EU) 2016/679)."""

    ADEQUACY = "adequacy"
    SCC = "scc"
    BCR = "bcr"
    PUBLIC_INSTRUMENT = "public-instrument"
    CODE_OF_CONDUCT = "code-of-conduct"
    CERTIFICATION = "certification"
    AD_HOC_CLAUSES = "ad-hoc-clauses"
    ADMINISTRATIVE_ARRANGEMENT = "administrative-arrangement"
    DEROGATION = "derogation"
    SAME_JURISDICTION = "same-jurisdiction"
    """Both regions are in one jurisdiction. The policy's table of regions must confirm it."""
    NOT_PERSONAL = "not-personal"
    """The owner states that no personal data crosses."""

    @property
    def article(self) -> str:
        """The article that a register names; empty where none applies."""
        return _ARTICLES.get(self, "")

    @property
    def needs_reference(self) -> bool:
        return self not in (Basis.NOT_PERSONAL, Basis.SAME_JURISDICTION)


_ARTICLES: Final = {
    Basis.ADEQUACY: "45",
    Basis.PUBLIC_INSTRUMENT: "46(2)(a)",
    Basis.BCR: "46(2)(b), 47",
    Basis.SCC: "46(2)(c)-(d)",
    Basis.CODE_OF_CONDUCT: "46(2)(e)",
    Basis.CERTIFICATION: "46(2)(f)",
    Basis.AD_HOC_CLAUSES: "46(3)(a)",
    Basis.ADMINISTRATIVE_ARRANGEMENT: "46(3)(b)",
    Basis.DEROGATION: "49",
}


_RESERVED: Final = NamePattern(f"{RESERVED_TENANT}/*/*")


def _unusable(sentence: str) -> RequestError:
    return RequestError(f"The terms of the grant cannot be used: {sentence}.", hint="See docs/policy.md.")


class GrantTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What crosses, from where to where, on which basis, until when. Times in ms since the Unix epoch."""

    version: Literal[2] = 2
    stream: str
    destination_stream: str = ""
    """The same name where it is left empty."""
    from_region: str
    to_region: str
    bridge: str
    purpose: Line
    basis: Basis
    mechanism: OptionalLine = ""
    """Which one exactly: the module of the clauses, the decision, the derogation's letter."""
    reference: OptionalLine = ""
    transfer_assessment: OptionalLine = ""
    categories: Annotated[tuple[Line, ...], msgspec.Meta(max_length=CATEGORIES_MAX)] = ()
    exporter: Line
    importer: Line
    owner: Line
    drawn_up_by: str
    """SPIFFE id of the operator who drew the terms up. Approvers sign over it, through the terms' hash."""
    not_before: Number
    expires: Number
    transform: TransformSpec = TransformSpec()
    """The filter is part of it."""
    rate_bytes: Number = 0
    """Bytes per second that may cross; 0: no limit."""
    budget_bytes: Number = 0
    """Bytes that may cross altogether; 0: no limit."""
    onward: bool = False
    """Whether records that came from a third region may cross, too."""
    wildcard: bool = False

    def __post_init__(self) -> None:
        if not self.destination_stream:
            msgspec.structs.force_setattr(self, "destination_stream", self.stream)
        pattern = NamePattern(self.stream)
        if not pattern.is_exact and not self.wildcard:
            raise _unusable(
                f"{self.stream} is a pattern; a grant for several streams needs the wildcard flag"
            )
        if self.wildcard:
            if pattern.is_exact:
                raise _unusable(f"{self.stream} is one exact name, so the wildcard flag must not be set")
            if self.destination_stream != self.stream:
                raise _unusable("a wildcard grant keeps the streams' names")
        else:
            StreamName.parse(self.destination_stream)
        for name in (pattern, NamePattern(self.destination_stream)):
            if overlap(name, _RESERVED):
                raise _unusable(f"{name} can name streams of {RESERVED_TENANT}, which are the system's own")
        parse_region(self.from_region)
        parse_region(self.to_region)
        if self.from_region == self.to_region:
            raise _unusable(f"source and destination are both {self.to_region}; nothing would cross")
        bridge = SpiffeId.parse(self.bridge)
        if bridge.kind != "bridge" or bridge.region != self.from_region:
            raise _unusable(f"{self.bridge} is not a bridge identity of {self.from_region}")
        drafter = SpiffeId.parse(self.drawn_up_by)
        if (drafter.kind, drafter.trust_domain) != ("operator", bridge.trust_domain):
            raise _unusable(f"{self.drawn_up_by} is not an operator of {self.from_region}")
        if self.expires <= self.not_before:
            raise _unusable("it would expire before it begins")
        if self.basis.needs_reference and not self.reference:
            raise _unusable(f"the basis {self.basis} needs a reference to the document it stands in")
        try:
            # Decoding checks the annotations; a struct made in Python is held to them here.
            msgspec.convert(msgspec.to_builtins(self), _Checked, strict=True)
            self.canonical_bytes()
        except UnicodeEncodeError:
            raise _unusable("one of its texts is not Unicode") from None
        except msgspec.ValidationError as error:
            raise _unusable(str(error)) from None

    @property
    def pattern(self) -> NamePattern:
        return NamePattern(self.stream)

    @property
    def bridge_id(self) -> SpiffeId:
        return SpiffeId.parse(self.bridge)

    def canonical_bytes(self) -> bytes:
        """Canonical JSON of all fields, defaults written out: nothing that is signed is implied."""
        return canonical(self)

    def hash(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.canonical_bytes()).digest()

    def destination_of(self, stream: StreamName) -> StreamName:
        """Under which name a granted stream arrives."""
        return stream if self.wildcard else StreamName.parse(self.destination_stream)


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of GrantTerms whose annotations a Python caller could pass by."""

    purpose: Line
    mechanism: OptionalLine
    reference: OptionalLine
    transfer_assessment: OptionalLine
    categories: Annotated[tuple[Line, ...], msgspec.Meta(max_length=CATEGORIES_MAX)]
    exporter: Line
    importer: Line
    owner: Line
    not_before: Number
    expires: Number
    rate_bytes: Number
    budget_bytes: Number


def grant_id(terms_hash: bytes) -> str:
    """`g-` and 16 characters of base32: easy to read aloud, and no one can find other terms of a given id. Two terms of one id, whatever it
    is, cost 2^40 hashes: what two parties must see alike is held to the whole hash."""
    return "g-" + b32encode(terms_hash[:10]).decode("ascii").lower()


def pseudonym_scope(terms: GrantTerms) -> str:
    """What separates pseudonyms: destination and purpose. A renewed grant keeps its pseudonyms, two
    destinations or two purposes never share theirs."""
    return f"{terms.from_region}\0{terms.to_region}\0{terms.purpose}"
