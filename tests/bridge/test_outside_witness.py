"""A bridge and a region that submit their logs to an outside witness, and a bridge that waits for a quorum."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from attacks.test_f13_unpinned_bundles import change_policy_key
from audit_log import key, witness_signer
from bridge_mesh import BRIDGE, POLICIES, Mesh, flight, two_regions, until
from witness_logs import serving

import bridge.renewal
from audit.note import VerifierKey
from audit.trail import Trail
from audit.witness_config import QuorumConfig, WitnessConfig
from audit.witness_policy import WitnessPolicy
from bridge.agent import Agent
from felix.errors import RequestError
from felix.files import PRIVATE, replace_file
from felix.messages import DescribeRegion
from felix.runtime.real import now_ms
from keys.bundle import sign_bundle
from keys.key_file import load_signing_key
from policy.quantity import Duration
from policy.residency import parse_policy, sign_policy
from region.bootstrap import issue_identity, trust_region
from region.config import AuditConfig, load_config


def policy_text(mesh: Mesh, outside: tuple[VerifierKey, ...]) -> str:
    """Both algorithms of the other region's witness, and the outside witness, by any one of their keys."""
    lines = [f"witness out{at} {key}" for at, key in enumerate(outside)]
    theirs = mesh.trust.region("eu-west").witnesses
    lines += [f"witness eu{at} {key}" for at, key in enumerate(theirs)]
    lines.append(f"group out any {' '.join(f'out{at}' for at in range(len(outside)))}")
    lines.append(f"group eu all {' '.join(f'eu{at}' for at in range(len(theirs)))}")
    return "\n".join([*lines, "group both all out eu", "quorum both", ""])


def trail_of(agent: Agent) -> Trail:
    trail = agent.context.trail
    assert trail is not None
    return trail


async def test_nothing_crosses_without_a_quorum_and_goes_on_once_there_is_one(tmp_path: Path) -> None:
    async with two_regions(tmp_path / "mesh") as mesh:
        with serving(tmp_path / "w") as witness:
            port, keys = witness.port, tuple(signer.key for signer in witness.state.signers)
            for key in mesh.trust.region("us-east").logs:
                witness.state.add_log(key.name, key)
            path = mesh.us.root / "witnesses.policy"
            path.write_text(policy_text(mesh, keys))
            config = {
                "witnesses": (WitnessConfig(url=f"http://127.0.0.1:{port}", keys=tuple(map(str, keys))),),
                "require_quorum": QuorumConfig(policy=path.name, max_lag=Duration(4_000)),
            }
            await mesh.create()
            await mesh.grant()
            agent = await Agent.start(mesh.bridge_config(**config), mesh.us.root)
            try:
                await mesh.publish([flight(at) for at in range(50)])
                await mesh.crossed(50)

                def has_quorum() -> bool:
                    policy = WitnessPolicy.parse(path.read_bytes())
                    durable = trail_of(agent).status().durable
                    return any(
                        held.checkpoint.size == durable and policy.is_met(by.key for by in held.cosigned)
                        for held in trail_of(agent).checkpoints.cosigned()
                    )

                await until(has_quorum, "one checkpoint with the cosignatures of both")
                assert agent.witnesses()[0].size == trail_of(agent).status().durable
                assert any(log.held.size > 0 for log in witness.state.logs())
                await asyncio.to_thread(witness.stop)

                async def held() -> bool:
                    await mesh.publish([flight(1)])
                    return "no quorum" in agent.not_ready()

                await until(held, "the bridge stands still without its witness")
                links = agent.links()
                position = links[0].position
                await mesh.publish([flight(at) for at in range(50)])
                await until(lambda: "no quorum" in agent.links()[0].reason, "the link says why")
                await asyncio.sleep(2)
                settled = agent.links()[0].position
                assert settled <= position + 24, "what was on its way may have arrived"
                end = (await mesh.describe("us-east")).state[0].high_watermark
                assert settled < end
            except BaseException:
                await agent.stop()
                raise
        with serving(tmp_path / "w", port=port):
            try:
                await mesh.crossed(end)
                assert agent.not_ready() == ""
            finally:
                await agent.stop()
        for region in ("us-east", "eu-west"):
            await mesh.stop(region)
        assert mesh.verify_egress(1).ok and mesh.verify_ingress().ok


