"""The filter language: which records of a granted stream cross at all.

    origin == "EWR" and (distance >= 1000 or dest in ["IAH", "MIA"]) and not exists(crew)

Grammar (keywords are lower case; a field with such a name is written in quotes)::

    expression = conjunction { "or" conjunction }
    conjunction = negation { "and" negation }
    negation   = "not" negation | "(" expression ")" | "exists" "(" path ")" | comparison
    comparison = path ( "==" | "!=" | "<" | "<=" | ">" | ">=" ) literal
               | path [ "not" ] "in" "[" literal { "," literal } "]"
    literal    = string ("…" or '…', with \\\\, \\" and \\' escapes) | number | "true" | "false" | "null"
    path       = names joined by dots (policy.fieldpath), without []

A field's double-quoted name and a string literal look alike; position tells them apart.

Invariants:
- three answers: true, false, undecided (None). A missing field, or one of another kind than the literal, makes a
  comparison undecided; `and`, `or` and `not` follow Kleene's strong logic, so `not` of undecided is undecided. A
  record crosses only on true, and undecided is no quiet false: the transform withholds the record.
- nothing is evaluated as Python; text, nodes, depth and list length are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

from felix.errors import RequestError
from policy.fieldpath import EACH, PART_PATTERN, FieldPath

TEXT_CHARS_MAX: Final = 2_048
NODES_MAX: Final = 64
"""Comparisons and connectives in one filter: it runs for every record."""
DEPTH_MAX: Final = 16
CHOICES_MAX: Final = 256

Literal = str | int | float | bool | None
Test = Callable[[dict[str, Any]], bool | None]


@dataclass(frozen=True, slots=True)
class Compare:
    path: FieldPath
    operator: str
    literal: Literal


@dataclass(frozen=True, slots=True)
class In:
    path: FieldPath
    choices: tuple[Literal, ...]


@dataclass(frozen=True, slots=True)
class Exists:
    path: FieldPath


@dataclass(frozen=True, slots=True)
class Not:
    operand: Predicate


@dataclass(frozen=True, slots=True)
class And:
    operands: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Or:
    operands: tuple[Predicate, ...]


Predicate = Compare | In | Exists | Not | And | Or

_TOKEN: Final = re.compile(
    rf"""\s*(?:
        (?P<number>-?[0-9]{{1,18}}(?:\.[0-9]{{1,18}})?(?:[eE][+-]?[0-9]{{1,2}})?)
      | (?P<operator>==|!=|<=|>=|<|>)
      | (?P<mark>[()\[\],])
      | (?P<path>(?:{PART_PATTERN})(?:\.(?:{PART_PATTERN}))+)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<word>[A-Za-z_][A-Za-z0-9_-]*)
    )""",
    re.VERBOSE | re.ASCII,
)
_KEYWORDS: Final = frozenset({"and", "or", "not", "in", "exists", "true", "false", "null"})
_CONSTANTS: Final[dict[str, Literal]] = {"true": True, "false": False, "null": None}


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse_predicate(text: str) -> Predicate:
    """The filter as a tree. Raises RequestError(INVALID) with the column and what was expected."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > TEXT_CHARS_MAX:
            raise RequestError(f"The filter is {len(text)} characters long; {TEXT_CHARS_MAX} are allowed.")
        self.text = text
        self.tokens = list(self._scan())
        self.index = 0
        self.nodes = 0

    def _scan(self) -> Iterator[_Token]:
        at = 0
        while self.text[at:].strip():
            found = _TOKEN.match(self.text, at)
            if found is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                self._refuse(at, "a character that no filter has")
            assert found.lastgroup is not None
            yield _Token(found.lastgroup, found[found.lastgroup], found.start(found.lastgroup))
            at = found.end()
        yield _Token("end", "", len(self.text))

    def _refuse(self, at: int, sentence: str) -> NoReturn:
        raise RequestError(
            f"The filter cannot be read at column {at + 1}: {sentence}.", hint="See docs/policy.md."
        )

    def _peek(self) -> _Token:
        return self.tokens[self.index]

    def _next(self) -> _Token:
        token = self.tokens[self.index]
        self.index += token.kind != "end"
        return token

    def _take(self, text: str) -> bool:
        """Consumes the next token if it is this keyword or mark."""
        token = self._peek()
        if token.text == text and token.kind in ("word", "mark"):
            self.index += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._take(text):
            self._refuse(self._peek().at, f"expected {text}, found {self._shown()}")

    def _shown(self) -> str:
        token = self._peek()
        return repr(token.text[:40]) if token.kind != "end" else "the end"

    def _count(self) -> None:
        self.nodes += 1
        if self.nodes > NODES_MAX:
            self._refuse(self._peek().at, f"more than {NODES_MAX} conditions")

    def parse(self) -> Predicate:
        result = self._or(0)
        if self._peek().kind != "end":
            self._refuse(self._peek().at, f"expected and, or, or the end, found {self._shown()}")
        return result

    def _or(self, depth: int) -> Predicate:
        if depth > DEPTH_MAX:
            self._refuse(self._peek().at, f"nested deeper than {DEPTH_MAX} levels")
        operands = [self._and(depth)]
        while self._take("or"):
            operands.append(self._and(depth))
        return operands[0] if len(operands) == 1 else Or(tuple(operands))

    def _and(self, depth: int) -> Predicate:
        operands = [self._not(depth)]
        while self._take("and"):
            operands.append(self._not(depth))
        return operands[0] if len(operands) == 1 else And(tuple(operands))

    def _not(self, depth: int) -> Predicate:
        self._count()
        if depth > DEPTH_MAX:
            self._refuse(self._peek().at, f"nested deeper than {DEPTH_MAX} levels")
        if self._take("not"):
            return Not(self._not(depth + 1))
        if self._take("("):
            inner = self._or(depth + 1)
            self._expect(")")
            return inner
        if self._take("exists"):
            self._expect("(")
            path = self._path()
            self._expect(")")
            return Exists(path)
        return self._comparison()

    def _comparison(self) -> Predicate:
        path = self._path()
        negated = self._take("not")
        if self._take("in"):
            choice = In(path, self._choices())
            return Not(choice) if negated else choice
        if negated:
            self._refuse(self._peek().at, f"expected in after not, found {self._shown()}")
        token = self._peek()
        if token.kind != "operator":
            self._refuse(token.at, f"expected ==, !=, <, <=, >, >= or in, found {self._shown()}")
        self._next()
        at = self._peek().at
        literal = self._literal()
        if token.text not in ("==", "!=") and (literal is None or isinstance(literal, bool)):
            self._refuse(at, f"{token.text} compares numbers or texts")
        return Compare(path, token.text, literal)

    def _choices(self) -> tuple[Literal, ...]:
        self._expect("[")
        choices = [self._literal()]
        while self._take(","):
            if len(choices) >= CHOICES_MAX:
                self._refuse(self._peek().at, f"more than {CHOICES_MAX} choices in one list")
            choices.append(self._literal())
        self._expect("]")
        return tuple(choices)

    def _path(self) -> FieldPath:
        token = self._peek()
        if token.kind not in ("word", "path", "text") or token.text in _KEYWORDS:
            self._refuse(token.at, f"expected a field's name, found {self._shown()}")
        self._next()
        text = token.text
        try:
            path = FieldPath.parse(text)
        except RequestError:
            self._refuse(token.at, f"{text[:40]!r} is not a field's path")
        assert EACH not in path.parts
        return path

    def _literal(self) -> Literal:
        token = self._next()
        if token.kind == "number":
            return float(token.text) if any(c in token.text for c in ".eE") else int(token.text)
        if token.kind == "text":
            return re.sub(r"\\(.)", r"\1", token.text[1:-1])
        if token.kind == "word" and token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        self.index -= token.kind != "end"
        self._refuse(
            token.at, f"expected a text in quotes, a number, true, false or null, found {self._shown()}"
        )


