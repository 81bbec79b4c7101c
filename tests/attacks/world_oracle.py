"""What docs/policy.md says about a world, decided by nothing but that page and plain data.

It imports nothing of the product on purpose. A world is dicts, lists, texts and numbers (tests/attacks/worlds.py draws it,
and renders the same data into signed documents for the product). Where the two disagree, one of them is wrong.
"""

from __future__ import annotations

from typing import Any, Final

World = dict[str, Any]

SOURCE: Final = "us-east"
DESTINATION: Final = "eu-west"
SKEW_MS: Final = 300_000


def fits(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern: three parts, each the same, or `*`, or a beginning and `*`."""
    for wanted, found in zip(pattern.split("/"), name.split("/"), strict=True):
        if wanted.endswith("*"):
            if not found.startswith(wanted[:-1]):
                return False
        elif wanted != found:
            return False
    return True


# -- the residency policy ------------------------------------------------------------------------------


def policy_says(
    policy: dict[str, Any], terms: dict[str, Any], stream: str, now: int
) -> tuple[str, list[dict[str, Any]]]:
    """("allowed", the rules that hold) or ("denied" | "against", []), for one name of a stream."""
    own, ends = policy["region"], (terms["from_region"], terms["to_region"])
    # 1. its region is one end, and it is in force
    if own not in ends:
        return "against", []
    if policy["valid_from"] is not None and now < policy["valid_from"]:
        return "against", []
    if policy["valid_until"] is not None and now >= policy["valid_until"]:
        return "against", []
    exporting = own == ends[0]
    other = ends[1] if exporting else ends[0]
    # 2. the other region is in its table
    if other not in policy["regions"]:
        return "against", []
    jurisdiction = policy["regions"][other]

    def leads(where: dict[str, list[str]]) -> bool:
        return other in where["regions"] or jurisdiction in where["jurisdictions"]

    classes = [name for name, patterns in policy["classes"].items() if any(fits(p, stream) for p in patterns)]
    # 3. no deny rule applies
    for rule in policy["deny"]:
        if rule["to"] is not None or rule["from"] is not None:
            where = rule["to"] if exporting else rule["from"]
            if where is None or not leads(where):
                continue
        if any(fits(p, stream) for p in rule["streams"]) or any(name in classes for name in rule["classes"]):
            return "denied", []
    # 4. the stream has a class
    if not classes:
        return "against", []
    # 5. for every class one rule covers it, and the terms satisfy it; the first one holds
    holding = []
    for name in classes:
        for rule in policy["rules"]:
            narrowed = not rule["streams"] or any(fits(p, stream) for p in rule["streams"])
            if name in rule["classes"] and narrowed and leads(rule["where"]) and satisfied(rule, terms):
                holding.append(rule)
                break
        else:
            return "against", []
    return "allowed", holding


def satisfied(rule: dict[str, Any], terms: dict[str, Any]) -> bool:
    """Whether the terms are what a rule asks for, approvals aside."""
    return (
        terms["basis"] in rule["bases"]
        and (not rule["purposes"] or terms["purpose"] in rule["purposes"])
        and (rule["wildcards"] or not terms["wildcard"])
        and (rule["onward"] or not terms["onward"])
        and terms["expires"] - terms["not_before"] <= rule["lifetime"]
    )


# -- approvals -----------------------------------------------------------------------------------------


def name_of(identity: str) -> str:
    return identity.rpartition("/")[2]


def approvers(
    world: World, grant: int, region: str, concerned: set[str], separate: bool, named: list[str]
) -> set[str]:
    """The names of those whose approval counts for a region."""
    found = set()
    for approval in world["approvals"]:
        if approval["grant"] != grant or approval["region"] != region or approval["defect"]:
            continue
        began, ended = world["certificates"]
        if not began <= approval["at"] <= ended or approval["at"] > world["now"] + SKEW_MS:
            continue
        if separate and approval["name"] in concerned:
            continue
        if named and approval["name"] not in named:
            continue
        found.add(approval["name"])
    return found


# -- the decision --------------------------------------------------------------------------------------


def believed(documents: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Those that their region signed, with these fields."""
    return [
        each
        for each in documents
        if not each["forged"] and all(each[key] == value for key, value in fields.items())
    ]


def denied_by_entry(world: World, region: str, peer: str, name: str) -> bool:
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in believed(world["denies"], region=region):
        key = (entry["streams"], entry["peer"])
        # Of two of one number, the one that denies holds.
        rank = (entry["sequence"], not entry["lifted"])
        if key not in newest or rank > (newest[key]["sequence"], not newest[key]["lifted"]):
            newest[key] = entry
    return any(
        not entry["lifted"] and entry["peer"] in ("*", peer) and fits(entry["streams"], name)
        for entry in newest.values()
    )


def decide(world: World, grant: int, stream: str, bridge: str | None, policy: dict[str, Any] | None) -> str:
    """ "allowed", or which refusal: the kinds of docs/policy.md, in its order. `policy` None: of the agent, which has none."""
    now, terms = world["now"], world["grants"][grant]["terms"]
    ends = (terms["from_region"], terms["to_region"])
    # a signed deny entry names the stream
    if denied_by_entry(world, SOURCE, DESTINATION, stream) or denied_by_entry(
        world, DESTINATION, SOURCE, stream
    ):
        return "denied"
    held = world["grants"][grant]
    exports = believed(held["exports"])
    imports = believed(held["imports"])
    mine = [half for half in imports if half["region"] == ends[1]]
    named = (exports and fits(terms["stream"], stream)) or any(
        fits(half["stream"], stream) and (half["from_region"], half["to_region"]) == (SOURCE, DESTINATION)
        for half in imports
    )
    claimed = any(each["forged"] for each in held["exports"]) and fits(terms["stream"], stream)
    claimed = claimed or any(
        each["forged"] and fits(each["stream"], stream) and each["to_region"] == DESTINATION
        and each["from_region"] == SOURCE
        for each in held["imports"]
    )  # fmt: skip
    if not named:
        return "forged" if claimed else "no-grant"
    if not exports:
        return "forged" if claimed else "export-missing"
    if not fits(terms["stream"], stream):
        return "no-grant"
    if not mine:
        return "forged" if claimed else "import-missing"
    agreeing = [half for half in mine if half["agrees"]]
    if not agreeing:
        return "terms-mismatch"
    export = max(exports, key=lambda half: half["signed_at"])
    accepted = max(agreeing, key=lambda half: half["signed_at"])
    if bridge is not None and bridge != terms["bridge"]:
        return "wrong-bridge"
    words = {region: last_word(world, grant, region) for region in ends}
    if "revoke" in words.values():
        return "revoked"
    if now < terms["not_before"]:
        return "not-yet"
    if now >= terms["expires"]:
        return "expired"
    drafter = {name_of(terms["drawn_up_by"])}
    concerned = {ends[0]: drafter, ends[1]: drafter | {name_of(accepted["accepted_by"])}}
    for region, half in ((ends[0], export), (ends[1], accepted)):
        if len(approvers(world, grant, region, concerned[region], half["separate"], [])) < half["approvals"]:
            return "not-approved"
    if "pause" in words.values():
        return "paused"
    arriving = stream if terms["wildcard"] else terms["destination_stream"]
    if denied_by_entry(world, DESTINATION, SOURCE, arriving):
        return "denied"
    if policy is None:
        return "allowed"
    names = [stream]
    if policy["region"] == ends[1] and terms["destination_stream"] != terms["stream"]:
        names.append(terms["destination_stream"])
    holding = []
    for name in names:
        answer, rules = policy_says(policy, terms, name, now)
        if answer != "allowed":
            return "denied" if answer == "denied" else "against-policy"
        holding += rules
    own = policy["region"]
    for rule in holding:
        count = approvers(world, grant, own, concerned[own], rule["separate"], rule["approvers"])
        if len(count) < rule["approvals"]:
            return "not-approved"
    return "allowed"


def last_word(world: World, grant: int, region: str) -> str:
    """What a region said last about a grant: a revocation holds whatever else it said."""
    said = believed(world["standings"], grant=grant, region=region)
    if any(each["action"] == "revoke" for each in said):
        return "revoke"
    # Of two of one number, the one that pauses holds.
    last = max(said, key=lambda each: (each["sequence"], each["action"] == "pause"), default=None)
    return "" if last is None else str(last["action"])


def decide_any(world: World, stream: str, bridge: str | None, policy: dict[str, Any] | None) -> bool:
    """Whether one grant lets the stream cross."""
    return any(
        decide(world, grant, stream, bridge, policy) == "allowed" for grant in range(len(world["grants"]))
    )
