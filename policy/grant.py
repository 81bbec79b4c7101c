"""Grants: two signed documents that let one stream cross, and the grant book that decides whether it may cross now.

The documents are in policy.grant_documents, the states in policy.grant_state, questions and answers in policy.attempt; this
module exports all of their names. Each half states how many approvals its region asks for, and on each side so many different
people must have signed the terms' hash (policy.approval). Without all of this nothing moves.

Checks of `GrantBook.check`, in this order; each has its own refusal:

 1. no signed deny entry names the stream          8. each side has the approvals that its half asks for
 2. there is a grant for stream and regions        9. it is not paused by either region
 3. both documents are there                      10. the record is not on its way back, nor travels onward unasked
 4. both signatures hold                          11. the region's policy in force allows it, and has the approvals that it
 5. both name the same terms                          asks for
 6. the bridge is the one that is named, and the  12. its byte budget is not used up
    grant is not revoked
 7. the grant has begun, and has not expired

Invariants:
- a `GrantBook` believes nothing that no trusted key signed: what cannot be verified is kept as a problem to report,
  never as a grant, and a forged revocation revokes nothing;
- deny wins over allow, revoked wins over everything later;
- of several standings (pause, resume) by one region the one with the highest sequence is in force: an old resume cannot be replayed
  over a newer pause;
- of several exports, or imports of one region, under one id the one that was signed last is in force. But the export that was signed
  first fixes the terms of an id, which is a part of their hash: documents with other terms have no effect;
- a grant book holds at most DOCUMENTS_MAX documents. If there are more, whole grants are left out, first those that expire
  first, and are refused and reported; deny entries are never left out, so that leaving out allows nothing.

Pure: no clock, no disk. Brokers on both sides, the agent and the commands query it; its documents come from metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, Self

from felix.errors import Code
from felix.names import NamePattern, SpiffeId, StreamName
from felix.peer import TrustBundle
from policy.approval import (
    Approval,
    ApprovalBody,
    ApprovalRule,
    Document,
    Tally,
    earliest,
    name_of,
    open_approval,
    tally,
)
from policy.attempt import CODES, Allowed, Attempt, Refusal, RefusalKind, check_path
from policy.claims import read_claim, select_documents
from policy.grant_documents import (
    EVERYWHERE,
    DenyEntry,
    ExportGrant,
    Fit,
    GrantError,
    ImportGrant,
    OutdatedError,
    Standing,
    StandingAction,
    agree,
    approves,
    fit_of,
    open_export,
    open_import,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.grant_state import TRANSITIONS, GrantEvent, GrantState, advance
from policy.pattern import PatternMap, PatternSet
from policy.quantity import Instant, Size
from policy.residency import Decision, ResidencyPolicy, decide_grant
from policy.signed import (
    NUMBER_MAX,
    Purpose,
    SignatureError,
    SignedDocument,
    Trusted,
    canonical,
    decode_body,
    verify,
)
from policy.terms import GrantTerms
from policy.truncation import Accepted, Live, Truncation, chain, said_first

__all__ = [
    "ANEW_FROM",
    "CODES",
    "DECISIONS_MAX",
    "DOCUMENTS_MAX",
    "EVERYWHERE",
    "NEVER",
    "TRANSITIONS",
    "Allowed",
    "Attempt",
    "Carried",
    "DenyEntry",
    "ExportGrant",
    "Fit",
    "GrantBook",
    "GrantError",
    "GrantEvent",
    "GrantState",
    "GrantView",
    "ImportGrant",
    "OutdatedError",
    "Problem",
    "Rank",
    "Refusal",
    "RefusalKind",
    "Standing",
    "StandingAction",
    "advance",
    "agree",
    "approves",
    "check_path",
    "denial",
    "deny_key",
    "deny_rank",
    "fit_of",
    "half_rank",
    "lasts",
    "open_export",
    "open_import",
    "paused",
    "sign_deny",
    "sign_export",
    "sign_import",
    "sign_standing",
    "standing_rank",
]

DOCUMENTS_MAX: Final = 100_000
"""Documents in one grant book: each is verified once when the book is made."""
DECISIONS_MAX: Final = 4_096
"""Cached policy decisions; beyond that the cache is cleared."""
ANEW_FROM: Final = 8
"""Where more than one of so many grants changes, a new book costs less than a changed one."""
NEVER: Final = 1 << 63
"""A time (ms) that does not come."""

Rank = tuple[int, bool, bytes]
"""Of one region's later words about one thing, the one of the highest rank holds, whatever order they came in."""


class Problem(NamedTuple):
    """A document that the grant book rejects, and why."""

    document: Document
    sentence: str


class _Unbelieved(NamedTuple):
    """What an unverified grant claims to be about: enough to say that it was not believed, and nothing else."""

    grant: str
    pattern: NamePattern
    from_region: str
    to_region: str
    kind: RefusalKind
    sentence: str
    hint: str


