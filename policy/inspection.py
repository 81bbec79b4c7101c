"""Inspection: what a destination finds out about a record that came in, by the terms and by nothing the sender says. Pure.

The bridge agent applies a grant's terms; the destination cannot see what it was given, but it sees what came out, and
holds every record to each term that shows there:

- headers: only those that the terms name, each once; `traceparent` only with `trace`, and well-formed; and the path;
- path: it ends in the source, has not been here, and names no third region unless the grant allows onward transfer;
- key: none (`drop`), or of the shape of a keyed digest (`hash`, `pseudonymize`), or any (`keep`);
- payload, where the format is JSON: an object written as the transform writes it, so with no name twice and no byte
  that is not part of a value, within the transform's limits; or empty, where a tombstone may cross;
- fields: none that `drop` or an allowlist excludes, all that a rule demands, and masked, hashed and pseudonymized ones
  of the shape that their rule gives them;
- filter: decided true, where all that it looks at crosses unchanged.

What it cannot see: whether a digest is that of the right value, whether a value that crosses was in the source's record, and
filters over what does not cross. The commitments in both logs hold the agent to that.

A record of 30 kB may hold 16,384 values with a rule for each: what is checked of a long one is a generator (`Inspection.steps`), and elements of lists are
checked some at a time, after all else of the record.

Invariants: the rules are those of policy.transform, so what a sound transform of these terms puts out passes; nothing of a
record stands in a refusal's sentence. Callers: region (ingest).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Never

import msgspec

from felix.batch import KEY_BYTES_MAX, Buffer, decode_header_pairs
from felix.errors import Code
from felix.provenance import PATH_HEADER, parse_path
from felix.steps import Steps, finished
from policy.fieldpath import EACH, FieldPath
from policy.grant import GrantError
from policy.predicate import compile_predicate, parse_predicate, paths
from policy.terms import GrantTerms
from policy.transform import (
    DEPTH_MAX,
    DIGEST_BYTES_DEFAULT,
    LONG_DIGITS_MAX,
    LONG_NUMBER,
    MASK,
    RECORD_BYTES_MAX,
    SHORT_LIST,
    STEP_BYTES,
    STEP_RULES,
    TRACE_HEADER,
    TRACEPARENT,
    VALUES_MAX,
    Action,
    Encoding,
    FieldRule,
    Format,
    KeyRule,
    Missing,
    RuleTree,
    TransformSpec,
    decode_json,
    deeper_than,
    effective_rule,
    has_too_long_numbers,
    has_too_many_values,
    rule_tree,
)

_HEADERS_KNOWN_MAX: Final = 256
_HEADERS_KNOWN_BYTES_MAX: Final = 512
"""Headers found in order are remembered: most records of a link have the same ones, the path alone."""

_encode: Final = msgspec.json.Encoder().encode


class _Elements(NamedTuple):
    """Elements of a list that are still to be checked."""

    left: list[Any]
    check: Check
    rules: int
    """that are asked for each, lists below it left out; at least 1"""


Later = deque[_Elements]
"""Lists of one record whose elements are still to be checked. Whoever checks a value puts those below it here."""
Check = Callable[[Any, Later], None]


class _Compiled(NamedTuple):
    """What is asked of a value that has rules below it."""

    check: Check
    rules: int


def _check_elements(later: Later) -> Steps[None]:
    """Check what is left, and what that leaves. Raises OutsideTermsError."""
    room = STEP_RULES
    while later:
        left, check, rules = later.popleft()
        at_once = max(1, STEP_RULES // rules)
        for at in range(0, len(left), at_once):
            some = left[at : at + at_once]
            for part in some:
                check(part, later)
            room -= len(some) * rules
            if room <= 0:
                room = STEP_RULES
                yield


class OutsideTermsError(GrantError):
    """A record that the terms do not let cross. The sentence says which term, and nothing of the record."""

    default_code = Code.OUTSIDE_TERMS


def _refuse(sentence: str, code: Code = Code.OUTSIDE_TERMS) -> Never:
    raise OutsideTermsError(
        sentence,
        code=code,
        hint="The bridge agent does not do what the grant says; find out what runs there.",
    )


class Inspection:
    """The terms of one grant as a check of one record. No state but a memory of headers that were in order."""

    __slots__ = (
        "_checks",
        "_header_names",
        "_json",
        "_key",
        "_known",
        "_spec",
        "_terms",
        "_test",
        "_tombstones",
    )

    def __init__(self, terms: GrantTerms) -> None:
        spec = terms.transform
        self._terms, self._spec = terms, spec
        self._json = spec.format is Format.JSON
        self._header_names = (
            frozenset(spec.headers) | {PATH_HEADER} | ({TRACE_HEADER} if spec.trace else set())
        )
        self._known: dict[bytes, tuple[str, ...]] = {}
        self._key = _KEY_CHECKS[spec.key]
        rules = rule_tree(spec)
        self._checks = _object_check(rules, not spec.is_allowlist, "").check if spec.fields else None
        self._test = None
        if spec.filter:
            predicate = parse_predicate(spec.filter)
            if all(_crosses_unchanged(spec, path) for path in paths(predicate)):
                self._test = compile_predicate(predicate)
        protective = bool(spec.fields) and (
            spec.is_allowlist or any(rule.do is not Action.KEEP for rule in spec.fields)
        )
        self._tombstones = spec.key in (KeyRule.HASH, KeyRule.PSEUDONYMIZE) or (
            spec.key is KeyRule.KEEP and not protective and not spec.filter
        )

    def record(self, key: Buffer, headers: Buffer, payload: Buffer) -> tuple[str, ...]:
        """As `steps`, all at once."""
        return finished(self.steps(key, headers, payload))

    def steps(self, key: Buffer, headers: Buffer, payload: Buffer) -> Steps[tuple[str, ...]]:
        """Check one record as it stands in a batch, with steps of some milliseconds; no key and no headers are empty. Returns the regions that it has been in, the
        source last. Raises RequestError."""
        raw = bytes(headers)
        path = self._known.get(raw)
        if path is None:
            path = self._check_headers(raw)
            if len(raw) <= _HEADERS_KNOWN_BYTES_MAX and len(self._known) < _HEADERS_KNOWN_MAX:
                self._known[raw] = path
        if key:
            self._key(key)
        if self._json and not len(payload):
            self._check_tombstone(key)
        elif self._json:
            record = (yield from _read_long(payload)) if len(payload) > STEP_BYTES else _read(payload)
            if self._checks is not None:
                later = Later()
                self._checks(record, later)
                if later:
                    yield from _check_elements(later)
            if self._test is not None and self._test(record) is not True:
                _refuse("The filter does not let it cross.")
        return path

    # Headers

    def _check_headers(self, raw: bytes) -> tuple[str, ...]:
        found = decode_header_pairs(raw) if raw else []
        names = [name for name, _ in found]
        if len(set(names)) != len(names):
            _refuse("It has a header of one name twice.")
        foreign = len(set(names) - self._header_names)
        if foreign:
            _refuse(f"It has {foreign} headers that the terms do not name.")
        values = dict(found)
        trace = values.get(TRACE_HEADER)
        if trace is not None and TRACEPARENT.fullmatch(trace) is None:
            _refuse(f"Its header {TRACE_HEADER} is not one.")
        path = values.get(PATH_HEADER)
        if path is None:
            _refuse("It does not say where it has been.", Code.LOOP_REFUSED)
        regions = parse_path(path)
        self._check_path(regions)
        return regions

    def _check_path(self, regions: tuple[str, ...]) -> None:
        terms = self._terms
        # A refusal's sentence stands in the log: it names no region that the sender chose.
        if regions[-1] != terms.from_region:
            _refuse(f"It does not say that it comes from {terms.from_region}.", Code.LOOP_REFUSED)
        if terms.to_region in regions:
            _refuse(f"It has been in {terms.to_region} before.", Code.LOOP_REFUSED)
        if not terms.onward and any(region != terms.from_region for region in regions):
            _refuse(
                "It came from a third region, and the grant does not allow onward transfer.",
                Code.RESIDENCY_DENIED,
            )

    # Payload

    def _check_tombstone(self, key: Buffer) -> None:
        if not key or not self._tombstones:
            _refuse("Its payload is empty, and the terms let no tombstone cross.")


# Payloads


def _read(payload: Buffer) -> dict[str, Any]:
    data = bytes(payload)
    if len(data) > VALUES_MAX:
        _check_text(data)
    record = _decode(data)
    _check_written(record, data)
    return record


def _read_long(payload: Buffer) -> Steps[dict[str, Any]]:
    """As `_read`, in steps."""
    data = bytes(payload)
    _check_text(data)
    yield
    record = _decode(data)
    yield
    _check_written(record, data)
    yield
    return record


def _check_text(data: bytes) -> None:
    if len(data) > RECORD_BYTES_MAX:
        _refuse(f"Its payload has {len(data)} bytes; {RECORD_BYTES_MAX} may cross.")
    if has_too_many_values(data):
        _refuse(f"Its payload has more than {VALUES_MAX} values.")
    if has_too_long_numbers(data):
        _refuse(f"Its payload has more than {LONG_DIGITS_MAX} digits in numbers of {LONG_NUMBER} and more.")


def _decode(data: bytes) -> dict[str, Any]:
    try:
        record = decode_json(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        _refuse("Its payload is not JSON, as the terms say.")
    if not isinstance(record, dict):
        _refuse("Its payload is not a JSON object.")
    return record


def _check_written(record: dict[str, Any], data: bytes) -> None:
    try:
        again = _encode(record)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        _refuse("Its payload is not JSON, as the terms say.")
    # A text that equals its decoded values written again has no duplicate name, and no other byte.
    if again != data:
        _refuse("Its payload is not written as the transform writes it.")
    if data.count(b"{") + data.count(b"[") > DEPTH_MAX and deeper_than(record, DEPTH_MAX):
        _refuse(f"Its payload is nested deeper than {DEPTH_MAX} levels.")


# Keys


def _any_key(key: Buffer) -> None:
    if len(key) > KEY_BYTES_MAX:
        _refuse(f"Its key has {len(key)} bytes; {KEY_BYTES_MAX} are allowed.")


def _no_key(key: Buffer) -> None:
    _refuse("It has a key, and the terms drop keys.")


def _base64url(digest_bytes: int) -> str:
    """What a digest of so many bytes looks like: base64url without padding (RFC 4648, 5), unused bits zero."""
    whole, rest = divmod(digest_bytes, 3)
    last = {0: "", 1: "[A-Za-z0-9_-][AQgw]", 2: "[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]"}[rest]
    return f"[A-Za-z0-9_-]{{{4 * whole}}}{last}"


_KEY_DIGEST: Final = re.compile(_base64url(DIGEST_BYTES_DEFAULT).encode())


def _digest_key(key: Buffer) -> None:
    if _KEY_DIGEST.fullmatch(key) is None:
        _refuse("Its key is not a digest, as the terms say.")


_KEY_CHECKS: Final[dict[KeyRule, Callable[[Buffer], None]]] = {
    KeyRule.KEEP: _any_key,
    KeyRule.DROP: _no_key,
    KeyRule.HASH: _digest_key,
    KeyRule.PSEUDONYMIZE: _digest_key,
}


# Fields: the shapes that policy.transform leaves behind, rule by rule


def _object_check(tree: RuleTree, kept: bool, where: str) -> _Compiled:
    absent: list[tuple[str, str]] = []
    demanded: list[tuple[str, str]] = []
    inner: list[tuple[str, Check]] = []
    containers: list[tuple[str, str, Check, bool]] = []
    named: set[str] = set()
    rules = 1
    for name, node in tree.members.items():
        field = str(FieldPath((name,))) if not where else f"{where}.{FieldPath((name,))}"
        below = kept or (node.rule is not None and node.rule.do is Action.KEEP)
        if not below and not node.survives():
            continue
        named.add(name)
        if node.rule is not None and node.rule.do is Action.DROP:
            absent.append((name, field))
        elif node.children:
            found = _container_check(node, below, field)
            rules += found.rules
            containers.append((name, field, found.check, node.strict()))
        elif node.rule is not None and node.rule.do is not Action.KEEP:
            inner.append((name, _leaf_check(node.rule)))
            if node.rule.missing is Missing.WITHHOLD:
                demanded.append((name, field))
        elif node.strict():
            demanded.append((name, field))

    def check(value: Any, later: Later) -> None:
        if not isinstance(value, dict):
            _refuse(f"{where or 'Its payload'} is not an object.")
        if not kept and not named.issuperset(value):
            _refuse(f"{where or 'Its payload'} has a field that the terms do not let cross.")
        for name, field in absent:
            if name in value:
                _refuse(f"The field {field} is there, and the terms drop it.")
        for name, field in demanded:
            if name not in value:
                _refuse(f"The field {field} is missing, and the terms demand it.")
        for name, field, below, strict in containers:
            part = value.get(name)
            if part is not None:
                below(part, later)
            elif strict:
                _refuse(f"The field {field} is missing, and the terms demand what is in it.")
        for name, leaf in inner:
            if name in value:
                leaf(value[name], later)

    return _Compiled(check, rules + len(absent) + len(demanded) + len(inner) + len(containers))


def _container_check(tree: RuleTree, kept: bool, where: str) -> _Compiled:
    """Of a value that has rules below it: an object, or every element of a list."""
    if tree.each is None:
        return _object_check(tree, kept, where)
    node, field = tree.each, f"{where}{EACH}"
    drops = node.rule is not None and node.rule.do is Action.DROP
    below = kept or (node.rule is not None and node.rule.do is Action.KEEP)
    part: _Compiled | None = None
    if node.children:
        part = _container_check(node, below, field)
    elif node.rule is not None and node.rule.do not in (Action.DROP, Action.KEEP):
        part = _Compiled(_leaf_check(node.rule), 1)

    def check(value: Any, later: Later) -> None:
        if not isinstance(value, list):
            _refuse(f"The field {where} is not a list.")
        if drops and value:
            _refuse(f"The field {where} has elements, and the terms drop them.")
        if part is None:
            return
        if len(value) * part.rules <= SHORT_LIST:
            for each in value:
                part.check(each, later)
        else:
            later.append(_Elements(value, *part))

    return _Compiled(check, SHORT_LIST)


def _leaf_check(rule: FieldRule) -> Check:
    field = rule.field
    if rule.do is Action.MASK:
        whole = len(MASK) + rule.last

        def masked(value: Any, later: Later) -> None:
            if value != MASK and not (
                rule.last and isinstance(value, str) and value.startswith(MASK) and len(value) == whole
            ):
                _refuse(f"The field {field} is not masked, as the terms say.")

        return masked
    shape = (
        f"[0-9a-f]{{{2 * rule.digest_bytes}}}"
        if rule.encoding is Encoding.HEX
        else _base64url(rule.digest_bytes)
    )
    matches = re.compile(shape, re.ASCII).fullmatch

    def digest(value: Any, later: Later) -> None:
        if value is not None and (not isinstance(value, str) or matches(value) is None):
            _refuse(f"The field {field} is not a digest, as the terms say.")

    return digest


def _crosses_unchanged(spec: TransformSpec, path: FieldPath) -> bool:
    """Whether a filter's field is at the destination what it was at the source."""
    return effective_rule(spec, path).do is Action.KEEP
