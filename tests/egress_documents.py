"""An agent's documents without the agent: what `EgressDocuments` asks of its bridge, with an empty ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from audit_log import BRIDGE, TIME_MS

from bridge.documents import EgressDocuments
from bridge.ledger import Ledger
from felix.names import SpiffeId


def egress_documents() -> EgressDocuments:
    """Of the bridge in us-east; its clock stands still."""
    context: Any = SimpleNamespace(
        runtime=SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: 0.0)),
        source=SimpleNamespace(region="us-east"),
        bridge=SpiffeId.parse(BRIDGE),
        clock_ms=lambda: TIME_MS,
        ledger=Ledger(),
    )
    return EgressDocuments(context)