@dataclass(slots=True)
class _Entry:
    grant: str
    exports: list[ExportGrant] = field(default_factory=list)
    export: ExportGrant | None = None
    """once the book is complete: of the terms that were signed first, the one that was signed last"""
    imports: dict[str, list[ImportGrant]] = field(default_factory=dict)
    """By the region that signed them: a half signed by another region under this id is kept in addition, and replaces nothing."""
    approvals: dict[tuple[SpiffeId, str], ApprovalBody] = field(default_factory=dict)
    """By approver and terms hash: an approval of other terms, of which a hash may begin like the grant's, takes the place of none."""
    speaking: dict[str, tuple[ApprovalBody, ...]] = field(default_factory=dict)
    """By region, once the book is complete: those of the grant's terms, in its own mesh."""
    approved_from: int = NEVER
    """The time at which all approvals that the halves require were found. They stay complete: a grant book does not change, and
    time only adds approvals that count. Checked at every read.
    """
    counted_from: dict[tuple[str, ApprovalRule], int] = field(default_factory=dict)
    """The same for a region's rules."""

    def complete(self) -> None:
        """All documents are there: which export counts, and of the approvals those of its terms by who has a say in it."""
        if self.exports:
            terms_hash = min(self.exports, key=half_rank).terms_hash
            self.export = max((half for half in self.exports if half.terms_hash == terms_hash), key=half_rank)
            for (who, _), body in sorted(self.approvals.items()):
                if approves(self.export, body):
                    self.speaking[who.region] = (*self.speaking.get(who.region, ()), body)

    def halves(self) -> Iterator[ImportGrant]:
        for held in self.imports.values():
            yield from held

    def newest_half(self) -> ImportGrant | None:
        """What is shown where there is no export: the acceptance that was signed last."""
        return max(self.halves(), key=half_rank, default=None)


class GrantView(NamedTuple):
    """One grant for a list: its state at the time asked for."""

    grant: str
    state: GrantState
    export: ExportGrant | None
    accepted: ImportGrant | None
    paused_by: tuple[str, ...]
    approvals: tuple[Tally, ...] = ()
    """how far the source's and the destination's approvals have come, as their halves ask"""

    @property
    def waits_for(self) -> str:
        """What an offered grant waits for, and who paused a paused one; else empty."""
        if self.state is GrantState.PAUSED:
            return f"paused by {' and '.join(self.paused_by)}"
        if self.state is not GrantState.OFFERED:
            return ""
        if self.export is None:
            return "waits for the source's half"
        if self.accepted is None:
            return f"waits for {self.export.terms.to_region} to accept"
        missing = [f"{tally.region} {tally.missing}" for tally in self.approvals if tally.missing]
        return f"waits for approvals: {', '.join(missing)}"


class Carried(NamedTuple):
    """What one bridge carries: its grants, and the regions that they are between."""

    grants: frozenset[str]
    regions: frozenset[str]


_NOTHING: Final = Carried(frozenset(), frozenset())


class _Step(IntEnum):
    """How far a candidate came; of several refused candidates the one that came furthest tells why."""

    DOCUMENTS = 3
    SIGNATURES = 4
    TERMS = 5
    BRIDGE = 6
    TIME = 7
    APPROVALS = 8
    STANDING = 9
    PATH = 10
    POLICY = 11
    BUDGET = 12


