"""A region changes its policy and receipt keys, the others compare and trust it again, and what stands is signed again: the link goes on, and all that was signed
before holds under the new bundle alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attacks.test_f08_truncation import accept, link, source_put_back
from bridge_mesh import ACCEPTED_BY, BRIDGE, POLICIES, STREAM, Mesh, flight, two_regions, until
from click.testing import Result
from slow_runs import only_slow
from typer.testing import CliRunner

from audit.checkpoint import Checkpoint, note_size
from audit.errors import AuditUnavailableError
from audit.leaf import Kind, Leaf
from audit.note import Note, encode_note
from audit.origin import egress_origin, region_origin
from audit.proof import check_proof, prove
from audit.receipt import signer_of
from audit.signer_disk import load_signers
from audit.trust import Trust
from audit.verify import Report, verify_log
from audit.witness import DiskWitnessStore
from cli import sign_again as cli_sign_again
from cli.bridge import app as bridge
from cli.region import app
from felix.address import Address
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.messages import DescribeRegion, LinkState, PutDocument
from felix.runtime.real import now_ms
from keys.bundle import (
    FORMER_MAX,
    KeyEnd,
    RegionBundle,
    SignedBundle,
    check_update,
    decode_bundle,
    sign_bundle,
)
from keys.key_file import load_signing_key
from keys.pin import UNCOMPARED
from keys.signing import SigningKey
from policy.approval import parse_document
from policy.grant import (
    ExportGrant,
    Standing,
    StandingAction,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import REVISION_MAX, ResidencyError, parse_policy, sign_policy
from policy.signed import Purpose, SignedDocument, decode_body, key_id
from policy.truncation import Truncation
from region.bootstrap import trust_region, write_profile
from region.config import load_config
from region.evidence.document_log import DocumentLog
from region.folder import RegionFolder
from region.governance.logged_truncations import logged_truncations
from region.trust import signing_keys
from region.trust.held_document import document_id
from region.trust.signing_key_leaves import ROLES, Role
from region.trust.signing_keys import change_signing_keys, raise_ends
from region.trust.trusted_bundles import read_pin

EGRESS = egress_origin("us-east", "acme", BRIDGE)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        yield mesh


def other(region: str) -> str:
    return "eu-west" if region == "us-east" else "us-east"


def logs(mesh: Mesh) -> dict[str, Path]:
    return {
        EGRESS: mesh.egress_folder,
        region_origin("us-east", "acme"): mesh.us.root / "data" / "audit",
        region_origin("eu-west", "acme"): mesh.ingress_folder,
    }


def witnessed(mesh: Mesh, origin: str) -> int:
    """How far the other region than the log's has cosigned it."""
    folder = mesh.folder(other(origin.partition(".")[0]))
    note = DiskWitnessStore(folder.root / "data" / "witness").last(origin)
    return 0 if note is None else note_size(note)


async def rested(mesh: Mesh, records: int) -> None:
    """Wait until all that crossed has its receipt, and every log is cosigned as far as it goes."""

    def has_rested() -> bool:
        acks = mesh.headers(mesh.egress_folder, Kind.ACK)
        return sum(ack.records for ack in acks) == records and is_cosigned(mesh)

    await until(has_rested, "every log is cosigned to its end")


def is_cosigned(mesh: Mesh) -> bool:
    """Whether the other region has cosigned each log as far as it goes."""
    sizes = {origin: note_size((path / "checkpoint").read_bytes()) for origin, path in logs(mesh).items()}
    return all(witnessed(mesh, origin) == size for origin, size in sizes.items())


async def change(mesh: Mesh, region: str) -> SignedBundle:
    """The runbook: stop, change, start; the other region compares, and this one trusts the other again."""
    await mesh.stop(region)
    folder = mesh.folder(region)
    changed = change_signing_keys(folder, load_config(folder.config), now_ms())
    await mesh.start(region)
    for by, of in ((other(region), region), (region, other(region))):
        pin = trust_region(mesh.folder(by), decode_bundle(mesh.folder(of).bundle.read_bytes()), now_ms())
        assert pin is not None
        async with mesh.operator(by) as client:
            await client.request(PutDocument("pin", pin.encode()))
    return changed.signed


async def sign_again(mesh: Mesh, region: str, grant: str) -> None:
    """The region's policy, as a later revision, and its half of the grant."""
    policy = parse_policy(POLICIES[region].replace("revision: 1", "revision: 2"), region)
    await mesh.put(region, "policy", sign_policy(policy, mesh.key(region)))
    write_profile(mesh.folder(region), region, "acme", Address("127.0.0.1", mesh.ports[region]))
    command = ["sign-again", grant, "--region", region, "--yes"]
    done = await asyncio.to_thread(CliRunner().invoke, bridge, command)
    assert done.exit_code == 0, done.exception


async def twenty_crossed(mesh: Mesh) -> ExportGrant:
    """A grant that is put everywhere, and 20 records under it."""
    body = await mesh.put_grant()
    await mesh.publish([flight(n) for n in range(20)])
    async with mesh.agent():
        await mesh.crossed(20)
        await rested(mesh, 20)
    return body


def verified(mesh: Mesh) -> dict[str, Report]:
    return {
        origin: verify_log(mesh.log_files(path), mesh.trust, origin=origin, cosignatures_min=1)
        for origin, path in logs(mesh).items()
    }


