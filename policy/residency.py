"""A region's residency policy: what may be granted at all, decided with reasons.

The policy is a YAML text, versioned (`revision`) and signed; its hash is the SHA-256 of the text, so what was
signed is what people read. It names regions with their country and jurisdiction, classes of data bound to
streams, rules that let a class leave (`exports`) or come in (`imports`), and `deny` rules.

How a decision is made, in this order; the first step that refuses ends it:

1. the policy's region is one end of the crossing, and the policy is in force at `now`;
2. the other region is in the policy's table;
3. no deny rule applies: deny wins over everything below;
4. the stream has at least one class;
5. for every class of the stream, one rule covers class, stream and other region, and the terms satisfy it. The first such rule
   of a class is the one that holds for it, and says how many people must approve.

`decide_grant` asks the destination's policy twice where a stream arrives under another name: about both names.

Invariants: an empty policy allows nothing; emptiness in a rule (no region, no basis) is refused when the policy is
read or matches nothing; a decision depends on its arguments alone; each reason names the rule and where it stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from felix.errors import Code, RequestError
from felix.names import NamePattern, StreamName, parse_region
from felix.visible import in_ascii, visible
from policy.approval import KIND_BYTES_MAX, ApprovalRule
from policy.documents import ConfigError, Document, Mistake, Parsed, Path, Place, decode_placed, nearest
from policy.fieldpath import FieldPath
from policy.pattern import PatternMap, covers, overlap
from policy.quantity import Duration, Instant
from policy.signed import (
    KEY_ID_BYTES,
    NUMBER_MAX,
    SIGNATURE_BYTES,
    Purpose,
    SignatureError,
    SignedDocument,
    Trusted,
    sign,
    verify,
)
from policy.terms import Basis, GrantTerms
from policy.transform import Action, FieldRule, Format, KeyRule, TransformSpec, effective_rule

APPROVALS_MAX: Final = 8
"""More signatures than any procedure asks for; each is verified by every broker."""
REVISION_MAX: Final = NUMBER_MAX
"""What a half can name as its policy's."""
RULES_MAX: Final = 1_000
"""Rules of one kind: a decision looks through all of them."""
POLICIES_KEPT: Final = 16
"""Texts that were read last: a broker and its agents read the same few again with each document that changes beside them,
5 ms and more for each."""
REASONS_TOLD: Final = 8
"""Of a decision, in one sentence: a stream may be in hundreds of classes, each with a reason. `felix bridge explain` lists them all."""

Region = Annotated[str, Parsed(parse_region)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Sentence = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
ApproverName = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9][a-z0-9._-]{0,62}\Z")]
Country = Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{2}\Z")]


class ResidencyError(RequestError):
    """The region's policy does not let this be."""

    default_code = Code.RESIDENCY_DENIED


class RegionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where a region is. Country: ISO 3166-1 alpha-2; jurisdiction: a word of the policy's own, as EU or US."""

    country: Country
    jurisdiction: Word


