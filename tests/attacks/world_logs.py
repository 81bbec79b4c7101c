"""Random worlds as audit logs: each document a leaf, in some order and at some time, and what the oracle says of such a log.

`draw_log` adds to a world of worlds.py what only a log has: in which order its documents came, when, and which revisions of the
own region's policy stand in the log. `leaves_of` makes the leaves as brokers and agents do.

What a log cannot show, and the oracle therefore does not ask of it (docs/audit.md, steps 7 and 10):

- the other region's policy. Its half of the grant states how many approvals it asks for, and whether apart from who drew
  the grant up; names of approvers and all else stays that region's own to keep;
- the own region's policy counts as of when the half was made that names it; the newest later one that the log has counts as well, as of
  the crossing, or of a moment before it;
- a pause or a deny entry whose leaf is not older than 10 s, and a half or policy that took another's place then: what was on its way
  is written down still;
- what came later than the crossing;
- the budget of terms that do not stand before it, or that it does not name: it is found for that, and counts for no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from random import Random
from typing import Any, Final

import audit_log
from approvers import DAY, authority
from attacks import world_oracle as oracle
from attacks.worlds import (
    BRIDGES,
    DESTINATION,
    KEYS,
    MALLORY,
    SOURCE,
    THIRD,
    TRUSTED,
    World,
    documents_of,
    grant_of,
    once,
    policy_of,
    revisions,
    terms_of,
)

from audit.leaf import Leaf, Side, decode_leaf, encode_leaf
from audit.signed_leaf import signed_leaf
from audit.trust import Trust
from policy.signed import Purpose, SignedDocument, sign

GRACE_MS: Final = 10_000
AGES: Final = (0, 1, 9_999, 10_000, 10_001, 60_000, 3_600_000)
"""How long before the asked time a leaf was made (ms)."""
LATER: Final = (0, 0, 9_999, 10_001, 60_000, 300_000, DAY, 11 * DAY)
"""How long after it a crossing behind all documents is asked about."""
SIDES: Final = {Side.EGRESS: SOURCE, Side.INGRESS: DESTINATION}
ORIGINS: Final = {Side.EGRESS: "us-east.acme/bridge/one", Side.INGRESS: "eu-west.acme/audit"}
ACTOR: Final = "spiffe://us-east.acme/operator/ann"
FAR: Final = 1 << 50
SIZES: Final = (0, 0, 100, 156, 256, 300, 700)
"""Bytes of the records of an envelope."""
EMPTY_ENVELOPE_BYTES: Final = 256
"""What an envelope without records counts towards a budget (docs/bridges.md)."""


@cache
def trust() -> Trust:
    """All three regions, with the keys that worlds.py signs with."""
    return Trust.of(
        audit_log.region_bundle(
            region,
            policy_keys=TRUSTED[region],
            root_pem=authority(region).anchor().root_pem.decode(),
            issued_ms=DAY,
        )
        for region in (SOURCE, DESTINATION, THIRD)
    )


# -- drawing -------------------------------------------------------------------------------------------


def draw_log(random: Random, world: World, side: Side) -> dict[str, Any]:
    """The log of one side, as data: the world's documents and the own policy, each with the time of its leaf, in order; and
    the world as it is then, of which some things are taken away."""
    own = SIDES[side]
    if random.random() < 0.4:
        # Nothing is stopped: then approvals, policies and times decide.
        world = {**world, "standings": [], "denies": []}
    if random.random() < 0.3:
        world = {**world, "policies": {**world["policies"], own: _begun_or_over(world["policies"][own])}}
    world = {**world, "grants": [_copied(held) for held in world["grants"]]}
    leaves_it_to_policies = random.random() < 0.5
    for held in world["grants"]:
        for half in (*held["exports"], *held["imports"]):
            half["approvals"] = 0 if leaves_it_to_policies else half["approvals"]
    entries = [{"made_of": data, "document": document} for data, document in documents_of(world)]
    for revised in revisions(world, own):
        policy, number = random.choice((*["there"] * 18, "absent", "forged")), revised["revision"]
        if policy != "absent":
            data = {"policy": own, "revision": number, "forged": policy == "forged"}
            # The first one stands before all else, a later one anywhere.
            data["rank"] = 0 if number == 1 else random.randrange(4)
            entries.append({"made_of": data, "document": None})
    random.shuffle(entries)
    if random.random() < 0.7:
        # As a region writes them: the policy, the halves, and then the rest.
        entries.sort(key=_rank)
    for entry, age in zip(entries, sorted(random.choices(AGES, k=len(entries)), reverse=True), strict=True):
        entry["time_ms"] = max(0, world["now"] - age)
    return {"side": side, "world": world, "entries": entries}


@once
def _begun_or_over(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy, in force from or until about when most worlds are asked. Which of the three follows from the policy, so that
    there are twice as many to read and not four times."""
    began, ended = ((10 * DAY, None), (11 * DAY, None), (None, 11 * DAY))[len(str(policy)) % 3]
    return {**policy, "valid_from": began, "valid_until": ended}


