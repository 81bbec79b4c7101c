"""What of a region's words on where links go on (policy.truncation) is signed again under its key of now, for a grant that stands. Pure.

What crossed since such a word crossed under an incarnation that follows from its content, and from no grant. So a link goes on once its words are signed again as words on whichever
grant carries it now, also where they were on one that has ended since: the same regions, the same stream, and the same stream there.

All of them are, also several that end one incarnation: of these that one holds under which something crossed. Which words the region really signed, and when, says its audit log alone;
who calls here takes them from there. Caller: cli.sign_again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import msgspec

from felix.names import StreamName
from policy.grant import Standing, StandingAction
from policy.terms import GrantTerms
from policy.truncation import Accepted, Truncation, said_first

Path = tuple[str, str, str]
"""from which region to which, and the name that a stream has there"""


def accepted_by(word: Standing) -> Accepted:
    """What a word on where a link goes on says."""
    assert isinstance(word.truncation, Truncation)
    return Accepted(word.truncation, word.region, word.at, word.action is StandingAction.RESEND)


def path_of(terms: GrantTerms, stream: str) -> Path | None:
    """Where these terms lead a stream; None where they are of others."""
    name = StreamName.parse(stream)
    if not terms.pattern.matches(name):
        return None
    return terms.from_region, terms.to_region, str(terms.destination_of(name))


def words_again(
    grant: str,
    grants: Mapping[str, GrantTerms],
    words: Iterable[Standing],
    held: Container[bytes] = (),
) -> list[tuple[Standing, str]]:
    """The words on links that cross under `grant` now, as words on it, those that were said first before others; each with the grant that it was on. `grants`: the terms
    of this one, and of those that the words are on. `held`: incarnations that begin by words that count already."""
    terms = grants[grant]
    found: dict[bytes, tuple[Standing, str]] = {}
    for word in sorted(words, key=lambda each: said_first(accepted_by(each))):
        accepted = accepted_by(word)
        before, stream = grants.get(word.grant), accepted.truncation.stream
        if before is None or word.region != terms.from_region or accepted.incarnation in held:
            continue
        path = path_of(terms, stream)
        if path is not None and path == path_of(before, stream):
            # Whichever grant it was on, and however often it was signed again, it begins the same.
            found.setdefault(accepted.incarnation, (msgspec.structs.replace(word, grant=grant), word.grant))
    return list(found.values())


def carried_by(grant: str, grants: Mapping[str, GrantTerms], words: Iterable[Standing]) -> list[str]:
    """Of `grants` the others that lead the same stream to the same place: its own, or of a pattern those that the words on it are about."""
    terms = grants[grant]
    streams = {accepted_by(word).truncation.stream for word in words if word.grant == grant}
    if not terms.wildcard:
        streams.add(terms.stream)

    def carries(other: GrantTerms) -> bool:
        ends = (other.from_region, other.to_region) == (terms.from_region, terms.to_region)
        if ends and terms.wildcard and other.stream == terms.stream:
            return True
        return any(
            (path := path_of(terms, stream)) is not None and path == path_of(other, stream)
            for stream in streams
        )

    return sorted(name for name, other in grants.items() if name != grant and carries(other))
