"""Who administers a region's metadata store, and nobody at all: an older store is put back, a policy key changed. The operator's own pause and deny entry stop what
they name, or the command says that they do not; and what it lists is what the broker judges by."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_f13_store_administrator import Administrator
from attacks.test_f13_unpinned_bundles import allowed, change_policy_key, keys, trust, write
from bridge_mesh import ACCEPTED_BY, POLICIES, Mesh, two_regions, until
from typer.testing import CliRunner
from warm.commands import warm_command

from cli.exits import exit_code
from cli.main import app
from felix.address import Address
from felix.errors import Code, FelixError, RequestError
from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle, sign_bundle
from keys.key_file import save_signing_key
from keys.signing import SigningKey
from policy.grant import (
    DenyEntry,
    ExportGrant,
    Standing,
    StandingAction,
    sign_deny,
    sign_export,
    sign_import,
    sign_standing,
)
from policy.residency import parse_policy, sign_policy
from policy.signed import NUMBER_MAX, Purpose, SignedDocument, decode_body
from region.bootstrap import trust_region, write_profile
from region.metadata.transaction import Put

PATTERN = "acme/ops/*"


class Operator:
    """us-east's, who has the commands: each in a process of its own, or in a thread of this one."""

    def __init__(self, mesh: Mesh, *, processes: bool = False) -> None:
        self.mesh = mesh
        self._run = self._process if processes else self._thread
        write_profile(mesh.us, "us-east", "acme", Address("127.0.0.1", mesh.ports["us-east"]))

    async def run(self, *words: str) -> tuple[int, str]:
        """How `felix bridge WORDS` ended, and what it told."""
        return await self._run("bridge", *words, "--region", "us-east")

    async def _process(self, *words: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *warm_command(*words), env={**os.environ, "FELIX_HOME": str(self.mesh.home)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        told, error = await process.communicate()
        assert process.returncode is not None
        return process.returncode, (told or error).decode()

    async def _thread(self, *words: str) -> tuple[int, str]:
        environment = {"FELIX_HOME": str(self.mesh.home)}
        done = await asyncio.to_thread(CliRunner().invoke, app, list(words), env=environment)
        if isinstance(done.exception, FelixError):
            return exit_code(done.exception), f"{done.exception} {done.exception.hint}"
        return done.exit_code, done.stdout or done.stderr

    async def does(self, *words: str) -> str:
        code, told = await self.run(*words)
        assert code == 0, told
        return told

    async def sees(self, grant: str) -> tuple[str, list[str], int]:
        """A grant's state, who paused it, and how many denials there are."""
        shown = json.loads(await self.does("show", grant, "--json"))
        listed = json.loads(await self.does("list", "--json"))
        return shown["state"], shown["paused_by"], len(listed["denials"])


async def agreed(mesh: Mesh) -> str:
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    for region in ("us-east", "eu-west"):
        await mesh.agree(region, body, export, accepted)
    assert allowed(mesh, body.grant) is None
    return body.grant


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_the_operator_stops_is_stopped_whatever_the_store_lost(
    tmp_path: Path, restarted: bool, tally: Tally
) -> None:
    async with two_regions(tmp_path) as mesh:
        grant, operator = await agreed(mesh), Operator(mesh, processes=not restarted)
        await operator.does("pause", grant)
        await operator.does("resume", grant)
        await operator.does("deny", "stream", PATTERN)
        await operator.does("deny", "stream", PATTERN, "--lift")
        administrator = Administrator(mesh)
        await administrator.delete("revocations")
        await administrator.delete("denies")
        if restarted:
            await mesh.stop("us-east")
            await mesh.start("us-east")
        assert allowed(mesh, grant) is None
        assert await operator.sees(grant) == ("active", [], 0)
        await operator.does("pause", grant)
        assert allowed(mesh, grant) is Code.PAUSED
        await operator.does("resume", grant)
        assert allowed(mesh, grant) is None
        await operator.does("deny", "stream", PATTERN)
        assert allowed(mesh, grant) is Code.RESIDENCY_DENIED
        assert await operator.sees(grant) == ("active", [], 1)
        tally("stores that lost an operator's words", 1)


async def test_what_is_shown_is_what_the_broker_judges_by(tmp_path: Path, tally: Tally) -> None:
    """The administrator leaves the pause in the store, and takes out what lifted it; or the other way round."""
    async with two_regions(tmp_path) as mesh:
        grant, operator, administrator = await agreed(mesh), Operator(mesh), Administrator(mesh)
        await operator.does("pause", grant)
        paused = await administrator.snapshot()
        await operator.does("resume", grant)
        await administrator.delete("revocations")
        await administrator.put_back(paused)
        await asyncio.sleep(0.5)
        assert allowed(mesh, grant) is None
        assert await operator.sees(grant) == ("active", [], 0)
        await write(mesh, Put(keys(mesh).document("denies", "state", "d.unreadable"), b"{}"))
        await operator.does("pause", grant)
        await administrator.delete("revocations")
        assert allowed(mesh, grant) is Code.PAUSED
        assert await operator.sees(grant) == ("paused", ["us-east"], 0)
        await operator.does("resume", grant)
        assert allowed(mesh, grant) is None
        tally("stores that tell another story", 2)


async def test_what_the_store_lost_is_put_back_once(tmp_path: Path, tally: Tally) -> None:
    async with two_regions(tmp_path) as mesh:
        grant, administrator = await agreed(mesh), Administrator(mesh)
        await mesh.stand("us-east", grant, StandingAction.PAUSE, 1)
        await mesh.stand("us-east", grant, StandingAction.RESUME, 2)
        await mesh.deny("us-east", PATTERN)
        stored = {kind: mirrored(mesh, kind) for kind in ("revocations", "denies")}
        assert len(stored["revocations"]) == 2 and len(stored["denies"]) == 1
        for kind in stored:
            await administrator.delete(kind)
        await until(lambda: len(mirrored(mesh, "denies")) == 1, "the deny entry is put back")
        await until(lambda: len(mirrored(mesh, "revocations")) == 1, "the resumption is put back")
        assert stored["denies"] == mirrored(mesh, "denies")
        assert mirrored(mesh, "revocations").items() <= stored["revocations"].items()
        await administrator.delete("denies")
        await asyncio.sleep(3)
        assert not mirrored(mesh, "denies"), "no war with who takes it out again"
        assert allowed(mesh, grant) is Code.RESIDENCY_DENIED
        # Of a grant that is removed nothing comes back.
        await mesh.stop("us-east")
        await mesh.start("us-east")
        await until(lambda: mirrored(mesh, "denies"), "after a restart")
        await administrator.delete("grants")
        await administrator.delete("revocations")
        await asyncio.sleep(3)
        assert not mirrored(mesh, "revocations")
        tally("documents that were put back", 3)


def mirrored(mesh: Mesh, section: str) -> dict[str, bytes]:
    """What us-east's store has."""
    mirror = mesh.nodes["us-east"].services.governance._mirror
    return dict(mirror.documents(section, "state"))  # type: ignore[arg-type]


async def test_an_operator_is_not_told_that_a_word_is_done_that_a_later_one_outranks(
    tmp_path: Path, tally: Tally
) -> None:
    async with two_regions(tmp_path) as mesh:
        grant = await agreed(mesh)
        await mesh.stand("us-east", grant, StandingAction.RESUME, 7)
        await mesh.deny("us-east", PATTERN, 7, lifted=True)
        with pytest.raises(RequestError, match="later word") as caught:
            await mesh.stand("us-east", grant, StandingAction.PAUSE, 6)
        assert caught.value.code is Code.CONFLICT
        with pytest.raises(RequestError, match="later word") as caught:
            await mesh.deny("us-east", PATTERN, 6)
        assert caught.value.code is Code.CONFLICT
        assert allowed(mesh, grant) is None
        operator = Operator(mesh)
        # The same number forbids, so the highest one does, too; but nothing lifts that any more.
        await mesh.stand("us-east", grant, StandingAction.RESUME, NUMBER_MAX)
        await operator.does("pause", grant)
        assert allowed(mesh, grant) is Code.PAUSED
        code, told = await operator.run("resume", grant)
        assert code == 1 and "later word" in told and "change the policy key" in told
        tally("words that are outranked", 4)


async def test_what_is_said_under_the_next_policy_key_counts(tmp_path: Path, tally: Tally) -> None:
    """us-east changes its own policy key; the words under the former one stay, and those under the present one stop and lift."""
    async with two_regions(tmp_path) as mesh:
        grant, operator = await agreed(mesh), Operator(mesh)
        await mesh.stand("us-east", grant, StandingAction.PAUSE, NUMBER_MAX)
        await mesh.deny("us-east", PATTERN, NUMBER_MAX)
        before, key = mesh.bundle("us-east"), SigningKey.generate()
        mesh.us.policy_key.unlink()
        save_signing_key(key, mesh.us.policy_key)
        changed = msgspec.structs.replace(
            before, issued_ms=before.issued_ms + 10_000, policy_keys=(key.verify_key.public,)
        )
        mesh.us.bundle.write_bytes(sign_bundle(changed, key).encode())
        await mesh.stop("us-east")
        await mesh.start("us-east")
        for region, other in (("us-east", mesh.eu), ("eu-west", mesh.us)):
            pin = trust_region(mesh.folder(region), decode_bundle(other.bundle.read_bytes()), now_ms())
            assert pin is not None
            async with mesh.operator(region) as client:
                await client.request(PutDocument("pin", pin.encode()))
        policy = parse_policy(POLICIES["us-east"].replace("revision: 1", "revision: 2"), "us")
        await mesh.put("us-east", "policy", sign_policy(policy, mesh.key("us-east")))
        held = SignedDocument.parse(next(iter(mesh.documents("us-east", "export").values())))
        terms = decode_body(held, ExportGrant, Purpose.EXPORT).terms
        await mesh.put("us-east", "export", sign_export(terms, policy, mesh.key("us-east"), now_ms()))
        assert allowed(mesh, grant) is Code.RESIDENCY_DENIED
        assert await operator.sees(grant) == ("paused", ["us-east"], 1)
        await operator.does("resume", grant)
        await operator.does("deny", "stream", PATTERN, "--lift")
        assert await operator.sees(grant) == ("active", [], 0)
        await operator.does("pause", grant)
        assert await operator.sees(grant) == ("paused", ["us-east"], 0)
        await operator.does("deny", "stream", PATTERN)
        assert allowed(mesh, grant) is Code.RESIDENCY_DENIED
        tally("words under a changed key", 6)


async def test_a_thief_who_resumed_with_the_highest_number_stops_no_later_stop(
    tmp_path: Path, tally: Tally
) -> None:
    """Who has eu-west's policy key resumes and lifts with the highest number; then the key is changed, and the change compared."""
    async with two_regions(tmp_path) as mesh:
        grant = await agreed(mesh)

        def words(number: int, *, stops: bool) -> list[tuple[str, SignedDocument]]:
            action = StandingAction.PAUSE if stops else StandingAction.RESUME
            standing = Standing(
                grant=grant, action=action, region="eu-west", sequence=number, at=now_ms(), by="x"
            )
            entry = DenyEntry(
                streams=PATTERN, peer="*", region="eu-west", sequence=number, at=now_ms(), by="x", lifted=not stops
            )  # fmt: skip
            key = mesh.key("eu-west")
            return [("standing", sign_standing(standing, key)), ("deny", sign_deny(entry, key))]

        for kind, document in words(NUMBER_MAX, stops=False):
            await mesh.put("us-east", kind, document)
        await trust(mesh, change_policy_key(mesh))
        policy = parse_policy(POLICIES["eu-west"], "eu")
        trusted = {name: mesh.bundle(name).policy_keys for name in ("us-east", "eu-west")}
        export = SignedDocument.parse(next(iter(mesh.documents("us-east", "export").values())))
        half = sign_import(export, policy, mesh.key("eu-west"), trusted, ACCEPTED_BY, now_ms())
        await mesh.put("us-east", "import", half)
        assert allowed(mesh, grant) is None
        for number in (1, now_ms()):
            for (kind, document), (_, lifts) in zip(
                words(number, stops=True), words(number + 1, stops=False), strict=True
            ):
                await mesh.put("us-east", kind, document)
                assert allowed(mesh, grant) is not None, kind
                await mesh.put("us-east", kind, lifts)
                assert allowed(mesh, grant) is None, kind
                tally("stops after a thief's highest number", 1)
        for kind, document in words(now_ms() + 9, stops=True):
            await mesh.put("us-east", kind, document)
        await mesh.stop("us-east")
        await mesh.start("us-east")
        assert allowed(mesh, grant) is not None