class DataClass(msgspec.Struct, frozen=True, kw_only=True):
    """A class of data and the streams that hold it."""

    streams: Annotated[tuple[NamePattern, ...], msgspec.Meta(min_length=1, max_length=RULES_MAX)]
    description: str = ""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Other regions, by name or by jurisdiction. An empty one matches none."""

    regions: tuple[Region, ...] = ()
    jurisdictions: tuple[Word, ...] = ()


class RequiredTransform(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that must not cross as they are. A stronger rule satisfies a weaker requirement."""

    do: Action
    fields: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.do not in _STRONGER:
            raise ValueError(
                f"{self.do} cannot be required; name what must be dropped, masked, hashed or pseudonymized"
            )
        for field in self.fields:
            FieldPath.parse(field)


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    name: Word
    classes: Annotated[tuple[Word, ...], msgspec.Meta(min_length=1)]
    streams: tuple[NamePattern, ...] = ()
    """Narrows the rule to these of the classes' streams; empty: all of them."""
    bases: Annotated[tuple[Basis, ...], msgspec.Meta(min_length=1)]
    purposes: tuple[str, ...] = ()
    """Purposes that a grant may state; empty: any."""
    transforms: tuple[RequiredTransform, ...] = ()
    keys: Annotated[tuple[KeyRule, ...], msgspec.Meta(min_length=1)] = (
        KeyRule.PSEUDONYMIZE, KeyRule.HASH, KeyRule.DROP,
    )  # fmt: skip
    headers: tuple[str, ...] = ()
    """Headers that a grant may let cross; empty: none."""
    trace: bool = False
    opaque: bool = False
    """Whether payloads may cross unread."""
    wildcards: bool = False
    onward: bool = False
    assessment: bool = False
    """Whether a grant must name a transfer assessment."""
    lifetime: Duration
    approvals: Annotated[int, msgspec.Meta(ge=0, le=APPROVALS_MAX)] = 1
    """How many approvers of the policy's region must sign; 0: none."""
    separate: bool = False
    """Whether the people who drew the terms up or accepted them are excluded from the approvals that count."""
    approvers: tuple[ApproverName, ...] = ()
    """Names of those who count; empty: every approver of the region."""

    def __post_init__(self) -> None:
        if self.approvers and len(set(self.approvers)) < self.approvals:
            raise ValueError(
                f"{self.approvals} approvals are asked of {len(set(self.approvers))} named approvers"
            )


class ExportRule(_Rule, frozen=True, kw_only=True):
    """Lets classes of data leave for other regions, under conditions."""

    to: Where


class ImportRule(_Rule, frozen=True, kw_only=True):
    """Lets classes of data come in from other regions, under conditions."""

    from_: Where = msgspec.field(name="from")


