"""Who was an approver once, and whoever writes a region's metadata store: an approval that is dated back into the time of its certificate counts no more
than where a broker is asked to take it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import timedelta
from pathlib import Path

import pytest
from attacks.conftest import Tally
from attacks.test_f13_unpinned_bundles import allowed, keys, write
from attacks.test_one_party_alone import EGRESS, INGRESS, files_of
from attacks.test_stop_word_outranked import Operator
from audit_log import TIME_MS, trust
from bridge_mesh import APPROVER, BRIDGE, Mesh, found_regions, until
from cryptography import x509
from signed_grants import approver, grant_leaves, paper_leaf, signed_grant

from audit.leaf import Kind, Side
from audit.verify import APPROVED_LATE, verify_log
from felix.errors import Code, RequestError
from felix.runtime.real import now_ms
from policy.approval import CLOCK_SKEW_MS, sign_approval
from region.bootstrap import issue_identity
from region.config import load_config
from region.metadata.transaction import Put

DAY_MS = 86_400_000


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_approval_under_a_certificate_that_ended_counts_for_nothing_in_the_store(
    tmp_path: Path, restarted: bool, tally: Tally
) -> None:
    then = now_ms() - 40 * DAY_MS
    us, eu = found_regions(tmp_path, then)
    for folder in (us, eu):
        issue_identity(folder, load_config(folder.config), "operator", "operator", now_ms())
        issue_identity(folder, load_config(folder.config), "approver", APPROVER, now_ms())
    issue_identity(us, load_config(us.config), "bridge", BRIDGE, now_ms())
    former = issue_identity(us, load_config(us.config), "approver", "gone", then, lifetime=timedelta(days=30))
    mesh = Mesh(tmp_path, us, eu)
    try:
        for region in ("us-east", "eu-west"):
            await mesh.start(region)
        await mesh.enact_policies()
        await mesh.create()
        body, export, accepted = mesh.sign_grant()
        await mesh.put("us-east", "export", export)
        await mesh.put("us-east", "import", accepted)
        await mesh.put("us-east", "approval", mesh.sign_approval("eu-west", body.terms_hash))
        approval = sign_approval(bytes.fromhex(body.terms_hash), former, now_ms() - 20 * DAY_MS)
        with pytest.raises(RequestError, match="expired"):
            await mesh.put("us-east", "approval", approval)
        assert allowed(mesh, body.grant) is Code.NOT_APPROVED
        name = f"{body.grant}.{hashlib.sha256(approval.claim.approver.encode()).hexdigest()[:24]}"
        await write(mesh, Put(keys(mesh).document("grants", "approval", name), approval.encode_file()))
        if restarted:
            await mesh.stop("us-east")
            await mesh.start("us-east")
        await asyncio.sleep(1)
        assert allowed(mesh, body.grant) is Code.NOT_APPROVED
        shown = json.loads(await Operator(mesh).does("show", body.grant, "--json"))
        tallies = {each["region"]: each["approved"] for each in shown["approvals"]}
        assert (shown["state"], tallies) == ("offered", {"us-east": [], "eu-west": [APPROVER]})
        mesh.nodes["us-east"].services.governance.trail.publish()
        leaves = mesh.headers(mesh.us.root / "data" / "audit", Kind.APPROVE)
        assert [leaf.actor for leaf in leaves] == ["spiffe://us-east.acme/operator/operator"], "eu-west's"
        # One whose certificate lives counts from the same place.
        genuine = mesh.sign_approval("us-east", body.terms_hash)
        name = f"{body.grant}.{hashlib.sha256(genuine.claim.approver.encode()).hexdigest()[:24]}"
        await write(mesh, Put(keys(mesh).document("grants", "approval", name), genuine.encode_file()))
        await until(lambda: allowed(mesh, body.grant) is None, "it counts")
        tally("approvals by a former approver", 2)
    finally:
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)


@pytest.mark.parametrize(("log", "side"), [(EGRESS, Side.EGRESS), (INGRESS, Side.INGRESS)])
def test_an_approval_that_came_after_its_certificate_had_ended_is_told_in_the_log_of_its_region(
    log: str, side: Side, tally: Tally
) -> None:
    """The writer's clock says when it came: that makes no log wrong (decision 0103). In the other region's log, and in an agent's, it may come at any
    time."""
    signed = signed_grant()
    for region in ("us-east", "eu-west"):
        approval = sign_approval(signed.terms.hash(), approver(region, "former"), TIME_MS)
        ended_ms = x509.load_pem_x509_certificates(approval.chain_pem)[0].not_valid_after_utc.timestamp()
        for by_ms in (-1, CLOCK_SKEW_MS, CLOCK_SKEW_MS + 1, 400 * DAY_MS):
            leaf = paper_leaf(approval, signed, side, int(ended_ms * 1000) + by_ms)
            report = verify_log(files_of(log, [*grant_leaves(signed, side), leaf]), trust())
            assert report.ok, report.findings
            told = [notice for notice in report.notices if notice.name == APPROVED_LATE]
            assert len(told) == ((log, region) == (INGRESS, "eu-west") and by_ms > CLOCK_SKEW_MS)
            tally("approvals that came late", 1)
