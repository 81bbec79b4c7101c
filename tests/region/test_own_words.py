"""Words of a region's own former policy key: what their leaf shows, and what comes of those that have none."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from audit_log import region_bundle

from audit.origin import egress_origin, region_origin
from keys.bundle import FormerKeys, KeyEnd, RegionBundle
from keys.signing import SigningKey
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_standing
from policy.signed import SignedDocument, verify
from region.governance.lasting import LastingDocuments, accepted_by_leaf
from region.governance.own_words import OwnWords
from region.trust.held_document import HeldDocument, digest_of

END = 6
FORMER, NOW, STRANGER = (SigningKey.generate() for _ in range(3))
LOG = region_origin("us-east", "acme")


def bundle(*ends: KeyEnd) -> RegionBundle:
    former = FormerKeys(policy_keys=(FORMER.verify_key.public,), ends=ends)
    own = msgspec.structs.replace(region_bundle("us-east"), policy_keys=(NOW.verify_key.public,))
    return own.with_former((former,))


OWN = bundle(KeyEnd(LOG, END, b"r" * 32))


def denied(
    key: SigningKey, number: int = 1, *, lifted: bool = False, region: str = "us-east"
) -> SignedDocument:
    entry = DenyEntry(
        streams="acme/ops/*", peer="*", region=region, sequence=number, at=1, by="a", lifted=lifted
    )
    return sign_deny(entry, key.private_key)


class Logged(dict[bytes, int | None]):
    """Leaves by the digests of documents."""

    def leaf_of(self, digest: bytes) -> int | None:
        return self.get(digest)


class Words:
    """What one broker makes of what the store holds and what it kept."""

    def __init__(
        self, leaves: Mapping[SignedDocument, int | None], *, kept: tuple[SignedDocument, ...] = (), own: RegionBundle = OWN
    ) -> None:  # fmt: skip
        self.logged = Logged({digest_of(document): leaf for document, leaf in leaves.items()})
        self.trusted = {"us-east": own.policy_keys, "eu-west": (FORMER.verify_key.public,)}
        memory = SimpleNamespace(keep=lambda *_: None)
        self.lasting = LastingDocuments(
            cast("Any", self.logged), cast("Any", memory), kept, lambda: self.trusted, OwnWords(own)
        )

    def waiting(self, *held: SignedDocument) -> list[Any]:
        return self.lasting.take(map(HeldDocument.of, (each.encode_file() for each in held)), self.is_genuine)

    def is_genuine(self, document: Any, is_accepted: bool) -> bool:
        try:
            if not is_accepted:
                verify(document, self.trusted)
        except Exception:
            return False
        return True


@pytest.mark.parametrize(("leaf", "counts"), [(END - 1, True), (END, False), (None, False)])
def test_a_leaf_behind_the_end_of_an_own_key_shows_no_word(leaf: int | None, counts: bool) -> None:
    said = denied(FORMER)
    words = Words({said: leaf})
    assert words.waiting(said) == []
    assert words.lasting.in_force() == ((said,) if counts else ())
    read = accepted_by_leaf([said.encode_file()], cast("Any", words.logged), OwnWords(OWN))
    assert read == ([said.encode_file()] if counts else [])


def test_without_an_end_in_the_regions_own_log_no_leaf_there_shows_anything() -> None:
    elsewhere = bundle(KeyEnd(egress_origin("us-east", "acme", "b"), END, b"r" * 32))
    assert not OwnWords(elsewhere).counts_by_leaf(denied(FORMER), 0)


def test_words_of_other_regions_and_under_keys_that_no_bundle_names_are_taken_as_they_were() -> None:
    words = OwnWords(OWN)
    assert words.counts_by_leaf(denied(FORMER, region="eu-west"), END)
    assert words.counts_by_leaf(denied(STRANGER), END)
    assert words.counts_by_leaf(denied(NOW), END)


def test_an_own_word_under_a_former_key_without_a_leaf_stays_in_force_and_gets_none() -> None:
    said, later = denied(FORMER), denied(NOW)
    words = Words({}, kept=(said,))
    assert words.waiting() == []
    assert words.lasting.in_force() == (said,) and words.lasting.to_be_said_again() == [said]
    assert words.lasting.is_to_be_said_again(later)
    # Said again under a key of now, which gets its leaf, and lifted: number and leaf of the one before say nothing.
    assert words.waiting(later) == [later]
    assert words.lasting.in_force() == (later,) and not words.lasting.to_be_said_again()
    lift = denied(NOW, 2, lifted=True)
    words.logged |= {digest_of(later): END + 4, digest_of(lift): END + 5}
    assert words.waiting(later, lift) == []
    assert words.lasting.in_force() == (lift,)


def test_another_regions_word_under_its_former_key_waits_for_its_leaf() -> None:
    said = denied(FORMER, region="eu-west")
    words = Words({}, kept=(said,))
    assert words.waiting() == [said] and not words.lasting.to_be_said_again()


def test_a_leaf_that_a_copy_of_the_log_had_not_got_yet_counts_once_it_has() -> None:
    said = denied(FORMER)
    words = Words({}, kept=(said,))
    assert words.waiting() == [] and words.lasting.to_be_said_again() == [said]
    words.logged[digest_of(said)] = END - 1
    assert words.lasting.in_force() == (said,) and not words.lasting.to_be_said_again()


def test_a_revocation_that_gets_no_leaf_gives_way_to_one_under_a_key_of_now() -> None:
    before, after = (
        sign_standing(
            Standing(grant="g-aaaaaaaaaaaaaaaa", action=StandingAction.REVOKE, region="us-east", sequence=1, at=1, by="a"),
            key.private_key,
        )
        for key in (FORMER, NOW)
    )  # fmt: skip
    words = Words({}, kept=(before,))
    assert words.waiting() == [] and words.lasting.to_be_said_again() == [before]
    assert words.waiting(after) == [after]
    assert words.lasting.in_force() == (after,) and not words.lasting.to_be_said_again()
