"""Outside witnesses in configurations (`region.yaml`, `bridge.yaml`), and the quorum that a bridge waits for. Values.

    witnesses:
      - url: https://witness.example/
        keys: [witness.example/w1+…]
    require_quorum:
      policy: witnesses.policy
      max_lag: 10m

Callers: region.config, bridge.config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from audit.note import Algorithm, VerifierKey
from audit.submission import WITNESSES_MAX
from audit.witness_client import WitnessTarget, check_url
from audit.witness_policy import WitnessPolicy
from felix.errors import Code, RequestError
from felix.files import read_file
from policy.documents import Parsed
from policy.quantity import Duration

QUORUM_LAG_MS_MIN: Final = 1_000


def _url(text: str) -> str:
    return check_url(text)


def _witness_key(text: str) -> str:
    if VerifierKey.parse(text).algorithm is Algorithm.ED25519:
        raise RequestError("This is a log's key, not a witness's.", code=Code.CONFIG_INVALID)
    return text


class WitnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An outside witness that a log's checkpoints are submitted to.

    `url`: its submission prefix. `keys`: its verifier keys; one good cosignature is enough, those of all are kept. `ca`:
    certificates (PEM) that its TLS certificate must lead to; the system's if left out.
    """

    url: Annotated[str, Parsed(_url)]
    keys: Annotated[
        tuple[Annotated[str, Parsed(_witness_key)], ...], msgspec.Meta(min_length=1, max_length=8)
    ]
    ca: str = ""

    def target(self, base: Path) -> WitnessTarget:
        """`base`: the folder that paths are relative to."""
        return WitnessTarget(
            self.url, tuple(map(VerifierKey.parse, self.keys)), base / self.ca if self.ca else None
        )


Witnesses = Annotated[tuple[WitnessConfig, ...], msgspec.Meta(max_length=WITNESSES_MAX)]


class QuorumConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Nothing crosses while the log's newest leaf without a quorum is older than `max_lag`. `policy`: a tlog-policy file."""

    policy: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    max_lag: Duration = Duration(600_000)

    def __post_init__(self) -> None:
        if self.max_lag < QUORUM_LAG_MS_MIN:
            raise RequestError(
                f"max_lag is {self.max_lag}; at least {Duration(QUORUM_LAG_MS_MIN)} are needed."
            )

    def load(self, base: Path) -> WitnessPolicy:
        """Read the policy. Blocks. Raises RequestError."""
        return WitnessPolicy.parse(read_file(base / self.policy, "the policy of the quorum"))
