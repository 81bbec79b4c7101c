"""Field rules on JSON records: what of a record crosses a border, and in which form.

A `TransformSpec` is data: it is part of a grant's terms and is signed with them. `compile_transform` compiles it into a function
once; per record there is one JSON decode, the rules, one JSON encode. A record of 30 kB may hold 16,384 values with a rule for each, so what is done for a long one
is a generator (`Transform.steps`): elements of lists are changed some at a time, after all else of the record.

Rules: `keep`, `drop`, `mask`, `hash` (HMAC-SHA256 under the region's key: equal values stay equal wherever they
go) and `pseudonymize` (HMAC-SHA256 under a key derived for one scope, so two destinations cannot join theirs).
One `keep` rule makes the rules an allowlist: what no rule names is dropped.

Invariants:
- it fails closed: a record that cannot be decoded, that is ambiguous (duplicate keys), or that has another shape
  than a rule expects is `Withheld`; no input bytes raise;
- a reason names fields by the rules, and kinds: nothing of the record stands in it, and no field that only the record names;
- the output is encoded from decoded values: no byte of the input is copied through unread;
- a record's key never crosses as it is unless the spec says `key: keep`, and even then not where it shows the
  value of a field that a rule protects; a header crosses only if it is named.

A filter sees the record before the rules change it.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from binascii import b2a_base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from felix.batch import HEADERS_MAX, Buffer
from felix.errors import RequestError
from felix.steps import Steps, finished
from policy.fieldpath import EACH, FieldPath
from policy.predicate import compile_predicate, parse_predicate, paths

RECORD_BYTES_MAX: Final = 1 << 20
"""A batch is not larger, so neither is a record; the output is held to it too."""
DEPTH_MAX: Final = 64
"""Nesting of a record. Real ones stay below ten; the decoder and the rules recurse once per level."""
VALUES_MAX: Final = 16_384
"""Commas and opening brackets of a record, outside of its texts: the number of values that it may have. More would block code
that checks them one by one; records come from outside, and an event loop waits.
"""
LONG_DIGITS_MAX: Final = 65_536
"""Digits of a record in whole numbers of LONG_NUMBER digits and more: reading and writing one takes time by the square of its length, and 260 of 4,000 digits half of a tenth of a second."""
LONG_NUMBER: Final = 400
"""Digits of a long number: one of the greatest numbers that most readers take (IEEE 754, binary64) has 309."""
RULES_MAX: Final = 256
STEP_RULES: Final = 256
"""How often rules are applied in one step: a millisecond or two."""
SHORT_LIST: Final = 4
"""Rules that are applied to a list's elements at once, rather than later: most lists are short."""
STEP_BYTES: Final = 32 << 10
"""Bytes of a record above which it is decoded, checked, changed and encoded in a step each: a MiB takes some milliseconds for each of them."""
KEY_BYTES_MIN: Final = 32
DIGEST_BYTES_MIN: Final = 8
"""Below 64 bits, two of some 10^9 values would share a pseudonym by chance."""
DIGEST_BYTES_DEFAULT: Final = 16
LAST_CHARS_MAX: Final = 8
CONTAINED_CHARS_MIN: Final = 4
"""A protected text this long is looked for inside a kept key; a shorter one occurs there by chance."""

TRACE_HEADER: Final = "traceparent"
RESERVED_HEADERS: Final = frozenset({TRACE_HEADER, "tracestate", "baggage"})
RESERVED_HEADER_PREFIX: Final = "felix-"
"""Provenance headers: the bridge alone writes them, the source's own never cross by a rule."""

MASK: Final = "***"

_HASH_CONTEXT: Final = b"felix/transform-hash/1\0"
_PSEUDONYM_CONTEXT: Final = b"felix/transform-pseudonym/1\0"
_MASK_LAST: Final = re.compile(r"(.+):([0-9]{1,2})", re.ASCII)
TRACEPARENT: Final = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C Trace Context, section 3.2, version 00."""


class Action(StrEnum):
    """What a rule does to its field."""

    KEEP = "keep"
    DROP = "drop"
    MASK = "mask"
    HASH = "hash"
    PSEUDONYMIZE = "pseudonymize"


class Missing(StrEnum):
    """What becomes of a record that lacks a rule's field."""

    OK = "ok"
    WITHHOLD = "withhold"


