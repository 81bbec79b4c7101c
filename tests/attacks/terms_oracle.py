"""What a grant's terms let cross, written from docs/policy.md and docs/wire.md and from nothing else: no import of policy/.

Terms are drawn as plain data (`draw_terms`), a record that a sound agent would send is made from them (`sound_record`),
something about it may be changed (`MUTATIONS`), and `lets_cross` says whether it may be taken. Field rules here are of
the first level and of one level below; what the oracle does not model is not drawn.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from random import Random
from typing import Any

FIELDS = ("id", "name", "card", "note", "inner.a", "inner.b")
HEADER_NAMES = ("note", "kind")
SOURCE, HERE, THIRD = "us-east", "eu-west", "ap-south"
Pairs = list[tuple[bytes, bytes]]


@dataclass
class OracleTerms:
    """A grant's terms as data; `rules` by field: keep, drop, mask, hash, pseudonymize, with their options."""

    rules: dict[str, dict[str, Any]] = field(default_factory=dict)
    key: str = "pseudonymize"
    headers: tuple[str, ...] = ()
    trace: bool = False
    onward: bool = False
    opaque: bool = False
    budget: int = 0
    """bytes altogether; 0 is no limit"""

    @property
    def is_allowlist(self) -> bool:
        return any(rule["do"] == "keep" for rule in self.rules.values())


@dataclass
class Sent:
    """A record as it stands in an envelope: headers as pairs, in their order."""

    key: bytes
    headers: Pairs
    payload: bytes


def draw_terms(random: Random) -> OracleTerms:
    if random.random() < 0.1:
        return OracleTerms(
            key=random.choice(["pseudonymize", "hash", "drop", "keep"]),
            opaque=True,
            onward=random.random() < 0.3,
        )
    rules: dict[str, dict[str, Any]] = {}
    for name in random.sample(FIELDS, random.randrange(0, 5)):
        do = random.choice(["keep", "drop", "mask", "hash", "pseudonymize"])
        rule: dict[str, Any] = {"do": do, "missing": random.choice(["ok", "withhold"])}
        if do == "mask":
            rule["last"] = random.choice([0, 0, 2, 4])
        if do in ("hash", "pseudonymize"):
            rule["digest_bytes"] = random.choice([8, 16, 17, 32])
            rule["encoding"] = random.choice(["base64url", "hex"])
        rules[name] = rule
    return OracleTerms(
        rules,
        random.choice(["pseudonymize", "hash", "drop", "keep"]),
        tuple(name for name in HEADER_NAMES if random.random() < 0.4),
        random.random() < 0.3,
        random.random() < 0.3,
    )


# What a sound agent would send


def digest_text(random: Random, size: int, encoding: str) -> str:
    raw = random.randbytes(size)
    return raw.hex() if encoding == "hex" else urlsafe_b64encode(raw).rstrip(b"=").decode()


def plain_value(random: Random) -> Any:
    return random.choice(
        [
            None,
            True,
            random.randrange(-(1 << 40), 1 << 40),
            "text",
            "Ünïcode ☃",
            "",
            'quo"te\\',
            [1, "x", None],
            {"deep": [{}]},
        ]
    )


def value_under(random: Random, rule: dict[str, Any] | None) -> Any:
    if rule is None or rule["do"] == "keep":
        return plain_value(random)
    if rule["do"] == "mask":
        shown = "".join(random.choices("abc1*é", k=rule["last"]))
        return "***" + (shown if rule["last"] and random.random() < 0.7 else "")
    return None if random.random() < 0.1 else digest_text(random, rule["digest_bytes"], rule["encoding"])


