"""A changed book says what a new one of the same documents would, and looks at what changed alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from approvers import approvals, roots
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from departures import DAY, terms

from felix.names import StreamName
from policy.approval import Document
from policy.grant import (
    Allowed,
    Attempt,
    DenyEntry,
    GrantBook,
    Standing,
    StandingAction,
    open_import,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy
from policy.signed import Purpose, canonical, raw_public_key, sign
from policy.terms import grant_id
from policy.truncation import Truncation

EXAMPLES = Path(__file__).parents[2] / "examples" / "regions"
US_TEXT = (EXAMPLES / "residency.yaml").read_text()
EU_TEXT = (EXAMPLES / "residency-eu-west.yaml").read_text()
ONE = "    streams: [acme/ops/departures]"
US_POLICY = parse_policy(
    US_TEXT.replace(f"{ONE}      # of the class, only this stream\n", "    wildcards: true\n"), "us.yaml"
)
EU_POLICY = parse_policy(EU_TEXT.replace(f"{ONE}\n", "    wildcards: true\n"), "eu.yaml")
US, EU, MALLORY = (Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32) for seed in (1, 2, 3))
TRUSTED = {"us-east": [raw_public_key(US)], "eu-west": [raw_public_key(EU)]}
NOW = 10 * DAY
STREAM = "acme/ops/departures"
ATTEMPTS = [
    Attempt(StreamName.parse(stream), "us-east", "eu-west") for stream in (STREAM, "acme/ops/arrivals")
]
GRANTS = 12
BRIDGE = "spiffe://us-east.acme/bridge/other"


def documents_of(number: int) -> tuple[str, list[Document]]:
    """All that may be said about one grant, some of it forged. Two of three grants name one stream, the rest a pattern."""
    stream = STREAM if number % 3 else "acme/ops/*"
    wanted = terms(not_before=DAY, reference=f"R-{number}", stream=stream, wildcard="*" in stream)
    export = sign_export(wanted, US_POLICY, US, NOW)
    grant = grant_id(wanted.hash())
    cut: dict[str, Any] = {
        "truncation": Truncation(stream=STREAM, shard=0, incarnation="ab" * 16, epoch=number + 1, offset=10)
    }
    said = [
        (StandingAction.PAUSE, 1, {}),
        (StandingAction.RESUME, 2, {}),
        (StandingAction.ACCEPT_TRUNCATION, 3, cut),
        (StandingAction.REVOKE, 4, {}),
    ]
    found: list[Document] = [
        export,
        sign_import(export, EU_POLICY, EU, TRUSTED, "spiffe://eu-west.acme/operator/bob", NOW),
        *approvals(wanted.hash()),
    ]
    for region, key in (("us-east", US), ("eu-west", MALLORY if number % 2 else EU)):
        for action, sequence, more in said[: 3 if number % 4 else 4]:
            body = Standing(
                grant=grant, action=action, region=region, sequence=sequence, at=NOW, by="a", **more
            )
            found.append(sign_standing(body, key))
    return grant, found


def denials() -> list[Document]:
    return [
        sign_deny(
            DenyEntry(
                streams=streams, peer="*", region="us-east", sequence=sequence, at=NOW, by="a", lifted=lifted
            ),
            US,
        )
        for streams in (STREAM, "acme/ops/*")
        for sequence, lifted in ((1, False), (2, True))
    ]


@pytest.fixture(scope="module")
def pool() -> dict[str, list[Document]]:
    return {**dict(map(documents_of, range(GRANTS))), "": denials()}


def answers(book: GrantBook, grants: list[str]) -> dict[str, object]:
    """All that a book says, but for which of several sentences."""
    found: dict[str, object] = {
        "problems": {problem.document for problem in book.problems},
        "denies": book.denies(),
        "grants": book.list(NOW),
    }
    for attempt in ATTEMPTS:
        for grant in ("", *grants):
            result = book.check(attempt, US_POLICY, NOW, grant=grant)
            found[f"{attempt.stream} {grant}"] = (
                result if isinstance(result, Allowed) else (result.kind, result.code)
            )
    for grant in grants:
        found[f"sequence {grant}"] = [
            (book.next_sequence(grant, region, 0), book.is_revoked_by(grant, region))
            for region in ("us-east", "eu-west")
        ]
        found[f"cut {grant}"] = book.accepted_truncations(grant, STREAM, 0)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_book_says_what_a_new_one_would(
    pool: dict[str, list[Document]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policy.grant.ANEW_FROM", 1)
    draw = random.Random(seed)
    every = [document for found in pool.values() for document in found]
    grants = [grant for grant in pool if grant]
    held = draw.sample(every, len(every) // 2)
    book = GrantBook(held, TRUSTED, roots())
    allowed = 0
    for _ in range(25):
        gone = draw.sample(held, draw.randrange(4))
        rest = [document for document in every if document not in held]
        come = draw.sample(rest, min(len(rest), draw.randrange(4)))
        before = answers(book, grants)
        made = book.changed(gone, come)
        assert answers(book, grants) == before, "a book is a value"
        held = [document for document in held if document not in gone] + come
        draw.shuffle(held)
        book = made
        said = answers(book, grants)
        assert said == answers(GrantBook(held, TRUSTED, roots()), grants)
        allowed += any(isinstance(each, Allowed) for each in said.values())
    assert book.changed(held, ()).list(NOW) == ()


def test_of_many_documents_only_those_of_the_changed_grant_are_looked_at(
    pool: dict[str, list[Document]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are counted, not timed: what a change costs does not grow with the book."""
    book = GrantBook((document for found in pool.values() for document in found), TRUSTED, roots())
    looked: list[Document] = []
    take = GrantBook._take

    def counting(self: GrantBook, document: Document) -> None:
        looked.append(document)
        take(self, document)

    monkeypatch.setattr(GrantBook, "_take", counting)
    found = next(iter(pool.values()))
    book.changed(found[-1:], ())
    assert sorted(map(repr, looked)) == sorted(map(repr, found[:-1]))
    looked.clear()
    book.changed(
        (),
        [
            sign_deny(
                DenyEntry(streams="acme/*/*", peer="*", region="us-east", sequence=1, at=NOW, by="a"), US
            )
        ],
    )
    assert len(looked) == 1


