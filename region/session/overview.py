"""What a region says of the mesh to those who may observe it: regions, grants, denials, audit logs. Read only.

Nothing here decides anything: states come from the grant book as it decides, sizes from the audit log and the witness. A signed
text stays as it is; the code that shows it escapes it. Caller: region.session.requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from audit.checkpoint import Checkpoint
from audit.note import parse_note
from audit.trail import Trail
from audit.witness import Witness
from felix.messages import (
    ApprovalTally,
    AuditLog,
    Cosigner,
    CrossingExplained,
    Denial,
    GrantSummary,
    KnownRegion,
)
from keys.bundle import RegionBundle
from policy.explanation import Explanation
from policy.grant import DenyEntry, GrantView


def known_region(bundle: RegionBundle) -> KnownRegion:
    """A region by its bundle."""
    return KnownRegion(bundle.region, bundle.mesh, bundle.country, bundle.jurisdiction)


def grant_summary(view: GrantView) -> GrantSummary:
    """One grant of the book; of an export that is not here yet, what its acceptance says."""
    half = view.export.terms if view.export is not None else view.accepted
    assert half is not None  # the book lists no grant of which it has neither half
    return GrantSummary(
        grant=view.grant,
        stream=half.stream,
        from_region=half.from_region,
        to_region=half.to_region,
        state=view.state.value,
        destination_stream=half.destination_stream,
        reason=view.waits_for,
        expires_ms=view.export.terms.expires if view.export is not None else 0,
    )


def denial(entry: DenyEntry) -> Denial:
    """A deny entry that stands."""
    return Denial(entry.streams, entry.region, entry.peer, entry.reason, entry.at)


def own_log(trail: Trail) -> AuditLog:
    """The region's own log at its last durable checkpoint, and who cosigned the newest one that is cosigned. Does not block."""
    head = Checkpoint.parse(parse_note(trail.checkpoint()).text)
    cosigned = trail.checkpoints.cosigned()
    if not cosigned:
        return AuditLog(head.origin, True, head.size, head.root)
    newest = max(cosigned, key=lambda each: each.checkpoint.size)
    # A witness with two keys cosigns with both: it is one cosigner.
    times: dict[str, int] = {}
    for by in newest.cosigned:
        times[by.key.name] = max(times.get(by.key.name, 0), (by.time_s or 0) * 1000)
    cosigners = [Cosigner(name, time_ms) for name, time_ms in sorted(times.items())]
    return AuditLog(head.origin, True, head.size, head.root, newest.checkpoint.size, cosigners)


def cosigned_logs(witness: Witness, origins: Iterable[str]) -> list[AuditLog]:
    """Other parties' logs, as far as this region has cosigned them. Reads a file for each; blocks."""
    found = []
    for origin in origins:
        note = witness.last_note(origin)
        if note is None:
            found.append(AuditLog(origin, False, 0, b""))
            continue
        head = Checkpoint.parse(parse_note(note).text)  # verified before it was kept
        found.append(AuditLog(origin, False, head.size, head.root, head.size, [Cosigner(witness.key.name)]))
    return found


def crossing_explained(found: Explanation) -> CrossingExplained:
    """The broker's decision about one crossing, as it stands on the wire."""
    decision, refusal, view = found.decision, found.refusal, found.view
    return CrossingExplained(
        found.crosses,
        decision.allowed,
        decision.rule or "",
        [str(reason) for reason in decision.reasons],
        "" if refusal is None else refusal.kind.value,
        "" if refusal is None else refusal.sentence,
        "" if view is None else view.grant,
        "none" if view is None else view.state.value,
        []
        if view is None
        else [
            ApprovalTally(each.region, each.needed, list(each.approved), each.missing, list(each.not_counted))
            for each in view.approvals
        ],
    )
