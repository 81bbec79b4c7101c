"""F13: the metadata store's administrator deletes, restores and exchanges documents. What a region forbade stays forbidden."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from attacks.chance import Chance
from bridge_mesh import POLICIES, STREAM, Mesh, two_regions, until
from slow_runs import only_slow

from audit.leaf import Kind
from felix.errors import Code, FelixError
from felix.names import StreamName
from felix.runtime.real import now_ms
from policy.approval import parse_document
from policy.grant import DenyEntry, Standing, StandingAction, sign_deny, sign_export, sign_standing
from policy.residency import parse_policy, sign_policy
from policy.terms import grant_id
from region.metadata.transaction import Delete, Put

Tally = Callable[[str, int], None]
NAME = StreamName.parse(STREAM)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def granted(mesh: Mesh) -> str:
    await mesh.create()
    body, export, accepted = mesh.sign_grant()
    await mesh.agree("us-east", body, export, accepted)
    assert allowed(mesh, body.grant) is None
    return body.grant


def allowed(mesh: Mesh, grant: str) -> Code | None:
    """Why us-east's broker hands nothing out; None where it does."""
    governance = mesh.nodes["us-east"].services.governance
    try:
        governance.check_export(mesh.bridge_id, grant, NAME, "read")
    except FelixError as error:
        return error.code
    return None


class Administrator:
    """Whoever may write us-east's metadata store, and keeps copies."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def _store(self):  # type: ignore[no-untyped-def]
        return self.mesh.nodes["us-east"].broker.catalog.store

    async def snapshot(self) -> dict[str, bytes]:
        loaded = await self._store.load(self.mesh.nodes["us-east"].broker.catalog.keys.prefix)
        sections = ("grants/", "revocations/", "denies/", "trusted/")
        prefix = self.mesh.nodes["us-east"].broker.catalog.keys.prefix
        return {
            entry.key: entry.value
            for entry in loaded.entries
            if entry.key.removeprefix(prefix).startswith(sections)
        }

    async def put_back(self, held: dict[str, bytes]) -> None:
        """Make the store what it was."""
        now = await self.snapshot()
        writes = [Put(key, value) for key, value in held.items() if now.get(key) != value]
        gone = [Delete(key) for key in now if key not in held]
        for write in (*writes, *gone):
            await self._store.transact([], [write])
        revision = (await self._store.load(self.mesh.nodes["us-east"].broker.catalog.keys.prefix)).revision
        await self.mesh.nodes["us-east"].services.requests._mirror.wait_for(revision)

    async def delete(self, section: str) -> None:
        held = await self.snapshot()
        await self.put_back({key: value for key, value in held.items() if f"/{section}/" not in key})


async def restart(mesh: Mesh, forgets: str = "") -> None:
    """`forgets`: which of the broker's copies are not there any more, as where they come from a backup; a glob."""
    await mesh.stop("us-east")
    for path in (mesh.folder("us-east").root / "data" / "governance").glob(forgets or "none"):
        path.unlink()
    await mesh.start("us-east")


@pytest.mark.parametrize(
    "then",
    [
        "runs",
        *(pytest.param(between, marks=only_slow) for between in ("restarts", "lost its copies")),
        "lost copies and snapshot",
    ],
)
@pytest.mark.parametrize("who", ["us-east", "eu-west"])
@pytest.mark.parametrize("what", ["pause", "deny", "revoke"])
async def test_what_forbids_stays_when_it_is_deleted(mesh: Mesh, what: str, who: str, then: str) -> None:
    grant, administrator = await granted(mesh), Administrator(mesh)
    before = await administrator.snapshot()
    if what == "deny":
        entry = DenyEntry(streams="acme/ops/*", peer="*", region=who, sequence=1, at=now_ms(), by="a")
        await mesh.put("us-east", "deny", sign_deny(entry, mesh.key(who)))
    else:
        standing = Standing(
            grant=grant, action=StandingAction(what), region=who, sequence=1, at=now_ms(), by="a"
        )
        await mesh.put("us-east", "standing", sign_standing(standing, mesh.key(who)))
    refused = allowed(mesh, grant)
    assert refused is not None
    await administrator.put_back(before)
    if then != "runs":
        # Where store and copies are old, the region's audit log is what knows.
        forgets = {"restarts": "", "lost its copies": "*.document"}.get(then, "*")
        await restart(mesh, forgets)
    assert allowed(mesh, grant) is refused


async def test_an_older_policy_does_not_come_back_with_a_backup_of_store_and_copies(mesh: Mesh) -> None:
    grant = await granted(mesh)
    catalog = mesh.nodes["us-east"].broker.catalog
    before = await catalog.store.get(catalog.keys.policy_pointer())
    assert before is not None
    newer = POLICIES["us-east"].replace("revision: 1", "revision: 2")
    assert newer != POLICIES["us-east"]
    await mesh.put("us-east", "policy", sign_policy(parse_policy(newer, "p"), mesh.key("us-east")))
    assert allowed(mesh, grant) is None
    await catalog.store.transact([], [Put(catalog.keys.policy_pointer(), before.value)])
    await restart(mesh, "*")
    assert mesh.nodes["us-east"].services.governance.policy is None, (
        "nothing may cross until somebody says which"
    )
    await mesh.put("us-east", "policy", sign_policy(parse_policy(newer, "p"), mesh.key("us-east")))
    assert allowed(mesh, grant) is None