async def test_the_link_goes_on_and_all_holds_under_the_new_bundle_alone(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await goes_on_under_the_new_bundle(mesh, "eu-west", monkeypatch)


@only_slow
@pytest.mark.parametrize("region", ["eu-west", "us-east"])
async def test_a_report_over_a_change_of_keys_has_no_findings(
    mesh: Mesh, region: str, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from audit.spark.report import run_report

    await goes_on_under_the_new_bundle(mesh, region, monkeypatch)
    result = run_report(
        list(logs(mesh).values()), tmp_path / "report", trust=mesh.trust, session=spark, cosignatures_min=1
    )
    assert result.exit_code == 0 and not result.report.findings.records()
    assert not result.report.exceptions.records()
    assert {row["crossed"] for row in result.report.reconciliation.records()} == {40}


async def goes_on_under_the_new_bundle(mesh: Mesh, region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    body = await twenty_crossed(mesh)
    before, former = mesh.bundle(region), load_signing_key(mesh.folder(region).policy_key)
    proof = prove(mesh.log_files(mesh.egress_folder), mesh.trust, STREAM, 0, 1)

    signed = await change(mesh, region)

    assert not {*before.policy_keys, *before.receipt_keys} & {
        *signed.bundle.policy_keys,
        *signed.bundle.receipt_keys,
    }
    (ended,) = signed.bundle.former
    assert {end.log for end in ended.ends} == set(logs(mesh)), "every log in which it has signed something"
    check_proof(proof, mesh.trust)
    for report in verified(mesh).values():
        assert report.ok, report.findings

    # Nothing new is taken under the former key.
    pause = Standing(
        grant=body.grant, action=StandingAction.PAUSE, region=region, sequence=1, at=now_ms(), by="thief"
    )
    for at in ("us-east", "eu-west"):
        with pytest.raises(FelixError, match="none of"):
            await mesh.put(at, "standing", sign_standing(pause, former.private_key))

    await sign_again(mesh, region, body.grant)
    await mesh.publish([flight(n) for n in range(20, 40)])
    async with mesh.agent():
        await mesh.crossed(40)
        await rested(mesh, 40)
    for report in verified(mesh).values():
        assert report.ok, report.findings
    check_proof(proof, mesh.trust)
    for offset in (0, 30):
        proven = check_proof(
            prove(mesh.log_files(mesh.egress_folder), mesh.trust, STREAM, 0, offset), mesh.trust
        )
        assert proven.receipt is not None
    used = {signer_of(ack.receipt) for ack in mesh.headers(mesh.egress_folder, Kind.ACK)}
    assert len(used) == (2 if region == "eu-west" else 1)


async def test_a_truncation_that_was_accepted_before_is_signed_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What crossed since crossed under an incarnation that follows from the acceptance."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await source_put_back(mesh, tmp_path / "older")
        async with mesh.agent() as agent:
            await accept(mesh, await link(agent, "truncated"))
            await link(agent, "active", 13)
            await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
        (grant,) = mesh.documents("us-east", "export")
        await change(mesh, "us-east")
        async with mesh.agent() as agent:
            await sign_again(mesh, "us-east", grant)
            await mesh.publish([flight(13)])
            goes_on = await link(agent, "active", 14)
            assert goes_on.cut is None
            await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
        # A second time there is nothing left of the former key.
        command = ["sign-again", grant, "--region", "us-east", "--yes"]
        done = await asyncio.to_thread(CliRunner().invoke, bridge, command)
        assert done.exit_code == 0 and "goes on" not in done.output, done.output
        for report in verified(mesh).values():
            assert report.ok, report.findings


async def said_again(mesh: Mesh, grant: str) -> Result:
    """`felix bridge sign-again` at us-east, whatever comes of it."""
    command = ["sign-again", grant, "--region", "us-east", "--yes"]
    return await asyncio.to_thread(CliRunner().invoke, bridge, command)


async def reported(mesh: Mesh, held: LinkState) -> None:
    """Wait until us-east's broker shows what its agent says of a link."""
    async with mesh.operator("us-east") as client:

        async def shown() -> bool:
            return held.reason in [each.reason for each in await client.list_links()]

        await until(shown, "the link, as an operator sees it")


async def holds_up(mesh: Mesh, records: int) -> None:
    """Both logs verify and agree entry by entry, once an agent has brought their checkpoints."""

    def has_rested() -> bool:
        acks = mesh.headers(mesh.ingress_folder, Kind.ACK)
        return sum(ack.records for ack in acks) == records and is_cosigned(mesh)

    await until(has_rested, "every log is cosigned to its end")
    for report in verified(mesh).values():
        assert report.ok, report.findings
    assert mesh.reconcile() == records


def us_words(mesh: Mesh, own: RegionBundle) -> list[Standing]:
    """What us-east's audit log has of where its links go on, by this bundle."""
    return list(logged_truncations(mesh.nodes["us-east"].services.governance.logged, own).values())


@pytest.mark.parametrize("when", [pytest.param("before the change", marks=only_slow), "after it"])
async def test_a_truncation_that_a_thief_wrote_into_the_store_stops_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """With an earlier time, and in place of the one that the link crossed under. What had no leaf when the key ended is not signed again; what had one is, beside the other one, and
    the link goes by that under which something crossed."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await source_put_back(mesh, tmp_path / "older")
        async with mesh.agent() as agent:
            held = await link(agent, "truncated")
            await accept(mesh, held)
            await link(agent, "active", 13)
            await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
        (grant,) = mesh.documents("us-east", "export")
        (genuine,) = us_words(mesh, mesh.bundle("us-east"))
        assert held.cut is not None
        cut = Truncation(
            stream=held.stream, shard=held.shard, incarnation=held.cut.incarnation.hex(), epoch=held.cut.epoch, offset=13
        )  # fmt: skip
        false = msgspec.structs.replace(genuine, at=1_700_000_000_000, by="thief", truncation=cut)
        forged = sign_standing(false, mesh.key("us-east"))

        async def write() -> None:
            catalog = mesh.nodes["us-east"].broker.catalog
            name = document_id(forged)
            await catalog.put_document("revocations", "state", name, forged.encode_file(), revision=0)
            await until(lambda: name in mesh.documents("us-east", "standing"), "it stands in the store")

        if when == "before the change":
            await write()
            await until(lambda: false in us_words(mesh, mesh.bundle("us-east")), "its leaf")
        await change(mesh, "us-east")
        if when == "after it":
            await write()
        own, is_logged = mesh.bundle("us-east"), when == "before the change"
        assert sorted(us_words(mesh, own), key=lambda word: word.at) == [*[false] * is_logged, genuine]
        async with mesh.agent() as agent:
            await sign_again(mesh, "us-east", grant)
            await mesh.publish([flight(13)])
            goes_on = await link(agent, "active", 14)
            assert goes_on.cut is None
            await holds_up(mesh, 19)
        again = [word for word in us_words(mesh, own) if word not in (false, genuine)]
        assert not again, "signed again with the same content"
        (keys,) = own.policy_keys
        signed = {
            decode_body(document, Standing, Purpose.STANDING)
            for data in mesh.documents("us-east", "standing").values()
            if isinstance(document := parse_document(data), SignedDocument) and document.key == key_id(keys)
        }
        assert signed == {genuine, *[false] * is_logged}


async def test_what_a_former_key_signed_in_the_log_is_said_again_where_it_counts_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the key's end, in the history that the end's root names."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await source_put_back(mesh, tmp_path / "older")
        async with mesh.agent() as agent:
            await accept(mesh, await link(agent, "truncated"))
            await link(agent, "active", 13)
        await change(mesh, "us-east")
        own = mesh.bundle("us-east")
        assert len(us_words(mesh, own)) == 1
        (former,) = own.former
        log = region_origin("us-east", "acme")
        (leaf,) = (
            index
            for index, header in enumerate(leaf.header for leaf in mesh.leaves(logs(mesh)[log]))
            if header.action == "accept-truncation"
        )

        def ended(*ends: KeyEnd) -> RegionBundle:
            others = (end for end in former.ends if end.log != log)
            return msgspec.structs.replace(
                own, former_keys=(msgspec.structs.replace(former, ends=(*others, *ends)),)
            )

        end = former.end_in(log)
        assert end is not None and leaf < end.size
        assert us_words(mesh, ended(end))
        for other in ((), (KeyEnd(log, leaf, end.root),), (KeyEnd(log, end.size, b"r" * 32),)):
            assert not us_words(mesh, ended(*other))
        assert not us_words(mesh, msgspec.structs.replace(own, former_keys=()))


@only_slow
async def test_a_truncation_that_was_accepted_anew_first_gives_way_to_the_one_that_is_signed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link says what to do, and `resume --accept-truncation` is refused; where an earlier release took it, the link goes on all the same."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await source_put_back(mesh, tmp_path / "older")
        async with mesh.agent() as agent:
            held = await link(agent, "truncated")
            await accept(mesh, held)
            await link(agent, "active", 13)
            await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
        (grant,) = mesh.documents("us-east", "export")
        export = SignedDocument.parse(mesh.documents("us-east", "export")[grant])
        terms = decode_body(export, ExportGrant, Purpose.EXPORT).terms
        await change(mesh, "us-east")
        policy = parse_policy(POLICIES["us-east"].replace("revision: 1", "revision: 2"), "us-east")
        await mesh.put("us-east", "policy", sign_policy(policy, mesh.key("us-east")))
        write_profile(mesh.us, "us-east", "acme", Address("127.0.0.1", mesh.ports["us-east"]))
        async with mesh.agent() as agent:
            # The half alone, as an earlier release did.
            await mesh.put("us-east", "export", sign_export(terms, policy, mesh.key("us-east"), now_ms()))
            await mesh.publish([flight(13)])
            stopped = await link(agent, "truncated")
            assert stopped.cut is None and f"felix bridge sign-again {grant}" in stopped.reason
            assert "accept-truncation" not in stopped.reason
            await reported(mesh, stopped)
            command = ["resume", grant, "--accept-truncation", "--region", "us-east", "--yes"]
            refused = await asyncio.to_thread(CliRunner().invoke, bridge, command)
            assert isinstance(refused.exception, RequestError) and refused.exception.code is Code.CONFLICT
            assert f"felix bridge sign-again {grant}" in refused.exception.hint

            await accept(mesh, held)

            def told() -> LinkState | None:
                return next(
                    (each for each in agent.links() if "not known here any more" in each.reason), None
                )

            stopped = await until(told, "what the destination says")
            assert (stopped.state, stopped.cut) == ("truncated", None)
            assert f"felix bridge sign-again {grant}" in stopped.reason
            done = await said_again(mesh, grant)
            assert done.exit_code == 0 and "goes on from source offset 5" in done.output, done.exception
            goes_on = await link(agent, "active", 14)
            assert goes_on.cut is None and goes_on.reason == ""
            await holds_up(mesh, 19)


async def renewed(mesh: Mesh) -> tuple[str, str]:
    """A truncation is accepted under a grant, which is revoked; the link goes on under the next one. Both grants."""
    await source_put_back(mesh, mesh.home / "older")
    async with mesh.agent() as agent:
        await accept(mesh, await link(agent, "truncated"))
        await link(agent, "active", 13)
        (first,) = mesh.documents("us-east", "export")
        await mesh.stand("us-east", first, StandingAction.REVOKE)
        await link(agent, "stopped")
        second = await mesh.grant(purpose="renewed")
        await mesh.publish([flight(13)])
        await link(agent, "active", 14)
        await until(lambda: is_cosigned(mesh), "every log is cosigned to its end")
    write_profile(mesh.us, "us-east", "acme", Address("127.0.0.1", mesh.ports["us-east"]))
    return first, second


async def changed(mesh: Mesh, revision: int) -> None:
    """us-east changes its keys, and signs its policy again."""
    await change(mesh, "us-east")
    text = POLICIES["us-east"].replace("revision: 1", f"revision: {revision}")
    await mesh.put("us-east", "policy", sign_policy(parse_policy(text, "us-east"), mesh.key("us-east")))


async def revoked_and_renewed(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncation is accepted under a grant that has ended since, over two changes of us-east's keys."""
    first, second = await renewed(mesh)

    def signed_now() -> list[str]:
        (key,) = mesh.bundle("us-east").policy_keys
        exports = mesh.documents("us-east", "export").items()
        return [name for name, data in exports if SignedDocument.parse(data).key == key_id(key)]

    # Whoever has the former key and writes the store makes up a third grant of the link.
    _, made_up, _ = mesh.sign_grant(purpose="made up")
    await changed(mesh, 2)
    third = decode_body(made_up, ExportGrant, Purpose.EXPORT).grant
    catalog = mesh.nodes["us-east"].broker.catalog
    await catalog.put_document("grants", "export", third, made_up.encode_file(), revision=0)
    await until(lambda: third in mesh.documents("us-east", "export"), "it stands in the store")
    for is_first in (True, False):
        refused = await said_again(mesh, first)
        assert isinstance(refused.exception, RequestError)
        assert refused.exception.code is Code.GRANT_REVOKED
        assert f"felix bridge sign-again {second} " in refused.exception.hint
        assert third not in refused.exception.hint
        assert first not in signed_now()
        done = await said_again(mesh, second)
        assert done.exit_code == 0, done.exception
        assert (f"under {first}" in done.output) is is_first, "once is enough"
        assert signed_now() == [second]
    async with mesh.agent() as agent:
        await mesh.publish([flight(14)])
        await link(agent, "active", 15)
        await holds_up(mesh, 20)

    # Another change: by now it is a word on the second grant, too.
    await changed(mesh, 3)
    done = await said_again(mesh, second)
    assert done.exit_code == 0 and done.output.count("goes on from source offset 5") == 1, done.exception
    async with mesh.agent() as agent:
        await mesh.publish([flight(15)])
        await link(agent, "active", 16)
        await holds_up(mesh, 21)
    with monkeypatch.context() as patch:
        patch.setattr(cli_sign_again, "now_ms", lambda: now_ms() + 400 * 86_400_000)
        refused = await said_again(mesh, second)
    assert isinstance(refused.exception, RequestError)
    assert refused.exception.code is Code.GRANT_EXPIRED
    assert "felix bridge allow" in refused.exception.hint


@only_slow
async def test_a_truncation_that_was_accepted_under_a_grant_that_was_revoked_is_signed_again_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await revoked_and_renewed(mesh, monkeypatch)


@only_slow
@pytest.mark.parametrize("in_log", [True, False])
async def test_a_truncation_of_an_ended_grant_that_the_store_has_no_more_is_signed_again_by_the_terms_in_the_log(
    in_log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker takes that export again: it is under the former key, and what has ended cannot be signed. Where the log's broker is of before, the command says what is missing."""
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        first, second = await renewed(mesh)
        await changed(mesh, 2)
        catalog = mesh.nodes["us-east"].broker.catalog
        assert await catalog.delete_document("grants", "export", first)
        await until(lambda: first not in mesh.documents("us-east", "export"), "the store has it no more")
        if not in_log:
            monkeypatch.setattr("region.governance.service.logged_exports", lambda *_: {})
        done = await said_again(mesh, second)
        assert done.exit_code == 0, done.exception
        assert (f"under {first}" in done.output) is in_log
        assert (f"which terms {first} had" in done.output) is not in_log
        assert "felix bridge submit" not in done.output
        async with mesh.agent() as agent:
            await mesh.publish([flight(14)])
            if in_log:
                await link(agent, "active", 15)
                await holds_up(mesh, 20)
            else:
                await link(agent, "truncated")


@only_slow
async def test_a_report_of_what_crossed_under_a_truncation_that_is_a_word_on_the_next_grant_has_no_findings(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    async with two_regions(tmp_path) as mesh:
        await revoked_and_renewed(mesh, monkeypatch)
        from audit.spark.report import run_report

        folder = tmp_path / "report"
        found = run_report(
            list(logs(mesh).values()), folder, trust=mesh.trust, session=spark, cosignatures_min=1
        )
        assert found.exit_code == 0 and not found.report.findings.records()


@pytest.mark.parametrize("region", ["eu-west", pytest.param("us-east", marks=only_slow)])
async def test_a_half_of_a_thief_with_a_later_time_keeps_no_half_of_now_from_the_other_region(
    mesh: Mesh, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He put it in both regions before the key was changed."""
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    body = await twenty_crossed(mesh)
    policy, key, later = parse_policy(POLICIES[region], region), mesh.key(region), now_ms() + 1_800_000
    if region == "us-east":
        kind, forged = "export", sign_export(body.terms, policy, key, later)
    else:
        trusted = {name: mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
        export = SignedDocument.parse(mesh.documents("us-east", "export")[body.grant])
        kind, forged = "import", sign_import(export, policy, key, trusted, ACCEPTED_BY, later)
    for name in ("us-east", "eu-west"):
        await mesh.put(name, kind, forged)
    await mesh.publish([flight(20)])
    async with mesh.agent():
        await mesh.crossed(21)
        await rested(mesh, 21)

    await change(mesh, region)
    await sign_again(mesh, region, body.grant)
    await mesh.publish([flight(n) for n in range(21, 41)])
    async with mesh.agent():
        await mesh.crossed(41)
        await rested(mesh, 41)
    for report in verified(mesh).values():
        assert report.ok, report.findings


async def test_what_was_on_its_way_counts_once_its_end_is_raised(mesh: Mesh) -> None:
    """eu-west's key ends before its witness has seen the last receipts: they count once it says so, and people compared that."""
    await twenty_crossed(mesh)
    witness = mesh.eu.root / "data" / "witness"
    shutil.copytree(witness, mesh.home / "seen")
    await mesh.publish([flight(n) for n in range(20, 40)])
    async with mesh.agent():
        await mesh.crossed(40)
        await rested(mesh, 40)
    await mesh.stop("eu-west")
    shutil.move(witness, mesh.home / "seen later")
    shutil.copytree(mesh.home / "seen", witness)
    config = load_config(mesh.eu.config)
    first = change_signing_keys(mesh.eu, config, now_ms())
    report = verified(mesh)[EGRESS]
    assert not report.ok and all("eu-west gave up at" in each.sentence for each in report.findings)
    with pytest.raises(RequestError, match="cosigned further"):
        raise_ends(mesh.eu, config, now_ms())
    shutil.rmtree(witness)
    shutil.move(mesh.home / "seen later", witness)
    raised = raise_ends(mesh.eu, config, now_ms())
    assert raised.signed.bundle.fingerprint() != first.signed.bundle.fingerprint()
    with pytest.raises(TamperError, match="other ends of a former policy key"):
        check_update(first.signed.bundle, raised.signed)
    for report in verified(mesh).values():
        assert report.ok, report.findings


async def test_a_change_that_is_cut_off_is_finished_by_the_next_call(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await twenty_crossed(mesh)
    await mesh.stop("eu-west")
    config, before = load_config(mesh.eu.config), mesh.bundle("eu-west")
    old = mesh.eu.receipt_key.read_bytes()

    def cut_off(*_: object) -> None:
        raise OSError("no power")

    async def refused(why: str) -> None:
        with pytest.raises(RequestError, match=why) as refusal:
            await mesh.start("eu-west")
        assert "change-signing-keys" in refusal.value.hint

    # Before the log says so, nothing has happened, whatever lies beside: brokers serve, and the next call begins anew.
    for name in ("save_signing_key", "replace_file", "_record"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
            patch.setattr(signing_keys, name, cut_off)
            change_signing_keys(mesh.eu, config, now_ms())
        assert mesh.bundle("eu-west") == before
        await mesh.start("eu-west")
        await mesh.stop("eu-west")
    # From then on no broker begins, and the next call goes on with what was written.
    planned = None
    appended = signing_keys.append_waiting

    def second_fails(trail: Any, leaf: Any) -> None:
        if leaf.header.action == "receipt-key-ended":
            cut_off()
        appended(trail, leaf)

    for name, fails, replaced in (
        ("append_waiting", second_fails, False),
        ("_put_in_place", cut_off, False),
        ("_move_new", cut_off, True),
    ):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
            patch.setattr(signing_keys, name, fails)
            change_signing_keys(mesh.eu, config, now_ms())
        assert (mesh.bundle("eu-west") != before) == replaced
        await refused("one that eu-west gave up" if replaced else "gave up the policy key")
        written = mesh.eu.bundle.with_name("new.bundle.json").read_bytes()
        assert planned in (None, written)
        planned = written
    changed = change_signing_keys(mesh.eu, config, now_ms())
    assert changed.signed.bundle == mesh.bundle("eu-west") and len(changed.signed.bundle.former) == 1
    assert changed.signed.encode() == planned and not mesh.eu.bundle.with_name("new.bundle.json").exists()
    assert not list(mesh.eu.secrets.glob("new.*")) and mesh.eu.receipt_key.read_bytes() != old
    await mesh.start("eu-west")
    for report in verified(mesh).values():
        assert report.ok, report.findings


async def test_the_command_names_every_log_or_asks_for_it(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await twenty_crossed(mesh)
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    command = ["change-signing-keys", "--region", "us-east", "--policy"]
    await mesh.stop("us-east")
    receipts = mesh.bundle("us-east").receipt_keys
    elsewhere = mesh.home / "another machine"
    shutil.move(mesh.us.bridge(BRIDGE), elsewhere)
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, RequestError) and f"--without {EGRESS}" in refused.exception.hint
    done = CliRunner().invoke(app, [*command, "--checkpoint", str(elsewhere / "egress" / "checkpoint")])
    assert done.exit_code == 0, done.exception
    bundle = mesh.bundle("us-east")
    (former,) = bundle.former
    assert bundle.receipt_keys == receipts and not former.receipt_keys and former.policy_keys
    assert {end.log for end in former.ends} == set(logs(mesh))
    shutil.move(elsewhere, mesh.us.bridge(BRIDGE))
    for report in verified(mesh).values():
        assert report.ok, report.findings
    assert former.ends[0].log in done.output
    shown = CliRunner().invoke(app, ["bundle", "--json", "--region", "us-east"])
    (listed,) = json.loads(shown.output)["former_keys"]
    assert {end["log"] for end in listed["ends"]} == set(logs(mesh)) and listed["receipt_keys"] == []


def ended_in(mesh: Mesh, region: str) -> set[str]:
    return {end.log for end in mesh.bundle(region).former[-1].ends}


def key_changes(mesh: Mesh) -> int:
    """KEY leaves of us-east's own log that say a policy or receipt key was changed."""
    found = mesh.headers(mesh.us.root / "data" / "audit", Kind.KEY)
    return sum(header.action in ("policy-key-changed", "receipt-key-changed") for header in found)


async def test_a_note_that_does_not_open_stops_no_change(mesh: Mesh) -> None:
    """us-east gave its egress log another key, and eu-west compared the bundle: what eu-west's witness remembers is under the one before."""
    await twenty_crossed(mesh)
    await mesh.stop("eu-west")
    config, kept = load_config(mesh.eu.config), (mesh.eu.trusted / "us-east.json").read_bytes()
    bundle, public = decode_bundle(kept).bundle, SigningKey.generate().verify_key.public
    keys = tuple(
        msgspec.structs.replace(key, public=public)
        if (key.name, key.algorithm) == (EGRESS, "ed25519")
        else key
        for key in bundle.audit_keys
        if key.name != EGRESS or key.algorithm == "ed25519"
    )
    replaced = msgspec.structs.replace(bundle, audit_keys=keys, issued_ms=bundle.issued_ms + 1)
    trust_region(mesh.eu, sign_bundle(replaced, load_signing_key(mesh.us.policy_key)), now_ms())
    shutil.rmtree(mesh.eu.root / "data" / "governance")
    changed = change_signing_keys(mesh.eu, config, now_ms())
    (sentence,) = changed.left_out
    assert EGRESS in sentence and "does not open" in sentence
    assert ended_in(mesh, "eu-west") == set(logs(mesh)) - {EGRESS}
    # Once the right bundle is trusted, the end is added; and whoever leaves the log out is told nothing.
    trust_region(mesh.eu, decode_bundle(kept), now_ms())
    raised = raise_ends(mesh.eu, config, now_ms())
    assert not raised.left_out and ended_in(mesh, "eu-west") == set(logs(mesh))
    for report in verified(mesh).values():
        assert report.ok, report.findings
    assert not change_signing_keys(mesh.eu, config, now_ms(), without=[EGRESS]).left_out
    assert ended_in(mesh, "eu-west") == set(logs(mesh)) - {EGRESS}


@pytest.mark.parametrize(
    "how", ["", pytest.param("without", marks=only_slow), pytest.param("checkpoint", marks=only_slow)]
)
async def test_two_histories_of_another_region_stop_no_change(mesh: Mesh, how: str) -> None:
    """us-east signed two roots at one size, and two of eu-west's brokers have cosigned one each."""
    await twenty_crossed(mesh)
    await mesh.stop("eu-west")
    witness = mesh.eu.root / "data" / "witness"
    note = DiskWitnessStore(witness).last(EGRESS)
    assert note is not None
    text = Checkpoint(EGRESS, note_size(note), b"x" * 32).text()
    signers = load_signers(EGRESS, mesh.us.egress_key(BRIDGE), mesh.us.egress_ml_dsa_key(BRIDGE))
    fork = encode_note(Note(text, tuple(signer.sign(text) for signer in signers)))
    copied = mesh.eu.root / "data2" / "witness"
    shutil.copytree(witness, copied)
    (held,) = [path for path in copied.rglob("*") if path.is_file() and path.read_bytes() == note]
    held.write_bytes(fork)

    class Config:
        data_folders = (*load_config(mesh.eu.config).data_folders, "data2")

    config: Any = Config()
    given = [(mesh.egress_folder / "checkpoint").read_bytes()] if how == "checkpoint" else []
    changed = change_signing_keys(
        mesh.eu, config, now_ms(), checkpoints=given, without=[EGRESS] if how == "without" else []
    )
    assert len(changed.left_out) == (how != "without")
    assert all("Two roots are known" in sentence and EGRESS in sentence for sentence in changed.left_out)
    assert (EGRESS in ended_in(mesh, "eu-west")) == (how == "checkpoint")


async def test_the_earliest_former_keys_are_dropped_where_there_is_no_room(mesh: Mesh) -> None:
    await mesh.stop("us-east")
    config, now = load_config(mesh.us.config), now_ms()
    without = [EGRESS]
    for _ in range(FORMER_MAX):
        change_signing_keys(mesh.us, config, now, ["receipt"], without=without)
    before, changes = mesh.bundle("us-east"), key_changes(mesh)
    with pytest.raises(RequestError, match="no room for one more") as refused:
        change_signing_keys(mesh.us, config, now, without=without)
    assert "--drop-earliest 1" in refused.value.hint
    with pytest.raises(RequestError, match="names the former keys of"):
        change_signing_keys(mesh.us, config, now, without=without, drop_earliest=FORMER_MAX + 1)
    assert mesh.bundle("us-east") == before and key_changes(mesh) == changes
    change_signing_keys(mesh.us, config, now, without=without, drop_earliest=2)
    assert mesh.bundle("us-east").former[:-1] == before.former[2:]


async def test_a_change_that_is_refused_writes_no_key_leaf(mesh: Mesh) -> None:
    await twenty_crossed(mesh)
    await mesh.stop("us-east")
    config = load_config(mesh.us.config)
    shutil.move(mesh.us.bridge(BRIDGE), mesh.home / "another machine")
    with pytest.raises(RequestError, match="is not here"):
        change_signing_keys(mesh.us, config, now_ms())
    policy = mesh.us.policy_key.rename(mesh.home / "policy.pem")
    for role in ROLES:
        with pytest.raises(RequestError, match=r"policy\.pem"):
            change_signing_keys(mesh.us, config, now_ms(), [role], without=[EGRESS])
    assert key_changes(mesh) == 0
    policy.rename(mesh.us.policy_key)
    change_signing_keys(mesh.us, config, now_ms(), without=[EGRESS])
    assert key_changes(mesh) == 2


async def test_a_folder_of_before_the_change_is_not_taken_up_beside_a_log_that_goes_on(mesh: Mesh) -> None:
    """A thief of the former keys gains nothing by an old backup of bundle.json and secrets/; whoever has lost the new keys changes them again."""
    folder, old = mesh.us, mesh.home / "old"

    async def back_to(saved: Path) -> None:
        shutil.rmtree(folder.secrets)
        shutil.copytree(saved / "secrets", folder.secrets)
        shutil.copy(saved / "bundle.json", folder.bundle)

    def save(to: Path) -> Path:
        shutil.copytree(folder.secrets, to / "secrets")
        shutil.copy(folder.bundle, to / "bundle.json")
        return to

    await twenty_crossed(mesh)
    save(old)
    await change(mesh, "us-east")
    newest = save(mesh.home / "newest")
    await mesh.stop("us-east")
    await back_to(old)
    for again in range(3):
        # Read from the log, from what the first start keeps of it, and where a command has signed the file anew.
        with pytest.raises(RequestError, match="gave up the policy key") as refused:
            await mesh.start("us-east")
        assert "change-signing-keys" in refused.value.hint
        if again == 1:
            later = msgspec.structs.replace(mesh.bundle("us-east"), issued_ms=now_ms())
            folder.bundle.write_bytes(sign_bundle(later, load_signing_key(folder.policy_key)).encode())
    await back_to(newest)
    await mesh.start("us-east")
    await mesh.stop("us-east")

    # The new keys are lost. Their bundle is not: other regions have it.
    await back_to(old)
    with pytest.raises(RequestError, match="gave up the policy key") as told:
        change_signing_keys(folder, load_config(folder.config), now_ms())
    assert "trusted/REGION.json" in told.value.hint
    shutil.copy(newest / "bundle.json", folder.bundle)
    await change(mesh, "us-east")
    first, second = mesh.bundle("us-east").former
    assert first == decode_bundle((newest / "bundle.json").read_bytes()).bundle.former[0]
    assert second.policy_keys == decode_bundle((newest / "bundle.json").read_bytes()).bundle.policy_keys
    assert key_changes(mesh) == 4
    async with mesh.operator("us-east") as client:
        (alarm,) = (await client.request(DescribeRegion())).alarms
    assert "felix policy apply" in alarm
    await mesh.stop("us-east")
    await back_to(newest)
    with pytest.raises(RequestError, match="gave up the policy key"):
        await mesh.start("us-east")


@pytest.mark.parametrize("has_bundle", [pytest.param(True, marks=only_slow), False])
async def test_what_a_thief_signed_behind_an_end_stays_there_where_the_keys_are_changed_again_from_an_older_folder(
    mesh: Mesh, has_bundle: bool
) -> None:
    """eu-west takes an export of the thief before it has compared. us-east then loses the new keys, and changes them with what is left."""
    folder, old = mesh.us, mesh.home / "old"
    await twenty_crossed(mesh)
    shutil.copytree(folder.secrets, old)
    bundle, thief = folder.bundle.read_bytes(), mesh.key("us-east")
    before = decode_bundle(bundle).bundle
    await mesh.stop("us-east")
    change_signing_keys(folder, load_config(folder.config), now_ms())
    newer = folder.bundle.read_bytes()
    (ended,) = mesh.bundle("us-east").former
    await mesh.start("us-east")
    own = parse_policy(POLICIES["us-east"], "us-east")
    forged = sign_export(mesh.terms(purpose="what the thief likes"), own, thief, now_ms())
    await mesh.put("eu-west", "export", forged)
    ingress = region_origin("eu-west", "acme")
    size = note_size((mesh.ingress_folder / "checkpoint").read_bytes())
    for by, of in (("eu-west", "us-east"), ("us-east", "eu-west")):
        pin = trust_region(mesh.folder(by), decode_bundle(mesh.folder(of).bundle.read_bytes()), now_ms())
        assert pin is not None
        async with mesh.operator(by) as client:
            await client.request(PutDocument("pin", pin.encode()))
    async with mesh.agent():
        await until(lambda: witnessed(mesh, ingress) > size, "us-east has cosigned the thief's leaf")
    assert "gave up at" in str(verified(mesh)[ingress].findings)

    await mesh.stop("us-east")
    shutil.rmtree(folder.secrets)
    shutil.copytree(old, folder.secrets)
    folder.bundle.write_bytes(newer if has_bundle else bundle)
    config = load_config(folder.config)
    if has_bundle:
        change_signing_keys(folder, config, now_ms())
    else:
        with pytest.raises(RequestError, match="gave up the policy key"):
            change_signing_keys(folder, config, now_ms())
        change_signing_keys(folder, config, now_ms(), lost_bundle=True)
    again = mesh.bundle("us-east").former[0]
    assert again.policy_keys == before.policy_keys
    assert again.ends == (ended.ends if has_bundle else ())
    why = "gave up at" if has_bundle else "names no end of it in this log"
    assert why in str(verified(mesh)[ingress].findings)
    await mesh.start("us-east")


@only_slow
async def test_after_an_own_change_other_regions_are_compared_again_on_whichever_machine(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second machine's folder has eu-west as it was before that region gave up its stolen key; nobody who only signs again what lies there brings that back."""

    async def trust(home: Path, *words: str) -> Result:
        monkeypatch.setenv("FELIX_HOME", str(home))
        return await asyncio.to_thread(CliRunner().invoke, app, ["trust", *words, "--region", "us-east"])

    await twenty_crossed(mesh)
    second = mesh.home / "second"
    shutil.copytree(mesh.us.root, second / "us-east", ignore=shutil.ignore_patterns("data", "run"))
    two = RegionFolder(second / "us-east")
    former = mesh.home / "former.json"
    shutil.copy(mesh.eu.bundle, former)
    await change(mesh, "eu-west")
    await mesh.stop("us-east")
    change_signing_keys(mesh.us, load_config(mesh.us.config), now_ms())
    await mesh.start("us-east")
    for name in ("policy.pem", "receipt.pem"):
        shutil.copy(mesh.us.secrets / name, two.secrets / name)
    shutil.copy(mesh.us.bundle, two.bundle)
    for folder in (mesh.us, two):
        write_profile(folder, "us-east", "acme", Address("127.0.0.1", mesh.ports["us-east"]))
    own, compared = mesh.bundle("us-east"), mesh.bundle("eu-west")

    for home, file in ((mesh.home, mesh.eu.bundle), (second, former), (second, former)):
        refused = await trust(home, str(file), "--yes")
        assert isinstance(refused.exception, RequestError) and "under the one of now" in str(
            refused.exception
        )
        # Nor without the pin of before.
        two.pin("eu-west").unlink(missing_ok=True)
    done = await trust(mesh.home, str(mesh.eu.bundle), "--fingerprint", compared.fingerprint(), "--yes")
    assert done.exit_code == 0, done.exception
    done = await trust(second)
    assert done.exit_code == 0, done.exception
    for folder in (mesh.us, two):
        pin = read_pin(folder, own, "eu-west")
        assert pin is not None and pin.bundle == compared and pin.pin.number > UNCOMPARED
    assert (await trust(second, str(mesh.eu.bundle), "--yes")).exit_code == 0, "it is compared now"


@pytest.mark.parametrize("has", [pytest.param("no file", marks=only_slow), "a file of before the bridge"])
async def test_the_ends_are_those_of_what_the_broker_believed_whatever_the_folder_has(
    mesh: Mesh, has: str
) -> None:
    """A bundle is compared once, where the policy key is; brokers take pins and successors from the store."""
    await twenty_crossed(mesh)
    path, pin = mesh.eu.trusted / "us-east.json", mesh.eu.pin("us-east")
    whole = mesh.bundle("us-east")
    pin.unlink(missing_ok=True)
    path.unlink()
    if has != "no file":
        keys = tuple(key for key in whole.audit_keys if key.name != EGRESS)
        before = msgspec.structs.replace(whole, audit_keys=keys, issued_ms=whole.issued_ms - 1)
        path.write_bytes(sign_bundle(before, load_signing_key(mesh.us.policy_key)).encode())
    await mesh.stop("eu-west")
    changed = change_signing_keys(mesh.eu, load_config(mesh.eu.config), now_ms())
    assert {end.log for end in changed.ends} == set(logs(mesh)) and not changed.left_out
    for report in verified(mesh).values():
        assert report.ok, report.findings

    # Where nobody has the bundle any more, the command says of each log that nothing is said of it.
    shutil.rmtree(mesh.eu.root / "data" / "governance")
    path.unlink(missing_ok=True)
    again = change_signing_keys(mesh.eu, load_config(mesh.eu.config), now_ms())
    assert len(again.left_out) == 2
    assert all("No bundle that is trusted here names that log" in each for each in again.left_out)


@pytest.mark.parametrize("roles", [pytest.param((["policy"], ["receipt"]), marks=only_slow), (ROLES, ROLES)])
async def test_an_end_that_was_left_out_is_added_after_a_second_change_too(
    mesh: Mesh, roles: tuple[list[Role], list[Role]]
) -> None:
    await twenty_crossed(mesh)
    await mesh.stop("eu-west")
    config = load_config(mesh.eu.config)
    change_signing_keys(mesh.eu, config, now_ms(), roles[0], without=[EGRESS])
    change_signing_keys(mesh.eu, config, now_ms(), roles[1])
    assert not verified(mesh)[EGRESS].ok
    with pytest.raises(RequestError, match="No log is cosigned further"):
        raise_ends(mesh.eu, config, now_ms())
    with pytest.raises(RequestError, match="there is no change 3"):
        raise_ends(mesh.eu, config, now_ms(), back=3)
    before, after = raise_ends(mesh.eu, config, now_ms(), back=2).signed.bundle.former
    assert before.end_in(EGRESS) == after.end_in(EGRESS) is not None
    for report in verified(mesh).values():
        assert report.ok, report.findings


@pytest.mark.parametrize("region", ["us-east", pytest.param("eu-west", marks=only_slow)])
async def test_no_revision_of_a_thiefs_policy_keeps_those_of_now_out(
    mesh: Mesh, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He puts the highest one into force before the keys are changed; the region's next one is of the number that it has in its file."""
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    body = await twenty_crossed(mesh)
    text = POLICIES[region]

    def revision(number: int) -> SignedDocument:
        changed = parse_policy(text.replace("revision: 1", f"revision: {number}"), region)
        return sign_policy(changed, mesh.key(region))

    with pytest.raises(ResidencyError, match="is the most"):
        revision(REVISION_MAX + 1)
    await mesh.put(region, "policy", revision(REVISION_MAX))
    async with mesh.agent():
        await rested(mesh, 20)
    await change(mesh, region)
    async with mesh.operator(region) as client:
        (alarm,) = (await client.request(DescribeRegion())).alarms
    assert "policy that the metadata store has is not believed" in alarm and "felix policy apply" in alarm

    await sign_again(mesh, region, body.grant)
    async with mesh.operator(region) as client:
        assert (await client.request(DescribeRegion())).alarms == []
    with pytest.raises(FelixError, match="revision 2"):
        await mesh.put(region, "policy", revision(1))
    await mesh.publish([flight(n) for n in range(20, 40)])
    async with mesh.agent():
        await mesh.crossed(40)
        await rested(mesh, 40)
    await mesh.put(region, "policy", revision(3))
    await mesh.stop(region)
    await mesh.start(region)
    with pytest.raises(FelixError, match="revision 3"):
        await mesh.put(region, "policy", revision(2))
    for report in verified(mesh).values():
        assert report.ok, report.findings


async def test_a_plan_that_a_backup_has_left_over_takes_the_place_of_no_later_change(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await twenty_crossed(mesh)
    await mesh.stop("us-east")
    folder, config, backup = mesh.us, load_config(mesh.us.config), mesh.home / "backup"
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no power"):
        patch.setattr(signing_keys, "_record", lambda *_: (_ for _ in ()).throw(OSError("no power")))
        change_signing_keys(folder, config, now_ms())
    planned = folder.bundle.with_name("new.bundle.json")
    shutil.copytree(folder.secrets, backup)
    for path in (folder.bundle, planned):
        shutil.copy(path, backup)
    made = change_signing_keys(folder, config, now_ms()).signed

    shutil.rmtree(folder.secrets)
    shutil.copytree(backup, folder.secrets)
    for path in (folder.bundle, planned):
        shutil.copy(backup / path.name, path)
    with pytest.raises(RequestError, match="gave up the policy key") as refused:
        change_signing_keys(folder, config, now_ms())
    assert "bundle.json of that change" in refused.value.hint
    folder.bundle.write_bytes(made.encode())
    again = change_signing_keys(folder, config, now_ms()).signed.bundle
    assert again.former[-1].policy_keys == made.bundle.policy_keys
    await mesh.start("us-east")
    for report in verified(mesh).values():
        assert report.ok, report.findings


async def test_an_own_log_that_is_not_here_is_asked_for_though_its_bridges_folder_is(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    await twenty_crossed(mesh)
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    await mesh.stop("us-east")
    command = ["change-signing-keys", "--region", "us-east"]
    elsewhere = mesh.home / "another machine"
    shutil.move(mesh.egress_folder, elsewhere)
    mesh.us.bridge(BRIDGE).mkdir(parents=True, exist_ok=True)
    refused = CliRunner().invoke(app, command)
    assert isinstance(refused.exception, RequestError) and f"--without {EGRESS}" in refused.exception.hint
    done = CliRunner().invoke(app, [*command, "--without", EGRESS])
    assert done.exit_code == 0, done.exception
    assert EGRESS not in ended_in(mesh, "us-east")
    shutil.move(elsewhere, mesh.egress_folder)
    assert not verified(mesh)[EGRESS].ok
    # What was forgotten is mended by the log's last checkpoint, once.
    mend = [*command, "--raise-ends", "--checkpoint", str(mesh.egress_folder / "checkpoint")]
    done = CliRunner().invoke(app, mend)
    assert done.exit_code == 0, done.exception
    for report in verified(mesh).values():
        assert report.ok, report.findings
    again = CliRunner().invoke(app, mend)
    assert isinstance(again.exception, RequestError) and "cosigned further" in again.exception.sentence


def copied_to(mesh: Mesh, name: str) -> RegionFolder:
    """us-east's folder as an operator has it on a machine of his own: no log, no data."""
    shutil.copytree(mesh.us.root, mesh.home / name, ignore=shutil.ignore_patterns("data", "bridges", "run"))
    return RegionFolder(mesh.home / name)


def brought_back(mesh: Mesh, folder: RegionFolder, *also: Path) -> None:
    shutil.copytree(folder.secrets, mesh.us.secrets, dirs_exist_ok=True)
    for path in (folder.bundle, *also):
        shutil.copy(path, mesh.us.root)


async def test_a_folder_without_the_log_changes_no_keys_that_the_log_may_have_given_up(mesh: Mesh) -> None:
    """An operator has a folder of before the last change on a machine of his own. From there the keys of that change would be named nowhere."""
    await twenty_crossed(mesh)
    elsewhere, config = copied_to(mesh, "elsewhere"), load_config(mesh.us.config)
    before = mesh.bundle("us-east")
    audit = mesh.us.root / "data" / "audit"
    await mesh.stop("us-east")
    change_signing_keys(mesh.us, config, now_ms())
    shutil.copytree(mesh.us.secrets, mesh.home / "new secrets")
    right = mesh.us.bundle.read_bytes()
    notes = [(log / "checkpoint").read_bytes() for log in (audit, mesh.egress_folder)]
    with pytest.raises(
        RequestError, match="is not here, which says whether the keys in this folder are"
    ) as no:
        change_signing_keys(elsewhere, config, now_ms(), checkpoints=notes)
    assert "--log" in no.value.hint and "--lost-bundle" in no.value.hint
    with pytest.raises(RequestError, match="gave up the policy key"):
        change_signing_keys(elsewhere, config, now_ms(), log=audit)
    assert decode_bundle(elsewhere.bundle.read_bytes()).bundle == before

    # Who says that the log is gone is believed there, and not by the broker that has it.
    own = region_origin("us-east", "acme")
    third = copied_to(mesh, "third")
    for name in ("bundle.json", "secrets/policy.pem", "secrets/receipt.pem"):
        shutil.copy(elsewhere.root / name, third.root / name)
    changed = change_signing_keys(third, config, now_ms(), checkpoints=notes[1:], without=[own])
    assert any("eu-west.acme/audit" in sentence for sentence in changed.left_out)
    brought_back(mesh, third)
    with pytest.raises(RequestError, match="neither as a key of now nor as a former one"):
        await mesh.start("us-east")

    # What says that the bundle is lost goes with the new one.
    lost = change_signing_keys(elsewhere, config, now_ms(), checkpoints=notes, lost_bundle=True)
    assert {end.log for end in lost.ends} == {own, EGRESS}
    files = [path.read_bytes() for path in (elsewhere.bundle, elsewhere.lost_bundle, elsewhere.policy_key)]
    for roles in (ROLES, ("policy",), ("receipt",)):
        again = change_signing_keys(elsewhere, config, now_ms(), roles, lost_bundle=True)
        assert (again.signed, again.ends) == (lost.signed, lost.ends)
        assert "none were made now" in str(again.left_out)
    assert files == [
        path.read_bytes() for path in (elsewhere.bundle, elsewhere.lost_bundle, elsewhere.policy_key)
    ]
    brought_back(mesh, elsewhere)
    with pytest.raises(RequestError, match="neither as a key of now nor as a former one"):
        await mesh.start("us-east")
    brought_back(mesh, elsewhere, elsewhere.lost_bundle)
    await mesh.start("us-east")
    await until(lambda: key_changes(mesh) == 4, "the log names the keys that took the place of lost ones")
    await mesh.stop("us-east")

    # Once the log names these, it is as with any others: the keys that were lost are none to begin with.
    shutil.copytree(mesh.home / "new secrets", mesh.us.secrets, dirs_exist_ok=True)
    mesh.us.bundle.write_bytes(right)
    with pytest.raises(RequestError, match="gave up the policy key"):
        await mesh.start("us-east")


async def test_the_keys_are_changed_on_another_machine_beside_a_copy_of_the_log(mesh: Mesh) -> None:
    await twenty_crossed(mesh)
    await mesh.stop("us-east")
    elsewhere, config = copied_to(mesh, "elsewhere"), load_config(mesh.us.config)
    audit = mesh.us.root / "data" / "audit"
    shutil.copytree(audit, mesh.home / "copy")
    egress = (mesh.egress_folder / "checkpoint").read_bytes()
    changed = change_signing_keys(elsewhere, config, now_ms(), checkpoints=[egress], log=mesh.home / "copy")
    assert {end.log for end in changed.ends} == {EGRESS, region_origin("us-east", "acme")}
    brought_back(mesh, elsewhere)
    await mesh.start("us-east")
    await until(lambda: key_changes(mesh) == 2, "the broker writes the leaves of the change")
    await mesh.stop("us-east")
    raised = raise_ends(mesh.us, config, now_ms())
    assert {end.log for end in raised.ends} == set(logs(mesh))
    for report in verified(mesh).values():
        assert report.ok, report.findings


@pytest.mark.parametrize(
    "known",
    [
        pytest.param("a checkpoint", marks=only_slow),
        "a note that eu-west remembers",
        pytest.param("the bundle", marks=only_slow),
    ],
)
async def test_a_copy_of_the_log_that_is_older_than_what_is_known_of_it_changes_no_keys(
    known: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it lacks may say that the keys in the folder were given up."""
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    await twenty_crossed(mesh)
    await mesh.stop("us-east")
    audit, copy = mesh.us.root / "data" / "audit", mesh.home / "copy"
    shutil.copytree(audit, copy)
    before, secrets = mesh.us.bundle.read_bytes(), mesh.home / "secrets of before"
    shutil.copytree(mesh.us.secrets, secrets)
    await mesh.start("us-east")
    async with mesh.agent():
        await mesh.stand("us-east", next(iter(mesh.documents("us-east", "export"))), StandingAction.PAUSE)
        own, size = region_origin("us-east", "acme"), note_size((copy / "checkpoint").read_bytes())
        await until(
            lambda: witnessed(mesh, own) > size, "eu-west has cosigned more of the log than the copy has"
        )
    await mesh.stop("us-east")
    egress = mesh.egress_folder / "checkpoint"
    change_signing_keys(mesh.us, load_config(mesh.us.config), now_ms())
    if known != "the bundle":
        mesh.us.bundle.write_bytes(before)
        shutil.copytree(secrets, mesh.us.secrets, dirs_exist_ok=True)
    given = [egress, audit / "checkpoint"] if known == "a checkpoint" else [egress]
    command = [
        "change-signing-keys", "--region", "us-east", "--log", str(copy),
        *(f"--checkpoint={path}" for path in given),
    ]  # fmt: skip
    if known != "a note that eu-west remembers":
        monkeypatch.setattr("cli.audit.remembered_here", list)
    held = mesh.us.bundle.read_bytes()
    # By the bundle of before no keys have ended.
    for also in ([], ["--raise-ends"])[: 2 if known == "the bundle" else 1]:
        refused = CliRunner().invoke(app, [*command, *also])
        assert isinstance(refused.exception, RequestError), refused.output
        assert "it is an older copy" in refused.exception.sentence
        assert "felix audit copy" in refused.exception.hint
    assert mesh.us.bundle.read_bytes() == held


async def test_ends_are_raised_beside_the_log_or_a_copy_of_it_alone(mesh: Mesh) -> None:
    """The folder may be of before the last change, and the bundle would name the keys of that change nowhere."""
    await twenty_crossed(mesh)
    await mesh.stop("us-east")
    config, audit = load_config(mesh.us.config), mesh.us.root / "data" / "audit"
    change_signing_keys(mesh.us, config, now_ms(), without=["eu-west.acme/audit"])
    elsewhere = copied_to(mesh, "elsewhere")
    shutil.copytree(audit, mesh.home / "copy")
    notes = [(audit / "checkpoint").read_bytes()]
    held = elsewhere.bundle.read_bytes()
    with pytest.raises(RequestError, match="is not here, which says") as refused:
        raise_ends(elsewhere, config, now_ms(), checkpoints=notes)
    assert "--log" in refused.value.hint and "--lost-bundle" not in refused.value.hint
    assert elsewhere.bundle.read_bytes() == held
    own = region_origin("us-east", "acme")
    raised = raise_ends(elsewhere, config, now_ms(), checkpoints=notes, log=mesh.home / "copy")
    assert {end.log: end.size for end in raised.ends}[own] == note_size(notes[0])
    elsewhere.bundle.write_bytes(held)
    assert raise_ends(elsewhere, config, now_ms(), checkpoints=notes, without=[own]).ends == raised.ends

    # From a folder of before the next change it is refused by the log, as beside it.
    change_signing_keys(mesh.us, config, now_ms())
    shutil.copytree(audit, mesh.home / "newer copy")
    with pytest.raises(RequestError, match="gave up the policy key"):
        raise_ends(elsewhere, config, now_ms(), log=mesh.home / "newer copy")


async def test_what_was_said_and_has_no_leaf_yet_when_the_keys_end_gets_none_and_is_said_again(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, export, accepted = mesh.sign_grant()
    await mesh.put("us-east", "export", export)
    await mesh.put("us-east", "import", accepted)
    audit = mesh.us.root / "data" / "audit"
    append = DocumentLog._append

    async def full(self: DocumentLog, document: bytes, leaf: Callable[[], Leaf]) -> bool:
        raise AuditUnavailableError("the disk is full")

    monkeypatch.setattr(DocumentLog, "_append", full)
    for said in (
        mesh.deny("us-east", "acme/secret/*"),
        mesh.stand("us-east", body.grant, StandingAction.PAUSE),
        mesh.stand("us-east", body.grant, StandingAction.REVOKE),
    ):
        with suppress(FelixError):
            await said
    words = ("the denial of acme/secret/* to or from *", f"the pause of {body.grant}", f"the revocation of {body.grant}")  # fmt: skip
    await mesh.stop("us-east")
    monkeypatch.setattr(DocumentLog, "_append", append)
    config = load_config(mesh.us.config)
    with pytest.raises(RequestError, match="no leaf of yet") as refused:
        change_signing_keys(mesh.us, config, now_ms(), without=[EGRESS])
    assert all(word in refused.value.sentence for word in words) and "--say-again" in refused.value.hint
    changed = change_signing_keys(mesh.us, config, now_ms(), without=[EGRESS], say_again=True)
    own = region_origin("us-east", "acme")
    (end,) = (end for end in changed.ends if end.log == own)

    await mesh.start("us-east")
    governance = mesh.nodes["us-east"].services.governance
    told = "\n".join(governance.problems)
    assert all(f"{word}, which has no leaf" in told for word in words)
    assert governance.book.denies() and governance.book.is_revoked_by(body.grant, "us-east")
    # Nothing but KEY leaves stands behind the end, until the new key says it again; then that counts, and lifts.
    await mesh.deny("us-east", "acme/secret/*", 2)
    await mesh.stand("us-east", body.grant, StandingAction.REVOKE)
    await mesh.deny("us-east", "acme/secret/*", 3, lifted=True)
    await mesh.stand("us-east", body.grant, StandingAction.RESUME, 2)
    assert not governance.book.denies() and not any("has no leaf" in each for each in governance.problems)

    def leaves() -> list[Kind]:
        return [header.kind for header in mesh.headers(audit)[end.size :] if header.kind is not Kind.KEY]

    said_again = [Kind.DENY_ENTRY, Kind.REVOKE, Kind.DENY_ENTRY, Kind.STANDING]
    await until(lambda: len(leaves()) == len(said_again), "all has its leaf")
    assert sorted(leaves()) == sorted(said_again)
    trust = Trust.of([changed.signed.bundle, mesh.bundle("eu-west")])
    report = verify_log(mesh.log_files(audit), trust, cosignatures_min=0)
    assert report.ok, report.findings


@only_slow
async def test_ends_are_raised_no_further_than_a_later_change_says_nor_from_a_folder_of_before_one(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later change let its key count for nothing in a log: the earlier key does not count there up to now."""
    monkeypatch.setenv("FELIX_HOME", str(mesh.home))
    body = await twenty_crossed(mesh)
    await change(mesh, "us-east")
    await sign_again(mesh, "us-east", body.grant)
    await mesh.publish([flight(number) for number in range(20, 30)])
    async with mesh.agent():
        await mesh.crossed(30)
        await rested(mesh, 30)
    await mesh.stop("us-east")
    config, older = load_config(mesh.us.config), tmp_path / "older"
    shutil.copytree(mesh.us.root, older, ignore=shutil.ignore_patterns("data", "bridges"))
    egress = (mesh.egress_folder / "checkpoint").read_bytes()
    log = open_checkpoint_text(egress)
    changed = change_signing_keys(mesh.us, config, now_ms(), without=[log])
    earlier = changed.signed.bundle.former[0]
    raised = raise_ends(mesh.us, config, now_ms(), checkpoints=[egress], back=2)
    assert raised.signed.bundle.former[0].end_in(log) == earlier.end_in(log) is not None
    assert any(f"count for nothing in {log}" in each for each in raised.left_out)
    # The folder of before that change, beside the log that has it.
    for name in ("bundle.json", "secrets"):
        path = mesh.us.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        source = older / name
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    own = (mesh.us.root / "data" / "audit" / "checkpoint").read_bytes()
    with pytest.raises(RequestError, match=r"given up|gave up|of before"):
        raise_ends(mesh.us, config, now_ms(), checkpoints=[own])


def open_checkpoint_text(note: bytes) -> str:
    """Whose log a checkpoint is of."""
    return note.decode().partition("\n")[0]
