"""A region for tests of the `felix` data source: a broker of its own process, an analyst who may only read, and streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from region_process import BrokerProcess, fixed_region

import felix
import felix.sync
from felix.messages import PutRights
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config
from region.folder import RegionFolder

READS = ("subscribe acme/payments/*",)
WRITES = ("publish acme/payments/*",)


@dataclass
class SparkRegion:
    """us-east, running. `client` is its operator."""

    home: Path
    folder: RegionFolder
    broker: BrokerProcess
    client: felix.sync.SyncRegion
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def identity(self, name: str, rights: Sequence[str]) -> str:
        """Issue an identity with these rights; its full name."""
        config = load_config(self.folder.config)
        issued = str(issue_identity(self.folder, config, "client", name, now_ms()).spiffe_id)
        self.client.request(PutRights(issued, list(rights)))
        return issued

    def key_path(self, name: str) -> Path:
        """The path of an identity, without its ending."""
        return self.folder.root / "identities" / name

    def secret(self, name: str) -> str:
        """A line of an identity's private key."""
        pem, key = self.key_path(name).with_suffix(".pem"), self.key_path(name).with_suffix(".key")
        text = (key if key.is_file() else pem).read_text()
        return text.split("PRIVATE KEY-----")[1].split("-----")[0].strip().splitlines()[0]

    def stream(self, *, shards: int = 2, **settings: Any) -> str:
        """A new stream; its name."""
        name = f"acme/payments/orders-{next(self._names)}"
        self.client.create_stream(name, shards=shards, **settings)
        return name

    def publish(self, stream: str, first: int, end: int, **options: Any) -> None:
        """Records `first` to before `end`: the number is key and payload, every tenth has a header."""
        with self.client.stream(stream).publisher(**options) as publisher:
            for number in range(first, end):
                text = b"%d" % number
                publisher.send(text, text, {"tens": text} if number % 10 == 0 else None)

    def newest_ms(self, stream: str) -> int:
        """The broker's time of the newest record."""
        held = self.client.describe_stream(stream)
        count, newest = sum(each.high_watermark for each in held.state), 0
        with self.client.stream(stream).subscribe("earliest") as subscription:
            while count > 0:
                received = subscription.next_batch()
                count, newest = count - len(received), max(newest, received.timestamp_ms)
        return newest

    def options(self, stream: str, identity: str = "analyst") -> dict[str, str]:
        """The options that every use of the data source has."""
        return {"region": "us-east", "home": str(self.home), "stream": stream, "identity": identity}


@contextmanager
def spark_region(home: Path) -> Iterator[SparkRegion]:
    folder = fixed_region(home)
    broker = BrokerProcess(folder, home)
    try:
        broker.wait()
        with felix.sync.connect(profile=felix.load_profile("us-east", home=home)) as client:
            made = SparkRegion(home, folder, broker, client)
            made.identity("analyst", READS)
            yield made
    finally:
        broker.terminate()