async def test_a_region_submits_its_own_log_and_shows_how_far_the_witness_is(tmp_path: Path) -> None:
    mesh = Mesh.make(tmp_path / "mesh")
    with serving(tmp_path / "w") as witness:
        keys = tuple(str(signer.key) for signer in witness.state.signers)
        for key in mesh.trust.region("us-east").logs:
            witness.state.add_log(key.name, key)
        audit = AuditConfig(witnesses=(WitnessConfig(url=f"http://127.0.0.1:{witness.port}", keys=keys),))
        node = await mesh.start("us-east", audit=audit)
        try:
            policy = parse_policy(POLICIES["us-east"], "us-east.yaml")
            await mesh.put("us-east", "policy", sign_policy(policy, mesh.key("us-east")))
            trail = node.services.governance.trail

            def cosigned() -> bool:
                status = trail.status()
                return 0 < status.cosigned == status.durable

            await until(cosigned, "the outside witness cosigns the region's log")
            async with mesh.operator("us-east") as operator:
                gauges = (await operator.request(DescribeRegion())).gauges
            assert (
                gauges["audit_witnesses"] == 1
                and gauges["audit_witness_leaves_least"] == trail.status().durable
            )
        finally:
            await mesh.stop("us-east")


def test_configurations_name_witnesses_and_a_quorum(tmp_path: Path) -> None:
    mesh = Mesh.make(tmp_path)
    key = mesh.trust.region("eu-west").witnesses[0]
    path = mesh.us.config
    path.write_text(
        path.read_text() + f"audit:\n  witnesses:\n    - url: https://w.example/a/\n      keys: ['{key}']\n"
    )
    (found,) = load_config(path).audit.witnesses
    assert found.target(tmp_path).keys == (key,) and found.target(tmp_path).ca is None
    for wrong in (
        f"- url: w.example\n      keys: ['{key}']",
        "- url: https://w.example\n      keys: ['nonsense']",
        "- url: https://w.example\n      keys: []",
        f"- url: https://w.example\n      keys: ['{mesh.trust.region('eu-west').logs[0]}']",
    ):
        text = path.read_text().partition("audit:")[0] + f"audit:\n  witnesses:\n    {wrong}\n"
        path.write_text(text)
        with pytest.raises(RequestError):
            load_config(path)


async def test_a_quorum_of_the_own_region_is_refused(tmp_path: Path) -> None:
    async with two_regions(tmp_path) as mesh:
        own = mesh.trust.region("us-east").witnesses[0]
        path = mesh.us.root / "own.policy"
        config = msgspec.structs.replace(
            mesh.bridge_config(), require_quorum=QuorumConfig(policy=path.name, max_lag=Duration(4_000))
        )
        # By its name, and by its key under a name that nobody knows.
        for name in (own.name, "witness.example/w1"):
            path.write_text(f"witness w {VerifierKey(name, own.algorithm, own.public)}\nquorum w\n")
            with pytest.raises(RequestError, match="does not vouch for itself"):
                await Agent.start(config, mesh.us.root)


