"""Signed documents that somebody brings: verified against the keys of the region that must have signed them, stored, and given their leaf.

Invariants: the store first, then the leaf, then judged by: the log never knows of what the store does not have. What another region may
have kept here, replace and sign again is bounded. On the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId
from felix.pace import Pace
from keys.bundle import decode_bundle
from keys.pin import decode_pin
from policy.approval import (
    APPROVERS_MAX,
    CLOCK_SKEW_MS,
    Approval,
    Document,
    open_approval,
    parse_document,
    refuse_ended,
    refuse_twin,
    require_size,
)
from policy.grant import (
    DenyEntry,
    ExportGrant,
    GrantError,
    ImportGrant,
    Standing,
    StandingAction,
    agree,
    half_rank,
    made_under_later,
    open_export,
    open_import,
)
from policy.residency import check_successor, open_policy, require_revision, require_visible
from policy.signed import Purpose, SignedDocument, decode_body, verify
from policy.signed_again import accepted_by
from policy.truncation import Truncation
from region.broker import Broker
from region.evidence.document_log import DocumentLog
from region.governance.denials import DENIED_PEERS_MAX
from region.governance.held_documents import PEER_BYTES_MAX, PEER_DOCUMENTS_MAX, STORED
from region.governance.judgement import MIRROR_TIMEOUT_S, Judgement
from region.governance.leaves import DRAIN_MS
from region.governance.logged_truncations import logged_truncations
from region.governance.parties import (
    ends_of,
    other_terms,
    require_concerned,
    require_end,
    require_party,
    require_say,
    require_source,
)
from region.metadata.catalog import Catalog
from region.metadata.mirror import CatalogMirror
from region.metadata.records import DocumentKind
from region.metadata.records import Side as DocumentSide
from region.trust.held_document import digest_of, document_id, require_signer
from region.trust.trusted_bundles import number_of, put_pin

SIGNED_AGAIN_MAX: Final = 8
"""How often another region may sign one half again, as it does after a new policy; each time is a leaf, and may be a file, for ever."""
SIGNED_AGAIN_PER_S: Final = 1 / 3_600
"""And so often after that."""
SUPERSEDED_MAX: Final = 1_000
"""How many pauses, resumptions, deny entries and liftings another region may replace by later ones at once: each is a leaf for ever.
A night's maintenance of 500 grants."""
SUPERSEDED_PER_S: Final = 1 / 60
"""And so many after that. What is refused is in force in the region that signed it, and nothing crosses without both."""
COMPACTED_MAX: Final = 100
"""Superseded documents that one document removes from the store where there is no room for it."""
HALVES_MAX: Final = 20_000
"""Halves that are remembered as signed again; one region can have 5,000 here."""
_DONE: Final = {
    StandingAction.PAUSE: "paused",
    StandingAction.RESUME: "resumed",
    StandingAction.REVOKE: "revoked",
    StandingAction.ACCEPT_TRUNCATION: "to go on after a truncation, accepted",
    StandingAction.RESEND: "to send again what stayed, asked for",
}
_PURPOSES: Final = {
    "export": Purpose.EXPORT,
    "import": Purpose.IMPORT,
    "approval": Purpose.APPROVAL,
    "standing": Purpose.STANDING,
    "deny": Purpose.DENY,
    "policy": Purpose.POLICY,
}


