"""Random worlds of policies and their revisions, grants, approvals, denials, revocations, standings and times: plain data first.

`draw` makes the data that the oracle judges; `render` makes of the same data what the product judges: signed documents, keys
and policies. Keys, policies and signatures are made once for equal data, so that a world costs little.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Final, cast

from approvers import DAY, MADE_MS, approver, authority, roots
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from felix.names import SpiffeId
from felix.peer import TrustBundle
from keys.authority import create_authority
from policy.approval import Approval, Document, sign_approval
from policy.grant import DenyEntry, ExportGrant, GrantBook, ImportGrant, Standing, StandingAction
from policy.residency import ResidencyPolicy, parse_policy
from policy.signed import Purpose, SignedDocument, canonical, raw_public_key, sign
from policy.terms import Basis, GrantTerms, grant_id

SOURCE: Final = "us-east"
DESTINATION: Final = "eu-west"
THIRD: Final = "ap-south"
STREAMS: Final = ("acme/ops/a", "acme/ops/b", "acme/hr/a", "bank/led/a")
PATTERNS: Final = ("acme/ops/a", "acme/ops/b", "acme/ops/*", "acme/*/a", "acme/hr/a", "bank/led/a", "*/*/*")
BRIDGES: Final = ("spiffe://us-east.acme/bridge/one", "spiffe://us-east.acme/bridge/two")
PEOPLE: Final = ("ann", "ben", "cy")
NOWS: Final = (DAY - 1, DAY, 10 * DAY, 20 * DAY - 1, 20 * DAY, 40 * DAY)
ATS: Final = (0, DAY, 9 * DAY, 10 * DAY + 240_000, 10 * DAY + 360_000, 32 * DAY)
CERTIFICATES: Final = (MADE_MS - 300_000, MADE_MS + 30 * DAY)
"""When an approver's certificate begins and ends (docs/keys.md: 30 days, begun 5 minutes before)."""
DEFECTS: Final = ("forged", "stranger", "operator", "colleague", "other-region", "other-terms", "other-mesh")
KEYS: Final = {
    region: Ed25519PrivateKey.from_private_bytes(region.encode().ljust(32, b"!"))
    for region in (SOURCE, DESTINATION, THIRD)
}
MALLORY: Final = Ed25519PrivateKey.from_private_bytes(b"m" * 32)
TRUSTED: Final = {region: (raw_public_key(key),) for region, key in KEYS.items()}

BUDGETS: Final = (0, 0, 0, 255, 256, 512, 1_000, 1_256, 2_000)
"""What terms allow altogether; 0 is no limit. A log has twelve crossings (world_logs.SIZES), under one grant or two."""

World = dict[str, Any]


# -- drawing -------------------------------------------------------------------------------------------


def draw_policies(random: Random, region: str) -> dict[str, Any]:
    """One policy, as data. Most allow something: a world in which nothing may cross shows little."""
    other = DESTINATION if region == SOURCE else SOURCE
    regions = {SOURCE: "US", DESTINATION: "EU", THIRD: "IN"}
    if random.random() < 0.04:
        del regions[other]
    classes = {"ops": ["acme/ops/*"]}
    if random.random() < 0.5:
        classes["hr"] = [random.choice(("acme/hr/a", "acme/*/a"))]
    if random.random() < 0.5:
        classes["led"] = [random.choice(("bank/led/a", "*/*/*", "acme/ops/b"))]

    def where() -> dict[str, list[str]]:
        lead = random.random()
        return {
            "regions": [other] if lead < 0.5 and other in regions else [],
            "jurisdictions": [regions[other]] if lead > 0.4 and other in regions else [],
        }

    rules = []
    for number in range(random.randint(1, 4)):
        approvals = random.choice((0, 1, 1, 2))
        named = random.sample(PEOPLE, random.randint(max(1, approvals), 3)) if random.random() < 0.25 else []
        rules.append(
            {
                "name": f"r{number}",
                "classes": sorted(random.sample(sorted(classes), random.randint(1, len(classes)))),
                "streams": [] if random.random() < 0.8 else [random.choice(PATTERNS)],
                "where": where(),
                "bases": random.sample(("scc", "bcr"), random.choice((1, 2, 2))),
                "purposes": [] if random.random() < 0.8 else ["analytics"],
                "wildcards": random.random() < 0.7,
                "onward": False,
                "lifetime": random.choice((19, 90)) * DAY,
                "approvals": approvals,
                "separate": random.random() < 0.3,
                "approvers": sorted(named),
            }
        )
    deny = []
    if random.random() < 0.15:
        direction = random.choice((None, "to", "from"))
        deny.append(
            {
                "name": "no",
                "streams": [random.choice(PATTERNS[:-1])] if random.random() < 0.7 else [],
                "classes": [],
                "to": where() if direction == "to" else None,
                "from": where() if direction == "from" else None,
            }
        )
        if not deny[0]["streams"]:
            deny[0]["classes"] = [random.choice(sorted(classes))]
    return {
        "region": region,
        "valid_from": DAY if random.random() < 0.1 else None,
        "valid_until": 20 * DAY if random.random() < 0.1 else None,
        "regions": regions,
        "classes": classes,
        "rules": rules,
        "deny": deny,
    }


