"""A policy that may be signed can be put, listed by bridges and judged by; a longer one is refused with a sentence before it is signed.

A policy's text may have 256 KiB, and its file is longer: in JSON each line feed and quote has two bytes. What one request and one page of a
list carry is the limit (decision 0109).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import pytest
from attacks.conftest import Tally
from bridge_mesh import POLICIES, flight, two_regions, until
from signed_grants import signing_key

from bridge.document_sync import list_documents
from felix.errors import Code
from felix.frames import CONTROL_BYTES_MAX
from felix.messages import DocumentPage, ListDocuments, PutDocument, encode_request
from policy.approval import KIND_BYTES_MAX
from policy.documents import DOCUMENT_BYTES_MAX
from policy.residency import ResidencyError, ResidencyPolicy, parse_policy, sign_policy
from policy.signed import SignedDocument

pytestmark = pytest.mark.timeout(120)

MOST: Final = KIND_BYTES_MAX["policy"]


def policy_of(file_bytes: int, quotes: int = 0) -> ResidencyPolicy:
    """The second revision of us-east's, with a comment that makes its signed file so long."""
    text = POLICIES["us-east"].replace("revision: 1", "revision: 2") + "# " + '"' * quotes + "\n"
    short = sign_policy(parse_policy(text, "p"), signing_key("us-east"))
    rest = file_bytes - len(short.encode_file())
    return parse_policy(text[:-1] + "x" * rest + "\n", "p")


async def test_the_largest_policy_is_put_and_bridges_cross_under_it(tmp_path: Path, tally: Tally) -> None:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        document = sign_policy(policy_of(MOST, quotes=60_000), mesh.key("us-east"))
        assert len(document.encode_file()) == MOST
        await mesh.put("us-east", "policy", document)
        await mesh.publish([flight(0)])
        async with mesh.agent() as agent:
            await until(
                lambda: [link.state for link in agent.links()] == ["active"], "the link is active", 60
            )
            await until(mesh.arrived, "a record arrived", 60)
    tally("policies of the largest size", 1)


@pytest.mark.parametrize("kind", sorted(KIND_BYTES_MAX))
def test_what_may_be_put_fits_one_request_and_one_page(kind: str, tally: Tally) -> None:
    data, name = bytes(KIND_BYTES_MAX[kind]), "9" * 24
    encode_request(PutDocument(kind, data), 1 << 31)
    page = DocumentPage({f"g-{name}.{name}": data}, True, bytes(64))
    assert len(encode_request(page, 1)) <= CONTROL_BYTES_MAX + 64
    tally("documents of the largest size", 1)


def test_a_longer_one_is_refused_before_it_is_signed(tally: Tally) -> None:
    text = POLICIES["us-east"] + "# "
    text += '"' * (DOCUMENT_BYTES_MAX - len(text) - 1) + "\n"
    for policy in (policy_of(MOST + 1), parse_policy(text, "p")):
        with pytest.raises(ResidencyError, match=f"{MOST} are allowed") as refused:
            sign_policy(policy, signing_key("us-east"))
        assert refused.value.code is Code.FRAME_TOO_LARGE
        assert "two bytes" in refused.value.hint
        tally("policies that are too long", 1)


async def test_a_policy_of_before_the_limit_is_read_by_its_agent(tally: Tally) -> None:
    """The longest that a request could carry."""
    document, page = bytes(CONTROL_BYTES_MAX - 104), "9" * 24
    encode_request(PutDocument("policy", document), 1 << 31)

    class Lists:
        async def request(self, request: ListDocuments) -> DocumentPage:
            return DocumentPage({page: document}, False)

    found, _ = await list_documents(cast("Any", Lists()), ("policy",))
    assert found == {"policy": {page: document}}
    tally("policies of before the limit", 1)


def test_what_a_log_has_of_a_longer_one_is_read_as_before(tally: Tally) -> None:
    document = sign_policy(policy_of(MOST), signing_key("us-east"))
    longer = SignedDocument(
        document.purpose, document.region, document.key, document.body + b"#\n" * 9_000, document.signature
    )
    assert SignedDocument.parse(longer.encode_file()) == longer
    tally("policies that are too long", 1)