async def test_a_changed_policy_counts_and_a_bad_one_leaves_the_former_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent runs on. Its witness is one that nobody has; then another region's."""
    monkeypatch.setattr(bridge.renewal, "RENEW_S", 0.1)
    stranger = witness_signer("witness.example/w1", seed=77).key
    async with two_regions(tmp_path) as mesh:
        path = mesh.us.root / "witnesses.policy"

        def write(text: str) -> None:
            replace_file(path, text.encode(), PRIVATE)

        write(f"witness w {stranger}\nquorum w\n")
        await mesh.create()
        await mesh.grant()
        quorum = QuorumConfig(policy=path.name, max_lag=Duration(4_000))
        with caplog.at_level(logging.WARNING, "felix.bridge.renewal"):
            async with mesh.agent(require_quorum=quorum) as agent:
                await until(lambda: agent.links() and "met by nobody" in agent.links()[0].reason, "at once")
                assert stranger.name in agent.links()[0].reason
                assert "no quorum" not in agent.not_ready()
                await mesh.publish([flight(at) for at in range(10)])
                await until(lambda: "no quorum" in agent.not_ready(), "it lets nothing cross")
                own, theirs = (mesh.trust.region(name).witnesses[0] for name in ("us-east", "eu-west"))
                bad = ("nonsense\n", f"witness w {own}\nquorum w\n", f"witness w {theirs}\n")
                for text in bad:
                    write(text)
                    await until(lambda: "former one counts" in agent.links()[0].reason, "the status says it")
                    assert "no quorum" in agent.not_ready()
                    write(f"witness w {stranger}\nquorum w\n")
                    await until(lambda: "former one counts" not in agent.links()[0].reason, "it is gone")
                path.unlink()
                await until(lambda: "does not exist" in agent.links()[0].reason, "also of no file")
                told = [each.message for each in caplog.records if "former one counts" in each.message]
                assert len(told) == len(set(told)) == len(bad) + 1, "each once"
                write(f"witness w {theirs}\nquorum w\n")
                await mesh.crossed(10)
                await until(lambda: agent.not_ready() == "", "all of it is cosigned")
                assert "former one" not in agent.links()[0].reason
                assert "met by nobody" not in agent.links()[0].reason
                # What a witness cosigns that was in no policy before counts from there on.
                await mesh.publish([flight(at) for at in range(10)])
                await mesh.crossed(20)
                write(f"witness w {stranger}\nquorum w\n")
                await until(lambda: "no quorum" in agent.not_ready(), "it is held to the stricter one")


async def test_a_renewed_bundle_with_the_key_of_the_quorum_is_not_taken(tmp_path: Path) -> None:
    """While the agent runs, its own region's bundle calls the outside witness's key one of its receipts' keys. All else that is renewed is taken."""
    outside = witness_signer("witness.example/w1", seed=77).key
    async with two_regions(tmp_path) as mesh:
        path = mesh.us.root / "outside.policy"
        path.write_text(f"witness w {outside}\nquorum w\n")
        config = msgspec.structs.replace(
            mesh.bridge_config(), require_quorum=QuorumConfig(policy=path.name, max_lag=Duration(4_000))
        )
        agent = await Agent.start(config, mesh.us.root)
        try:
            held, policy_key = mesh.bundle("us-east"), load_signing_key(mesh.us.policy_key)
            for public in (outside.public, key(78).verify_key.public):
                changed = msgspec.structs.replace(held, receipt_keys=(*held.receipt_keys, public))
                mesh.us.bundle.write_bytes(sign_bundle(changed, policy_key).encode())
                await agent._renewal.renew()
                is_taken = agent._renewal.files.bundles["us-east"] == changed
                assert is_taken == (public != outside.public)
                refused = [said for said in agent._renewal.troubles() if "is not taken" in said]
                assert is_taken == (refused == [])
                renewed = issue_identity(mesh.us, load_config(mesh.us.config), "bridge", BRIDGE, now_ms())
                await agent._renewal.renew()
                assert agent._renewal.files.identity.chain_pem == renewed.chain_pem
        finally:
            await agent.stop()


async def test_pins_are_judged_by_the_bundle_that_counts_and_not_by_one_that_is_not_taken(
    tmp_path: Path,
) -> None:
    """us-east's bundle with another policy key is refused; eu-west's of before is put back beside a pin under the key that counts."""
    outside = witness_signer("witness.example/w1", seed=77).key
    async with two_regions(tmp_path) as mesh:
        (mesh.us.root / "outside.policy").write_text(f"witness w {outside}\nquorum w\n")
        quorum = QuorumConfig(policy="outside.policy", max_lag=Duration(4_000))
        async with mesh.agent(require_quorum=quorum) as agent:
            path = mesh.us.trusted / "eu-west.json"
            former, new = path.read_bytes(), change_policy_key(mesh)
            assert trust_region(mesh.us, new, now_ms()) is not None
            path.write_bytes(former)
            held, other = mesh.bundle("us-east"), key(79)
            changed = msgspec.structs.replace(
                held,
                policy_keys=(other.verify_key.public,),
                receipt_keys=(*held.receipt_keys, outside.public),
            )
            mesh.us.bundle.write_bytes(sign_bundle(changed, other).encode())
            await agent._renewal.renew()
            assert agent._renewal.files.bundles == {"us-east": held, "eu-west": new.bundle}