class Encoding(StrEnum):
    BASE64URL = "base64url"
    HEX = "hex"


class KeyRule(StrEnum):
    """What becomes of a record's key. `pseudonymize` is the default: order and compaction by key still work."""

    PSEUDONYMIZE = "pseudonymize"
    HASH = "hash"
    DROP = "drop"
    KEEP = "keep"


class Format(StrEnum):
    JSON = "json"
    OPAQUE = "opaque"
    """Payloads cross as they are; no rule and no filter can apply."""


def _unusable(sentence: str) -> RequestError:
    return RequestError(f"The transform cannot be used: {sentence}.", hint="See docs/policy.md.")


class FieldRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. `missing` is withhold unless said otherwise, but ok for keep and drop.

    A field that a rule should protect and that is missing may have been renamed by its producer, and the new
    name would cross in the clear: hence withhold.
    """

    field: str
    do: Action
    missing: Missing | None = None
    last: Annotated[int, msgspec.Meta(ge=0, le=LAST_CHARS_MAX)] = 0
    """mask: how many characters at the end stay readable."""
    digest_bytes: Annotated[int, msgspec.Meta(ge=DIGEST_BYTES_MIN, le=32)] = DIGEST_BYTES_DEFAULT
    """hash and pseudonymize: length before encoding."""
    encoding: Encoding = Encoding.BASE64URL

    def __post_init__(self) -> None:
        canonical = str(FieldPath.parse(self.field))
        if canonical != self.field:
            raise _unusable(f"write the field {self.field} as {canonical}")
        if not 0 <= self.last <= LAST_CHARS_MAX:
            raise _unusable(f"last is {self.last}; 0 to {LAST_CHARS_MAX} are allowed")
        if not DIGEST_BYTES_MIN <= self.digest_bytes <= 32:
            raise _unusable(f"digest_bytes is {self.digest_bytes}; {DIGEST_BYTES_MIN} to 32 are allowed")
        if self.last and self.do is not Action.MASK:
            raise _unusable(f"last belongs to mask, not to {self.do}")
        if self.missing is None:
            loose = self.do in (Action.KEEP, Action.DROP)
            msgspec.structs.force_setattr(self, "missing", Missing.OK if loose else Missing.WITHHOLD)

    @property
    def path(self) -> FieldPath:
        return FieldPath.parse(self.field)


class TransformSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a record crosses. The empty spec passes every field of a JSON object and pseudonymizes the key."""

    format: Format = Format.JSON
    fields: Annotated[tuple[FieldRule, ...], msgspec.Meta(max_length=RULES_MAX)] = ()
    filter: str = ""
    key: KeyRule = KeyRule.PSEUDONYMIZE
    headers: Annotated[tuple[str, ...], msgspec.Meta(max_length=HEADERS_MAX)] = ()
    """Names of headers that cross; all others stay."""
    trace: bool = False
    """Whether a well-formed `traceparent` header crosses."""

    def __post_init__(self) -> None:
        if self.format is Format.OPAQUE and (self.fields or self.filter):
            raise _unusable("opaque payloads are not read, so they take no field rules and no filter")
        if len(self.fields) > RULES_MAX:
            raise _unusable(f"{len(self.fields)} field rules; {RULES_MAX} are allowed")
        for name in self.headers:
            if name.lower() in RESERVED_HEADERS or name.lower().startswith(RESERVED_HEADER_PREFIX):
                raise _unusable(
                    f"the header {name} is not passed on by a rule; trace: true passes traceparent"
                )
        if self.filter:
            parse_predicate(self.filter)
        rule_tree(self)

    @property
    def is_allowlist(self) -> bool:
        """True where what no rule names is dropped."""
        return any(rule.do is Action.KEEP for rule in self.fields)