class DenyRule(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps streams or classes from crossing. Without `to` and `from`: in both directions, everywhere."""

    name: Word
    streams: tuple[NamePattern, ...] = ()
    classes: tuple[Word, ...] = ()
    to: Where | None = None
    from_: Where | None = msgspec.field(name="from", default=None)
    because: Sentence

    def __post_init__(self) -> None:
        if not self.streams and not self.classes:
            raise ValueError("a deny rule names streams or classes")


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The YAML document."""

    version: Literal[1]
    name: Word
    revision: Annotated[int, msgspec.Meta(ge=1)]
    region: Region
    valid_from: Instant | None = None
    valid_until: Instant | None = None
    regions: dict[Region, RegionEntry]
    classes: Annotated[dict[Word, DataClass], msgspec.Meta(max_length=RULES_MAX)] = {}
    exports: Annotated[tuple[ExportRule, ...], msgspec.Meta(max_length=RULES_MAX)] = ()
    imports: Annotated[tuple[ImportRule, ...], msgspec.Meta(max_length=RULES_MAX)] = ()
    deny: Annotated[tuple[DenyRule, ...], msgspec.Meta(max_length=RULES_MAX)] = ()


@dataclass(frozen=True, slots=True)
class ResidencyPolicy:
    """A policy that was read, and where its rules stand."""

    file: PolicyFile
    text: str
    hash: bytes
    """SHA-256 of the text."""
    document: Document[PolicyFile]

    @property
    def region(self) -> str:
        return self.file.region

    @property
    def revision(self) -> int:
        return self.file.revision

    def in_force(self, now: int) -> bool:
        """Whether its own dates let it speak at `now` (ms)."""
        begin, end = self.file.valid_from, self.file.valid_until
        return (begin is None or now >= begin) and (end is None or now < end)

    def place(self, *path: str | int) -> Place:
        """Where a rule stands."""
        return self.document.place(*path)


def parse_policy(text: str, source: str) -> ResidencyPolicy:
    """`source` names the text in messages. Raises ConfigError(CONFIG_INVALID) with every mistake, names that nothing declares
    included."""
    try:
        policy = _read_once(text)
    except ConfigError:
        return _read(text, source)
    return replace(policy, document=replace(policy.document, source=source))


@lru_cache(maxsize=POLICIES_KEPT)
def _read_once(text: str) -> ResidencyPolicy:
    return _read(text, "")


def _read(text: str, source: str) -> ResidencyPolicy:
    document = decode_placed(text, PolicyFile, source)
    mistakes = list(_undeclared(document))
    if mistakes:
        raise ConfigError(source, mistakes)
    return ResidencyPolicy(document.value, text, hashlib.sha256(text.encode()).digest(), document)


def _undeclared(document: Document[PolicyFile]) -> Iterator[Mistake]:
    """Names that a rule uses and no table has: a rule with a slip of the pen would silently match nothing."""
    file = document.value
    jurisdictions = {entry.jurisdiction for entry in file.regions.values()}

    def missing(path: Path, name: str, what: str, known: list[str]) -> Mistake:
        text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        close = nearest(name, known) or f"; known: {', '.join(known) or 'none'}."
        return Mistake(document.place(*path), text.removeprefix("."), f"{name} is not a {what}{close}")

    if file.region not in file.regions:
        yield missing(("region",), file.region, "region of the table below", sorted(file.regions))
    rules: list[tuple[Path, ExportRule | ImportRule | DenyRule]] = [
        *((("exports", index), rule) for index, rule in enumerate(file.exports)),
        *((("imports", index), rule) for index, rule in enumerate(file.imports)),
        *((("deny", index), rule) for index, rule in enumerate(file.deny)),
    ]
    names: dict[str, Path] = {}
    for path, rule in rules:
        if rule.name in names:
            first = document.place(*names[rule.name]).line
            yield Mistake(
                document.place(*path, "name"),
                "",
                f"a second rule named {rule.name}; the first is on line {first}.",
            )
        names.setdefault(rule.name, path)
        for index, name in enumerate(rule.classes):
            if name not in file.classes:
                yield missing((*path, "classes", index), name, "class of this policy", sorted(file.classes))
        for end in ("to", "from"):
            where: Where | None = getattr(rule, end if end == "to" else "from_", None)
            for index, name in enumerate(where.regions if where else ()):
                if name not in file.regions:
                    at = (*path, end, "regions", index)
                    yield missing(at, name, "region of this policy", sorted(file.regions))
            for index, name in enumerate(where.jurisdictions if where else ()):
                if name not in jurisdictions:
                    at = (*path, end, "jurisdictions", index)
                    yield missing(at, name, "jurisdiction of this policy's regions", sorted(jurisdictions))


# ----------------------------------------------------------------------------------------------- signatures


def sign_policy(policy: ResidencyPolicy, key: Ed25519PrivateKey) -> SignedDocument:
    """The region's policy, signed by its policy key; the text is the body. Raises what `require_size_to_sign`, `require_revision` and `require_visible` do."""
    require_size_to_sign(policy)
    require_revision(policy)
    require_visible(policy)
    return sign(Purpose.POLICY, policy.region, policy.text.encode(), key)


def require_revision(policy: ResidencyPolicy) -> None:
    """Raises ResidencyError where no half could name the policy's revision. What stands in a log is not asked."""
    if policy.revision > REVISION_MAX:
        raise ResidencyError(
            f"The policy of {policy.region} has revision {policy.revision}; {REVISION_MAX} is the most.",
            code=Code.CONFIG_INVALID,
            hint="Give it the number that follows the one in force.",
        )


def require_visible(policy: ResidencyPolicy) -> None:
    """Raises ResidencyError where the text has what an editor does not show and readers of YAML take differently: U+0085, U+2028 and U+2029 end a line, and a comment with it, in
    YAML 1.1, as here, and not in 1.2; other characters hide what follows or turn its direction. What stands in a log is not asked."""
    lines = policy.text.replace("\r\n", "\n").split("\n")
    for number, line in enumerate(lines, 1):
        shown = visible(line, keep="\t")
        if shown != line:
            # Up to there both are the same, and what stands for a character begins as none of these does.
            at = next(at for at, (one, other) in enumerate(zip(shown, line, strict=False)) if one != other)
            raise ResidencyError(
                f"Line {number} of the policy of {policy.region} has a character that is not shown, {in_ascii(line[at])}: who reads the text may take it for another policy.",
                code=Code.CONFIG_INVALID,
                hint="Take it out. A text in quotes may name it by an escape.",
            )


def require_size_to_sign(policy: ResidencyPolicy) -> None:
    """Raises ResidencyError where the policy, as a signed file, is longer than a broker takes and shows. What stands in a log is not asked."""
    unsigned = SignedDocument(
        Purpose.POLICY, policy.region, "0" * 2 * KEY_ID_BYTES, policy.text.encode(), bytes(SIGNATURE_BYTES)
    )
    size, most = len(unsigned.encode_file()), KIND_BYTES_MAX["policy"]
    if size > most:
        raise ResidencyError(
            f"The policy of {policy.region} has {size} bytes as a signed file, and {most} are allowed.",
            code=Code.FRAME_TOO_LARGE,
            hint="Shorten it. In the file each line feed, quote and backslash of the text has two bytes.",
        )


def open_policy(document: SignedDocument, trusted: Trusted, source: str) -> ResidencyPolicy:
    """The policy in a signed document. Raises SignatureError or ConfigError."""
    if document.purpose is not Purpose.POLICY:
        raise SignatureError(f"The document is a {document.purpose}, not a residency policy.")
    verify(document, trusted)
    policy = parse_policy(document.body.decode(), source)
    if policy.region != document.region:
        raise SignatureError(f"The policy is for {policy.region}, but {document.region} signed it.")
    return policy


def check_successor(current: ResidencyPolicy, new: ResidencyPolicy) -> None:
    """Raises ResidencyError unless `new` may take the place of `current`: same region, higher revision."""
    if new.region != current.region:
        raise ResidencyError(f"The new policy is for {new.region}; this region is {current.region}.")
    if new.hash != current.hash and new.revision <= current.revision:
        raise ResidencyError(
            f"The new policy has revision {new.revision}; the one in force has revision {current.revision}.",
            code=Code.CONFLICT,
            hint=f"Raise its revision to {current.revision + 1} or more.",
        )


# ------------------------------------------------------------------------------------------------ decisions


class Direction(StrEnum):
    """Seen from the policy's region."""

    EXPORT = "export"
    IMPORT = "import"


class Question(NamedTuple):
    """What is asked: may this stream cross from one region to the other, on these terms?

    `stream` is a pattern where a wildcard grant is being made. Without `terms`, the question is whether a grant
    could be made at all, and the answer lists what it would need.
    """

    stream: StreamName | NamePattern
    from_region: str
    to_region: str
    terms: GrantTerms | None = None


class Reason(NamedTuple):
    """One sentence, the rule it rests on (empty: none), and where that rule stands."""

    sentence: str
    rule: str
    place: Place | None

    def __str__(self) -> str:
        if self.place is None:
            return self.sentence
        where = f"rule {self.rule}, {self.place}" if self.rule else str(self.place)
        return f"{self.sentence} ({where})"


class Decision(NamedTuple):
    """The answer. `rule` is the one that decided; `denied` is true where a deny rule did.

    `approvals`: whose approval the rules ask for, one for each rule that holds for a class; empty where it is refused.
    """

    allowed: bool
    rule: str
    reasons: tuple[Reason, ...]
    denied: bool = False
    approvals: tuple[ApprovalRule, ...] = ()

    @property
    def sentence(self) -> str:
        """The first REASONS_TOLD reasons, and how many more there are."""
        told = [str(reason) for reason in self.reasons[:REASONS_TOLD]]
        more = len(self.reasons) - len(told)
        return " ".join([*told, f"And {more} more."] if more else told)

    def error(self) -> ResidencyError:
        """The refusal as an error."""
        assert not self.allowed
        return ResidencyError(
            self.sentence,
            hint="Ask `felix bridge explain` what a grant would need, or the owner of the region's policy.",
        )


def decide(policy: ResidencyPolicy, question: Question, now: int) -> Decision:
    """Whether the policy lets the stream cross. `now` in ms since the Unix epoch."""
    return _Decider(policy, question).decide(now)


_STRONGER: Final[dict[Action, tuple[Action, ...]]] = {
    Action.DROP: (Action.DROP,),
    Action.MASK: (Action.MASK, Action.DROP),
    Action.PSEUDONYMIZE: (Action.PSEUDONYMIZE, Action.DROP),
    Action.HASH: (Action.HASH, Action.PSEUDONYMIZE, Action.DROP),
}
"""Which rules satisfy a requirement. A mask satisfies pseudonymize and hash only if it shows nothing."""


def satisfies(rule: FieldRule, required: Action) -> bool:
    """True where the rule that holds for a field protects it at least as well as the requirement."""
    if rule.do in _STRONGER[required]:
        return True
    return rule.do is Action.MASK and rule.last == 0 and required in (Action.PSEUDONYMIZE, Action.HASH)


def decide_grant(
    policy: ResidencyPolicy, terms: GrantTerms, stream: StreamName | NamePattern, now: int
) -> Decision:
    """Whether the policy lets `stream` cross on these terms. `stream` is the one that they name, or one that their pattern fits.

    The destination's policy is asked about the name under which the stream arrives, too; both answers must be yes.
    """
    decision = decide(policy, Question(stream, terms.from_region, terms.to_region, terms), now)
    renamed = terms.destination_stream != terms.stream
    if not decision.allowed or not renamed or policy.region != terms.to_region:
        return decision
    arriving = StreamName.parse(terms.destination_stream)
    there = decide(policy, Question(arriving, terms.from_region, terms.to_region, terms), now)
    if not there.allowed:
        return there
    return Decision(
        True,
        decision.rule,
        tuple(dict.fromkeys((*decision.reasons, *there.reasons))),
        approvals=tuple(dict.fromkeys((*decision.approvals, *there.approvals))),
    )


class _Indexed:
    """A policy as a key: two of one text are the same."""

    __slots__ = ("policy",)

    def __init__(self, policy: ResidencyPolicy) -> None:
        self.policy = policy

    def __hash__(self) -> int:
        return hash(self.policy.hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Indexed) and self.policy.hash == other.policy.hash


@lru_cache(maxsize=POLICIES_KEPT)
def _classes_of(indexed: _Indexed) -> PatternMap[list[tuple[int, str]]]:
    """A policy's classes, with their numbers, by the patterns of their streams: a policy may have ten thousand of these, and each stream
    of a wildcard grant asks it."""
    found = PatternMap[list[tuple[int, str]]]()
    for number, (name, data) in enumerate(indexed.policy.file.classes.items()):
        for pattern in data.streams:
            held = found.get(pattern)
            if held is None:
                found.put(pattern, [(number, name)])
            else:
                held.append((number, name))
    return found


class _Decider:
    def __init__(self, policy: ResidencyPolicy, question: Question) -> None:
        self.policy = policy
        self.file = policy.file
        self.question = question
        self.terms = question.terms
        self.pattern = NamePattern(str(question.stream))

    def decide(self, now: int) -> Decision:
        file, question = self.file, self.question
        if question.from_region == question.to_region or file.region not in (
            question.from_region, question.to_region,
        ):  # fmt: skip
            return self._refuse(
                f"The policy of {file.region} does not speak for a crossing from {question.from_region} to "
                f"{question.to_region}.",
                ("region",),
            )
        self.direction = Direction.EXPORT if file.region == question.from_region else Direction.IMPORT
        self.peer = question.to_region if self.direction is Direction.EXPORT else question.from_region
        if file.valid_from is not None and now < file.valid_from:
            return self._refuse(f"The policy is in force only from {file.valid_from}.", ("valid_from",))
        if file.valid_until is not None and now >= file.valid_until:
            return self._refuse(
                f"The policy was valid until {file.valid_until}; it has to be renewed.", ("valid_until",)
            )
        entry = file.regions.get(self.peer)
        if entry is None:
            return self._refuse(f"The policy does not know the region {self.peer}.", ("regions",))
        self.jurisdiction = entry.jurisdiction
        self.classes = self._classes()
        denials = list(self._denials())
        if denials:
            return Decision(False, denials[0].rule, tuple(denials), denied=True)
        if not self._is_covered():
            return self._refuse(
                f"{question.stream} has no class in the policy, and what has no class does not cross.",
                ("classes",),
            )
        return self._by_class()

    def _classes(self) -> list[str]:
        """The classes that have streams of the question, in the order of the policy."""
        stream = self.question.stream
        if isinstance(stream, StreamName):
            found = {each for held in _classes_of(_Indexed(self.policy)).matching(stream) for each in held}
            return [name for _, name in sorted(found)]
        return [
            name
            for name, data in self.file.classes.items()
            if any(overlap(pattern, self.pattern) for pattern in data.streams)
        ]

    def _is_covered(self) -> bool:
        """Whether one class has all streams of the question; of one stream, each that has it."""
        if isinstance(self.question.stream, StreamName):
            return bool(self.classes)
        return any(
            covers(pattern, self.pattern)
            for name in self.classes
            for pattern in self.file.classes[name].streams
        )

    def _refuse(self, sentence: str, path: Path) -> Decision:
        return Decision(False, "", (Reason(sentence, "", self.policy.place(*path)),))

    def _denials(self) -> Iterator[Reason]:
        for index, rule in enumerate(self.file.deny):
            if rule.to is not None or rule.from_ is not None:
                where = rule.to if self.direction is Direction.EXPORT else rule.from_
                if where is None or not self._matches(where):
                    continue
            named = any(covers(pattern, self.pattern) for pattern in rule.streams)
            # A class that a wildcard merely touches is no reason to refuse the rest of it: each of its streams
            # is decided again, by its own name, whenever one of its records is about to cross.
            classed = any(
                covers(pattern, self.pattern)
                for name in rule.classes
                for pattern in self.file.classes[name].streams
            )
            if named or classed:
                verb = "leave for" if self.direction is Direction.EXPORT else "come in from"
                sentence = (
                    f"{self.question.stream} must not {verb} {self.peer}: {rule.because.removesuffix('.')}."
                )
                yield Reason(sentence, rule.name, self.policy.place("deny", index))

    def _matches(self, where: Where) -> bool:
        return self.peer in where.regions or self.jurisdiction in where.jurisdictions

    def _by_class(self) -> Decision:
        refusals: list[Reason] = []
        reasons: list[Reason] = []
        approvals: list[ApprovalRule] = []
        deciding = ""
        for name in self.classes:
            best: list[Reason] | None = None
            for rule, place in self._rules(name):
                failures = list(self._failures(rule, place))
                if not failures:
                    deciding = deciding or rule.name
                    reasons.extend(self._praise(name, rule, place))
                    approvals.append(ApprovalRule(rule.approvals, rule.separate, rule.approvers, rule.name))
                    best = []
                    break
                if best is None or len(failures) < len(best):
                    best = failures
            if best is None:
                verb = "leave for" if self.direction is Direction.EXPORT else "come in from"
                refusals.append(
                    Reason(
                        f"{self.question.stream} is {name} data, and no rule lets that {verb} {self.peer}.",
                        "",
                        self.policy.place("classes", name),
                    )
                )
            else:
                refusals.extend(best)
        if refusals:
            return Decision(False, refusals[0].rule, tuple(refusals))
        return Decision(
            True, deciding, tuple(dict.fromkeys(reasons)), approvals=tuple(dict.fromkeys(approvals))
        )

    def _rules(self, name: str) -> Iterator[tuple[ExportRule | ImportRule, Place]]:
        key = "exports" if self.direction is Direction.EXPORT else "imports"
        rules: tuple[ExportRule | ImportRule, ...] = getattr(self.file, key)
        for index, rule in enumerate(rules):
            where = rule.to if isinstance(rule, ExportRule) else rule.from_
            narrowed = not rule.streams or any(covers(pattern, self.pattern) for pattern in rule.streams)
            if name in rule.classes and narrowed and self._matches(where):
                yield rule, self.policy.place(key, index)

    def _praise(self, name: str, rule: ExportRule | ImportRule, place: Place) -> Iterator[Reason]:
        verb = "leave for" if self.direction is Direction.EXPORT else "come in from"
        yield Reason(f"{self.question.stream} is {name} data, and may {verb} {self.peer}.", rule.name, place)
        if self.terms is None:
            for sentence in _needs(rule):
                yield Reason(sentence, rule.name, place)

    def _failures(self, rule: ExportRule | ImportRule, place: Place) -> Iterator[Reason]:
        if self.terms is not None:
            for sentence in self._unmet(rule, self.terms):
                yield Reason(sentence, rule.name, place)

    def _unmet(self, rule: ExportRule | ImportRule, terms: GrantTerms) -> Iterator[str]:
        if terms.basis not in rule.bases:
            yield f"The basis {terms.basis} is not accepted here; {_list(rule.bases)} would be."
        if terms.basis is Basis.SAME_JURISDICTION:
            home = self.file.regions[self.file.region].jurisdiction
            if home != self.jurisdiction:
                yield f"The basis same-jurisdiction does not hold between {home} and {self.jurisdiction}."
        if rule.purposes and terms.purpose not in rule.purposes:
            yield f"The purpose {terms.purpose!r} is not accepted here; {_list(rule.purposes)} would be."
        yield from self._unprotected(rule, terms.transform)
        if terms.wildcard and not rule.wildcards:
            yield "A wildcard is not accepted here; grant each stream by its exact name."
        if terms.onward and not rule.onward:
            yield "Onward transfer is not accepted here."
        if rule.assessment and not terms.transfer_assessment:
            yield "The terms must name a transfer assessment."
        if terms.expires - terms.not_before > rule.lifetime:
            lasting = Duration(terms.expires - terms.not_before)
            yield f"A grant of {_days(lasting)} is too long; {_days(rule.lifetime)} are allowed."

    def _unprotected(self, rule: ExportRule | ImportRule, spec: TransformSpec) -> Iterator[str]:
        if spec.format is Format.OPAQUE and not rule.opaque:
            yield "Payloads must not cross unread; the format must be json."
        for required in rule.transforms:
            for field in required.fields:
                found = effective_rule(spec, FieldPath.parse(field))
                if spec.format is Format.OPAQUE or not satisfies(found, required.do):
                    yield f"The field {field} must be transformed with {required.do}; the terms have {found.do}."
        if spec.key not in rule.keys:
            yield f"The record key must not cross with the rule {spec.key}; {_list(rule.keys)} would be accepted."
        extra = [name for name in spec.headers if name not in rule.headers]
        if extra:
            yield f"The header {extra[0]} must not cross; {_list(rule.headers) or 'none'} may."
        if spec.trace and not rule.trace:
            yield "Trace context must not cross."


def _needs(rule: ExportRule | ImportRule) -> Iterator[str]:
    """What a grant under this rule would have to bring."""
    yield f"A grant needs one of these bases: {_list(rule.bases)}."
    if rule.purposes:
        yield f"Its purpose must be {_list(rule.purposes)}."
    for required in rule.transforms:
        yield f"It must {required.do} {', '.join(required.fields)}, or protect better."
    yield f"It may last {_days(rule.lifetime)}."
    yield f"It needs {rule.approvals} approval{'s' * (rule.approvals != 1)}{_whose(rule)}."
    if rule.assessment:
        yield "It must name a transfer assessment."


def _whose(rule: ExportRule | ImportRule) -> str:
    named = f" of {_list(rule.approvers)}" if rule.approvers else ""
    return named + (", by others than who drew it up or accepted it" if rule.separate else "")


def _list(words: tuple[str, ...]) -> str:
    return " or ".join(str(word) for word in words)


def _days(span: Duration) -> str:
    days, rest = divmod(int(span), 86_400_000)
    return f"{days} days" if not rest else str(Duration(span))