# ------------------------------------------------------------------------------------------------- running

_MISSING: Final = object()


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    return "null" if value is None else "other"


def _getter(path: FieldPath) -> Callable[[dict[str, Any]], Any]:
    if len(path.parts) == 1:
        name = path.parts[0]
        return lambda record: record.get(name, _MISSING)
    parts = path.parts

    def get(record: dict[str, Any]) -> Any:
        value: Any = record
        for part in parts:
            if not isinstance(value, dict):
                return _MISSING
            value = value.get(part, _MISSING)
        return value

    return get


def compile_predicate(predicate: Predicate) -> Test:
    """A function of a decoded record: true, false, or None where it cannot be decided. It never raises."""
    match predicate:
        case Compare(path, operator, literal):
            return _compile_compare(_getter(path), operator, literal)
        case In(path, choices):
            return _compile_in(_getter(path), choices)
        case Exists(path):
            get_existing = _getter(path)
            return lambda record: get_existing(record) is not _MISSING
        case Not(operand):
            inner = compile_predicate(operand)

            def negate(record: dict[str, Any]) -> bool | None:
                answer = inner(record)
                return None if answer is None else not answer

            return negate
        case And(operands):
            return _compile_all([compile_predicate(part) for part in operands], stop=False)
        case Or(operands):
            return _compile_all([compile_predicate(part) for part in operands], stop=True)


