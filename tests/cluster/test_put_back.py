"""What forbids, and the metadata store lost, is put back by one broker of three: the one that writes the audit log. Real brokers, a real etcd."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from bridge_mesh import until
from cluster.audited import home_of
from cluster.clustered_region import ClusteredRegion, serving
from etcd_process import EtcdProcess, etcd_of_each_test

from felix.messages import PutDocument
from felix.runtime.real import now_ms
from keys.key_file import load_signing_key
from policy.grant import DenyEntry, sign_deny
from region.governance.put_back import EACH_S, LOST_FOR_S, PutBack
from region.metadata.catalog import Catalog

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

PATTERNS = ("acme/ops/*", "acme/hr/*", "acme/web/*")
DENIES = "/felix/1/us-east/denies/"


class Watched:
    """The region, and which broker puts what into the store of its own accord."""

    def __init__(self, region: ClusteredRegion, monkeypatch: pytest.MonkeyPatch) -> None:
        self.region = region
        self.puts: list[tuple[str, str]] = []
        """broker and name in the store"""
        put = PutBack._put

        async def noted(work: PutBack, kind: str, name: str, document: object) -> None:
            self.puts.append((self.broker_of(work._catalog), name))
            await put(work, kind, name, document)  # type: ignore[arg-type]

        monkeypatch.setattr(PutBack, "_put", noted)

    def broker_of(self, catalog: Catalog) -> str:
        return next(name for name, node in self.region.nodes.items() if node.broker.catalog is catalog)

    async def deny(self) -> None:
        """us-east denies the patterns, and every broker judges by it."""
        key = load_signing_key(self.region.folder.policy_key).private_key
        async with self.region.client(min(self.region.nodes)) as client:
            for number, streams in enumerate(PATTERNS, 1):
                entry = DenyEntry(
                    streams=streams,
                    peer="*",
                    region="us-east",
                    sequence=number,
                    at=now_ms(),
                    by="a",
                    lifted=False,
                )
                await client.request(PutDocument("deny", sign_deny(entry, key).encode_file()))
        await self.all(lambda denied, lost: denied == len(PATTERNS) and not lost)

    async def all(self, holds: Callable[[int, int], bool]) -> None:
        """Wait until this holds of every broker: how many patterns it denies, and how many of their documents the store lacks for it."""

        def told(name: str) -> tuple[int, int]:
            governance = self.region.nodes[name].services.governance
            return len(governance.book.denies()), len(governance._judgement.held.lost()["deny"])

        await until(lambda: all(holds(*told(name)) for name in self.region.nodes), "every broker")

    def stored(self) -> dict[str, str]:
        """The deny entries in the store."""
        told = json.loads(self.region.etcd.ctl("get", "--prefix", DENIES, "-w", "json"))
        return {each["key"]: each["value"] for each in told.get("kvs", ())}

    async def lose_and_get_back(self) -> None:
        """The store's administrator takes them out. Returns once the store has them again, and a second broker has had the time to do the same."""
        stored = await asyncio.to_thread(self.stored)
        assert len(stored) == len(PATTERNS)
        await asyncio.to_thread(self.region.etcd.ctl, "del", "--prefix", DENIES)
        await until(lambda: len(self.puts) >= len(PATTERNS), "they are put back")
        await self.all(lambda denied, lost: denied == len(PATTERNS) and not lost)
        await asyncio.sleep(LOST_FOR_S + (len(PATTERNS) + 1) * EACH_S)
        assert await asyncio.to_thread(self.stored) == stored


async def test_one_broker_puts_back_what_the_store_lost_and_the_next_one_once_that_is_gone(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, etcd) as region:
        watched = Watched(region, monkeypatch)
        await watched.deny()
        for _ in range(2):
            home = await home_of(region)
            watched.puts.clear()
            with caplog.at_level(logging.WARNING, "felix.region.governance"):
                await watched.lose_and_get_back()
            names = [name for _, name in watched.puts]
            assert {broker for broker, _ in watched.puts} == {home}
            assert len(names) == len(set(names)) == len(PATTERNS)
            told = [each for each in caplog.messages if "it is put back" in each]
            assert len(told) == len(PATTERNS), told
            caplog.clear()
            if len(region.nodes) == 3:
                await region.stop(home)


async def test_brokers_that_all_took_themselves_for_the_writer_are_found(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule switched off: several put the same, and the store takes the first."""
    async with serving(tmp_path, etcd) as region:
        watched = Watched(region, monkeypatch)
        await watched.deny()
        for node in region.nodes.values():
            node.services.governance.put_back._writes_log = lambda: True
        await watched.lose_and_get_back()
        assert len({broker for broker, _ in watched.puts}) > 1
