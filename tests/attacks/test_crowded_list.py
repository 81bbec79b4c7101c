"""What one region signed takes no room from what another signed, in the list that an agent reads."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from attacks.conftest import Tally
from audit_log import TIME_MS, trust
from signed_grants import BRIDGE, deny_entry, signed_grant, signing_key, standing

from bridge import document_sync
from bridge.document_sync import KINDS, list_documents
from bridge.plan import UNFOUNDED_MAX, plan_links
from felix.messages import DocumentPage, ListDocuments
from felix.names import SpiffeId
from policy.grant import GrantBook, ImportGrant, StandingAction
from policy.signed import Purpose, SignedDocument, canonical, sign
from region.listing import fitting

REGIONS = ("us-east", "eu-west")
CROWD = 300
REVOKED = standing(signed_grant().grant, StandingAction.REVOKE, "us-east").encode_file()
PAUSES = [
    standing(signed_grant().grant, StandingAction.PAUSE, "eu-west", sequence=number).encode_file()
    for number in range(1, CROWD + 1)
]
DENIED = deny_entry("acme/ops/*", "us-east").encode_file()


class Broker:
    """It lists what it has, page by page, as brokers do."""

    def __init__(self, documents: dict[str, dict[str, bytes]]) -> None:
        self.documents = documents
        self.asked = 0

    async def request(self, request: ListDocuments) -> DocumentPage:
        self.asked += 1
        held = self.documents.get(request.kind, {})
        names = sorted(name for name in held if name > request.after)
        page = fitting((name, held[name]) for name in names[: request.limit])
        return DocumentPage(dict(page), len(names) > len(page))


def crowded(pauses: int) -> Broker:
    listed = {f"a.{number:04}": data for number, data in enumerate(PAUSES[:pauses])}
    return Broker({"standing": {**listed, "z": REVOKED}, "deny": {"z": DENIED}})


@pytest.mark.parametrize(("limit", "most"), [("LISTED_BYTES_MAX", 20 * len(REVOKED)), ("DOCUMENTS_MAX", 20)])
async def test_what_forbids_is_read_behind_what_another_region_signed(
    monkeypatch: pytest.MonkeyPatch, tally: Tally, limit: str, most: int
) -> None:
    monkeypatch.setattr(document_sync, limit, most)
    found, _ = await list_documents(crowded(40), KINDS, REGIONS)  # type: ignore[arg-type]
    assert found["standing"]["z"] == REVOKED and found["deny"]["z"] == DENIED
    assert 15 <= len(found["standing"]) - 1 <= 21, "of eu-west as much as it has room for"
    tally("documents that crowd a list", 40)


async def test_no_number_of_other_regions_hides_what_the_own_one_forbids(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    """The own region's broker keeps as much of each, also of those to which the bridge does not lead."""
    monkeypatch.setattr(document_sync, "DOCUMENTS_MAX", 20)
    others = {
        f"a.{number:04}": standing(
            signed_grant().grant, StandingAction.PAUSE, "ap-south", sequence=number
        ).encode_file()
        for number in range(1, CROWD + 1)
    }
    broker = Broker({"standing": {**others, "z": REVOKED}, "deny": {**others, "z": DENIED}})
    found, _ = await list_documents(broker, KINDS, REGIONS, is_own=True)  # type: ignore[arg-type]
    assert found["standing"]["z"] == REVOKED and found["deny"]["z"] == DENIED
    assert len(found["standing"]) == len(found["deny"]) == 21
    tally("documents that crowd a list", 2 * CROWD)


@pytest.mark.parametrize("regions", [(), ("us-east",), ("eu-west",)])
async def test_a_list_without_end_is_left(
    monkeypatch: pytest.MonkeyPatch, tally: Tally, regions: tuple[str, ...]
) -> None:
    """Whomever it claims to be of."""
    monkeypatch.setattr(document_sync, "DOCUMENTS_MAX", 60)
    broker = crowded(CROWD)
    found, _ = await list_documents(broker, ("standing",), regions)  # type: ignore[arg-type]
    assert len(found["standing"]) == 60
    assert broker.asked == 1 + len(regions)
    tally("documents that crowd a list", CROWD)


def accepted(number: int, region: str) -> SignedDocument:
    """An acceptance of a grant that nobody gave."""
    body = msgspec.structs.replace(
        msgspec.json.decode(signed_grant().accepted.body, type=ImportGrant),
        grant="g-" + f"{number:016o}".translate({48: "a", 49: "b"}),
        to_region=region,
        accepted_by=f"spiffe://{region}.acme/operator/bob",
    )
    return sign(Purpose.IMPORT, region, canonical(body), signing_key(region))


def test_acceptances_of_nothing_hide_no_other_regions(tally: Tally) -> None:
    count = 3 * UNFOUNDED_MAX
    documents = [*(accepted(number, "ap-south") for number in range(count)), accepted(count, "eu-west")]
    trusted = trust("us-east", "eu-west", "ap-south")
    book = GrantBook(documents, trusted.policy_keys, trusted.anchors)
    rows = plan_links(book, SpiffeId.parse(BRIDGE), {}, ["eu-west", "ap-south"], TIME_MS)
    assert Counter(row.destination_region for row in rows) == {"ap-south": UNFOUNDED_MAX, "eu-west": 1}
    tally("acceptances of nothing", count)