def build_spec(
    *,
    keep: Iterable[str] = (),
    drop: Iterable[str] = (),
    mask: Iterable[str] = (),
    hash_: Iterable[str] = (),
    pseudonymize: Iterable[str] = (),
    missing: Missing | None = None,
    filter_: str = "",
    key: KeyRule = KeyRule.PSEUDONYMIZE,
    headers: Iterable[str] = (),
    trace: bool = False,
    opaque: bool = False,
) -> TransformSpec:
    """A spec from field paths, as the command line names them; `mask` takes `card` or `card:4` (last four shown). `opaque`: payloads
    are not read, so that no other rule for them can be.

    Raises RequestError(INVALID).
    """
    rules: list[FieldRule] = []
    for action, names in (
        (Action.KEEP, keep), (Action.DROP, drop), (Action.HASH, hash_), (Action.PSEUDONYMIZE, pseudonymize),
    ):  # fmt: skip
        rules += [FieldRule(field=name, do=action, missing=missing) for name in names]
    for text in mask:
        found = _MASK_LAST.fullmatch(text)
        name, last = (found[1], int(found[2])) if found else (text, 0)
        rules.append(FieldRule(field=name, do=Action.MASK, last=last, missing=missing))
    return TransformSpec(
        fields=tuple(rules),
        filter=filter_,
        key=key,
        headers=tuple(headers),
        trace=trace,
        format=Format.OPAQUE if opaque else Format.JSON,
    )


class Withheld(NamedTuple):
    """The record does not cross, because it could not be transformed as agreed."""

    reason: str


class FilteredOut(NamedTuple):
    """The record does not cross, because the grant's filter excludes it."""


class Crossing(NamedTuple):
    """What crosses of one record."""

    key: bytes | None
    headers: dict[str, bytes]
    payload: bytes


# ------------------------------------------------------------------------------------------ rules as a tree


class RuleTree:
    """The rules by path. A node has members, or one subtree for every element, never both."""

    __slots__ = ("each", "members", "rule")

    def __init__(self) -> None:
        self.rule: FieldRule | None = None
        self.members: dict[str, RuleTree] = {}
        self.each: RuleTree | None = None

    @property
    def children(self) -> list[RuleTree]:
        return [*self.members.values(), *([self.each] if self.each else [])]

    def survives(self) -> bool:
        """In an allowlist: whether anything at or below this node crosses."""
        if self.rule is not None:
            return self.rule.do is not Action.DROP
        return any(child.survives() for child in self.children)

    def strict(self) -> bool:
        """Whether some rule at or below needs its field to be there."""
        if self.rule is not None and self.rule.missing is Missing.WITHHOLD:
            return True
        return any(child.strict() for child in self.children)


def rule_tree(spec: TransformSpec) -> RuleTree:
    """The rules of a spec by path. Raises RequestError where two rules contradict each other."""
    root = RuleTree()
    for rule in spec.fields:
        node = root
        for part in rule.path.parts:
            if part == EACH:
                if node.members:
                    raise _unusable(f"{rule.field} takes for a list what another rule takes for an object")
                node.each = node.each or RuleTree()
                node = node.each
            else:
                if node.each:
                    raise _unusable(f"{rule.field} takes for an object what another rule takes for a list")
                node = node.members.setdefault(part, RuleTree())
        if node.rule is not None:
            both = {rule.do, node.rule.do}
            kept = Action.KEEP in both and len(both) == 2 and Action.DROP not in both
            more = "; it crosses by the other one, so it need not be kept besides" if kept else ""
            raise _unusable(f"{rule.field} has two rules{more}")
        node.rule = rule

    def check(node: RuleTree) -> None:
        if node.rule is not None and node.rule.do is not Action.KEEP and node.children:
            raise _unusable(f"{node.rule.field} has the rule {node.rule.do}, so no rule can apply below it")
        for child in node.children:
            check(child)

    check(root)
    return root


def effective_rule(spec: TransformSpec, path: FieldPath) -> FieldRule:
    """The rule that decides about one field; implied ones (kept, or dropped by an allowlist) included."""
    node: RuleTree | None = rule_tree(spec)
    kept = not spec.is_allowlist
    for part in path.parts:
        assert node is not None
        node = node.each if part == EACH else node.members.get(part)
        if node is None:
            break
        if node.rule is not None:
            if node.rule.do is not Action.KEEP:
                return node.rule
            kept = True
    crosses = kept or (node is not None and node.survives())
    return FieldRule(field=str(path), do=Action.KEEP if crosses else Action.DROP)


# -------------------------------------------------------------------------------------------- compiled rules


class _Refuse(Exception):
    """Leaves the rules where a record does not have the shape they expect; becomes `Withheld`."""


