"""A region's state folder: what lies where. Values only; who reads and writes the files is said with each.

<home>/<region>/
    region.yaml        configuration of the broker                       region init; people
    profile.json       how clients of this machine reach the region      region init
    bundle.json        what other regions need to know; public           region init, identity issue
    lost-bundle        signing keys made where the bundle was lost       region change-signing-keys
    authority/         root and issuing certificates and keys            region init; cli
    secrets/           policy, import, receipt, audit and witness keys   region init; broker, cli
    keys/              key file and root keys of the data                region init; broker
    identities/        certificate chain and key, one file an identity   region init, identity issue
    trusted/           bundles of other regions, and signed pins         region trust
    offers/            offers of other regions                           region trust
    data/              streams, metadata, audit logs                     broker
    data.begun         which folder `data` is (felix.storage.begun)      broker
    run/               process id and log of a detached broker           region up
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from felix.names import parse_region
from felix.profile import felix_home

STREAMS: Final = "streams"
"""Of a data folder: the logs of streams, and their lock."""
AUDIT: Final = "audit"
"""The folder of the region's audit log, in the data folder of a broker that has it."""


@dataclass(frozen=True, slots=True)
class RegionFolder:
    """The paths of one region."""

    root: Path

    @classmethod
    def of(cls, region: str, home: Path | None = None) -> RegionFolder:
        """The folder of a region by its name. Raises RequestError(NAME_INVALID)."""
        return cls((home or felix_home()) / parse_region(region))

    @property
    def config(self) -> Path:
        return self.root / "region.yaml"

    @property
    def profile(self) -> Path:
        return self.root / "profile.json"

    @property
    def bundle(self) -> Path:
        return self.root / "bundle.json"

    @property
    def lost_bundle(self) -> Path:
        """Names the keys that were made instead of lost ones, whose bundle is lost with them (region.trust.signing_keys)."""
        return self.root / "lost-bundle"

    @property
    def authority(self) -> Path:
        return self.root / "authority"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def policy_key(self) -> Path:
        """Signs grants, standings and policies; the operator's, not needed by a broker."""
        return self.secrets / "policy.pem"

    @property
    def import_key(self) -> Path:
        """Opens what other regions seal to this one."""
        return self.secrets / "import.key"

    @property
    def receipt_key(self) -> Path:
        return self.secrets / "receipt.pem"

    @property
    def audit_key(self) -> Path:
        """Signs the checkpoints of the region's own audit log."""
        return self.secrets / "audit.pem"

    @property
    def audit_ml_dsa_key(self) -> Path:
        """Signs them beside it, with ML-DSA-44."""
        return self.secrets / "audit.mldsa.pem"

    @property
    def witness_key(self) -> Path:
        """Cosigns other regions' checkpoints."""
        return self.secrets / "witness.pem"

    @property
    def witness_ml_dsa_key(self) -> Path:
        """Cosigns them beside it, with ML-DSA-44."""
        return self.secrets / "witness.mldsa.pem"

    def egress_key(self, bridge: str) -> Path:
        """Signs the checkpoints of a bridge's egress log; lies beside its identity."""
        return self.identities / f"{bridge}.audit.pem"

    def egress_ml_dsa_key(self, bridge: str) -> Path:
        """Signs them beside it, with ML-DSA-44."""
        return self.identities / f"{bridge}.audit.mldsa.pem"

    def handoff_key(self, bridge: str) -> Path:
        """What a bridge's data keys are sealed to."""
        return self.identities / f"{bridge}.handoff.key"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def identities(self) -> Path:
        return self.root / "identities"

    def identity(self, name: str) -> Path:
        return self.identities / f"{name}.pem"

    def approver(self, name: str) -> Path:
        """An approver's, where an operator has the same name."""
        return self.identity(f"{name}.approver")

    @property
    def trusted(self) -> Path:
        return self.root / "trusted"

    def pin(self, region: str) -> Path:
        """This region's signed pin of another one's bundle, beside that bundle: what a broker puts into the metadata store."""
        return self.trusted / f"{region}.pin"

    def offer(self, region: str) -> Path:
        """What another region said of itself: where it is reached, which entity runs it."""
        return self.root / "offers" / f"{region}.json"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def bridges(self) -> Path:
        return self.root / "bridges"

    def bridge(self, name: str) -> Path:
        """The state of a bridge agent that runs from this folder."""
        return self.bridges / name

    @property
    def broker_log(self) -> Path:
        return self.run / "broker.log"

    @property
    def broker_pid(self) -> Path:
        return self.run / "broker.pid"

    def pid_of(self, broker: str) -> Path:
        """Of a process that serves as one of several brokers."""
        return self.run / f"{broker}.pid"
