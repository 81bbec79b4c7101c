"""Deny entries are looked up by a stream's name; the answer is that of a search through all of them, in a changed book too."""

from __future__ import annotations

from audit_log import BRIDGE, TIME_MS, trust
from hypothesis import given, settings
from hypothesis import strategies as st
from signed_grants import deny_entry

from felix.names import NamePattern, SpiffeId, StreamName
from policy.attempt import Attempt, Refusal, RefusalKind
from policy.grant import EVERYWHERE, DenyEntry, GrantBook
from policy.signed import Purpose, SignedDocument, decode_body

PART = st.builds(lambda stem, end: stem + end or "*", st.text("ab", max_size=2), st.sampled_from(["", "*"]))
ENTRY = st.builds(
    lambda streams, region, lifted: deny_entry("/".join(streams), region=region, lifted=lifted),
    st.tuples(PART, PART, PART),
    st.sampled_from(["us-east", "eu-west"]),
    st.booleans(),
)
NAME = st.tuples(*[st.text("ab", min_size=1, max_size=2)] * 3).map("/".join)


def denies(document: SignedDocument, stream: StreamName) -> bool:
    entry = decode_body(document, DenyEntry, Purpose.DENY)
    assert entry.peer == EVERYWHERE
    return not entry.lifted and NamePattern(entry.streams).matches(stream)


@settings(max_examples=100, deadline=None)
@given(first=st.lists(ENTRY, max_size=8), more=st.lists(ENTRY, max_size=2), name=NAME)
def test_a_stream_is_denied_where_one_entry_that_stands_matches_it(
    first: list[SignedDocument], more: list[SignedDocument], name: str
) -> None:
    stream = StreamName.parse(name)
    attempt = Attempt(stream, "us-east", "eu-west", SpiffeId.parse(BRIDGE), ("us-east",))
    book = GrantBook(first, trust().policy_keys, trust().anchors)
    for held, documents in ((book, first), (book.including(more), [*first, *more])):
        found = held.check(attempt, None, TIME_MS)
        assert isinstance(found, Refusal)
        # Of two of one number and pattern the one that denies holds.
        assert (found.kind is RefusalKind.DENIED) == any(denies(each, stream) for each in documents)