def sound_record(random: Random, terms: OracleTerms) -> Sent:
    headers: Pairs = [
        (name.encode(), random.randbytes(random.randrange(9)))
        for name in terms.headers
        if random.random() < 0.6
    ]
    if terms.trace and random.random() < 0.6:
        headers.append(
            (b"traceparent", b"00-%032x-%016x-%02x" % (random.getrandbits(128), random.getrandbits(64), 1))
        )
    hops = [SOURCE]
    if terms.onward and random.random() < 0.4:
        hops = [THIRD, SOURCE]
    headers.insert(random.randrange(len(headers) + 1), (b"felix-path", ",".join(hops).encode()))
    key = b""
    if terms.key == "keep":
        key = random.choice([b"", b"plain key", b"\xff\x00"])
    elif terms.key != "drop" and random.random() < 0.7:
        key = digest_text(random, 16, "base64url").encode()
    if terms.opaque:
        return Sent(key, headers, random.choice([b"", b"\xff\xfe", b"{", random.randbytes(20)]))
    if key and tombstones(terms) and random.random() < 0.1:
        return Sent(key, headers, b"")
    record: dict[str, Any] = {}
    for name in FIELDS:
        outer, _, inner = name.partition(".")
        rule = terms.rules.get(name)
        named = rule is not None and rule["do"] != "drop"
        if (rule is not None and rule["do"] == "drop") or (terms.is_allowlist and not named):
            continue
        if not must_be_there(rule) and random.random() < 0.4:
            continue
        if inner:
            record.setdefault(outer, {})[inner] = value_under(random, rule)
        else:
            record[outer] = value_under(random, rule)
    # A container whose members are dropped, and must have been there, is there itself.
    for name, rule in terms.rules.items():
        if name.startswith("inner.") and rule["missing"] == "withhold" and inner_crosses(terms):
            record.setdefault("inner", {})
    if not terms.is_allowlist and random.random() < 0.5:
        record["unnamed"] = plain_value(random)
    return Sent(key, headers, compact(record))


def compact(record: Any) -> bytes:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()


def must_be_there(rule: dict[str, Any] | None) -> bool:
    return rule is not None and rule["do"] != "drop" and rule["missing"] == "withhold"


def inner_crosses(terms: OracleTerms) -> bool:
    """Whether anything of the object `inner` crosses: always, but under an allowlist that names nothing of it."""
    return not terms.is_allowlist or any(
        name.startswith("inner.") and rule["do"] != "drop" for name, rule in terms.rules.items()
    )


def tombstones(terms: OracleTerms) -> bool:
    protects = terms.is_allowlist or any(rule["do"] != "keep" for rule in terms.rules.values())
    return terms.key in ("hash", "pseudonymize") or (terms.key == "keep" and not protects)


# The oracle


def lets_cross(terms: OracleTerms, sent: Sent) -> bool:
    return headers_ok(terms, sent.headers) and key_ok(terms, sent.key) and payload_ok(terms, sent)


def fits(terms: OracleTerms, taken: int, envelope: int) -> bool:
    """Whether an envelope of so many bytes of keys, headers and payloads is within the budget, after so many that were taken."""
    return terms.budget == 0 or taken + envelope <= terms.budget


def headers_ok(terms: OracleTerms, headers: Pairs) -> bool:
    names = [name for name, _ in headers]
    allowed = {b"felix-path", *(name.encode() for name in terms.headers)} | (
        {b"traceparent"} if terms.trace else set()
    )
    if len(names) != len(set(names)) or not set(names) <= allowed:
        return False
    values = dict(headers)
    if b"traceparent" in values and not re.fullmatch(
        rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", values[b"traceparent"]
    ):
        return False
    if b"felix-path" not in values:
        return False
    hops = values[b"felix-path"].split(b",")
    if not all(re.fullmatch(rb"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", hop) for hop in hops) or len(hops) > 16:
        return False
    if hops[-1] != SOURCE.encode() or HERE.encode() in hops:
        return False
    return terms.onward or set(hops) == {SOURCE.encode()}


def is_digest(text: object, size: int, encoding: str) -> bool:
    if not isinstance(text, str):
        return False
    if encoding == "hex":
        return re.fullmatch(r"[0-9a-f]*", text) is not None and len(text) == 2 * size
    try:
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return False
    return len(raw) == size and urlsafe_b64encode(raw).rstrip(b"=").decode() == text


def key_ok(terms: OracleTerms, key: bytes) -> bool:
    if not key:
        return True
    if terms.key == "drop":
        return False
    if terms.key == "keep":
        return len(key) <= 4_096
    try:
        return is_digest(key.decode("ascii"), 16, "base64url")
    except UnicodeDecodeError:
        return False


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
    return 0


def payload_ok(terms: OracleTerms, sent: Sent) -> bool:
    if terms.opaque:
        return True
    if not sent.payload:
        return bool(sent.key) and tombstones(terms)
    twice = False

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        twice = twice or len(dict(members)) != len(members)
        return dict(members)

    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        record = json.loads(sent.payload.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError):
        return False
    if twice or not isinstance(record, dict) or compact(record) != sent.payload or depth(record) > 64:
        return False
    return fields_ok(terms, record)