class GrantBook:
    """All grants that one region knows. A changed grant book is a new object (`including`)."""

    __slots__ = (
        "_accepted",
        "_anchors",
        "_beyond",
        "_carried",
        "_decisions",
        "_denies",
        "_denying",
        "_documents_max",
        "_entries",
        "_exact",
        "_groups",
        "_problems",
        "_standings",
        "_truncations",
        "_trusted",
        "_unbelieved",
        "_wild",
        "left_out",
    )

    def __init__(
        self,
        documents: Iterable[Document] = (),
        trusted: Trusted | None = None,
        anchors: TrustBundle | None = None,
        *,
        accepted: frozenset[Document] = frozenset(),
        documents_max: int | None = None,
    ) -> None:
        """Verifies every document once, but for the standings and deny entries in `accepted`: that their region signed them was verified when they
        came, under whichever keys it had then. `trusted`: the policy keys of both regions, this one's included; `anchors`: their
        roots, under which their approvers' certificates stand. What is more than `documents_max` (DOCUMENTS_MAX) is in `left_out`."""
        self._documents_max = DOCUMENTS_MAX if documents_max is None else documents_max
        every = tuple(dict.fromkeys(documents))
        chosen, self.left_out = select_documents(every, self._documents_max)
        # Kept for a changed book, which may have room for them.
        self._beyond: tuple[Document, ...] = ()
        if len(chosen) < len(every):
            held = set(chosen)
            self._beyond = tuple(document for document in every if document not in held)
        self._accepted = accepted
        self._trusted: Trusted = trusted or {}
        self._anchors = anchors or TrustBundle()
        self._groups: dict[str, dict[Document, None]] = {}
        self._entries: dict[str, _Entry] = {}
        self._unbelieved: dict[str, tuple[_Unbelieved, ...]] = {}
        self._standings: dict[tuple[str, str], Standing] = {}
        self._truncations: dict[tuple[str, int], list[tuple[str, Accepted]]] = {}
        self._denies: dict[tuple[str, str, str], DenyEntry] = {}
        self._decisions: dict[tuple[bytes, str, str, bool, bool], Decision] = {}
        self._problems: dict[str, tuple[Problem, ...]] = {}
        for document in chosen:
            group = _group_of(document)
            self._groups.setdefault(group, {})[document] = None
            try:
                self._take(document)
            except SignatureError as error:
                self._disbelieve(group, document, error)
        self._remember_left_out()
        exact: dict[tuple[str, str, str], list[_Entry]] = {}
        wild: list[tuple[NamePattern, tuple[str, str], _Entry]] = []
        for _, entry in sorted(self._entries.items()):
            entry.complete()
            for pattern, ends in _places(entry):
                if pattern.is_exact:
                    exact.setdefault((str(pattern), *ends), []).append(entry)
                else:
                    wild.append((pattern, ends, entry))
        # Every read of a bridge queries this book, so an exact name is looked up, not searched for.
        self._exact = {place: tuple(found) for place, found in exact.items()}
        self._wild = tuple(wild)
        self._denying: PatternMap[list[DenyEntry]] | None = None
        self._carried: dict[str, Carried] | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Documents that were not believed, for the operator and the audit log."""
        return tuple(problem for found in self._problems.values() for problem in found)

    @property
    def believed(self) -> set[Document]:
        """Documents that it was made of and whose signatures hold."""
        doubted = {problem.document for problem in self.problems}
        return {document for held in self._groups.values() for document in held} - doubted

    def including(self, documents: Iterable[Document]) -> Self:
        """A grant book with these documents in addition."""
        return self.changed((), documents)

    def changed(
        self,
        gone: Iterable[Document],
        come: Iterable[Document],
        accepted: frozenset[Document] | None = None,
    ) -> Self:
        """The book without `gone` and with `come`, under the same keys: equal to a new one of all these documents, but only the
        grants and deny entries that these documents concern are rebuilt. `accepted`: None for those of before.
        """
        accepted = self._accepted if accepted is None else accepted
        groups = dict(self._groups)
        touched: dict[str, None] = {}
        beyond = dict.fromkeys(self._beyond)
        gone, come = tuple(gone), tuple(come)
        for document in gone:
            beyond.pop(document, None)
        for documents, stays in ((gone, False), (come, True)):
            for document in documents:
                group = _group_of(document)
                if group not in touched:
                    touched[group] = None
                    groups[group] = dict(groups.get(group, {}))
                if stays:
                    groups[group][document] = None
                else:
                    groups[group].pop(document, None)
        count = sum(map(len, groups.values()))
        if self._beyond or count > self._documents_max or len(touched) * ANEW_FROM > len(groups):
            every = (*(document for group in groups.values() for document in group), *beyond)
            return type(self)(
                every, self._trusted, self._anchors, accepted=accepted, documents_max=self._documents_max
            )
        made = self._copy()
        made._accepted = accepted
        made._groups = {group: held for group, held in groups.items() if held}
        for group in touched:
            made._leave_group(group, self._groups.get(group, {}))
            part = type(self)(groups[group], self._trusted, self._anchors, accepted=accepted)
            made._join(part)
        return made

    def _copy(self) -> Self:
        """Entries and tuples are shared; nothing changes them."""
        made = object.__new__(type(self))
        made._documents_max, made.left_out, made._beyond = self._documents_max, (), ()
        made._trusted, made._anchors = self._trusted, self._anchors
        made._entries, made._unbelieved = dict(self._entries), dict(self._unbelieved)
        made._standings, made._denies = dict(self._standings), dict(self._denies)
        made._truncations, made._decisions = dict(self._truncations), {}
        made._problems, made._exact = dict(self._problems), dict(self._exact)
        made._wild, made._denying, made._carried = self._wild, None, None
        return made

    def _leave_group(self, group: str, documents: Iterable[Document]) -> None:
        """Forget what these documents, all of a group, said."""
        self._problems.pop(group, None)
        self._unbelieved.pop(group, None)
        entry = self._entries.pop(group, None)
        if entry is not None:
            for pattern, ends in _places(entry):
                place = (str(pattern), *ends)
                if pattern.is_exact and len(self._exact[place]) > 1:
                    self._exact[place] = tuple(each for each in self._exact[place] if each is not entry)
                elif pattern.is_exact:
                    del self._exact[place]
            self._wild = tuple(each for each in self._wild if each[2] is not entry)
        for document in documents:
            if isinstance(document, Approval) or document.purpose not in (Purpose.STANDING, Purpose.DENY):
                continue
            try:
                if document.purpose is Purpose.DENY:
                    self._denies.pop(deny_key(decode_body(document, DenyEntry, Purpose.DENY)), None)
                    continue
                standing = decode_body(document, Standing, Purpose.STANDING)
            except SignatureError:
                continue
            self._standings.pop((standing.grant, standing.region), None)
            if (
                isinstance(cut := standing.truncation, Truncation)
                and (cut.stream, cut.shard) in self._truncations
            ):
                left = [
                    each for each in self._truncations[cut.stream, cut.shard] if each[0] != standing.grant
                ]
                self._truncations[cut.stream, cut.shard] = left

    def _join(self, part: GrantBook) -> None:
        """Merge in the book of one group, of which this book holds nothing yet."""
        self._problems |= part._problems
        self._unbelieved |= part._unbelieved
        self._standings |= part._standings
        self._denies |= part._denies
        for shard, accepted in part._truncations.items():
            self._truncations[shard] = [*self._truncations.get(shard, ()), *accepted]
        self._entries |= part._entries
        for place, found in part._exact.items():
            self._exact[place] = tuple(sorted((*self._exact.get(place, ()), *found), key=_grant_of))
        if part._wild:
            self._wild = tuple(sorted((*self._wild, *part._wild), key=lambda each: each[2].grant))

    def _take(self, document: Document) -> None:
        if isinstance(document, Approval):
            body = open_approval(document, self._anchors)
            approvals = self._entry(body.grant).approvals
            held = approvals.get(place := (SpiffeId.parse(body.approver), body.terms_hash))
            if held is None or earliest(body) < earliest(held):
                approvals[place] = body
            return
        match document.purpose:
            case Purpose.EXPORT:
                export = open_export(document, self._trusted)
                self._entry(export.grant).exports.append(export)
            case Purpose.IMPORT:
                accepted = open_import(document, self._trusted)
                self._entry(accepted.grant).imports.setdefault(document.region, []).append(accepted)
            case Purpose.STANDING:
                self._verify_word(document)
                self._stand(decode_body(document, Standing, Purpose.STANDING), document.region)
            case Purpose.DENY:
                self._verify_word(document)
                entry_ = decode_body(document, DenyEntry, Purpose.DENY)
                if entry_.region != document.region:
                    raise SignatureError(f"A deny entry of {entry_.region} is signed by {document.region}.")
                key = deny_key(entry_)
                # Of two of one number, the one that denies holds.
                if key not in self._denies or deny_rank(self._denies[key]) < deny_rank(entry_):
                    self._denies[key] = entry_
            case Purpose.POLICY | Purpose.APPROVAL:
                raise SignatureError(f"A {document.purpose} is no grant document.")

    def _verify_word(self, document: SignedDocument) -> None:
        if document not in self._accepted:
            verify(document, self._trusted)

    def _entry(self, grant: str) -> _Entry:
        return self._entries.setdefault(grant, _Entry(grant))

    def _stand(self, standing: Standing, signer: str) -> None:
        if standing.region != signer:
            raise SignatureError(f"A {standing.action} by {standing.region} is signed by {signer}.")
        key = (standing.grant, standing.region)
        if isinstance(standing.truncation, Truncation):
            cut = standing.truncation
            is_resend = standing.action is StandingAction.RESEND
            accepted = Accepted(cut, standing.region, standing.at, is_resend)
            self._truncations.setdefault((cut.stream, cut.shard), []).append((standing.grant, accepted))
            return
        held = self._standings.get(key)
        if held is None or _outranks(standing, held):
            self._standings[key] = standing

    def accepted_truncations(self, grant: str, stream: str, shard: int) -> dict[str, tuple[Accepted, ...]]:
        """Truncations and resends of a shard, under this grant or another into the same stream of the same region, by the incarnation
        (hex) that each ends: those signed first before others."""
        ends = self._ends_of(grant, stream)
        accepted: dict[str, list[Accepted]] = {}
        for named, found in self._truncations.get((stream, shard), ()):
            # Of the destination's, those that no earlier version carried anything under begin nothing (policy.truncation).
            if found.region in ends[: 1 if found.is_resend else 2] and (
                named == grant or self._ends_of(named, stream) == ends
            ):
                accepted.setdefault(found.truncation.incarnation, []).append(found)
        # Signed again, or as a word on another grant of the link, it says the same.
        return {
            ended: tuple(sorted(dict.fromkeys(words), key=said_first)) for ended, words in accepted.items()
        }

    def cut_under(self, grants: Collection[str]) -> set[str]:
        """The grants under which a truncation or a resend was accepted that also applies to one of these: an agent that crosses
        under these needs their documents to know the current incarnation.
        """
        exact: dict[str, set[tuple[str, ...]]] = {}
        wild: dict[tuple[str, ...], PatternSet] = {}
        for grant in grants:
            entry = self._entries.get(grant)
            if entry is None or entry.export is None:
                continue
            terms = entry.export.terms
            if terms.wildcard:
                wild.setdefault(_ends(terms), PatternSet()).add(NamePattern(terms.stream))
            else:
                exact.setdefault(terms.stream, set()).add(self._ends_of(grant, terms.stream))
        found: set[str] = set()
        counts: dict[tuple[str, tuple[str, ...]], bool] = {}
        for (stream, _), accepted in self._truncations.items():
            for named, _ in accepted:
                ends = self._ends_of(named, stream)
                if (stream, ends) not in counts:
                    patterns = wild.get(ends[:2]) if ends[2:] == (stream,) else None
                    counts[stream, ends] = ends in exact.get(stream, ()) or (
                        patterns is not None and patterns.matches(StreamName.parse(stream))
                    )
                if counts[stream, ends]:
                    found.add(named)
        return found

    def incarnations(
        self, grant: str, stream: str, shard: int, incarnation: bytes, begun: Iterable[bytes] = ()
    ) -> tuple[Live, ...]:
        """What a shard crossed under, from its stream's own incarnation to the one that lives now: another begins wherever a
        truncation was accepted. `begun`: under which something crossed (policy.truncation)."""
        accepted = self.accepted_truncations(grant, stream, shard)
        source = next(iter(self._ends_of(grant, stream)), "")
        return chain(incarnation, accepted, source, begun)

    def live_incarnation(self, grant: str, stream: str, shard: int, incarnation: bytes) -> Live:
        """What a shard crosses under now."""
        return self.incarnations(grant, stream, shard, incarnation)[-1]

    def _ends_of(self, grant: str, stream: str) -> tuple[str, ...]:
        """The regions that the grant is between, and the stream that `stream` arrives as; empty for a grant that is not known."""
        entry = self._entries.get(grant)
        if entry is None or entry.export is None:
            return ()
        terms = entry.export.terms
        return (*_ends(terms), stream if terms.wildcard else terms.destination_stream)

    def _disbelieve(self, group: str, document: Document, error: SignatureError) -> None:
        self._problems[group] = (*self._problems.get(group, ()), Problem(document, error.sentence))
        # Only to answer "there is a grant, but it is forged" instead of "there is none"; it allows nothing.
        claim = None if isinstance(document, Approval) else read_claim(document)
        if claim is None or claim.pattern is None:
            return
        outdated = isinstance(error, OutdatedError)
        found = _Unbelieved(
            claim.grant,
            claim.pattern,
            claim.from_region,
            claim.to_region,
            RefusalKind.OUTDATED if outdated else RefusalKind.FORGED,
            error.sentence,
            error.hint if outdated else "Find out who wrote it; make or fetch a genuine one.",
        )
        self._unbelieved[group] = (*self._unbelieved.get(group, ()), found)

    def _remember_left_out(self) -> None:
        for claim in self.left_out:
            if claim.pattern is not None:
                found = _Unbelieved(
                    claim.grant,
                    claim.pattern,
                    claim.from_region,
                    claim.to_region,
                    RefusalKind.LEFT_OUT,
                    f"There are more documents than one book takes, and those of the grant {claim.grant} were left out.",
                    "Remove grants that ended long ago from the metadata store.",
                )
                self._unbelieved[claim.grant] = (*self._unbelieved.get(claim.grant, ()), found)

    # ------------------------------------------------------------------------------------------- questions

    def check(
        self,
        attempt: Attempt,
        policy: ResidencyPolicy | None,
        now: int,
        used: Mapping[str, int] | None = None,
        *,
        grant: str = "",
    ) -> Allowed | Refusal:
        """Whether the attempt may go ahead at `now` (ms).

        `policy` is the asking region's own, in force; None for who has none, as the agent: both brokers ask theirs.
        `used`: bytes that crossed so far, by grant id. `grant`: under this grant and no other.
        """
        denied = self._denied(attempt)
        if denied is not None:
            return denied
        best: tuple[_Step, Refusal] | None = None
        for entry in self._concerning(attempt):
            if grant and entry.grant != grant:
                continue
            result = self._judge(entry, attempt, policy, now, used or {})
            if isinstance(result, Allowed):
                return result
            if best is None or result[0] > best[0]:
                best = result
        unbelieved = self._disbelief(attempt, grant)
        if unbelieved is not None and (best is None or best[0] < _Step.SIGNATURES):
            return unbelieved
        if best is not None:
            return best[1]
        return Refusal(
            RefusalKind.NO_GRANT,
            f"No grant lets {attempt.stream} cross from {attempt.from_region} to {attempt.to_region}.",
            "Make one with `felix bridge allow`, and have the destination accept it.",
        )

    def check_grant(self, grant: str, bridge: SpiffeId | None, now: int) -> Refusal | None:
        """Why nothing at all crosses under a grant, whichever stream it is; None where some stream may.

        Denials of streams and policies are not asked. For a pattern that no stream fits yet.
        """
        entry = self._entries.get(grant)
        if entry is None:
            return Refusal(
                RefusalKind.NO_GRANT,
                f"There is no grant {grant[:40]}.",
                "List them with `felix bridge list`.",
            )
        found = self._agreement(entry, bridge, now)
        return found[1] if isinstance(found[1], Refusal) else None

    def _denied(self, attempt: Attempt) -> Refusal | None:
        return self._denial(attempt, attempt.stream, (attempt.from_region, attempt.to_region))

    def _denied_there(self, attempt: Attempt, arriving: StreamName) -> Refusal | None:
        """The destination denies a stream by the name that it has there, too."""
        return self._denial(attempt, arriving, (attempt.to_region,))

    def _denial(self, attempt: Attempt, stream: StreamName, regions: Collection[str]) -> Refusal | None:
        """The refusal by a deny entry of these regions on this name. Looked up: a region may have thousands, and every read asks."""
        denying = self._denying
        if denying is None:
            denying = PatternMap[list[DenyEntry]]()
            for _, entry in sorted(self._denies.items()):
                if not entry.lifted:
                    pattern = NamePattern(entry.streams)
                    held = denying.get(pattern)
                    if held is None:
                        denying.put(pattern, [entry])
                    else:
                        held.append(entry)
            self._denying = denying
        for held in denying.matching(stream):
            for entry in held:
                if entry.region in regions and _is_towards(entry, attempt):
                    return denial(entry, attempt, stream)
        return None

    def _concerning(self, attempt: Attempt) -> Iterator[_Entry]:
        ends = (attempt.from_region, attempt.to_region)
        yield from self._exact.get((str(attempt.stream), *ends), ())
        for pattern, found, entry in self._wild:
            if found == ends and pattern.matches(attempt.stream):
                yield entry

    def _disbelieved(self) -> Iterator[_Unbelieved]:
        for found in self._unbelieved.values():
            yield from found

    def _disbelief(self, attempt: Attempt, grant: str) -> Refusal | None:
        for claim in self._disbelieved():
            if grant and claim.grant != grant:
                continue
            if (claim.from_region, claim.to_region) == attempt[1:3] and claim.pattern.matches(attempt.stream):
                return Refusal(
                    claim.kind,
                    f"The grant for {attempt.stream} from {attempt.from_region} to {attempt.to_region} is not "
                    f"believed. {claim.sentence}"
                    if claim.kind is RefusalKind.FORGED
                    else claim.sentence,
                    claim.hint,
                )
        return None

    def _agreement(
        self, entry: _Entry, bridge: SpiffeId | None, now: int
    ) -> tuple[ExportGrant, ImportGrant] | tuple[_Step, Refusal]:
        """Checks 3 to 9, which are about the grant and not about a record: the two halves that agree, or why not."""
        name, export = entry.grant, entry.export

        def refuse(step: _Step, kind: RefusalKind, sentence: str, hint: str) -> tuple[_Step, Refusal]:
            return step, Refusal(kind, sentence, hint, name)

        if export is None:
            half = entry.newest_half()
            by, source = (half.to_region, half.from_region) if half is not None else ("Nobody", "its source")
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.EXPORT_MISSING,
                f"{by} accepted the grant {name}, but there is no export grant by {source}.",
                f"Fetch the export grant from {source}.",
            )
        terms = export.terms
        halves = entry.imports.get(terms.to_region, [])
        if not halves:
            return refuse(
                _Step.DOCUMENTS,
                RefusalKind.IMPORT_MISSING,
                f"{terms.from_region} offers {terms.stream} under the grant {name}, but {terms.to_region} has not "
                "accepted it.",
                f"Have {terms.to_region} accept it with `felix bridge accept`.",
            )
        accepted = _agreeing(export, halves)
        if accepted is None:
            return refuse(
                _Step.TERMS,
                RefusalKind.TERMS_MISMATCH,
                f"The two halves of the grant {name} do not name the same terms.",
                f"Have {terms.to_region} accept the export grant anew.",
            )
        if bridge is not None and terms.bridge != str(bridge):
            return refuse(
                _Step.BRIDGE,
                RefusalKind.WRONG_BRIDGE,
                f"The grant {name} is for the bridge {terms.bridge}, not for {bridge}.",
                "Run the agent with the identity that the grant names.",
            )
        standings = [self._standings.get((name, region)) for region in _ends(terms)]
        for standing in standings:
            if standing is not None and standing.action is StandingAction.REVOKE:
                return refuse(
                    _Step.BRIDGE,
                    RefusalKind.REVOKED,
                    f"{standing.region} revoked the grant {name} at {Instant(standing.at)}{_because(standing.reason)}.",
                    "A revoked grant stays revoked; a new one has to be made.",
                )
        if now < terms.not_before:
            return refuse(
                _Step.TIME,
                RefusalKind.NOT_YET,
                f"The grant {name} holds only from {Instant(terms.not_before)}.",
                "Wait, or make a grant that begins earlier.",
            )
        if now >= terms.expires:
            return refuse(
                _Step.TIME,
                RefusalKind.EXPIRED,
                f"The grant {name} expired at {Instant(terms.expires)}.",
                "Make a new grant, and have the destination accept it.",
            )
        if now < entry.approved_from:
            tallies = self._tallies(entry, export, accepted, now)
            if any(found.missing for found in tallies):
                return _Step.APPROVALS, _not_approved(name, tallies)
            entry.approved_from = now
        for standing in standings:
            if standing is not None and standing.action is StandingAction.PAUSE:
                return _Step.STANDING, paused(standing)
        return export, accepted

    def _tallies(
        self, entry: _Entry, export: ExportGrant, accepted: ImportGrant | None, now: int
    ) -> tuple[Tally, ...]:
        """How far both sides' approvals have come, as the halves that are there ask."""
        terms = export.terms
        found = [
            self._tally(
                entry,
                export,
                accepted,
                terms.from_region,
                ApprovalRule(export.approvals, export.separate),
                now,
            )
        ]
        if accepted is not None:
            asked = ApprovalRule(accepted.approvals, accepted.separate)
            found.append(self._tally(entry, export, accepted, terms.to_region, asked, now))
        return tuple(found)

    def _tally(
        self,
        entry: _Entry,
        export: ExportGrant,
        accepted: ImportGrant | None,
        region: str,
        rule: ApprovalRule,
        now: int,
    ) -> Tally:
        terms = export.terms
        concerned = {name_of(terms.drawn_up_by)}
        if accepted is not None and region == terms.to_region:
            concerned.add(name_of(accepted.accepted_by))
        return tally(rule, region, entry.speaking.get(region, ()), export.terms_hash, concerned, now)

    def _judge(
        self,
        entry: _Entry,
        attempt: Attempt,
        policy: ResidencyPolicy | None,
        now: int,
        used: Mapping[str, int],
    ) -> Allowed | tuple[_Step, Refusal]:
        found = self._agreement(entry, attempt.bridge, now)
        if isinstance(found[1], Refusal):
            return found
        export, accepted = found
        assert isinstance(export, ExportGrant)
        name, terms = entry.grant, export.terms
        arriving = terms.destination_of(attempt.stream)
        denied = self._denied_there(attempt, arriving)
        if denied is not None:
            return _Step.STANDING, denied
        strayed = check_path(name, terms, attempt.path)
        if strayed is not None:
            return _Step.PATH, strayed
        decision = None if policy is None else self._decide(policy, attempt, terms, name, now)
        if policy is not None and decision is not None:
            later = made_under_later(export if policy.region == terms.from_region else accepted, policy)
            if later is not None:
                return _Step.POLICY, later
            if not decision.allowed:
                return _Step.POLICY, Refusal(
                    RefusalKind.DENIED if decision.denied else RefusalKind.AGAINST_POLICY,
                    f"The grant {name} is against the policy of {policy.region}, revision {policy.revision}: {decision.sentence}",
                    "Ask `felix bridge explain`; make a grant that the policy allows.",
                    name,
                    decision.rule,
                )
            for rule in decision.approvals:
                if now >= entry.counted_from.get((policy.region, rule), NEVER):
                    continue
                counted = self._tally(entry, export, accepted, policy.region, rule, now)
                if counted.missing:
                    return _Step.POLICY, _not_approved(name, (counted,), policy, rule)
                entry.counted_from[policy.region, rule] = now
        spent = used.get(name, 0)
        if terms.budget_bytes and spent >= terms.budget_bytes:
            return _Step.BUDGET, Refusal(
                RefusalKind.BUDGET,
                f"The grant {name} has used up its budget of {Size(terms.budget_bytes)}: {spent} bytes crossed.",
                "Make a new grant with a new budget.",
                name,
            )
        return Allowed(export, accepted, bytes.fromhex(export.terms_hash), arriving, decision)

    def _decide(
        self, policy: ResidencyPolicy, attempt: Attempt, terms: GrantTerms, name: str, now: int
    ) -> Decision:
        """The policy's decision, remembered: it depends on `now` only through the policy's own validity."""
        file = policy.file
        begun = file.valid_from is None or now >= file.valid_from
        over = file.valid_until is not None and now >= file.valid_until
        key = (policy.hash, name, str(attempt.stream), begun, over)
        found = self._decisions.get(key)
        if found is None:
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            found = self._decisions[key] = decide_grant(policy, terms, attempt.stream, now)
        return found

    def grants(self) -> tuple[str, ...]:
        """The ids of every grant, sorted."""
        return tuple(
            sorted(
                grant for grant, entry in self._entries.items() if entry.export is not None or entry.imports
            )
        )

    def half(self, grant: str) -> ExportGrant | ImportGrant | None:
        """The grant's export, else the acceptance that was signed last: where it leads, whatever its state is."""
        entry = self._entries.get(grant)
        return None if entry is None else entry.export or entry.newest_half()

    def list(self, now: int) -> tuple[GrantView, ...]:
        """Every grant with its state at `now`, by id."""
        return tuple(self._view(self._entries[grant], now) for grant in self.grants())

    def _view(self, entry: _Entry, now: int) -> GrantView:
        name, export = entry.grant, entry.export
        if export is None:
            accepted = entry.newest_half()
        else:
            accepted = _agreeing(export, entry.imports.get(export.terms.to_region, []))
        state = GrantState.OFFERED
        tallies: tuple[Tally, ...] = ()
        if export is not None:
            tallies = self._tallies(entry, export, accepted, now)
            if accepted is not None and not any(found.missing for found in tallies):
                state = advance(state, GrantEvent.COMPLETE)
        half = export.terms if export is not None else accepted
        ends = () if half is None else sorted((half.from_region, half.to_region))
        standings = [self._standings[name, region] for region in ends if (name, region) in self._standings]
        pausing = [held.region for held in standings if held.action is StandingAction.PAUSE]
        if pausing:
            state = advance(state, GrantEvent.PAUSE)
        if any(held.action is StandingAction.REVOKE for held in standings):
            state = advance(state, GrantEvent.REVOKE)
        if export is not None and now >= export.terms.expires:
            state = advance(state, GrantEvent.EXPIRE)
        return GrantView(name, state, export, accepted, tuple(pausing), tallies)

    def carried_by(self, bridge: str) -> Carried:
        """The grants that name this bridge, in whichever half. Found once for all bridges: each of them asks every second."""
        if self._carried is None:
            grants: dict[str, set[str]] = {}
            regions: dict[str, set[str]] = {}
            for entry in self._entries.values():
                export = entry.export
                accepted = (
                    entry.newest_half()
                    if export is None
                    else _agreeing(export, entry.imports.get(export.terms.to_region, []))
                )
                for half in (export.terms if export is not None else None, accepted):
                    if half is not None:
                        grants.setdefault(half.bridge, set()).add(entry.grant)
                        regions.setdefault(half.bridge, set()).update((half.from_region, half.to_region))
            self._carried = {
                name: Carried(frozenset(held), frozenset(regions[name])) for name, held in grants.items()
            }
        return self._carried.get(bridge, _NOTHING)

    def get(self, grant: str, now: int) -> GrantView:
        """One grant by its id. Raises GrantError(GRANT_MISSING)."""
        entry = self._entries.get(grant)
        if entry is None or (entry.export is None and not entry.imports):
            raise GrantError(
                f"There is no grant {grant[:40]}.",
                code=Code.GRANT_MISSING,
                hint="Name it by its id, not by its file: list them with `felix bridge list`.",
            )
        return self._view(entry, now)

    def approval(self, grant: str, approver: SpiffeId) -> ApprovalBody | None:
        """How an approver approved a grant's terms; None where he did not."""
        bodies = self._speaking(grant, approver.region)
        return next((body for body in bodies if body.approver == str(approver)), None)

    def approvers(self, grant: str, region: str) -> int:
        """How many people of a region have approved a grant."""
        return len(self._speaking(grant, region))

    def _speaking(self, grant: str, region: str) -> tuple[ApprovalBody, ...]:
        entry = self._entries.get(grant)
        return () if entry is None else entry.speaking.get(region, ())

    def is_revoked_by(self, grant: str, region: str) -> bool:
        """Whether the region has revoked the grant: its first revocation holds, and no other one is needed."""
        held = self._standings.get((grant, region))
        return held is not None and held.action is StandingAction.REVOKE

    def claimed_destination(self, grant: str) -> str:
        """Where a grant that is not believed claims to lead; for the refusal's sentence alone. Empty: no such claim."""
        return next((claim.to_region for claim in self._disbelieved() if claim.grant == grant), "")

    def denies(self) -> tuple[DenyEntry, ...]:
        """The deny entries that stand."""
        return tuple(entry for _, entry in sorted(self._denies.items()) if not entry.lifted)

    def next_sequence(self, grant: str, region: str, now: int) -> int:
        """The sequence for the region's next standing on a grant, signed at `now` (ms)."""
        return _next_number(self._standings.get((grant, region)), now)

    def next_deny_sequence(self, region: str, streams: str, peer: str, now: int) -> int:
        """The sequence for the region's next deny entry (or its lifting) on a pattern towards a peer, signed at `now` (ms)."""
        return _next_number(self._denies.get((region, streams, peer)), now)