class _Hmac:
    """HMAC-SHA256 (RFC 2104) with both key blocks absorbed once: half the time of a one-shot call."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        assert len(key) <= 64
        block = key.ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def digest(self, message: bytes) -> bytes:
        inner = self._inner.copy()
        inner.update(message)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


def _text_of(value: object, field: str) -> str:
    """The text under which a value is hashed: 1545, 1545.0 and "1545" are one identifier."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Refuse(f"{field} holds {_kind(value)}, where its rule expects a text or a number.")
    return str(int(value)) if value == int(value) else repr(value)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    return "nothing (null)" if value is None else "a number"


_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


def _encoder(encoding: Encoding, digest_bytes: int) -> Callable[[bytes], str]:
    if encoding is Encoding.HEX:
        return lambda digest: digest[:digest_bytes].hex()
    # RFC 4648, section 5, without padding.
    chars = (digest_bytes * 4 + 2) // 3
    return lambda digest: (
        b2a_base64(digest[:digest_bytes], newline=False)[:chars].translate(_URL_SAFE).decode("ascii")
    )


class _Elements(NamedTuple):
    """Elements of a list that are still to be changed."""

    done: list[Any]
    """where they go"""
    left: list[Any]
    change: Change
    rules: int
    """that are applied to each, lists below it left out; at least 1"""


Later = deque[_Elements]
"""Lists of one record whose elements are still to be changed. Whoever changes a value puts those below it here."""
Change = Callable[[Any, Later], Any]


