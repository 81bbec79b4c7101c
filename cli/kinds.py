"""The kinds of the objects that commands print, and the field that identifies each. docs/schemas describes them."""

from __future__ import annotations

from typing import Any, Final

KINDS: Final = {
    "audit check-proof": "CheckedProof",
    "audit report": "ReportSummary",
    "audit show": "Leaf",
    "audit verify": "Verification",
    "bridge accept": "GrantFile",
    "bridge allow": "GrantFile",
    "bridge approve": "ApprovalFile",
    "bridge explain": "Explanation",
    "bridge list": "Grant",
    "bridge plan": "Plan",
    "bridge show": "Grant",
    "bridge status": "Link",
    "cache alter": "Stream",
    "cache cas": "CacheVersion",
    "cache create": "Stream",
    "cache delete": "Count",
    "cache get": "CacheEntry",
    "cache incr": "CacheNumber",
    "cache list": "Stream",
    "cache put": "CacheVersion",
    "cache scan": "CacheEntry",
    "cache stats": "CacheStatistics",
    "cache watch": "CacheChange",
    "doctor": "Finding",
    "identity list": "Identity",
    "keys list": "Key",
    "log inspect": "Segment",
    "log restore": "Restoration",
    "log verify": "ShardVerdict",
    "mesh": "Mesh",
    "namespace list": "Namespace",
    "namespace show": "Namespace",
    "policy check": "Policy",
    "policy show": "Policy",
    "queue alter": "Stream",
    "queue consume": "Job",
    "queue create": "Stream",
    "queue describe": "Queue",
    "queue lease": "Job",
    "queue list": "Stream",
    "queue peek": "QueueRecord",
    "queue purge": "Count",
    "queue put": "Publication",
    "queue redrive": "Count",
    "quota list": "Quota",
    "quota set": "Quota",
    "quota show": "Quota",
    "region bundle": "Bundle",
    "region drain": "Broker",
    "region rebalance": "ShardMoves",
    "region offer": "Offer",
    "region status": "Region",
    "stream alter": "Stream",
    "stream create": "Stream",
    "stream describe": "Stream",
    "stream list": "Stream",
    "stream publish": "Publication",
    "stream subscribe": "Record",
    "subscription alter": "Subscription",
    "subscription consume": "Record",
    "subscription create": "Subscription",
    "subscription describe": "Subscription",
    "subscription list": "Subscription",
    "subscription redrive": "Redrive",
    "top": "Traffic",
    "witness list": "WitnessedLog",
}
"""By the words of the command. `felix bench` prints a Benchmark; a command that only does something, Done."""

DATA_FIELDS: Final = frozenset(("key", "value", "payload", "headers"))
"""Fields whose bytes somebody published; bytes in any other field are an id, a hash or a signature."""

_NAMES: Final = {
    "Leaf": "index",
    "Link": "grant",
    "Record": "offset",
    "QueueRecord": "offset",
    "CacheEntry": "key",
    "CacheChange": "key",
    "CacheVersion": "key",
    "CacheNumber": "value",
    "Finding": "what",
    "Key": "id",
    "Subscription": "name",
    "Verification": "origin",
    "WitnessedLog": "origin",
}
_NAMED_BY: Final = (
    "name",
    "grant",
    "stream",
    "queue",
    "cache",
    "region",
    "broker",
    "identity",
    "job",
    "file",
    "id",
    "page",
)


def kind_of(command: str) -> str:
    """The kind of a command's objects, by its words (`stream list`)."""
    return KINDS.get(command) or ("Benchmark" if command.startswith("bench ") else "Done")


def name_in(item: dict[str, Any]) -> Any:
    """The identifying value of an object, for `-o name`; empty if it has none."""
    own = _NAMES.get(item["kind"])
    if own is not None:
        return item.get(own, "")
    for field in _NAMED_BY:
        if field in item:
            return item[field]
    return name_in({"kind": "", **item["arguments"]}) if "arguments" in item else ""