def _next_number(held: Standing | DenyEntry | None, now: int) -> int:
    """The time, so that a word outranks those of before that nobody knows of here any more; and more than the number of the one that is held.
    Where there is no higher one, a word that forbids outranks one of the same number that does not."""
    return min(max(now, held.sequence + 1 if held else 1), NUMBER_MAX)


def _group_of(document: Document) -> str:
    """What a document is about: its grant, or the key of a deny entry. Documents of different groups are independent of each
    other. Unreadable documents form one group, which states nothing.
    """
    try:
        if isinstance(document, Approval):
            return document.claim.grant
        match document.purpose:
            case Purpose.EXPORT:
                return decode_body(document, ExportGrant, Purpose.EXPORT).grant
            case Purpose.IMPORT:
                return decode_body(document, ImportGrant, Purpose.IMPORT).grant
            case Purpose.STANDING:
                return decode_body(document, Standing, Purpose.STANDING).grant
            case Purpose.DENY:
                return "\0".join(deny_key(decode_body(document, DenyEntry, Purpose.DENY)))
    except SignatureError:
        pass
    return ""


def lasts(document: Document) -> bool:
    """Whether it is a pause, resumption, revocation, deny entry or lifting: of those of one region about one thing, one counts."""
    if isinstance(document, Approval):
        return False
    if document.purpose is Purpose.STANDING:
        try:
            return not isinstance(decode_body(document, Standing, Purpose.STANDING).truncation, Truncation)
        except SignatureError:
            return False
    return document.purpose is Purpose.DENY


