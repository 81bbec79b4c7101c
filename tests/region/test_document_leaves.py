"""Leaves of documents on a broker that does not write them: what it keeps of a document ends with its leaf, whoever wrote that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from audit_log import region_bundle
from signed_grants import signed_grant

from felix.names import SpiffeId
from region.governance.leaves import DocumentLeaves
from region.held_document import digest_of

OPERATOR = SpiffeId("us-east", "acme", "operator", "alice")


class Logged(set[bytes]):
    """The log of documents: those that have a leaf."""

    learn = set[bytes].add


class Elsewhere:
    """Another broker writes the leaves, and has written them."""

    writes_here = False

    async def has_leaf(self, digest: bytes, *, passed: bool) -> bool:
        return True


async def test_who_put_a_document_is_forgotten_once_another_broker_has_written_its_leaf() -> None:
    logged, nothing = Logged(), cast("Any", None)
    leaves = DocumentLeaves(
        cast("Any", SimpleNamespace(broker_id="2")), region_bundle("us-east"), nothing, cast("Any", logged), nothing,
        nothing, nothing, nothing, cast("Any", Elsewhere()), lambda: None,
    )  # fmt: skip
    document = signed_grant().export
    leaves.name_actor(document, OPERATOR)
    await leaves.log(document)
    assert logged == {digest_of(document)} and leaves.is_current
    assert not leaves._actors
