"""A stream cannot be opened at a region's start. The leaf of a word waits for it where what the word stops may have arrived in it, and not
at the source, which may well have a stream of the name under which its records arrive abroad."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from attacks.conftest import Tally
from audit_log import TIME_MS, region_bundle, trust
from signed_grants import deny_entry, signed_grant, standing

from audit.leaf import Leaf
from felix.names import StreamName
from policy.approval import Document
from policy.grant import GrantBook, StandingAction
from region.crossing.landings import Landings
from region.governance.leaves import Alone, DocumentLeaves

GRANTED = signed_grant()
ARRIVES = StreamName.parse(GRANTED.terms.destination_stream)
WORDS: dict[str, Document] = {
    "revocation": standing(GRANTED.grant, StandingAction.REVOKE, "us-east"),
    "pause": standing(GRANTED.grant, StandingAction.PAUSE, "us-east"),
    "deny entry": deny_entry(GRANTED.terms.stream, "us-east"),
    "deny entry of all": deny_entry("*/*/*", "us-east"),
    "export again": GRANTED.export,
    "import again": GRANTED.accepted,
}


class Clock:
    broker_id = "1"

    def clock_ms(self) -> int:
        return TIME_MS


class Logged(list[bytes]):
    """The log of documents: what has a leaf."""

    async def append(self, document: bytes, leaf: Callable[[], Leaf]) -> None:  # type: ignore[override]
        super().append(document)


def leaves_of(region: str, landings: Landings) -> tuple[DocumentLeaves, Logged]:
    trusted = trust()
    book = GrantBook([GRANTED.export, GRANTED.accepted], trusted.policy_keys, trusted.anchors)
    logged, nothing = Logged(), cast("Any", None)
    leaves = DocumentLeaves(
        cast("Any", Clock()), region_bundle(region), nothing, cast("Any", logged), nothing,
        lambda: book, landings.drained, nothing, Alone(), nothing, lambda digest: True,
    )  # fmt: skip
    return leaves, logged


def closed(stream: StreamName) -> Landings:
    landings = Landings()
    landings.streams_opened()
    landings.unopened(stream)
    return landings


@pytest.mark.parametrize("word", WORDS)
async def test_at_the_source_a_word_waits_for_no_stream(word: str, tally: Tally) -> None:
    """Nothing arrives there under the grant."""
    leaves, logged = leaves_of("us-east", closed(ARRIVES))
    await leaves.log(WORDS[word])
    assert logged == [WORDS[word].encode_file()]
    tally("words about streams that do not open", 1)


@pytest.mark.parametrize("word", WORDS)
async def test_at_the_destination_it_waits_for_the_stream_in_which_records_arrive(
    word: str, tally: Tally
) -> None:
    other, logged = leaves_of("eu-west", closed(StreamName.parse("acme/other/stream")))
    await other.log(WORDS[word])
    assert len(logged) == 1, "nothing arrives in that one"
    landings = closed(ARRIVES)
    leaves, logged = leaves_of("eu-west", landings)
    waiting = asyncio.ensure_future(leaves.log(WORDS[word]))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done() and not logged
    landings.opened(ARRIVES)
    await waiting
    assert len(logged) == 1
    tally("words about streams that do not open", 2)