def deny_key(entry: DenyEntry) -> tuple[str, str, str]:
    """What a deny entry or lifting is about: region, pattern, peer. Of one key one word holds."""
    return entry.region, entry.streams, entry.peer


def _grant_of(entry: _Entry) -> str:
    return entry.grant


def _places(entry: _Entry) -> list[tuple[NamePattern, tuple[str, str]]]:
    """Stream, and source and destination, that an entry is found under."""
    named = [(half.stream, half.from_region, half.to_region) for half in entry.halves()]
    if entry.export is not None:
        terms = entry.export.terms
        named.append((terms.stream, terms.from_region, terms.to_region))
    return [(NamePattern(stream), (source, to)) for stream, source, to in dict.fromkeys(named)]


def _ends(terms: GrantTerms) -> tuple[str, str]:
    return terms.from_region, terms.to_region


def half_rank(half: ExportGrant | ImportGrant) -> tuple[int, bytes]:
    """Of two halves of one region under one id the higher holds: the one that was signed last."""
    return half.signed_at, canonical(half)


def carrying_rank(export: ExportGrant) -> tuple[int, str]:
    """Of grants that lead one stream into the same one, that of the lowest rank carries it until it ends: the one that was signed first."""
    return export.signed_at, export.grant


def _agreeing(export: ExportGrant, halves: Iterable[ImportGrant]) -> ImportGrant | None:
    """Of the import grants that name the export's terms, the one that was signed last."""
    return max((half for half in halves if agree(export, half)), key=half_rank, default=None)


