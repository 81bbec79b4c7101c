"""`felix bridge approve` and `submit`: signed on a machine that has nothing but files, handed in where the region is."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import STREAM, Mesh, two_regions
from e2e.command_mesh import Said, felix_command

from felix.files import PUBLIC, replace_file
from felix.identity_file import load_identity
from felix.names import StreamName
from felix.peer import TrustBundle
from felix.runtime.real import now_ms
from policy.approval import Approval, ApprovalRule, name_of, open_approval, tally
from policy.grant import GrantState


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path / "home") as mesh:
        yield mesh


class Desk:
    """A machine with a home of its own: the grant's file, the source's bundle, one approver's identity; no region."""

    def __init__(self, mesh: Mesh, place: Path) -> None:
        self.mesh, self.place = mesh, place
        (place / "empty").mkdir(parents=True)
        self.body, self.export, self.accepted = mesh.sign_grant()
        self.grant = place / "departures.grant"
        self.grant.write_bytes(self.export.encode_file())
        for name, source in (("us.json", mesh.us.bundle), ("dpo.pem", mesh.us.identity("dpo"))):
            shutil.copy(source, place / name)
        (place / "dpo.pem").chmod(0o600)

    async def approve(self, *words: str, code: int = 0, grant: str = "", as_: str = "", **how: Any) -> Said:
        return await asyncio.to_thread(
            felix_command,
            self.place / "empty", "bridge", "approve", grant or str(self.grant), "--as", as_ or str(self.place / "dpo.pem"),
            "--bundle", str(self.place / "us.json"), *words, code=code, cwd=self.place, **how,
        )  # fmt: skip


@pytest.fixture
def desk(mesh: Mesh, tmp_path: Path) -> Desk:
    return Desk(mesh, tmp_path / "desk")


async def test_signed_on_one_machine_and_handed_in_on_another(mesh: Mesh, desk: Desk) -> None:
    await mesh.create()
    for region in ("us-east", "eu-west"):
        await mesh.put(region, "export", desk.export)
        await mesh.put(region, "import", desk.accepted)
    said = await desk.approve("--out", "dpo.approval", "--yes", "--comment", "as discussed")
    for term in (
        STREAM,
        "SCC-2026-014",
        "pseudonymize tailnum",
        "no limit",
        "terms hash",
        desk.body.terms_hash,
    ):
        assert term in said.out, term
    approval = Approval.parse((desk.place / "dpo.approval").read_bytes())
    found = open_approval(approval, TrustBundle([mesh.bundle("us-east").anchor()]))
    assert (found.grant, found.name, found.comment) == (desk.body.grant, "dpo", "as discussed")
    # In the region: handed in as a file, and the second region's signed there by its name.
    handed = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "submit", str(desk.place / "dpo.approval"), "--region", "us-east"
    )
    assert f"{desk.body.grant} is approved by dpo of us-east" in handed.out
    again = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "submit", approval.encode_token(), "--region", "us-east"
    )
    assert "already" in again.out
    book = mesh.nodes["us-east"].services.governance.book
    assert book.get(desk.body.grant, now_ms()).state is GrantState.OFFERED
    listed = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "list", "--region", "us-east", "--json"
    )
    (row,) = listed.json()["items"]
    assert [(each["region"], each["approved"], each["missing"]) for each in row["approvals"]] == [
        ("us-east", ["dpo"], 0),
        ("eu-west", [], 1),
    ]
    explained = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "explain", "stream", STREAM, "--from", "us-east", "--region", "eu-west",
        "--json", code=3,
    )  # fmt: skip
    assert explained.json()["refused"] == "not-approved"
    # Approved by its id, in the region, with the terms from its broker.
    done = await asyncio.to_thread(
        felix_command,
        mesh.home,
        "bridge",
        "approve",
        desk.body.grant,
        "--as",
        "dpo",
        "--region",
        "eu-west",
        "--yes",
    )
    assert "eu-west: 1 of 1" in done.out
    shown = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "show", desk.body.grant, "--region", "eu-west", "--json"
    )
    assert shown.json()["approvals"][1]["approved"] == ["dpo"]
    governance = mesh.nodes["eu-west"].services.governance
    await mesh.put("eu-west", "approval", approval)
    assert governance.check_import(mesh.bridge_id, desk.body.grant, "us-east", StreamName.parse(STREAM))
    allowed = await asyncio.to_thread(
        felix_command, mesh.home, "bridge", "explain", "stream", STREAM, "--from", "us-east", "--region", "eu-west"
    )  # fmt: skip
    assert "eu-west: crosses" in allowed.out and "filter or their path keep back stay" in allowed.out