def _change_elements(later: Later) -> Steps[None]:
    """Do what is left, and what that leaves. Raises _Refuse."""
    room = STEP_RULES
    while later:
        done, left, change, rules = later.popleft()
        at_once = max(1, STEP_RULES // rules)
        for at in range(0, len(left), at_once):
            some = left[at : at + at_once]
            done += [change(part, later) for part in some]
            room -= len(some) * rules
            if room <= 0:
                room = STEP_RULES
                yield


def _leaf(rule: FieldRule, macs: Mapping[Action, _Hmac]) -> Change:
    field = rule.field
    if rule.do is Action.MASK:
        last = rule.last

        def mask(value: Any, later: Later) -> Any:
            if not last:
                return MASK
            text = _text_of(value, field) if value is not None else ""
            # Where the readable end would be most of the value, nothing of it is shown.
            return MASK + text[-last:] if len(text) >= 2 * last else MASK

        return mask
    digest = macs[rule.do].digest
    encode = _encoder(rule.encoding, rule.digest_bytes)

    def replace(value: Any, later: Later) -> Any:
        if value is None:
            return None
        return encode(digest(_text_of(value, field).encode()))

    return replace


Step = Callable[[dict[str, Any], Later], None]


class _Compiled(NamedTuple):
    """What is done with a value that has rules below it."""

    change: Change
    rules: int
    """that it applies at once, at most: those of elements of lists that are longer than SHORT_LIST come later"""


def _compile_object(tree: RuleTree, kept: bool, macs: Mapping[Action, _Hmac], where: str) -> _Compiled:
    """A function that takes an object (anything else is refused) and gives what crosses of it."""
    steps: list[Step] = []
    named: set[str] = set()
    demanded: list[str] = []
    rules = 1
    for name, node in tree.members.items():
        field = str(FieldPath((name,))) if not where else f"{where}.{FieldPath((name,))}"
        below = kept or (node.rule is not None and node.rule.do is Action.KEEP)
        if not below and not node.survives():
            # An allowlist leaves it out; only a rule that insists on the field has something left to do.
            if node.strict():
                demanded.append(name)
            continue
        named.add(name)
        if node.rule is not None and node.rule.do is Action.DROP:
            steps.append(_drop(name, field, node.rule.missing is Missing.WITHHOLD))
        elif node.children:
            inner = _compile_inner(node, below, macs, field)
            rules += inner.rules
            steps.append(_change(name, field, inner.change, node.strict(), container=True))
        elif node.rule is not None and node.rule.do is not Action.KEEP:
            strict = node.rule.missing is Missing.WITHHOLD
            steps.append(_change(name, field, _leaf(node.rule, macs), strict, container=False))
        elif node.strict():
            demanded.append(name)

    def run(value: Any, later: Later) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Refuse(f"{where or 'the record'} holds {_kind(value)}, where a rule expects an object.")
        for name in demanded:
            if name not in value:
                raise _Refuse(f"{where + '.' if where else ''}{FieldPath((name,))} is missing.")
        crossing = value if kept else {name: part for name, part in value.items() if name in named}
        for step in steps:
            step(crossing, later)
        return crossing

    return _Compiled(run, rules + len(steps) + len(demanded))


def _compile_inner(tree: RuleTree, kept: bool, macs: Mapping[Action, _Hmac], where: str) -> _Compiled:
    """What is to be done with one value that has rules below it: an object, or every element of a list."""
    if tree.each is None:
        return _compile_object(tree, kept, macs, where)
    node, field = tree.each, f"{where}{EACH}"
    drops = node.rule is not None and node.rule.do is Action.DROP
    below = kept or (node.rule is not None and node.rule.do is Action.KEEP)
    each: _Compiled | None = None
    if node.children:
        each = _compile_inner(node, below, macs, field)
    elif node.rule is not None and node.rule.do not in (Action.DROP, Action.KEEP):
        each = _Compiled(_leaf(node.rule, macs), 1)

    def run(value: Any, later: Later) -> list[Any]:
        if not isinstance(value, list):
            raise _Refuse(f"{where} holds {_kind(value)}, where a rule expects a list.")
        if drops:
            return []
        if each is None or not value:
            return value
        if len(value) * each.rules <= SHORT_LIST:
            return [each.change(part, later) for part in value]
        done = list[Any]()
        later.append(_Elements(done, value, *each))
        return done

    return _Compiled(run, SHORT_LIST)


def _as_is(value: Any) -> Any:
    return value


def _drop(name: str, field: str, strict: bool) -> Step:
    def drop(record: dict[str, Any], later: Later) -> None:
        if name in record:
            del record[name]
        elif strict:
            raise _Refuse(f"{field} is missing.")

    return drop


def _change(name: str, field: str, change: Change, strict: bool, container: bool) -> Step:
    def apply(record: dict[str, Any], later: Later) -> None:
        if name not in record:
            if strict:
                raise _Refuse(f"{field} is missing.")
            return
        value = record[name]
        if container and value is None:
            # null where an object or a list may stand: there is nothing below it.
            if strict:
                raise _Refuse(f"{field} holds nothing, and a rule below it needs its field.")
            return
        record[name] = change(value, later)

    return apply


def deeper_than(value: Any, levels: int) -> bool:
    """Whether decoded JSON is nested deeper than so many levels."""
    layer = [value]
    for _ in range(levels):
        layer = [
            part
            for outer in layer
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
        if not layer:
            return False
    return True


def has_too_many_values(data: bytes) -> bool:
    """Whether a JSON text has more than VALUES_MAX values, found before it is decoded. Of what is no JSON: up to where it is."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets + data.count(b",") <= VALUES_MAX:
        return False
    outside = _outside(data)
    return outside is None or outside.count(b",") + outside.count(b"[") + outside.count(b"{") > VALUES_MAX


def _outside(data: bytes) -> bytes | None:
    """A JSON text without its texts; None where those are more than VALUES_MAX values have."""
    texts = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Of names and values, a comma or a bracket has one each before it.
    if texts.count(b'"') > 4 * VALUES_MAX + 1:
        return None
    return b" ".join(texts.split(b'"')[::2])


_DIGITS: Final = bytes(ord("0") if chr(each).isdigit() and each < 128 else ord(" ") for each in range(256))


def has_too_long_numbers(data: bytes) -> bool:
    """Whether a JSON text has more than LONG_DIGITS_MAX digits in long numbers, found before it is decoded."""
    if len(data) <= LONG_DIGITS_MAX or b"0" * LONG_NUMBER not in data.translate(_DIGITS):
        return False
    outside = _outside(data)
    if outside is None:
        return True
    numbers = outside.translate(_DIGITS).split()
    return sum(len(each) for each in numbers if len(each) >= LONG_NUMBER) > LONG_DIGITS_MAX


def _colons(data: bytes) -> int:
    """Of a JSON text: between names and values, and in texts, however they are written there."""
    count = data.count(b":")
    if b"\\u003" in data:
        # A backslash that another one escapes escapes nothing.
        escapes = data.replace(b"\\\\", b"")
        count += escapes.count(b"\\u003a") + escapes.count(b"\\u003A")
    return count


def _number(text: str) -> float:
    """The decoder's own way takes 20 microseconds for a number near the ends of the range."""
    number = float(text)
    if number in (math.inf, -math.inf):
        raise ValueError("The number is out of range.")
    return number


decode_json: Final = msgspec.json.Decoder(float_hook=_number).decode
"""Any JSON, at a price that its length bounds. Raises MsgspecError, RecursionError."""
_encode: Final = msgspec.json.Encoder().encode


def _read(payload: Buffer) -> dict[str, Any]:
    """The record as decoded JSON. Raises _Refuse with the reason."""
    data = bytes(payload)
    if len(data) > VALUES_MAX:
        # A shorter one has not as many of anything.
        _check_text(data)
    record = _decode(data)
    _check_members(record, data)
    return record


def _read_long(payload: Buffer) -> Steps[dict[str, Any]]:
    """As `_read`, of a long record."""
    data = bytes(payload)
    _check_text(data)
    yield
    record = _decode(data)
    yield
    _check_members(record, data)
    yield
    return record


def _check_text(data: bytes) -> None:
    if len(data) > RECORD_BYTES_MAX:
        raise _Refuse(f"the record is {len(data)} bytes; {RECORD_BYTES_MAX} are allowed.")
    if has_too_many_values(data):
        raise _Refuse(f"the record has more than {VALUES_MAX} values.")
    if has_too_long_numbers(data):
        raise _Refuse(
            f"the record has more than {LONG_DIGITS_MAX} digits in numbers of {LONG_NUMBER} and more."
        )


def _decode(data: bytes) -> dict[str, Any]:
    try:
        record = decode_json(data)
    except RecursionError:
        raise _Refuse(f"the record is nested deeper than {DEPTH_MAX} levels.") from None
    except (msgspec.MsgspecError, ValueError):
        raise _Refuse("the record is not valid JSON.") from None
    if not isinstance(record, dict):
        raise _Refuse(f"the record is {_kind(record)}, not a JSON object.")
    return record


def _check_members(record: dict[str, Any], data: bytes) -> None:
    if data.count(b"{") + data.count(b"[") > DEPTH_MAX and deeper_than(record, DEPTH_MAX):
        raise _Refuse(f"the record is nested deeper than {DEPTH_MAX} levels.")
    # The decoder keeps the last of two equal names. What it kept, encoded again, has one colon for each member and the
    # colons within texts; the input has those, and more for each member that was overwritten.
    try:
        kept = _encode(record).count(b":")
    except (msgspec.MsgspecError, ValueError, OverflowError):
        # A number of thousands of digits: decoded, but not to be written again.
        raise _Refuse("the record holds a value that cannot be written again.") from None
    if _colons(data) != kept:
        raise _Refuse("the record has the same key twice in one object.")


def _written(crossing: dict[str, Any]) -> bytes | Withheld:
    try:
        output = _encode(crossing)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return Withheld("the record holds a value that cannot be written again.")
    if len(output) > RECORD_BYTES_MAX:
        return Withheld(f"the transformed record is {len(output)} bytes; {RECORD_BYTES_MAX} are allowed.")
    return output


class FieldOutcome(NamedTuple):
    """One leaf of a sample: JSON texts before and after; `after` is None where nothing crosses."""

    path: str
    action: Action
    before: str
    after: str | None


class Plan(NamedTuple):
    """What would become of one record. `outcome` is crosses, withheld or filtered."""

    outcome: str
    reason: str
    fields: tuple[FieldOutcome, ...]
    key: bytes | None
    headers: dict[str, bytes]


class Transform:
    """A compiled spec. Calling it with a payload gives the payload that crosses, or why none does.

    No call raises, whatever the bytes. Not bound to a loop or a thread: it keeps no state between records.
    """

    __slots__ = ("_json", "_key", "_protective", "_run", "_test", "_test_paths", "_tree", "spec")

    def __init__(self, spec: TransformSpec, key: bytes, scope: str) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise RequestError(f"A transform key of {len(key)} bytes; at least {KEY_BYTES_MIN} are needed.")
        self.spec = spec
        macs = {
            Action.HASH: _Hmac(hmac.digest(key, _HASH_CONTEXT, "sha256")),
            Action.PSEUDONYMIZE: _Hmac(hmac.digest(key, _PSEUDONYM_CONTEXT + scope.encode(), "sha256")),
        }
        self._tree = rule_tree(spec)
        self._json = spec.format is Format.JSON
        self._run = _compile_object(self._tree, not spec.is_allowlist, macs, "").change
        self._protective = any(rule.do is not Action.KEEP for rule in spec.fields) or spec.is_allowlist
        predicate = parse_predicate(spec.filter) if spec.filter else None
        self._test = compile_predicate(predicate) if predicate else None
        self._test_paths = ", ".join(map(str, paths(predicate))) if predicate else ""
        self._key: Callable[[bytes], bytes | None]
        if spec.key in (KeyRule.HASH, KeyRule.PSEUDONYMIZE):
            digest = macs[Action(spec.key)].digest
            encode = _encoder(Encoding.BASE64URL, DIGEST_BYTES_DEFAULT)
            self._key = lambda plain: encode(digest(plain)).encode("ascii")
        elif spec.key is KeyRule.KEEP:
            self._key = _as_is
        else:
            self._key = lambda plain: None

    def __call__(self, payload: Buffer) -> bytes | Withheld | FilteredOut:
        """The payload that crosses."""
        result = self.record(None, {}, payload)
        return result.payload if isinstance(result, Crossing) else result

    def record(
        self, key: Buffer | None, headers: Mapping[str, bytes], payload: Buffer
    ) -> Crossing | Withheld | FilteredOut:
        """What crosses of a whole record."""
        return finished(self.steps(key, headers, payload))

    def steps(
        self, key: Buffer | None, headers: Mapping[str, bytes], payload: Buffer
    ) -> Steps[Crossing | Withheld | FilteredOut]:
        """As `record`, with steps of some milliseconds. An empty payload with a key (a tombstone) crosses by its key alone."""
        plain_key = bytes(key) if key is not None else None
        output: bytes | Withheld | FilteredOut
        if not self._json:
            output = bytes(payload)
        elif not len(payload) and plain_key is not None:
            output = self._tombstone()
        else:
            is_long = len(payload) > STEP_BYTES
            try:
                record = (yield from _read_long(payload)) if is_long else _read(payload)
                if self._test is not None and (stays := self._filtered(record)) is not None:
                    return stays
                if plain_key is not None and self.spec.key is KeyRule.KEEP and self._protective:
                    yield from self._refuse_shown(plain_key, record)
                later = Later()
                crossing = self._run(record, later)
                if later:
                    yield from _change_elements(later)
            except _Refuse as refusal:
                return Withheld(str(refusal))
            if is_long:
                yield
            output = _written(crossing)
        if not isinstance(output, bytes):
            return output
        return Crossing(
            self._key(plain_key) if plain_key is not None else None,
            self._headers(headers) if headers else {},
            output,
        )

    def _filtered(self, record: dict[str, Any]) -> Withheld | FilteredOut | None:
        assert self._test is not None
        answer = self._test(record)
        if answer is None:
            reason = f"the filter cannot be decided: it looks at {self._test_paths}, and not all are as it expects."
            return Withheld(reason)
        return None if answer else FilteredOut()

    def _tombstone(self) -> bytes | Withheld:
        """Deletions must reach the destination, but only where the key itself shows nothing."""
        if self.spec.key in (KeyRule.HASH, KeyRule.PSEUDONYMIZE):
            return b""
        if self.spec.key is KeyRule.KEEP and not self._protective and self._test is None:
            return b""
        return Withheld(f"the record is a tombstone, and its key cannot cross under key: {self.spec.key}.")

    def _headers(self, headers: Mapping[str, bytes]) -> dict[str, bytes]:
        crossing = {name: bytes(headers[name]) for name in self.spec.headers if name in headers}
        if self.spec.trace and TRACEPARENT.fullmatch(trace := bytes(headers.get(TRACE_HEADER, b""))):
            crossing[TRACE_HEADER] = trace
        return crossing

    def _refuse_shown(self, key: bytes, record: dict[str, Any]) -> Steps[None]:
        """Raises _Refuse where a key that is kept shows what a rule protects.

        A dropped number is not compared: small numbers meet by chance, and the key would cross or not by luck.
        """
        text = key.decode("utf-8", "replace")
        protected = _protected(self._tree, record, not self.spec.is_allowlist)
        for at, (rule, value) in enumerate(protected, 1):
            if at % STEP_RULES == 0:
                yield
            if isinstance(value, str):
                shown = value == text or (len(value) >= CONTAINED_CHARS_MIN and value in text)
                shown = shown and bool(value)
            else:
                shown = rule is not None and rule.do is not Action.DROP and _text_of(value, "") == text
            if shown:
                # The reason stands in the audit log for good: a name that only the record has is its producer's text.
                what = f"{rule.field}, whose rule is {rule.do}" if rule else "a field that no rule keeps"
                raise _Refuse(f"the record's key shows the value of {what}.")

    def plan(self, key: Buffer | None, headers: Mapping[str, bytes], payload: Buffer) -> Plan:
        """What `record` would do, field by field, for a person in the source region: values are shown."""
        result = self.record(key, headers, payload)
        try:
            before = _read(payload) if self._json and len(payload) else {}
        except _Refuse:
            before = {}
        after = decode_json(result.payload) if isinstance(result, Crossing) and before else None
        fields = tuple(
            FieldOutcome(path, action, _encode(value).decode(), _look_up(after, steps))
            for path, action, value, steps in _flat(self._tree, before, not self.spec.is_allowlist)
        )
        if isinstance(result, Crossing):
            return Plan("crosses", "", fields, result.key, result.headers)
        if isinstance(result, Withheld):
            return Plan("withheld", result.reason, fields, None, {})
        return Plan("filtered", f"the filter excludes it: {self.spec.filter}", fields, None, {})


def _protected(
    tree: RuleTree | None, value: Any, kept: bool
) -> Iterator[tuple[FieldRule | None, str | int | float]]:
    """Texts and numbers of a record that must not cross in the clear, with the rule that holds for each; None where it is dropped because no rule keeps it.

    Dropped numbers may be left out: no code compares them.
    """
    if tree is None:
        if not kept:
            yield from ((None, scalar) for scalar in _scalars(value))
        return
    if tree.rule is not None:
        if tree.rule.do is not Action.KEEP:
            yield from ((tree.rule, scalar) for scalar in _scalars(value))
            return
        kept = True
    if isinstance(value, list):
        for part in value:
            yield from _protected(tree.each, part, kept)
    elif not isinstance(value, dict):
        yield from _protected(None, value, kept)
    elif kept:
        for name, node in tree.members.items():
            if name in value:
                yield from _protected(node, value[name], kept)
    else:
        for name, part in value.items():
            below = tree.members.get(name)
            if below is not None or isinstance(part, dict | list):
                yield from _protected(below, part, kept)
            elif isinstance(part, str):
                yield None, part


def _scalars(value: Any) -> Iterator[str | int | float]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _scalars(part)
    elif value is not None and not isinstance(value, bool):
        yield value


def _flat(
    tree: RuleTree | None, value: Any, kept: bool, where: str = "", steps: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, Action, Any, tuple[str | int, ...]]]:
    """Every leaf of a record with the action that holds for it. A rule on a whole object holds for its leaves."""
    if tree is not None and tree.rule is not None:
        if tree.rule.do is not Action.KEEP:
            for path, _, leaf, at in _flat(None, value, True, where, steps):
                yield path, tree.rule.do, leaf, at
            return
        kept = True
    if isinstance(value, dict) and value:
        for name, part in value.items():
            below = tree.members.get(name) if tree is not None else None
            dotted = f"{where}.{FieldPath((name,))}" if where else str(FieldPath((name,)))
            yield from _flat(below, part, kept, dotted, (*steps, name))
    elif isinstance(value, list) and value:
        for index, part in enumerate(value):
            yield from _flat(
                tree.each if tree is not None else None, part, kept, f"{where}[{index}]", (*steps, index)
            )
    elif steps:
        # What is empty where a kept member could have been (null, {} or []) crosses as it is.
        empty = value is None or isinstance(value, dict | list)
        crosses = kept or (empty and tree is not None and tree.survives())
        yield where, Action.KEEP if crosses else Action.DROP, value, steps


def _look_up(value: Any, steps: tuple[str | int, ...]) -> str | None:
    for step in steps:
        inside = (
            step in value
            if isinstance(value, dict)
            else isinstance(value, list) and step in range(len(value))
        )
        if not inside:
            # A leaf below a field that was replaced as a whole has no place of its own any more.
            return None
        value = value[step]
    return _encode(value).decode()


def compile_transform(spec: TransformSpec, key: bytes, scope: str) -> Transform:
    """A spec as a function. `key`: the region's transform key, 32 bytes or more, which never leaves the region.

    `scope` separates pseudonyms: use `policy.grant.pseudonym_scope(terms)`, one per destination and purpose.
    Raises RequestError(INVALID) for a key that is too short.
    """
    return Transform(spec, key, scope)