def _outranks(found: Standing, held: Standing) -> bool:
    """Whether `found` holds rather than `held`, of one region on one grant: the first revocation, else the highest sequence."""
    revokes = StandingAction.REVOKE
    if held.action is revokes or found.action is revokes:
        return found.action is revokes and (held.action is not revokes or _first(found) < _first(held))
    return standing_rank(found) > standing_rank(held)


def standing_rank(standing: Standing) -> Rank:
    """Of one region's pauses and resumptions of one grant the highest holds: of two of one number, the one that pauses."""
    return standing.sequence, standing.action is StandingAction.PAUSE, canonical(standing)


def deny_rank(entry: DenyEntry) -> Rank:
    """Of the deny entries and liftings of one key the highest holds: of two of one number, the one that denies."""
    return entry.sequence, not entry.lifted, canonical(entry)


def _first(standing: Standing) -> tuple[int, bytes]:
    return standing.at, canonical(standing)


def _is_towards(entry: DenyEntry, attempt: Attempt) -> bool:
    peer = attempt.to_region if entry.region == attempt.from_region else attempt.from_region
    return entry.peer in (EVERYWHERE, peer)


def denial(entry: DenyEntry, attempt: Attempt, stream: StreamName) -> Refusal:
    """The refusal of an attempt by a deny entry; `stream`: the name that the entry is about, there or at the destination."""
    because = f": {entry.reason.removesuffix('.')}" if entry.reason else ""
    arriving = f" as {stream}" if stream != attempt.stream else ""
    return Refusal(
        RefusalKind.DENIED,
        f"{entry.region} denies that {attempt.stream} crosses from {attempt.from_region} to "
        f"{attempt.to_region}{arriving}{because}.",
        f"Deny wins over every grant; only {entry.region} can lift it.",
    )


