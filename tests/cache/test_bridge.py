"""A cache in one region, filled by a bridge with a stream of another: keys, values, deletions and expiries, and watches there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bridge_mesh import POLICIES, Mesh, two_regions, until

import felix
from felix.runtime.real import now_ms
from felix.settings import CacheSettings, Views
from policy.transform import Format, KeyRule, TransformSpec

STREAM = "acme/ops/sessions"

pytestmark = pytest.mark.timeout(120)


HEADERS = ("felix.tombstone", "felix.expires-at", "felix.operation")


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    for region, policy in POLICIES.items():
        text = policy.replace("headers: [note, kind]", f"headers: [note, kind, {', '.join(HEADERS)}]")
        assert text != policy
        for name, line in (("opaque:", "opaque: true"), ("keys:", "keys: [keep]")):
            if name not in text:
                text = text.replace("    onward: true", f"    {line}\n    onward: true")
        monkeypatch.setitem(POLICIES, region, text)
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_a_granted_stream_fills_a_cache_in_another_region(mesh: Mesh) -> None:
    await mesh.create(STREAM, shards=2)
    spec = TransformSpec(format=Format.OPAQUE, key=KeyRule.KEEP, headers=HEADERS)
    async with mesh.operator("us-east") as us, mesh.operator("eu-west") as eu:
        there = await eu.create_cache(STREAM, shards=2)
        stream = us.stream(STREAM)
        await stream.publish_many(
            [b"v%d" % number for number in range(50)], [b"k%d" % number for number in range(50)]
        )
        await mesh.grant(stream=STREAM, transform=spec)
        async with mesh.agent(), there.mirror() as mirror:
            soon = b"%d" % (now_ms() + 2_000)
            await stream.publish(b"", key=b"k1", headers={"felix.tombstone": b"deleted"})
            await stream.publish(b"x", key=b"brief", headers={"felix.expires-at": soon})
            await stream.publish(b"new", key=b"k2")
            await until(lambda: mirror.get(b"k2") == b"new" and b"k1" not in mirror, "the last changes")
            await until(lambda: b"k49" in mirror and b"brief" not in mirror, "the expiry")
            wanted = {b"k%d" % number: b"v%d" % number for number in range(50) if number != 1}
            wanted[b"k2"] = b"new"

            async def same() -> bool:
                found = {key: entry.value async for key, entry in there.scan()}
                return found == dict(mirror) == wanted

            await until(same, "what was published")
            entry = await there.get("k7")
            assert isinstance(entry, felix.Entry) and entry.value == b"v7"
            # It is a cache like any other, and what is written there stays there.
            assert await there.compare_and_set("k7", b"local", version=entry.version)


async def test_a_cache_itself_does_not_cross(mesh: Mesh) -> None:
    await mesh.create(STREAM, views=Views(cache=CacheSettings()))
    await mesh.grant(
        stream=STREAM, transform=TransformSpec(format=Format.OPAQUE, key=KeyRule.KEEP, headers=HEADERS)
    )
    async with mesh.agent() as agent:
        await until(lambda: [link.state for link in agent.links()] == ["denied"], "the refusal")
        assert "compacted" in agent.links()[0].reason