def draw_terms(random: Random) -> dict[str, Any]:
    stream = random.choice(("acme/ops/a", "acme/ops/a", "acme/ops/b", "acme/ops/*", "acme/hr/a"))
    wildcard = "*" in stream
    renamed = not wildcard and random.random() < 0.2
    return {
        "stream": stream,
        "destination_stream": random.choice(("acme/hr/a", "bank/led/a")) if renamed else stream,
        "wildcard": wildcard,
        "from_region": SOURCE,
        "to_region": DESTINATION,
        "bridge": BRIDGES[random.random() < 0.1],
        "purpose": random.choice(("analytics", "analytics", "planning")),
        "basis": random.choice(("scc", "scc", "bcr")),
        "onward": False,
        "drawn_up_by": f"spiffe://{SOURCE}.acme/operator/{random.choice(PEOPLE)}",
        "not_before": DAY,
        "expires": 20 * DAY,
    }


class Pools:
    """Terms and policies to draw from: few enough that each is parsed and signed once. Reading a policy's YAML costs more than
    all else that a world needs."""

    def __init__(self, random: Random, size: int) -> None:
        drawn = [draw_terms(random) for _ in range(60)]
        self.terms = list({json.dumps(terms): terms for terms in drawn}.values())
        self.policies = {
            (region, revision): [{**draw_policies(random, region), "revision": revision} for _ in range(size)]
            for region in (SOURCE, DESTINATION)
            for revision in (1, 2, 3)
        }
        for terms in self.terms:
            terms["budget_bytes"] = random.choice(BUDGETS)


