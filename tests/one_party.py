"""One party alone: what each party can put into the leaves of the logs that it can sign, as a table of cells.

The world: one grant of us-east to eu-west over one bridge, three batches across; the egress log (kept by the agent), the
ingress log (kept by eu-west) and the log of us-east itself. A party changes one field of one leaf, signs everything anew
with every key that it holds, *before* the other region cosigns, so that the cosignature is genuine. A cell is (party, log,
kind, field). Either `felix audit verify` of one of the logs finds it, or the reconciliation of both sides does, or the
table says that the party *can*, and why that shows nothing wrong about what crossed.

`CAN` is data for docs/claims.md: rules in order, the first that fits a cell says its reason.
"""

from __future__ import annotations

from typing import Final, NamedTuple

AGENT: Final = "agent"
SOURCE: Final = "source operator"
DESTINATION: Final = "destination operator"
THIRD: Final = "third region"
PARTIES: Final = (AGENT, SOURCE, DESTINATION, THIRD)

EGRESS: Final = "egress"
INGRESS: Final = "ingress"
REGION: Final = "source region's own"
LOGS: Final = (EGRESS, INGRESS, REGION)

SIGNS: Final = {
    AGENT: (EGRESS,),
    SOURCE: (EGRESS, REGION),
    DESTINATION: (INGRESS,),
    THIRD: (),
}
"""Whose logs a party can sign. Who signs none can try all three; each is refused by its signature."""


class Cell(NamedTuple):
    """One field of one kind of leaf in one log, in the hands of one party."""

    party: str
    log: str
    kind: str
    field: str


class Rule(NamedTuple):
    """Cells that a party can write as it likes, and why. Empty sets: all."""

    reason: str
    fields: frozenset[str]
    kinds: frozenset[str] = frozenset()
    logs: frozenset[str] = frozenset()

    def fits(self, cell: Cell) -> bool:
        return (
            cell.field in self.fields
            and (not self.kinds or cell.kind in self.kinds)
            and (not self.logs or cell.log in self.logs)
        )


def _set(*names: str) -> frozenset[str]:
    return frozenset(names)


PAPERS: Final = _set("GRANT", "ACCEPT", "APPROVE", "STANDING", "DENY_ENTRY", "REVOKE", "POLICY")
CROSSING: Final = _set("INTENT", "ACK", "WITHHELD", "GAP")
EVENTS: Final = _set("DENY", "KEY", "SEAL", "UNCLEAN")

CAN: Final = (
    Rule(
        "when the keeper of the log says that it was: inside the grant's window, and told where it is later than a cosignature that covers it",
        _set("time_ms"),
    ),
    Rule(
        "who put the document there: the document itself says who signed it",
        _set("actor"),
        PAPERS,
    ),
    Rule("a sentence for people, which nothing is concluded from", _set("sentence")),
    Rule("the keeper's own report about itself, which nobody else witnesses", frozenset(), EVENTS),
    Rule(
        "records that stayed: only the source knows why, and what they were",
        _set(
            "reason",
            "code",
            "commitment_key_id",
            "entries.time_ms",
            "entries.size",
            "entries.commitment",
            "entries.tag",
            "source_epoch",
            "source_batch_sha256",
            "grant_id",
            "terms_hash",
            "destination_stream",
            "policy_version",
            "policy_hash",
        ),
        _set("WITHHELD"),
    ),
    Rule(
        "offsets that never left: only the source knows why they are missing",
        _set(
            "gap",
            "grant_id",
            "terms_hash",
            "destination_stream",
            "source_epoch",
            "policy_version",
            "policy_hash",
        ),
        _set("GAP"),
    ),
    Rule(
        "ids of the keeper's own keys, for finding them; they open nothing and commit to nothing",
        _set("source_key_id", "destination_key_id", "commitment_key_id"),
    ),
    Rule(
        "the keeper's word for the policy in force; which policy counts is in the signed documents",
        _set("policy_version", "policy_hash"),
    ),
    Rule(
        "of a batch as it stands sealed at the source, which only the source can open",
        _set("source_batch_sha256"),
    ),
    Rule("how often it was sent: each delivery has one receipt all the same", _set("attempt")),
    Rule(
        "left out, as before leaves named them: the ACK of the egress log names the regions, as the destination's receipt has them",
        _set("path"),
        _set("INTENT", "ACK"),
    ),
    Rule(
        "a later word of the same region about its own grant, in its own hand",
        _set("document", "document_sha256"),
        _set("STANDING", "REVOKE", "DENY_ENTRY"),
    ),
    Rule(
        "how long a region says that what was on its way had: it can only have more told of its own log",
        _set("drain_until_ms"),
    ),
    Rule("pause or resume: the signed document says which", _set("action"), _set("DENY_ENTRY")),
    Rule(
        "the destination signed the right one in its receipt, which the source holds; the records are the entries",
        _set("source_epoch", "last_offset"),
        _set("ACK"),
        _set(INGRESS),
    ),
    Rule("the records that stayed are its entries, one by one", _set("last_offset"), _set("WITHHELD")),
    Rule(
        "a document that concerns no grant belongs to both sides", _set("side"), _set("POLICY", "DENY_ENTRY")
    ),
)
"""The first rule that fits is the reason."""

UNUSED: Final = "not used by this kind: no reader asks for it"


def reason(cell: Cell, used: bool) -> str:
    """Why a party can write what it likes there; empty where it must be found. `used`: the kind has a value there."""
    if not used:
        return UNUSED
    for rule in CAN:
        if rule.fits(cell) or (rule.kinds == EVENTS and not rule.fields and cell.kind in EVENTS):
            return rule.reason
    return ""