def _copied(held: dict[str, Any]) -> dict[str, Any]:
    """A grant whose halves may be changed for one log."""
    return {
        **held,
        "exports": [dict(each) for each in held["exports"]],
        "imports": [dict(each) for each in held["imports"]],
    }


def _rank(entry: dict[str, Any]) -> int:
    document = entry["document"]
    if document is None:
        return int(entry["made_of"]["rank"])
    return {Purpose.EXPORT: 1, Purpose.IMPORT: 2}.get(document.purpose, 3)


@cache
def _policy_document(region: str, text: str, forged: bool) -> SignedDocument:
    return sign(Purpose.POLICY, region, text.encode(), MALLORY if forged else KEYS[region])


def leaves_of(world: World, log: dict[str, Any]) -> list[Leaf]:
    """Its leaves. Of a document about a grant that the log does not know yet, as little as a broker knows then."""
    side = log["side"]
    known: dict[str, Any] = {}
    leaves = []
    for entry in log["entries"]:
        document, policy, data = entry["document"], None, entry["made_of"]
        terms = None
        if document is None:
            policy = policy_of(revisions(world, data["policy"])[data["revision"] - 1])
            document = _policy_document(policy.region, policy.text, data["forged"])
        elif document.purpose is Purpose.APPROVAL:
            terms = known.get(document.claim.grant)
        elif document.purpose is Purpose.STANDING:
            terms = known.get(grant_of(world["grants"][data["grant"]]["terms"]))
        elif document.purpose is Purpose.EXPORT and not data["forged"]:
            held = next(held for held in world["grants"] if any(data is each for each in held["exports"]))
            found = terms_of(held["terms"])
            known[grant_of(held["terms"])] = found
        leaf = signed_leaf(
            document, own_region=SIDES[side], time_ms=entry["time_ms"], actor=ACTOR, terms=terms, policy=policy,
            drain_until_ms=entry["time_ms"] + GRACE_MS if data.get("action") == "revoke" else 0, side=side,
        )  # fmt: skip
        leaves.append(decode_leaf(encode_leaf(leaf)))
    return leaves


# -- the oracle's view of a log ------------------------------------------------------------------------


def view(world: World, log: dict[str, Any], upto: int, now: int, *, grace: bool) -> World:
    """The world as the first `upto` leaves of this log tell it at `now`; `grace`: without what stops, and is too young."""
    here = [
        entry["made_of"]
        for entry in log["entries"][:upto]
        if not (grace and entry["time_ms"] > now - GRACE_MS and _stops(entry["made_of"]))
    ]
    ids = set(map(id, here))

    def stand(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in documents if id(each) in ids]

    return {
        **world,
        "now": now,
        "grants": [
            {**held, "exports": stand(held["exports"]), "imports": stand(held["imports"])}
            for held in world["grants"]
        ],
        "approvals": stand(world["approvals"]),
        "standings": stand(world["standings"]),
        "denies": stand(world["denies"]),
        "revisions": [data["revision"] for data in here if data.get("policy") and not data["forged"]],
    }


def _stops(data: dict[str, Any]) -> bool:
    return data.get("action") == "pause" or data.get("lifted") is False


def may_stand(world: World, log: dict[str, Any], upto: int, now: int, crossing: dict[str, Any]) -> str:
    """ "allowed", or why this crossing may not stand behind the log's first `upto` leaves. A half or policy whose place was taken less
    than the grace ago counts as well."""
    seen = view(world, log, upto, now, grace=True)
    answers = [
        _may_stand(world, log, counting, crossing)
        for counting in (seen, *counting_views(log, seen, upto, crossing["grant"], now))
    ]
    return "allowed" if "allowed" in answers else answers[0]