def fields_ok(terms: OracleTerms, record: dict[str, Any]) -> bool:
    inner_rules = {name: rule for name, rule in terms.rules.items() if name.startswith("inner.")}
    if terms.is_allowlist:
        named = {name.partition(".")[0] for name, rule in terms.rules.items() if rule["do"] != "drop"}
        if not set(record) <= named:
            return False
    for name, rule in terms.rules.items():
        if not name.startswith("inner.") and not field_ok(rule, record, name):
            return False
    if not inner_rules or not inner_crosses(terms):
        return True
    inner = record.get("inner")
    if inner is None:
        # Absent or null: nothing below it; wrong where a rule below insists on its field.
        return not any(rule["missing"] == "withhold" for rule in inner_rules.values())
    if not isinstance(inner, dict):
        return False
    if terms.is_allowlist and not {f"inner.{name}" for name in inner} <= {
        name for name, rule in inner_rules.items() if rule["do"] != "drop"
    }:
        return False
    return all(field_ok(rule, inner, name.partition(".")[2]) for name, rule in inner_rules.items())


def field_ok(rule: dict[str, Any], record: dict[str, Any], name: str) -> bool:
    if rule["do"] == "drop":
        return name not in record
    if name not in record:
        return rule["missing"] == "ok"
    value = record[name]
    if rule["do"] == "keep":
        return True
    if rule["do"] == "mask":
        return value == "***" or (
            rule["last"] > 0
            and isinstance(value, str)
            and value.startswith("***")
            and len(value) == 3 + rule["last"]
        )
    return value is None or is_digest(value, rule["digest_bytes"], rule["encoding"])


# Changes that a rogue might make; the oracle says of each result whether it breaks the terms


def mutate(random: Random, sent: Sent) -> Sent:
    kind = random.randrange(16)
    headers, payload, key = list(sent.headers), sent.payload, sent.key
    if kind == 0:
        headers.append(
            (random.choice([b"note", b"kind", b"x-data", b"felix.tombstone", b"traceparent"]), b"v")
        )
    elif kind == 1 and headers:
        headers.append(random.choice(headers))
    elif kind == 2:
        headers = [(name, value) for name, value in headers if name != b"felix-path"]
    elif kind == 3:
        path = random.choice(
            [
                b"us-east",
                b"ap-south,us-east",
                b"eu-west,us-east",
                b"us-east,ap-south",
                b"US",
                b"",
                b"us-east,",
            ]
        )
        headers = [(name, path if name == b"felix-path" else value) for name, value in headers]
    elif kind == 4:
        key = random.choice(
            [
                b"",
                b"alice",
                b"A" * 22,
                b"A" * 21 + b"B",
                b"A" * 23,
                key + b"=",
                key[:-1],
                b"\xff",
                b"k" * 4_096,
            ]
        )
    elif kind == 5:
        payload = random.choice(
            [
                b"",
                b"1",
                b"[]",
                b"{}",
                b'""',
                b"null",
                b"{",
                b"\xff",
                payload + b" ",
                b" " + payload,
                payload + payload,
            ]
        )
    elif kind == 6 and payload:
        at = random.randrange(len(payload))
        payload = payload[:at] + bytes([random.randrange(32, 127)]) + payload[at + 1 :]
    elif kind == 7 and payload.startswith(b"{") and len(payload) > 2:
        name = random.choice(FIELDS[:4])
        payload = b'{"%s":1,' % name.encode() + payload[1:]
    elif kind == 8:
        payload = b'{"a":' * random.choice([3, 63, 64, 65, 80]) + b"1" + b"}" * payload.count(b"{")
    elif kind == 9:
        levels = random.choice([10, 62, 63, 64, 65])
        payload = b'{"unnamed":' + b"[" * levels + b"]" * levels + b"}"
    else:
        try:
            record = json.loads(payload)
        except ValueError:
            return Sent(key, headers, payload)
        if not isinstance(record, dict):
            return Sent(key, headers, payload)
        name = random.choice([*FIELDS, "unnamed", "inner"])
        outer, _, inner = name.partition(".")
        place = record.setdefault(outer, {}) if inner else record
        if not isinstance(place, dict):
            place, inner = record, ""
        where = inner or outer
        change = random.randrange(4)
        if change == 0:
            place.pop(where, None)
        elif change == 1:
            place[where] = random.choice(["***", "***1234", "***12", "*** 1", 4111, "alice", None, {}, []])
        elif change == 2:
            place[where] = digest_text(
                random, random.choice([8, 16, 17, 32]), random.choice(["hex", "base64url"])
            )
        else:
            place[where] = plain_value(random)
        payload = compact(record)
    return Sent(key, headers, payload)
