"""What somebody wants to move from one region to another, and the answer: under which grant it may, or why it may not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from felix.errors import Code
from felix.names import SpiffeId, StreamName
from policy.grant_documents import ExportGrant, GrantError, ImportGrant
from policy.residency import Decision
from policy.terms import GrantTerms


class RefusalKind(StrEnum):
    """Why nothing crosses; one sentence and one code for each."""

    DENIED = "denied"
    NO_GRANT = "no-grant"
    IMPORT_MISSING = "import-missing"
    EXPORT_MISSING = "export-missing"
    FORGED = "forged"
    OUTDATED = "outdated"
    LEFT_OUT = "left-out"
    TERMS_MISMATCH = "terms-mismatch"
    WRONG_BRIDGE = "wrong-bridge"
    REVOKED = "revoked"
    NOT_YET = "not-yet"
    EXPIRED = "expired"
    NOT_APPROVED = "not-approved"
    PAUSED = "paused"
    LOOP = "loop"
    ONWARD = "onward"
    AGAINST_POLICY = "against-policy"
    BUDGET = "budget"


CODES: Final[Mapping[RefusalKind, Code]] = {
    RefusalKind.DENIED: Code.RESIDENCY_DENIED,
    RefusalKind.NO_GRANT: Code.GRANT_MISSING,
    RefusalKind.IMPORT_MISSING: Code.GRANT_MISSING,
    RefusalKind.EXPORT_MISSING: Code.GRANT_MISSING,
    RefusalKind.FORGED: Code.GRANT_INVALID,
    RefusalKind.OUTDATED: Code.GRANT_INVALID,
    RefusalKind.LEFT_OUT: Code.GRANT_MISSING,
    RefusalKind.NOT_APPROVED: Code.NOT_APPROVED,
    RefusalKind.TERMS_MISMATCH: Code.GRANT_MISMATCH,
    RefusalKind.WRONG_BRIDGE: Code.IDENTITY_REFUSED,
    RefusalKind.REVOKED: Code.GRANT_REVOKED,
    RefusalKind.NOT_YET: Code.GRANT_NOT_YET,
    RefusalKind.EXPIRED: Code.GRANT_EXPIRED,
    RefusalKind.PAUSED: Code.PAUSED,
    RefusalKind.LOOP: Code.LOOP_REFUSED,
    RefusalKind.ONWARD: Code.RESIDENCY_DENIED,
    RefusalKind.AGAINST_POLICY: Code.RESIDENCY_DENIED,
    RefusalKind.BUDGET: Code.BUDGET_EXHAUSTED,
}


class Attempt(NamedTuple):
    """What somebody wants to do: move records of `stream` from one region to the other.

    `bridge` None: whichever the grant names. `path`: the regions that the records have been in, oldest first; the source
    region itself may be among them.
    """

    stream: StreamName
    from_region: str
    to_region: str
    bridge: SpiffeId | None = None
    path: tuple[str, ...] = ()


class Allowed(NamedTuple):
    """It may cross, under this grant. `export` and `accepted` are the two bodies that agree."""

    export: ExportGrant
    accepted: ImportGrant
    terms_hash: bytes
    destination_stream: StreamName
    decision: Decision | None
    """of the policy that was asked; None where none was"""

    @property
    def grant(self) -> str:
        return self.export.grant

    @property
    def terms(self) -> GrantTerms:
        return self.export.terms


class Refusal(NamedTuple):
    """It may not, for this reason. `grant` is empty where no grant is involved; `rule` where no policy rule is."""

    kind: RefusalKind
    sentence: str
    hint: str
    grant: str = ""
    rule: str = ""

    @property
    def code(self) -> Code:
        return CODES[self.kind]

    def error(self) -> GrantError:
        """The refusal as an error."""
        return GrantError(self.sentence, code=self.code, hint=self.hint)


def check_path(grant: str, terms: GrantTerms, path: tuple[str, ...]) -> Refusal | None:
    """The refusal of one record for where it has been, or None. `grant` is empty where terms have no grant yet.

    For the bridge, which asks the grant book once per batch and this for every record that has a path.
    """
    elsewhere = [region for region in path if region != terms.from_region]
    if terms.to_region in elsewhere:
        return Refusal(
            RefusalKind.LOOP,
            f"The records have been in {terms.to_region} already; they do not return there.",
            "Grant the stream in one direction only, or filter what came from there.",
            grant,
        )
    if elsewhere and not terms.onward:
        return Refusal(
            RefusalKind.ONWARD,
            f"The records came from {elsewhere[0]}, and {f'the grant {grant}' if grant else 'this grant'} does not allow onward transfer.",
            "Make a grant that allows it, where the policy does.",
            grant,
        )
    return None