def draw(random: Random, pools: Pools) -> World:
    """A world, as data. `policies`: those in force; `earlier`: the revisions before them, the first one first."""
    revised = {region: random.choice((0, 0, 1, 2)) for region in (SOURCE, DESTINATION)}

    def policy(region: str, revision: int) -> dict[str, Any]:
        return random.choice(pools.policies[region, revision])

    def made_under(region: str) -> int:
        """Which revision a half names; 0: one that stands nowhere."""
        return random.choice((0, *range(1, revised[region] + 2)))

    grants = []
    chosen = random.sample(range(len(pools.terms)), random.choice((1, 1, 2)))
    for index in chosen:
        terms = pools.terms[index]
        exports = [
            {
                "forged": random.random() < 0.04,
                "approvals": random.choice((0, 1, 1, 2)),
                "separate": random.random() < 0.3,
                "made_under": made_under(SOURCE),
                "signed_at": DAY + number,
            }
            for number in range(random.choice((0, *[1] * 15, 2, 2)))
        ]
        imports = []
        for number in range(random.choice((0, *[1] * 15, 2, 2))):
            half = {
                "forged": random.random() < 0.04,
                "region": DESTINATION,
                "agrees": True,
                "stream": terms["stream"],
                "destination_stream": terms["destination_stream"],
                "from_region": SOURCE,
                "to_region": DESTINATION,
                "bridge": terms["bridge"],
                "other_hash": False,
                "accepted_by": f"spiffe://{DESTINATION}.acme/operator/{random.choice(PEOPLE)}",
                "approvals": random.choice((0, 1, 1, 2)),
                "separate": random.random() < 0.3,
                "made_under": made_under(DESTINATION),
                "signed_at": DAY + number,
            }
            if random.random() < 0.08:
                half["agrees"] = False
                change = random.choice(("hash", "bridge", "stream", "third"))
                if change == "hash":
                    half["other_hash"] = True
                elif change == "bridge":
                    half["bridge"] = BRIDGES[half["bridge"] == BRIDGES[0]]
                elif change == "stream":
                    half["destination_stream"] = "acme/hr/b"
                else:
                    # Another region accepts under this grant's id, and signs it itself.
                    half |= {
                        "region": THIRD, "to_region": THIRD,
                        "accepted_by": f"spiffe://{THIRD}.acme/operator/mallory",
                    }  # fmt: skip
            imports.append(half)
        grants.append({"terms": terms, "exports": exports, "imports": imports})
    approvals = []
    for grant in range(len(grants)):
        for region in (SOURCE, DESTINATION):
            for name in PEOPLE:
                if random.random() < 0.7:
                    late = random.random() < 0.15
                    approvals.append(
                        {
                            "grant": grant,
                            "region": region,
                            "name": name,
                            "at": random.choice(ATS) if late else DAY,
                            "defect": random.choice(DEFECTS) if random.random() < 0.12 else "",
                        }
                    )
                    if random.random() < 0.1:
                        # The same person again, sound or not.
                        again = random.choice(("", "", *DEFECTS))
                        approvals.append({**approvals[-1], "at": random.choice(ATS), "defect": again})
    standings = []
    for grant in range(len(grants)):
        standings += [
            {
                "forged": random.random() < 0.15,
                "grant": grant,
                "region": random.choice((SOURCE, DESTINATION, DESTINATION, THIRD)),
                "action": random.choice(("pause", "resume", "resume", "resume", "revoke")),
                "sequence": random.randint(1, 3),
                "at": DAY,
            }
            for _ in range(random.choice((0, 0, 0, 0, 1, 2, 3)))
        ]
    denies = [
        {
            "forged": random.random() < 0.15,
            "region": random.choice((SOURCE, DESTINATION, THIRD)),
            "streams": random.choice(PATTERNS),
            "peer": random.choice(("*", SOURCE, DESTINATION, THIRD)),
            "sequence": random.randint(1, 2),
            "lifted": random.random() < 0.6,
        }
        for _ in range(random.choice((0, 0, 0, 0, 0, 0, 1, 2)))
    ]
    renamed = [held for held in grants if held["terms"]["destination_stream"] != held["terms"]["stream"]]
    if renamed and random.random() < 0.3:
        # The destination denies a stream by the name that it has there.
        arriving = random.choice(renamed)["terms"]["destination_stream"]
        denies.append(
            {
                "forged": False, "region": DESTINATION, "streams": arriving, "peer": "*", "sequence": 1, "lifted": False,
            }
        )  # fmt: skip
    return {
        "now": random.choice((*[10 * DAY] * 12, *NOWS)),
        "certificates": CERTIFICATES,
        "policies": {region: policy(region, count + 1) for region, count in revised.items()},
        "earlier": {
            region: [policy(region, number + 1) for number in range(count)]
            for region, count in revised.items()
        },
        "grants": grants,
        "approvals": approvals,
        "standings": standings,
        "denies": denies,
    }


# -- rendering -----------------------------------------------------------------------------------------