def test_what_a_book_had_no_room_for_is_known_to_the_changed_one(pool: dict[str, list[Document]]) -> None:
    every = [document for found in pool.values() for document in found]
    grants = [grant for grant in pool if grant]
    most = len(every) - 3
    book = GrantBook(every, TRUSTED, roots(), documents_max=most)
    left_out = [claim.grant for claim in book.left_out]
    assert left_out

    deny = sign_deny(
        DenyEntry(streams="acme/none/*", peer="*", region="us-east", sequence=1, at=NOW, by="a"), US
    )
    more = book.including([deny])
    assert answers(more, grants) == answers(
        GrantBook([*every, deny], TRUSTED, roots(), documents_max=most), grants
    )
    assert set(left_out) <= {claim.grant for claim in more.left_out}

    gone = [
        document for grant, found in pool.items() if grant and grant not in left_out for document in found
    ]
    assert gone
    fewer = more.changed(gone, ())
    assert not fewer.left_out, "there is room again"
    rest = [document for document in (*every, deny) if document not in gone]
    assert answers(fewer, grants) == answers(GrantBook(rest, TRUSTED, roots()), grants)
    assert fewer.changed((), gone).left_out


def test_words_of_one_instant_count_alike_in_any_order() -> None:
    """A broker reads its documents in another order than the agent, and both must name one incarnation."""
    grant, (export, accepted, *_) = documents_of(1)
    cut = Truncation(stream=STREAM, shard=0, incarnation="ab" * 16, epoch=0, offset=10)
    words = [
        sign_standing(
            Standing(
                grant=grant, action=action, region="us-east", sequence=1, at=NOW, by="a", truncation=cut
            ),
            US,
        )
        for action in (StandingAction.RESEND, StandingAction.ACCEPT_TRUNCATION)
    ]
    ways = (words, words[::-1])
    books = [GrantBook([export, *way], TRUSTED, roots()) for way in ways]
    one, other = (book.live_incarnation(grant, STREAM, 0, bytes.fromhex("ab" * 16)) for book in books)
    assert one == other
    body = open_import(accepted, TRUSTED)
    halves = [sign(Purpose.IMPORT, "eu-west", canonical(body), EU)]
    halves.append(
        sign(Purpose.IMPORT, "eu-west", canonical(msgspec.structs.replace(body, bridge=BRIDGE)), EU)
    )
    one_list, other_list = (GrantBook(way, TRUSTED, roots()).list(NOW) for way in (halves, halves[::-1]))
    assert one_list == other_list