def counting_views(log: dict[str, Any], seen: World, upto: int, number: int, now: int) -> Iterator[World]:
    """What is seen behind the first `upto` leaves, with each choice of halves of this grant and of a policy that counts at `now`."""
    held, times, places = seen["grants"][number], {}, {}
    for place, entry in enumerate(log["entries"][:upto]):
        made_of = entry["made_of"]
        times[made_of["revision"] if made_of.get("policy") else id(made_of)] = entry["time_ms"]
        places[id(made_of)] = place
    exports, imports = (
        lately(
            sorted(halves, key=lambda half: places[id(half)]),
            lambda half: int(half["signed_at"]),
            lambda half: times[id(half)],
            now,
        )
        for halves in (
            [each for each in held["exports"] if not each["forged"]],
            [each for each in held["imports"] if not each["forged"] and each["agrees"]],
        )
    )
    revisions_ = lately(seen["revisions"], int, times.__getitem__, now)
    for export, accepted, revision in product(exports, imports, revisions_):
        replaced = {**held, "exports": [export], "imports": [accepted]}
        grants = [replaced if each is held else each for each in seen["grants"]]
        # What a half names is looked for among all that stand there; only of the others the newest is taken.
        yield {**seen, "grants": grants, "newest_revision": revision}


def lately(said: list[Any], rank: Callable[[Any], int], time_of: Callable[[Any], int], now: int) -> list[Any]:
    """Of words of which the highest one counts, given in the log's order: those that counted at some time of the grace."""
    counted: list[Any] = []
    for at, each in enumerate(said):
        if all(rank(each) > rank(other) for other in said[:at]):
            over = [time_of(other) for other in said[at:] if rank(other) > rank(each)]
            if not over or over[0] > now - GRACE_MS:
                counted.append(each)
    return counted


def _may_stand(world: World, log: dict[str, Any], seen: World, crossing: dict[str, Any]) -> str:
    own = SIDES[log["side"]]
    number, stream = crossing["grant"], crossing["stream"]
    terms = world["grants"][number]["terms"]
    asked = oracle.decide(seen, number, stream, crossing["bridge"], None)
    if asked != "allowed":
        return asked
    arriving = stream if terms["wildcard"] else terms["destination_stream"]
    if crossing["destination_stream"] != arriving or crossing["other_hash"]:
        return "other-terms"
    half = _own_half(seen, own, number)
    answers = [
        oracle.decide(seen, number, stream, crossing["bridge"], policy)
        for policy in _policies_of_half(world, own, seen, half)
    ]
    return "allowed" if "allowed" in answers else (*answers, "no-policy")[0]


def _own_half(seen: World, own: str, number: int) -> dict[str, Any]:
    """The own region's half that counts, where both agree."""
    halves = seen["grants"][number]["exports" if own == SOURCE else "imports"]
    return max(
        (each for each in halves if not each["forged"] and (own == SOURCE or each["agrees"])),
        key=lambda each: each["signed_at"],
    )