def _compile_all(tests: list[Test], stop: bool) -> Test:
    """Kleene's `or` (stop at true) and `and` (stop at false)."""

    def combined(record: dict[str, Any]) -> bool | None:
        undecided = False
        for test in tests:
            answer = test(record)
            if answer is stop:
                return stop
            if answer is None:
                undecided = True
        return None if undecided else not stop

    return combined


def _compile_in(get: Callable[[dict[str, Any]], Any], choices: tuple[Literal, ...]) -> Test:
    # By kind, because Python holds 1, 1.0 and True for equal.
    by_kind = {kind: frozenset(c for c in choices if _kind(c) == kind) for kind in map(_kind, choices)}

    def test(record: dict[str, Any]) -> bool | None:
        value = get(record)
        if value is _MISSING:
            return None
        found = by_kind.get(_kind(value))
        # null is a value that a record may well have where texts are listed: it is simply not among them.
        return value in found if found is not None else (False if value is None else None)

    return test


def _compile_compare(get: Callable[[dict[str, Any]], Any], operator: str, literal: Literal) -> Test:
    kind = _kind(literal)

    def equal(record: dict[str, Any]) -> bool | None:
        value = get(record)
        if value is _MISSING:
            return None
        if _kind(value) != kind:
            # Against null, and null against anything, the answer is known; between other kinds it is a mistake.
            return False if kind == "null" or value is None else None
        return bool(value == literal)

    if operator == "==":
        return equal
    if operator == "!=":

        def unequal(record: dict[str, Any]) -> bool | None:
            answer = equal(record)
            return None if answer is None else not answer

        return unequal

    def ordered(record: dict[str, Any]) -> bool | None:
        value = get(record)
        if value is _MISSING or _kind(value) != kind:
            return None
        if operator == "<":
            return bool(value < literal)
        if operator == "<=":
            return bool(value <= literal)
        if operator == ">":
            return bool(value > literal)
        return bool(value >= literal)

    return ordered


def paths(predicate: Predicate) -> tuple[FieldPath, ...]:
    """The fields that a filter looks at, each once, in the order written."""
    match predicate:
        case Compare(path, _, _) | In(path, _) | Exists(path):
            return (path,)
        case Not(operand):
            return paths(operand)
        case And(operands) | Or(operands):
            return tuple(dict.fromkeys(path for part in operands for path in paths(part)))
