"""The destination answers that it has cosigned, and gives nothing, another checkpoint's cosignature, or one line of two; or it gives a checkpoint of its log that
is none. The agent says so for as long as it goes on, keeps what there is, and has the other logs cosigned all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from attacks.conftest import Tally
from bridge_mesh import BRIDGE, Mesh, flight, two_regions, until

import region.evidence.witnessing
from audit.note import Algorithm, Note, encode_note, parse_note
from audit.origin import egress_origin, region_origin
from audit.trust import Trust
from audit.verify import verify_log
from audit.witness_policy import WitnessPolicy
from bridge.agent import Agent
from felix.messages import CheckpointAnswer, Witnessed
from felix.names import SpiffeId

Witnessing = region.evidence.witnessing.Witnessing


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        await mesh.create()
        await mesh.grant()
        yield mesh


def require_lines(mesh: Mesh, algorithm: Algorithm) -> None:
    """Both logs of us-east are cosigned by eu-west's key of this algorithm, whole."""
    (key,) = (key for key in mesh.trust.region("eu-west").witnesses if key.algorithm is algorithm)
    egress = egress_origin("us-east", "acme", BRIDGE)
    own = region_origin("us-east", "acme")
    for folder, origin in ((mesh.egress_folder, egress), (mesh.us.root / "data" / "audit", own)):
        logs = [log for log in mesh.trust.region("us-east").logs if log.name == origin]
        policy = WitnessPolicy.parse(
            "\n".join([*(f"log {log}" for log in logs), f"witness eu {key}", "quorum eu", ""]).encode()
        )
        trust = Trust([mesh.trust.region("us-east"), mesh.trust.region("eu-west")], policy=policy)
        report = verify_log(mesh.log_files(folder), trust, origin=origin, cosignatures_min=1)
        assert report.ok and report.cosigned_size == report.size, (origin, report.findings)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nothing", "answered without a cosignature"),
        ("an earlier one", "answered with another checkpoint"),
        ("one line", "(ML-DSA-44), which its bundle names"),
    ],
)
async def test_a_witness_that_gives_nothing_or_half_is_shown_until_it_gives_all(
    mesh: Mesh, how: str, says: str, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    honest, first, calls, lies = Witnessing.cosign, dict[str, Witnessed](), list[str](), [True]

    async def hostile(self: Witnessing, actor: SpiffeId, checkpoint: bytes, proof: list[bytes]) -> Witnessed:
        answer = await honest(self, actor, checkpoint, proof)
        note = parse_note(answer.cosigned)
        if self._region != "eu-west":
            return answer
        calls.append(note.text)
        if not lies[0]:
            return answer
        if how == "nothing":
            return Witnessed(answer.size)
        if how == "an earlier one":
            # Of the first, too, one before it: nothing that was asked for.
            return first.setdefault(note.text.partition("\n")[0], Witnessed(1, older(note)))
        return Witnessed(answer.size, encode_note(without_ml_dsa(note)))

    monkeypatch.setattr(Witnessing, "cosign", hostile)
    await mesh.publish([flight(at) for at in range(20)])
    async with mesh.agent() as agent:
        await mesh.crossed(20)
        await until(lambda: agent._notice().count(says) >= 2, "both logs of us-east", 60)
        assert "the egress log" in agent._notice() and "the audit log of us-east" in agent._notice()
        await asyncio.sleep(7)
        assert "Cosigning with eu-west has failed" in agent._notice()
        assert agent._cosigning.failed_ms()["eu-west"] > 6_000
        assert max(map(calls.count, calls)) <= 3, "at once, and 3 and 9 s later"
        tally("answers of a witness that gives nothing or half", len(calls))
        lies[0] = False
        await until(lambda: not agent._notice(), "it gives all", 90)
    for name in ("us-east", "eu-west"):
        await mesh.stop(name)
    require_lines(mesh, Algorithm.ML_DSA_44)


def older(note: Note) -> bytes:
    return encode_note(note._replace(text=note.text.partition("\n")[0] + "\n1\n" + "A" * 43 + "=\n"))


def without_ml_dsa(note: Note) -> Note:
    return Note(note.text, tuple(line for line in note.signatures if len(line.data) < 1000))


async def test_a_checkpoint_that_has_no_line_of_its_log_keeps_no_other_log_from_being_cosigned(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    honest = Witnessing.checkpoint

    async def hostile(self: Witnessing, actor: SpiffeId, from_size: int, leaf: int) -> CheckpointAnswer:
        answer = await honest(self, actor, from_size, leaf)
        if self._region != "eu-west":
            return answer
        note = parse_note(answer.checkpoint)
        strange = tuple(line._replace(name="someone") for line in note.signatures)
        return CheckpointAnswer(encode_note(note._replace(signatures=strange)), answer.size, answer.proof)

    monkeypatch.setattr(Witnessing, "checkpoint", hostile)
    await mesh.publish([flight(at) for at in range(20)])
    async with mesh.agent() as agent:
        await mesh.crossed(20)
        await until(lambda: "with a line of that log" in agent._notice(), "eu-west's checkpoint is none", 60)
        trail = mesh.nodes["us-east"].services.governance.trail
        await until(
            lambda: trail.status().cosigned == trail.status().durable, "us-east's log is cosigned", 60
        )
        assert isinstance(agent, Agent) and "us-east" not in agent._cosigning._uncosigned
        tally("checkpoints that are none of the log that was asked for", 1)
    for name in ("us-east", "eu-west"):
        await mesh.stop(name)
    require_lines(mesh, Algorithm.ML_DSA_44)


async def test_two_honest_regions_show_nothing(mesh: Mesh) -> None:
    await mesh.publish([flight(at) for at in range(20)])
    async with mesh.agent() as agent:
        await mesh.crossed(20)
        for at in range(40):
            await mesh.publish([flight(20 + at)])
            await asyncio.sleep(0.3)
            assert not agent._notice()
        trail = mesh.nodes["us-east"].services.governance.trail
        await until(
            lambda: trail.status().cosigned == trail.status().durable, "us-east's log is cosigned", 60
        )
        assert not agent._notice()