def _policies_of_half(world: World, own: str, seen: World, half: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Any of which lets a crossing stand: the policy that a half names, as of when it was made; and the newest, where that is a later one,
    also if its end is not older than the grace."""
    named = half["made_under"]
    if named in seen["revisions"]:
        yield as_of(revisions(world, own)[named - 1], half["signed_at"])
    newest = seen.get("newest_revision", max(seen["revisions"], default=0))
    if newest > max(named, 1):
        yield revisions(world, own)[newest - 1]
        yield as_of(revisions(world, own)[newest - 1], seen["now"] - GRACE_MS)


def as_of(policy: dict[str, Any], at: int) -> dict[str, Any]:
    """The policy, in force at any time if it was at this one."""
    begun = policy["valid_from"] is None or at >= policy["valid_from"]
    over = policy["valid_until"] is not None and at >= policy["valid_until"]
    return {**policy, "valid_from": None if begun and not over else FAR, "valid_until": None}


def is_revoked(world: World, log: dict[str, Any], upto: int, number: int) -> bool:
    """Whether one of a grant's two regions revoked it within the first `upto` leaves, and the log names these regions."""
    seen = view(world, log, upto, FAR, grace=False)
    whole = view(world, log, len(log["entries"]), FAR, grace=False)
    return bool(oracle.believed(whole["grants"][number]["exports"])) and any(
        said["region"] in (SOURCE, DESTINATION)
        for said in oracle.believed(seen["standings"], grant=number, action="revoke")
    )


def is_over_budget(world: World, log: dict[str, Any], crossed: list[tuple[int, dict[str, Any]]]) -> bool:
    """Whether by the last of these crossings more had crossed under its grant than its terms allow altogether (docs/audit.md, step 7). Each comes with
    how many leaves of documents stand before it."""

    def counts(upto: int, crossing: dict[str, Any]) -> bool:
        exports = view(world, log, upto, FAR, grace=False)["grants"][crossing["grant"]]["exports"]
        return not crossing["other_hash"] and bool(oracle.believed(exports))

    *_, (upto, last) = crossed
    budget = world["grants"][last["grant"]]["terms"]["budget_bytes"]
    if not budget or not counts(upto, last):
        return False
    size = 0
    for at, crossing in crossed:
        if crossing["grant"] != last["grant"] or not counts(at, crossing):
            continue
        # All envelopes here are as long: none is a gap that grew before its first one was answered, of which one more counts nothing (decision 0138).
        size += crossing["bytes"] or EMPTY_ENVELOPE_BYTES
    return size > budget


def has_terms(world: World, log: dict[str, Any], number: int) -> bool:
    """Whether the register may name the terms of a grant: both halves, their approvals at some time in its window, and the
    own region's policy stand in the log, up to some leaf: a half that is signed again later undoes nothing."""
    return any(_has_terms(world, log, upto, number) for upto in range(len(log["entries"]), 0, -1))


def _has_terms(world: World, log: dict[str, Any], upto: int, number: int) -> bool:
    seen = view(world, log, upto, FAR, grace=False)
    if not seen["revisions"]:
        return False
    terms = seen["grants"][number]["terms"]
    # What stops, and which window, is not the register's to say of terms: as if asked in the grant's last moment.
    seen = {**seen, "now": terms["expires"] - 1, "standings": [], "denies": []}
    stream = terms["stream"].replace("*", "a")
    return any(
        oracle.decide(counting, number, stream, terms["bridge"], None) == "allowed"
        for counting in (seen, *counting_views(log, seen, upto, number, log["entries"][upto - 1]["time_ms"]))
    )


def draw_crossings(
    random: Random, world: World, log: dict[str, Any], streams: tuple[str, ...], count: int
) -> list[tuple[int, int, dict[str, Any]]]:
    """Crossings of a log, in order: how many of its documents stand before each, its time, and the crossing. Half of them or more
    stand behind all documents."""
    entries = log["entries"]
    places = random.choices(range(len(entries) + 1), k=count // 2) + [len(entries)] * (count - count // 2)
    behind = sorted(random.choices(LATER, k=places.count(len(entries))))
    # A crossing is written after the leaf before it, and before the one behind it.
    times = [entries[at]["time_ms"] for at in sorted(places) if at < len(entries)]
    times += [world["now"] + later for later in behind]
    return [
        (at, now, draw_crossing(random, world, streams))
        for at, now in zip(sorted(places), times, strict=True)
    ]


def draw_crossing(random: Random, world: World, streams: tuple[str, ...]) -> dict[str, Any]:
    """One crossing of the world, most as its grant says."""
    number = random.randrange(len(world["grants"]))
    terms = world["grants"][number]["terms"]
    fitting = [stream for stream in streams if oracle.fits(terms["stream"], stream)]
    stream = random.choice(fitting if random.random() < 0.95 else streams)
    arriving = stream if terms["wildcard"] else terms["destination_stream"]
    return {
        "grant": number,
        "stream": stream,
        "bridge": terms["bridge"] if random.random() < 0.97 else random.choice(BRIDGES),
        "destination_stream": arriving if random.random() < 0.97 else random.choice(streams),
        "other_hash": random.random() < 0.02,
        "bytes": random.choice(SIZES),
        "shard": random.randrange(2),
        "first_offset": random.randrange(3),
    }