async def test_nothing_is_signed_without_a_yes_by_a_stranger_or_over_what_was_edited(
    mesh: Mesh, desk: Desk
) -> None:
    out = desk.place / "none.approval"
    refused = await desk.approve("--out", str(out), code=2)
    assert "no terminal to ask at" in refused.err and desk.body.terms_hash in refused.out
    operator = desk.place / "operator.pem"
    shutil.copy(mesh.us.identity("operator"), operator)
    operator.chmod(0o600)
    assert "it takes an approver of us-east or eu-west" in (
        await desk.approve("--out", str(out), "--yes", as_=str(operator), code=3)
    ).err  # fmt: skip
    edited = json.loads(desk.grant.read_bytes())
    edited["body"]["terms"]["purpose"] = "something else"
    other = desk.place / "edited.grant"
    replace_file(other, json.dumps(edited).encode(), PUBLIC)
    assert "edited" in (await desk.approve("--out", str(out), "--yes", grant=str(other), code=3)).err
    assert "there is no region on this machine" in (
        await desk.approve("--out", str(out), "--yes", grant=desk.body.grant, code=2)
    ).err  # fmt: skip
    assert not out.exists()


async def test_a_person_has_one_name_as_operator_and_as_approver(mesh: Mesh, desk: Desk) -> None:
    """By which `separate` knows whoever drew the grant up."""

    async def said(*words: str, code: int = 0) -> Said:
        return await asyncio.to_thread(felix_command, mesh.home, *words, "--region", "us-east", code=code)

    issued = await said("identity", "issue", "operator", "--kind", "approver")
    assert str(mesh.us.identity("operator.approver")) in issued.out.replace("\n", "")
    assert (await said("identity", "issue", "operator", "--kind", "approver")).out, "and renewed there"
    # The other way round the approver's makes room: commands look for the operator's under the name alone.
    for kind in ("approver", "operator"):
        issued = await said("identity", "issue", "bob", "--kind", kind)
        assert str(mesh.us.identity("bob")) in issued.out.replace("\n", "")
    kinds = {name: load_identity(mesh.us.identity(name)).spiffe_id.kind for name in ("bob", "bob.approver")}
    assert kinds == {"bob": "operator", "bob.approver": "approver"}
    assert (
        "needs another name" in (await said("identity", "issue", "operator", "--kind", "client", code=1)).err
    )
    file = desk.place / "own.approval"
    await said("bridge", "approve", str(desk.grant), "--as", "operator", "--out", str(file), "--yes")
    found = open_approval(Approval.parse(file.read_bytes()), TrustBundle([mesh.bundle("us-east").anchor()]))
    assert found.approver == "spiffe://us-east.acme/approver/operator"
    own = name_of(desk.body.terms.drawn_up_by)
    for others, counted in (({own}, False), (set(), True)):
        rule = ApprovalRule(1, separate=True)
        counts = tally(rule, "us-east", [found], desk.body.terms_hash, others, now_ms())
        assert (counts.missing == 0) is counted


async def test_a_file_of_a_terabyte_is_refused_and_not_read(mesh: Mesh, desk: Desk) -> None:
    """It takes no room on the disk of who sends it."""
    endless = desk.place / "endless.grant"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    for words in (
        ("bridge", "approve", str(endless), "--as", str(desk.place / "dpo.pem"), "--bundle", str(desk.place / "us.json")),
        ("bridge", "approve", str(desk.grant), "--as", str(desk.place / "dpo.pem"), "--bundle", str(endless)),
        ("bridge", "submit", str(endless)),
        ("audit", "check-proof", str(endless), "--bundle", str(desk.place / "us.json")),
    ):  # fmt: skip
        said = await asyncio.to_thread(felix_command, desk.place / "empty", *words, code=1, cwd=desk.place)
        assert "has more than 16777216 bytes" in said.err and "Traceback" not in said.err, words