async def test_a_region_that_is_no_party_to_a_grant_gets_no_leaf_for_its_word_about_it(mesh: Mesh) -> None:
    """A trusted region revokes others' grant; whoever administers the store puts that there."""
    await mesh.create()
    terms = mesh.terms(to_region="ap-south")  # eu-west is the third region here
    policy = parse_policy(
        POLICIES["us-east"].replace("eu-west: {country: IE", "ap-south: {country: IE"), "us-east"
    )
    export = sign_export(terms, policy, mesh.key("us-east"), now_ms())
    catalog = mesh.nodes["us-east"].broker.catalog
    grant = grant_id(terms.hash())
    await catalog.put_document("grants", "export", grant, export.encode_file())
    for region, name in (("eu-west", "no-say"), ("us-east", "say")):
        standing = Standing(
            grant=grant, action=StandingAction.REVOKE, region=region, sequence=1, at=now_ms(), by="a"
        )
        document = sign_standing(standing, mesh.key(region))
        await catalog.put_document("revocations", "state", name, document.encode_file())
    folder = mesh.folder("us-east").root / "data" / "governance"
    await until(lambda: list(folder.glob("*.document")), "the party's revocation is kept")
    await mesh.stop("us-east")
    leaves = mesh.headers(mesh.folder("us-east").root / "data" / "audit", Kind.REVOKE)
    signers = [parse_document(leaf.document).region for leaf in leaves]
    assert (signers, len(list(folder.glob("*.document")))) == (["us-east"], 1)


@pytest.mark.parametrize("again", [False, True], ids=["running", "restarted"])
async def test_a_revocation_outlives_the_bundle_that_it_was_verified_with(mesh: Mesh, again: bool) -> None:
    """The other region's bundle is taken out, the revocation deleted, the bundle put back."""
    grant, administrator = await granted(mesh), Administrator(mesh)
    standing = Standing(
        grant=grant, action=StandingAction.REVOKE, region="eu-west", sequence=1, at=now_ms(), by="a"
    )
    before = await administrator.snapshot()
    await mesh.put("us-east", "standing", sign_standing(standing, mesh.key("eu-west")))
    assert allowed(mesh, grant) is Code.GRANT_REVOKED
    await administrator.delete("trusted")
    assert allowed(mesh, grant) is not None
    await administrator.delete("revocations")
    if again:
        await restart(mesh)
    await administrator.put_back(before)
    assert allowed(mesh, grant) is Code.GRANT_REVOKED


async def test_only_a_newer_word_of_the_same_region_lifts(mesh: Mesh) -> None:
    grant, administrator = await granted(mesh), Administrator(mesh)
    before = await administrator.snapshot()
    await mesh.stand("us-east", grant, StandingAction.RESUME, 1)
    resumed = await administrator.snapshot()
    await mesh.stand("us-east", grant, StandingAction.PAUSE, 2)
    for held in (before, resumed):
        await administrator.put_back(held)
        assert allowed(mesh, grant) is Code.PAUSED
    await restart(mesh)
    assert allowed(mesh, grant) is Code.PAUSED
    await mesh.stand("us-east", grant, StandingAction.RESUME, 3)
    assert allowed(mesh, grant) is None


async def test_no_state_of_the_store_allows_what_is_forbidden(
    mesh: Mesh, tally: Tally, chance: Chance, attack_scale: int
) -> None:
    """Words of both regions in any order; between them any earlier state of the store, whole or in parts, comes back."""
    grant, administrator = await granted(mesh), Administrator(mesh)
    drawn = chance(13)
    states = [await administrator.snapshot()]
    standing = {("stand", "us-east"): False, ("stand", "eu-west"): False, ("deny", "us-east"): False}
    tried, refused = 0, 0
    for sequence in range(1, 30 * attack_scale + 1):
        kind, who = drawn.choice(sorted(standing))
        forbid = drawn.random() < 0.6
        if kind == "stand":
            action = StandingAction.PAUSE if forbid else StandingAction.RESUME
            word = Standing(grant=grant, action=action, region=who, sequence=sequence, at=now_ms(), by="a")
            await mesh.put("us-east", "standing", sign_standing(word, mesh.key(who)))
        else:
            entry = DenyEntry(
                streams="acme/ops/*", peer="*", region=who, sequence=sequence, at=now_ms(), by="a",
                lifted=not forbid,
            )  # fmt: skip
            await mesh.put("us-east", "deny", sign_deny(entry, mesh.key(who)))
        standing[kind, who] = forbid
        states.append(await administrator.snapshot())
        old, now = drawn.choice(states), states[-1]
        mixed = {key: (old if drawn.random() < 0.5 else now).get(key, b"") for key in {*old, *now}}
        # The grant's own halves stay, else nothing could ever be allowed.
        kept = {key: value for key, value in now.items() if "/grants/" in key or "/trusted/" in key}
        await administrator.put_back({key: value for key, value in mixed.items() if value} | kept)
        tried += 1
        refused += any(standing.values())
        assert (allowed(mesh, grant) is not None) == any(standing.values())
    await restart(mesh)
    assert (allowed(mesh, grant) is not None) == any(standing.values())
    tally("states of the store", tried)
    tally("of them with something forbidden", refused)