def once(make: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """What is made of data, remembered for this very dict, which is kept. For what comes from pools: to find an equal dict by
    its text costs more than most of what is asked of a world."""
    made: dict[int, tuple[dict[str, Any], Any]] = {}

    def remembered(data: dict[str, Any]) -> Any:
        held = made.get(id(data))
        if held is None:
            held = made[id(data)] = data, make(data)
        return held[1]

    return remembered


@once
def policy_of(found: dict[str, Any]) -> ResidencyPolicy:
    exporting = found["region"] == SOURCE

    def where(value: dict[str, list[str]]) -> dict[str, list[str]]:
        return {key: held for key, held in value.items() if held}

    def ms(value: int | None) -> str | None:
        return None if value is None else f"1970-01-{value // DAY + 1:02}"

    countries = {"US": "US", "EU": "IE", "IN": "IN"}
    document: dict[str, Any] = {
        "version": 1,
        "name": found["region"],
        "revision": found["revision"],
        "region": found["region"],
        "regions": {
            name: {"country": countries[word], "jurisdiction": word}
            for name, word in found["regions"].items()
        },
        "classes": {name: {"streams": patterns} for name, patterns in found["classes"].items()},
        "exports" if exporting else "imports": [
            {
                "name": rule["name"],
                "classes": rule["classes"],
                "streams": rule["streams"],
                "to" if exporting else "from": where(rule["where"]),
                "bases": rule["bases"],
                "purposes": rule["purposes"],
                "wildcards": rule["wildcards"],
                "lifetime": f"{rule['lifetime'] // DAY}d",
                "approvals": rule["approvals"],
                "separate": rule["separate"],
                "approvers": rule["approvers"],
            }
            for rule in found["rules"]
        ],
        "deny": [
            {
                "name": rule["name"],
                "because": "it stays",
                **{key: rule[key] for key in ("streams", "classes") if rule[key]},
                **{key: where(rule[key]) for key in ("to", "from") if rule[key] is not None},
            }
            for rule in found["deny"]
        ],
    }
    for key in ("valid_from", "valid_until"):
        if found[key] is not None:
            document[key] = ms(found[key])
    return parse_policy(json.dumps(document), f"{found['region']}.yaml")


@once
def terms_of(found: dict[str, Any]) -> GrantTerms:
    return GrantTerms(
        **{**found, "basis": Basis(found["basis"])},
        reference="R-1",
        exporter="Acme Inc.",
        importer="Acme Ltd.",
        owner="ops",
    )


@once
def hash_of(terms: dict[str, Any]) -> bytes:
    return cast("bytes", terms_of(terms).hash())


@once
def grant_of(terms: dict[str, Any]) -> str:
    return grant_id(hash_of(terms))


@lru_cache(maxsize=200_000)
def _signed(purpose: Purpose, region: str, body: bytes, forged: bool) -> SignedDocument:
    return sign(purpose, region, body, MALLORY if forged else KEYS[region])


@lru_cache(maxsize=1)
def _look_alike() -> Any:
    """An authority of the same name and mesh, that is not the region's."""
    return create_authority(SOURCE, "acme", MADE_MS), create_authority(DESTINATION, "acme", MADE_MS)


@lru_cache(maxsize=200_000)
def _approval(terms_hash: bytes, region: str, name: str, at: int, defect: str) -> Approval:
    honest = sign_approval(terms_hash, approver(name, region), at)
    if not defect:
        return honest
    if defect == "forged":
        other = generate_private_key(SECP256R1())
        identity = approver(name, region)
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256

        message = b"felix/grant-approval/1\0" + honest.body
        return Approval(honest.body, identity.chain_pem, other.sign(message, ec.ECDSA(SHA256())))
    if defect == "stranger":
        authority_ = _look_alike()[region == DESTINATION]
        return sign_approval(
            terms_hash, authority_.issue_identity(SpiffeId(region, "acme", "approver", name), MADE_MS), at
        )
    if defect == "other-terms":
        return sign_approval(bytes(reversed(terms_hash)), approver(name, region), at)
    if defect == "other-region":
        # An approver of a third region says that he speaks for this one.
        identity = approver(name, THIRD)
    elif defect == "other-mesh":
        identity = authority(region, "umbrella").issue_identity(
            SpiffeId(region, "umbrella", "approver", name), MADE_MS
        )
        return sign_approval(terms_hash, identity, at)
    elif defect == "operator":
        identity = authority(region).issue_identity(SpiffeId(region, "acme", "operator", name), MADE_MS)
    else:
        identity = approver(f"not-{name}", region)
    return Approval(honest.body, identity.chain_pem, identity.sign(Purpose.APPROVAL, honest.body))


@lru_cache(maxsize=1)
def anchors() -> TrustBundle:
    """The three regions' roots, and that of a region of the same name in another mesh."""
    bundle = roots(SOURCE, DESTINATION, THIRD)
    for region in (SOURCE, DESTINATION):
        bundle = bundle.trusting(authority(region, "umbrella").anchor())
    return bundle


@dataclass(frozen=True, slots=True)
class Rendered:
    """What the product is given."""

    documents: tuple[Document, ...]
    book: GrantBook
    grants: tuple[str, ...]
    policies: dict[str, ResidencyPolicy]


def revisions(world: World, region: str) -> list[dict[str, Any]]:
    """A region's policies, in the order of their revisions; the last one is in force."""
    return [*world["earlier"][region], world["policies"][region]]


def _made_under(world: World, region: str, half: dict[str, Any]) -> str:
    """The hash of the policy that a half of a grant names: one of the region's own, or one that stands nowhere."""
    number = half["made_under"]
    return policy_of(revisions(world, region)[number - 1]).hash.hex() if number else "0" * 64


def grants_of(world: World) -> tuple[str, ...]:
    return tuple(grant_of(held["terms"]) for held in world["grants"])


def documents_of(world: World) -> Iterator[tuple[dict[str, Any], Document]]:
    """Each of the world's documents, beside the data that it was made of."""
    grants = grants_of(world)
    for number, held in enumerate(world["grants"]):
        name, terms = grants[number], terms_of(held["terms"])
        terms_hash = hash_of(held["terms"])
        for export in held["exports"]:
            body = canonical(
                ExportGrant(
                    grant=name, terms=terms, terms_hash=terms_hash.hex(), approvals=export["approvals"],
                    separate=export["separate"], policy_revision=max(1, export["made_under"]),
                    policy_hash=_made_under(world, SOURCE, export), signed_at=export["signed_at"],
                )
            )  # fmt: skip
            yield export, _signed(Purpose.EXPORT, SOURCE, body, export["forged"])
        for half in held["imports"]:
            body = canonical(
                ImportGrant(
                    grant=name, terms_hash=("0" * 64 if half["other_hash"] else terms_hash.hex()),
                    stream=half["stream"], destination_stream=half["destination_stream"],
                    from_region=half["from_region"], to_region=half["to_region"], bridge=half["bridge"],
                    accepted_by=half["accepted_by"], approvals=half["approvals"], separate=half["separate"],
                    policy_revision=max(1, half["made_under"]), policy_hash=_made_under(world, DESTINATION, half),
                    signed_at=half["signed_at"],
                )
            )  # fmt: skip
            yield half, _signed(Purpose.IMPORT, half["region"], body, half["forged"])
    for approval in world["approvals"]:
        terms_hash = hash_of(world["grants"][approval["grant"]]["terms"])
        yield (
            approval,
            _approval(terms_hash, approval["region"], approval["name"], approval["at"], approval["defect"]),
        )
    for said in world["standings"]:
        standing = Standing(
            grant=grants[said["grant"]], action=StandingAction(said["action"]), region=said["region"],
            sequence=said["sequence"], at=said["at"], by="somebody",
        )  # fmt: skip
        yield said, _signed(Purpose.STANDING, said["region"], canonical(standing), said["forged"])
    for entry in world["denies"]:
        deny = DenyEntry(
            streams=entry["streams"], peer=entry["peer"], region=entry["region"], sequence=entry["sequence"],
            at=DAY, by="somebody", lifted=entry["lifted"],
        )  # fmt: skip
        yield entry, _signed(Purpose.DENY, entry["region"], canonical(deny), entry["forged"])


def render(world: World, random: Random) -> Rendered:
    """The world's documents, in any order, and the book that is made of them."""
    documents = [document for _, document in documents_of(world)]
    random.shuffle(documents)
    return Rendered(
        tuple(documents),
        GrantBook(documents, TRUSTED, anchors()),
        grants_of(world),
        {region: policy_of(world["policies"][region]) for region in (SOURCE, DESTINATION)},
    )