def paused(standing: Standing) -> Refusal:
    """The refusal of an attempt under a grant that a region paused."""
    return Refusal(
        RefusalKind.PAUSED,
        f"{standing.region} paused the grant {standing.grant} at {Instant(standing.at)}{_because(standing.reason)}.",
        f"Only {standing.region} can resume it, with `felix bridge resume`.",
        standing.grant,
    )


def made_under_later(half: ExportGrant | ImportGrant, policy: ResidencyPolicy) -> Refusal | None:
    """A region's half, and its policy in force. Under a half of a later revision nothing crosses: no log could show that it was allowed, as that
    policy has no leaf yet. None: it is of this revision, or of an earlier one."""
    if policy.revision >= half.policy_revision:
        return None
    return Refusal(
        RefusalKind.AGAINST_POLICY,
        f"The grant {half.grant} was made under revision {half.policy_revision} of the policy of {policy.region}; revision "
        f"{policy.revision} is in force.",
        "Put that revision in force first: felix policy apply FILE.",
        half.grant,
    )


def _not_approved(
    grant: str,
    tallies: Iterable[Tally],
    policy: ResidencyPolicy | None = None,
    rule: ApprovalRule | None = None,
) -> Refusal:
    lacking = [found for found in tallies if found.missing]
    asked = f", as rule {rule.rule} of revision {policy.revision} asks" if policy is not None and rule else ""
    return Refusal(
        RefusalKind.NOT_APPROVED,
        f"The grant {grant} is not approved{asked}. {'. '.join(map(str, lacking))}.",
        f"Another approver signs it: felix bridge approve {grant} --as NAME --region {lacking[0].region}.",
        grant,
        rule.rule if rule else "",
    )


def _because(reason: str) -> str:
    return f" ({reason.removesuffix('.')})" if reason else ""
