"""What document synchronization brings from one region to the other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from bridge_mesh import until
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from departures import DAY, terms

from bridge.document_sync import DocumentSync, missing
from felix.messages import Done, PutDocument
from keys.signing import SigningKey
from policy.grant import DenyEntry, ExportGrant, Standing, StandingAction, sign_deny, sign_standing
from policy.signed import NUMBER_MAX, Purpose, canonical, raw_public_key, sign
from policy.terms import GrantTerms, grant_id

US, EU = (SigningKey.from_seed(bytes([seed]) * 32).private_key for seed in (1, 2))


def export(wanted: GrantTerms, key: Ed25519PrivateKey = US, at: int = DAY) -> tuple[str, bytes]:
    found = wanted.hash()
    body = ExportGrant(
        grant=grant_id(found), terms=wanted, terms_hash=found.hex(), approvals=1, separate=False, policy_revision=1, policy_hash="0" * 64,
        signed_at=at,
    )  # fmt: skip
    return body.grant, sign(Purpose.EXPORT, "us-east", canonical(body), key).encode_file()


def standing(grant: str, region: str) -> bytes:
    said = Standing(grant=grant, action=StandingAction.PAUSE, region=region, sequence=1, at=DAY, by="alice")
    return sign_standing(said, US if region == "us-east" else EU).encode_file()


def deny(peer: str) -> bytes:
    return sign_deny(
        DenyEntry(streams="acme/*/*", peer=peer, region="us-east", sequence=1, at=DAY, by="alice"), US
    ).encode_file()


def test_what_one_region_signed_about_the_other_is_brought_once() -> None:
    grant, data = export(terms())
    elsewhere, other = export(terms(to_region="ap-south"))
    here = {
        "export": {grant: data, elsewhere: other},
        "standing": {f"{grant}.a": standing(grant, "us-east"), f"{grant}.b": standing(grant, "eu-west")},
        "deny": {"d.1": deny("eu-west"), "d.2": deny("ap-south"), "d.3": deny("*")},
    }
    wanted = [("export", grant), ("standing", f"{grant}.a"), ("deny", "d.1"), ("deny", "d.3")]
    assert missing(here, {}, "us-east", "eu-west", {}) == wanted
    assert missing(here, here, "us-east", "eu-west", {}) == []
    assert missing(here, {}, "eu-west", "us-east", {}) == [("standing", f"{grant}.b")]


def test_what_cannot_be_read_is_left_where_it_is() -> None:
    assert missing({"export": {"g": b"{}"}}, {}, "us-east", "eu-west", {}) == []


def test_a_half_under_a_key_of_now_takes_the_place_of_one_under_a_former_key_whatever_time_that_one_states() -> (
    None
):
    new = SigningKey.generate().private_key
    grant, former = export(terms(), US, NUMBER_MAX)
    again, later = (export(terms(), new, at)[1] for at in (DAY, DAY + 1))
    forged, first, second = ({"export": {grant: data}} for data in (former, again, later))
    keys = {"us-east": (raw_public_key(new),)}
    assert missing(first, forged, "us-east", "eu-west", keys) == [("export", grant)]
    assert missing(forged, first, "us-east", "eu-west", keys) == []
    assert missing(second, first, "us-east", "eu-west", keys) == [("export", grant)]
    assert missing(first, second, "us-east", "eu-west", keys) == []


async def test_what_is_missing_is_looked_for_again_where_a_region_changed_its_key() -> None:
    new = SigningKey.generate().private_key
    (grant, former), (_, again) = export(terms(), US, NUMBER_MAX), export(terms(), new)
    here, there, to = {"export": {grant: again}}, {"export": {grant: former}}, Region("eu-west")
    looked: asyncio.Queue[int] = asyncio.Queue()
    document_sync = DocumentSync(lambda: 0, lambda file: True, looked.put_nowait)
    async with asyncio.timeout(120):
        for key in (US, new):
            keys = {"us-east": (raw_public_key(key),)}
            document_sync.send(here, there, "us-east", to, keys)  # type: ignore[arg-type]
            await until(lambda: not document_sync.is_between("us-east", "eu-west"), "it was looked at")
            assert to.asked == ([] if key is US else ["export"])
        await document_sync.close()


class Region:
    """A region that takes what it is brought; a silent one never answers."""

    def __init__(self, name: str, *, silent: bool = False) -> None:
        self.profile = SimpleNamespace(region=name)
        self.silent = silent
        self.asked: list[str] = []

    async def request(self, request: PutDocument) -> Done:
        self.asked.append(request.kind)
        if self.silent:
            await asyncio.Event().wait()
        return Done()


async def test_a_region_that_never_answers_delays_only_itself() -> None:
    silent, other, source = Region("ap-south", silent=True), Region("eu-west"), Region("us-east")
    journeys: asyncio.Queue[int] = asyncio.Queue()
    document_sync = DocumentSync(lambda: 0, lambda file: True, journeys.put_nowait)
    (first, one), (second, two) = export(terms()), export(terms(to_region="ap-south"))
    here = {"export": {first: one, second: two}, "standing": {f"{first}.a": standing(first, "us-east")}}
    back = {"export": here["export"], "standing": {f"{first}.b": standing(first, "eu-west")}}

    nothing: dict[str, dict[str, bytes]] = {}

    def send_all() -> None:
        document_sync.send(here, nothing, "us-east", silent, {})  # type: ignore[arg-type]
        document_sync.send(here, nothing, "us-east", other, {})  # type: ignore[arg-type]
        document_sync.send(back, nothing, "eu-west", source, {})  # type: ignore[arg-type]

    send_all()
    assert document_sync.is_between("eu-west", "us-east")
    async with asyncio.timeout(120):
        assert sorted([await journeys.get(), await journeys.get()]) == [1, 2]
        while not silent.asked:  # noqa: ASYNC110 - of what is not answered no event comes
            await asyncio.sleep(0.01)
    send_all()
    assert not document_sync.is_between("eu-west", "us-east"), "what was taken is not brought again at once"
    assert document_sync.is_between("us-east", "ap-south")
    assert (sorted(other.asked), source.asked) == (["export", "standing"], ["standing"])
    assert silent.asked == ["export"], "of one way there is one journey at a time"
    async with asyncio.timeout(120):
        await document_sync.close()
