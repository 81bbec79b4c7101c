"""Why a stream may cross between two regions now, or may not: the answer of a grant book, and its grounds. Pure.

A broker answers `explain_crossing` with it, from the same grant book and policy by which it admits bridges.
"""

from __future__ import annotations

from typing import NamedTuple

from felix.names import StreamName
from policy.grant import Attempt, GrantBook, GrantView, Refusal
from policy.residency import Decision, Question, ResidencyPolicy, decide, decide_grant


class Explanation(NamedTuple):
    """The grant book's own answer, and its grounds. `view`: the grant that it is about, if there is one."""

    refusal: Refusal | None
    decision: Decision
    view: GrantView | None

    @property
    def crosses(self) -> bool:
        return self.refusal is None


def explain_crossing(
    book: GrantBook, policy: ResidencyPolicy, stream: StreamName, source: str, destination: str, now: int
) -> Explanation:
    """Whether a stream may cross right now, as a broker with this policy and this grant book decides."""
    answer = book.check(Attempt(stream, source, destination), policy, now)
    view = book.get(answer.grant, now) if answer.grant else None
    terms = view.export.terms if view is not None and view.export is not None else None
    decision = (
        decide(policy, Question(stream, source, destination), now)
        if terms is None
        else decide_grant(policy, terms, stream, now)
    )
    return Explanation(answer if isinstance(answer, Refusal) else None, decision, view)