class DocumentIntake:
    """One per broker."""

    def __init__(
        self,
        broker: Broker,
        judgement: Judgement,
        catalog: Catalog,
        mirror: CatalogMirror,
        logged: DocumentLog,
    ) -> None:
        """`logged`: the documents that have a leaf."""
        clock = broker.runtime.clock
        self._broker = broker
        self._judgement = judgement
        self._regions = judgement.regions
        self._held = judgement.held
        self._leaves = judgement.leaves
        self._own = judgement.regions.own
        self._catalog = catalog
        self._mirror = mirror
        self._logged = logged
        self._superseded = Pace(SUPERSEDED_PER_S, SUPERSEDED_MAX, DENIED_PEERS_MAX, clock.monotonic)
        self._signed_again = Pace(SIGNED_AGAIN_PER_S, SIGNED_AGAIN_MAX, HALVES_MAX, clock.monotonic)

    async def put(self, actor: SpiffeId, kind: str, body: bytes) -> str:
        """Verify a signed document and put it in force. Returns a sentence for a person. Raises the refusal."""
        if kind == "bundle":
            return await self._put_bundle(body)
        if kind == "pin":
            return await self._put_pin(actor, body)
        require_size(kind, body)
        document = parse_document(body)
        if document.purpose is not _PURPOSES.get(kind):
            raise RequestError(
                f"The document is a {document.purpose}, not of the kind {kind!r}.", code=Code.GRANT_INVALID
            )
        if isinstance(document, Approval):
            return await self._put_approval(actor, document)
        if kind == "policy":
            return await self._put_policy(actor, document)
        verify(document, self._regions.policy_keys())
        if kind == "standing":
            return await self._put_standing(actor, document)
        await self._require_room(document)
        if kind == "deny":
            entry = decode_body(document, DenyEntry, Purpose.DENY)
            require_signer(document, entry.region, "deny entry")
            require_concerned(self._own.region, entry)
            if await self._is_outranked(actor, document, f"{entry.streams} to or from {entry.peer}"):
                return f"{entry.region} has a later word on {entry.streams} to or from {entry.peer}."
            await self._store_and_log(actor, "denies", "state", document_id(document), document)
            return f"{entry.streams} to or from {entry.peer}: {'lifted' if entry.lifted else 'denied'}."
        if kind == "import":
            accepted = open_import(document, self._regions.policy_keys())
            require_party(self._own.region, actor, accepted.bridge, accepted.from_region, accepted.to_region)
            self._require_same_terms(accepted)
            self._require_policy_of(accepted, accepted.to_region)
            # By the region that signed it: nobody's acceptance stands in the place of another's.
            name = f"{accepted.grant}.{accepted.to_region}"
            before = await self._require_newest("import", name, document, accepted)
            await self._store_and_log(actor, "grants", "import", name, document, before)
            return f"{accepted.grant} is accepted by {accepted.to_region}."
        export = open_export(document, self._regions.policy_keys())
        terms = export.terms
        require_party(self._own.region, actor, terms.bridge, terms.from_region, terms.to_region)
        self._require_policy_of(export, terms.from_region)
        before = await self._require_newest("export", export.grant, document, export)
        await self._store_and_log(actor, "grants", "export", export.grant, document, before)
        return f"{export.grant} is granted by {terms.from_region}."

    async def _put_standing(self, actor: SpiffeId, document: SignedDocument) -> str:
        standing = decode_body(document, Standing, Purpose.STANDING)
        require_signer(document, standing.region, str(standing.action))
        self._judgement.book.get(standing.grant, self._broker.clock_ms())
        ends = self._held.ends_of(standing.grant)
        require_end(self._own.region, standing, ends)
        if actor.kind != "bridge":
            # A bridge brings what was signed elsewhere, also by an earlier version, under which it may have carried something.
            require_source(standing, ends)
        done = f"{standing.grant} is {_DONE[standing.action]} by {standing.region}."
        if self._judgement.book.is_revoked_by(
            standing.grant, standing.region
        ) and not self._held.lasting.is_to_be_said_again(document):
            # The first one holds. Others would be kept, verified at each change, and have no end.
            return f"{standing.grant} is revoked by {standing.region} already."
        if said := await self._accepted_before(actor, standing):
            return said
        name = document_id(document)
        if standing.action is not StandingAction.REVOKE:
            if await self._is_outranked(actor, document, standing.grant):
                return f"{standing.region} has a later word on {standing.grant}."
            await self._require_room(document)
            await self._store_and_log(actor, "revocations", "state", name, document)
            return done
        # A revocation takes effect whether or not the log can be written, and its leaf comes behind what it found on its way.
        revision = await self._store(actor, "revocations", "state", name, document)
        await self._judgement.follow_to(revision)
        await asyncio.wait({self._leaves.log_soon(document)}, timeout=DRAIN_MS / 1000)
        return done

    async def _accepted_before(self, actor: SpiffeId, standing: Standing) -> str:
        """What an operator is told who ends a shard's incarnation that was ended before: who decides twice has one answer. Empty: it was not, or it is a word that this
        region's audit log has and that is signed again: what crossed may have crossed under it. Raises GrantError(CONFLICT) where it was ended otherwise."""
        cut = standing.truncation
        if not isinstance(cut, Truncation) or actor.kind == "bridge":
            # What a bridge brings stands elsewhere already: both regions hold all words, and choose alike (policy.truncation).
            return ""
        accepted = self._judgement.book.accepted_truncations(standing.grant, cut.stream, cut.shard)
        words = [held for held in accepted.get(cut.incarnation, ()) if held.region == standing.region]
        said = f"{standing.grant} is {_DONE[standing.action]} by {standing.region} already, from offset {cut.offset} on."
        if not words:
            return ""
        if accepted_by(standing) in words:
            return said
        logged = await asyncio.to_thread(logged_truncations, self._logged, self._own)
        if accepted_by(standing) in map(accepted_by, logged.values()):
            return ""
        if (cut, standing.action is StandingAction.RESEND) in {
            (held.truncation, held.is_resend) for held in words
        }:
            return said
        held = words[0]
        how = "a resend" if held.is_resend else "an accepted truncation"
        raise GrantError(
            f"Shard {cut.shard} of {cut.stream} goes on from offset {held.truncation.offset} by {how} of {held.region} already; "
            f"offset {cut.offset} was asked for by what was so before.",
            code=Code.CONFLICT,
            hint="Look at the link with `felix bridge status`, and decide again where it is truncated still.",
        )

    async def _store_and_log(
        self,
        actor: SpiffeId,
        kind: DocumentKind,
        side: DocumentSide,
        name: str,
        document: Document,
        before: int | None = None,
    ) -> None:
        """Into the store first, then its leaf, and wait until this broker judges by it. The log never knows of what the store does
        not have: whatever ends this between the two, what stands in the store without a leaf gets one, and allows nothing
        before that. `before`: the revision that it replaces, None for whichever there is."""
        revision = await self._store(actor, kind, side, name, document, before)
        await self._judgement.take_in(document, revision)

    async def _put_policy(self, actor: SpiffeId, document: SignedDocument) -> str:
        policy = open_policy(document, {self._own.region: self._own.policy_keys}, "the policy")
        require_revision(policy)
        require_visible(policy)
        if self._judgement.policies.newest is not None:
            check_successor(self._judgement.policies.newest, policy)
        unbelieved = self._judgement.policies.unbelieved
        await self._catalog.put_policy(policy.revision, document.encode_file(), unbelieved=unbelieved)
        self._leaves.name_actor(document, actor)
        await self._leaves.log_stored(document)
        if digest_of(document) not in self._logged:
            return (
                f"Policy revision {policy.revision} of {policy.region} is kept, and in force within a minute: "
                "transfers of before have their leaves first."
            )
        self._judgement.recheck(document)
        async with asyncio.timeout(MIRROR_TIMEOUT_S):
            await self._judgement.watch.until(
                lambda: (
                    self._judgement.policy is not None and self._judgement.policy.revision >= policy.revision
                )
            )
        return f"Policy revision {policy.revision} of {policy.region} is in force."

    async def _put_bundle(self, body: bytes) -> str:
        signed = decode_bundle(body)
        bundle = signed.bundle
        if bundle.region == self._own.region:
            raise RequestError("That is this region's own bundle.", hint="Trust the other region's.")
        if bundle.mesh != self._own.mesh:
            raise RequestError(
                f"{bundle.region} belongs to mesh {bundle.mesh!r}, this region to {self._own.mesh!r}.",
                code=Code.WRONG_REGION,
            )
        held = self._regions.bundles.get(bundle.region)
        if held == bundle:
            return f"{bundle.region} is trusted already."
        if not await asyncio.to_thread(self._regions.is_pinned, bundle):
            if held is None:
                raise RequestError(
                    f"Nobody compared this bundle of {bundle.region} for {self._own.region}.",
                    code=Code.FORBIDDEN,
                    hint=f"Where {self._own.region}'s policy key is, compare its fingerprint: felix region trust FILE.",
                )
            self._regions.check_update(held, signed)
        self._regions.check_new(signed)
        revision = self._mirror.trusted_revision(bundle.region)
        await self._catalog.put_trusted(bundle.region, body, revision=revision)
        return f"{bundle.region} is trusted, fingerprint {bundle.fingerprint()}."

    async def _put_pin(self, actor: SpiffeId, body: bytes) -> str:
        pin = decode_pin(body, self._own)
        region = pin.bundle.region
        if not self._regions.is_later(pin):
            held = self._regions.pin_of(region)
            is_same = self._regions.bundles.get(region) == pin.bundle and not pin.is_withdrawn
            if pin == held or is_same:
                later = pin if held is None else held
                if number_of(self._mirror.pins().get(region), self._own) < later.pin.number:
                    # The store lost it, or it is of a key that this region gave up: a broker that begins anew would believe nobody.
                    await self._judgement.follow_to(await put_pin(later, self._catalog, self._mirror))
                return f"{region} is {'not trusted any more' if pin.is_withdrawn else 'trusted'} already."
            raise RequestError(
                f"{self._own.region} has compared another bundle of {region}, or this one, later than this pin says, or took its trust back.",
                code=Code.CONFLICT,
                hint=f"felix region trust --region {self._own.region} takes what was compared later. If this is the bundle to trust, compare it again "
                "after that: felix region trust FILE --fingerprint ….",
            )
        if not pin.is_withdrawn:
            self._regions.check_new(pin.pin.bundle)
        self._judgement.pin_leaves.name_actor(pin, actor)
        await self._judgement.follow_to(await put_pin(pin, self._catalog, self._mirror))
        await self._judgement.pin_leaves.wait(pin)
        if pin.is_withdrawn:
            return f"{region} is not trusted any more."
        return f"{region} is trusted, fingerprint {pin.bundle.fingerprint()}."

    async def _put_approval(self, actor: SpiffeId, approval: Approval) -> str:
        trust, now = self._regions.trust, self._broker.clock_ms()
        body = open_approval(approval, trust)
        approver = SpiffeId.parse(body.approver)
        export = require_say(self._own.region, body, self._judgement.book.get(body.grant, now).export)
        require_party(self._own.region, actor, export.terms.bridge, *ends_of(export.terms))
        if body.region == self._own.region:
            refuse_ended(approval, trust, now)
            refuse_twin(approval)
            if body.at > now + CLOCK_SKEW_MS:
                raise GrantError(
                    f"The approval of {body.grant} by {approver.name} is dated {(body.at - now) // 1000} s ahead.",
                    hint="Compare the clocks, and have it signed again.",
                )
        if self._judgement.book.approval(body.grant, approver) is not None:
            return f"{body.grant} is approved by {approver.name} of {body.region} already."
        if self._judgement.book.approvers(body.grant, body.region) >= APPROVERS_MAX:
            raise GrantError(
                f"{APPROVERS_MAX} people of {body.region} have approved {body.grant}; no more are kept.",
                hint="More approvals change nothing.",
            )
        await self._require_room(approval)
        name = f"{body.grant}.{hashlib.sha256(body.approver.encode()).hexdigest()[:24]}"
        await self._store_and_log(actor, "grants", "approval", name, approval)
        found = next(
            (
                each
                for each in self._judgement.book.get(body.grant, now).approvals
                if each.region == body.region
            ),
            None,
        )
        return f"{body.grant} is approved by {approver.name} of {body.region}." + (
            f" {found}." if found else ""
        )

    def _require_same_terms(self, accepted: ImportGrant) -> None:
        """An acceptance fits the export grant that is held under its id. Raises GrantError(GRANT_MISMATCH)."""
        try:
            export = self._judgement.book.get(accepted.grant, self._broker.clock_ms()).export
        except GrantError:
            return
        if export is not None and not agree(export, accepted):
            raise other_terms(accepted)

    def _require_policy_of(self, half: ExportGrant | ImportGrant, region: str) -> None:
        """An own half comes behind its policy: what crosses under it could not be shown to be allowed. Raises GrantError(CONFLICT)."""
        if region != self._own.region or self._judgement.policy is None:
            return
        later = made_under_later(half, self._judgement.policy)
        if later is not None:
            raise GrantError(later.sentence, code=Code.CONFLICT, hint=later.hint)

    async def _require_newest(
        self, kind: str, name: str, document: SignedDocument, half: ExportGrant | ImportGrant
    ) -> int:
        """A half does not take the place of one that outranks it, nor one of another region's again and again. Returns the revision of what
        it would replace.

        Raises GrantError(CONFLICT), UnavailableError(LIMIT_RATE).
        """
        stored = await self._catalog.document(*STORED[kind], name)
        if stored is None:
            return 0
        try:
            held, keys = SignedDocument.parse(stored.document), self._regions.policy_keys()
            before = open_export(held, keys) if kind == "export" else open_import(held, keys)
        except FelixError:
            return stored.revision  # what is not believed is replaced
        if before.terms_hash != half.terms_hash:
            raise GrantError(
                f"The grant {half.grant} stands with other terms here: two terms have the same id.",
                code=Code.CONFLICT,
                hint="Change a word of the new terms, and grant them again: they get another id.",
            )
        if half_rank(before) > half_rank(half):
            raise GrantError(
                f"{held.region} signed {before.grant} again at {before.signed_at}; this is an older one.",
                code=Code.CONFLICT,
            )
        if document.region == self._own.region or held == document:
            return stored.revision
        wait_ms = self._signed_again.take(f"{kind}/{name}")
        if wait_ms:
            raise UnavailableError(
                f"{document.region} has signed {before.grant} {SIGNED_AGAIN_MAX} times and more.",
                code=Code.LIMIT_RATE,
                hint="Make a new grant, or bring this one later.",
                retry_after_ms=wait_ms,
            )
        return stored.revision

    async def _is_outranked(self, actor: SpiffeId, document: SignedDocument, about: str) -> bool:
        """True where a later word takes the place of this one, which gets its leaf and is kept no longer. Raises
        UnavailableError(LIMIT_RATE) where another region replaces its words without end, and GrantError(CONFLICT) where it is one of this region's operators who says it:
        he is not told that it is done where nothing comes of it. `about`: what the word is on."""
        if (
            document.region != self._own.region
            and self._held.lasting.has(document)
            and digest_of(document) not in self._logged
        ):
            wait_ms = self._superseded.take(document.region)
            if wait_ms:
                raise UnavailableError(
                    f"{document.region} has replaced {SUPERSEDED_MAX} of its pauses and deny entries and more.",
                    code=Code.LIMIT_RATE,
                    hint="Bring this one later.",
                    retry_after_ms=wait_ms,
                )
        if not self._held.lasting.outranks(document):
            return False
        if document.region == self._own.region and actor.kind != "bridge":
            raise GrantError(
                f"{document.region} has a later word on {about}: this one is not in force, and changes nothing.",
                code=Code.CONFLICT,
                hint="Say it again, under a clock that is right: its number is the time, or one more than that of the word that this broker knows. "
                f"If it is refused again, a word of the highest number stands: change the policy key of {document.region}.",
            )
        self._leaves.name_actor(document, actor)
        await self._leaves.log(document)
        return True

    async def _require_room(self, document: Document) -> None:
        """Another region may have so many documents kept here, of so many bytes, and one revocation of each grant besides. A half takes the
        place of the one before it; no newer document takes another's. Raises UnavailableError(LIMIT_MEMORY)."""
        region = document.region
        if region == self._own.region or self._held.has_room(document):
            return
        await self._compact(region)
        replaces = isinstance(document, SignedDocument) and self._held.lasting.has(document)
        if not replaces and not self._held.has_room(document):
            documents, size = self._held.taken_by(region)
            raise UnavailableError(
                f"{region} has {documents} documents of {size >> 20} MiB in {self._own.region}; "
                f"{PEER_DOCUMENTS_MAX} of {PEER_BYTES_MAX >> 20} MiB in all are the most that are kept.",
                code=Code.LIMIT_MEMORY,
                hint="Remove grants that ended long ago from the metadata store.",
            )

    async def _compact(self, region: str) -> None:
        """Remove a region's documents from the store whose place a later word took: they stand in the log, and what this broker keeps
        of the later word holds against them should somebody bring them again."""
        outranked = self._held.outranked(region)[:COMPACTED_MAX]
        for kind, side, name in outranked:
            await self._catalog.delete_document(kind, side, name)
        async with asyncio.timeout(MIRROR_TIMEOUT_S):
            await self._mirror.until(
                lambda: all(self._mirror.document(*place) is None for place in outranked)
            )

    async def _store(
        self,
        actor: SpiffeId,
        kind: DocumentKind,
        side: DocumentSide,
        name: str,
        document: Document,
        before: int | None = None,
    ) -> int:
        """Keep a verified document in place of the one of revision `before`, or of whichever there is; its leaf names the actor.
        Returns the revision that has it. Raises RequestError(CONFLICT)."""
        self._leaves.name_actor(document, actor)
        try:
            data = document.encode_file()
            held = await self._catalog.document(kind, side, name)
            if held is not None and held.document == data:
                return held.revision
            if before is None:
                before = 0 if held is None else held.revision
            return (await self._catalog.put_document(kind, side, name, data, revision=before)).revision
        except BaseException:
            self._leaves.forget_actor(document)
            raise
