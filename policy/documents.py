"""YAML documents decoded into typed structs, with mistakes that say where they are and what was expected.

    policy = decode_document(text, PolicyDocument, "residency.yaml")

The type directs the decoding: a field declared `str` takes the scalar as it is written, so `country: NO` is
Norway and `version: 1.10` keeps its zero; a bool is `true` or `false` and nothing else. All mistakes of a
document are found in one pass and reported together, each with file, line, column and path.

What a field may be: `str`, `int`, `float`, `bool`, enums of strings, `Literal`, `None | T`, lists, `tuple[T, ...]`,
`dict[str, T]`, msgspec structs, and every class that has a `parse(text)` classmethod or is a `NamePattern`. A plain
function serves through `Annotated[str, Parsed(parse_region)]`. `msgspec.Meta` bounds (`ge`, `le`, `gt`, `lt`,
`min_length`, `max_length`, `pattern`) hold. `__post_init__` may raise RequestError or ValueError: the mistake is
reported at the struct's own place.

Invariants:
- only data is read: no YAML tag constructs an object, no text is resolved to a date or a sexagesimal number;
- work is bounded: `DOCUMENT_BYTES_MAX`, `DEPTH_MAX`, `NODES_MAX` (after aliases are followed), `ALIASES_MAX`;
- a duplicate key, an unknown key and a second document in the file are mistakes.

Pure: the text is handed in. Anyone may call.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from felix.errors import Code, FelixError, RequestError
from felix.names import NamePattern

DOCUMENT_BYTES_MAX: Final = 256 * 1024
"""A policy or a region's config is written by people; the safe loader is slow enough that more would hurt."""
DEPTH_MAX: Final = 32
NODES_MAX: Final = 20_000
"""Nodes visited, each alias counted as often as it is used: a few nested aliases cannot stand for millions."""
ALIASES_MAX: Final = 100
MISTAKES_MAX: Final = 50
"""More would not be read, and a hostile file must not make a report larger than itself."""
SHOWN_CHARS_MAX: Final = 60

T = TypeVar("T")
Path = tuple[str | int, ...]

_INT: Final = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_FLOAT: Final = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_NULLS: Final = ("", "~", "null", "Null", "NULL")
_PLAIN_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
)


class Place(NamedTuple):
    """Where something stands in its source; line and column count from 1."""

    source: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


class Mistake(NamedTuple):
    """One mistake: its place, its path within the document (`exports[0].bases`), and what was expected."""

    place: Place
    path: str
    sentence: str

    def __str__(self) -> str:
        at = f"{self.path}: " if self.path else ""
        return f"{self.place}: {at}{self.sentence}"


class ConfigError(RequestError):
    """A document that cannot be used. `mistakes` holds each of them, in the order of the file."""

    default_code = Code.CONFIG_INVALID

    def __init__(self, source: str, mistakes: Iterable[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        assert self.mistakes
        if len(self.mistakes) == 1:
            sentence = str(self.mistakes[0])
        else:
            listed = "\n".join(f"  {mistake}" for mistake in self.mistakes)
            sentence = f"{source} has {len(self.mistakes)} mistakes:\n{listed}"
        super().__init__(sentence)


@dataclass(frozen=True, slots=True)
class Parsed:
    """Field metadata: decode the scalar with this function, which raises RequestError or ValueError."""

    parse: Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Document(Generic[T]):
    """A decoded value and where its parts stand in the source."""

    value: T
    source: str
    places: Mapping[Path, Place]

    def place(self, *path: str | int) -> Place:
        """Where the part at `path` stands; the nearest enclosing part's place where it has none of its own."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.source, 1, 1))._replace(source=self.source)


def decode_document(text: str, type_: type[T], source: str) -> T:
    """The document as a `type_`. `source` names the file in messages. Raises ConfigError(CONFIG_INVALID)."""
    return decode_placed(text, type_, source).value


def decode_placed(text: str, type_: type[T], source: str) -> Document[T]:
    """Like `decode_document`, and keeps where each part stands. Raises ConfigError(CONFIG_INVALID)."""
    node = _compose(text, source)
    decoder = _Decoder(source)
    value = decoder.decode(node, type_, ())
    if decoder.mistakes:
        ordered = sorted(decoder.mistakes, key=lambda mistake: mistake.place[1:])
        raise ConfigError(source, ordered[:MISTAKES_MAX])
    return Document(value, source, decoder.places)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean x?` where one of `known` is close to `word`, else an empty text."""
    found = difflib.get_close_matches(word[:SHOWN_CHARS_MAX], list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


# ------------------------------------------------------------------------------------------ YAML to nodes


class _Bounds(Exception):
    def __init__(self, mark: Any, sentence: str) -> None:
        self.mark = mark
        self.sentence = sentence


class _Loader(yaml.SafeLoader):
    """Composes nodes and constructs nothing; depth and aliases are bounded while composing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.aliases = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > ALIASES_MAX:
                raise _Bounds(event.start_mark, f"more than {ALIASES_MAX} aliases in one document.")
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise _Bounds(event.start_mark, f"nested deeper than {DEPTH_MAX} levels.")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


def _compose(text: str, source: str) -> yaml.Node:
    def refuse(mark: Any, sentence: str) -> ConfigError:
        place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source, 1, 1)
        return ConfigError(source, [Mistake(place, "", sentence)])

    size = len(text.encode("utf-8", "surrogatepass"))
    if size > DOCUMENT_BYTES_MAX:
        raise refuse(None, f"the document is {size} bytes; {DOCUMENT_BYTES_MAX} are allowed.")
    try:
        node = _Loader(text).get_single_node()
    except _Bounds as error:
        raise refuse(error.mark, error.sentence) from None
    except yaml.MarkedYAMLError as error:
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise refuse(error.problem_mark or error.context_mark, f"not valid YAML: {what}.") from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line = before.count("\n") + 1
        place = Place(source, line, error.position - (before.rfind("\n") + 1) + 1)
        sentence = f"the character U+{_code_point(error.character):04X} is not allowed in YAML."
        raise ConfigError(source, [Mistake(place, "", sentence)]) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise refuse(None, f"not valid YAML: {type(error).__name__}.") from None
    if node is None:
        raise refuse(None, "the document is empty.")
    return node


def _code_point(character: object) -> int:
    return ord(character) if isinstance(character, str) else int(str(character))


# ----------------------------------------------------------------------------------------- nodes to values


class _Absent:
    """Stands for a value that could not be decoded; its mistake is already noted."""


_ABSENT: Final = _Absent()


class _Enough(Exception):
    pass


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…")


def _path_text(path: Path) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).removeprefix(".")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not _is_quoted(node) and node.value in _NULLS


def _is_quoted(node: yaml.ScalarNode) -> bool:
    # Block scalars (| and >) count too: their author means a text.
    return node.style is not None


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping (key: value)"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if _is_null(node):
        return "nothing"
    quoted = " (quoted, so a text)" if isinstance(node, yaml.ScalarNode) and _is_quoted(node) else ""
    return f"{_shown(node.value)}{quoted}"


def _meta(type_: Any) -> tuple[Any, tuple[object, ...]]:
    if get_origin(type_) is Annotated:
        inner, *extras = get_args(type_)
        return inner, tuple(extras)
    return type_, ()


def _expected(type_: Any) -> str:
    """What a person should have written for this type."""
    inner, _ = _meta(type_)
    origin = get_origin(inner)
    if inner is str:
        return "a text"
    if inner is bool:
        return "true or false"
    if inner is int:
        return "a whole number"
    if inner is float:
        return "a number"
    if origin in (list, tuple):
        return "a list"
    if origin is dict or (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
        return "a mapping (key: value)"
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(inner))
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "one of " + ", ".join(str(member.value) for member in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(part) for part in get_args(inner) if part is not type(None))
    names = {"StreamName": "a stream name", "NamePattern": "a name pattern", "SpiffeId": "an identity"}
    name = getattr(inner, "__name__", str(inner))
    return names.get(name, f"a {name.lower()}")


class _Decoder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.mistakes: list[Mistake] = []
        self.places: dict[Path, Place] = {}
        self.nodes = 0

    def decode(self, node: yaml.Node, type_: Any, path: Path) -> Any:
        try:
            return self._value(node, type_, path)
        except _Enough:
            return _ABSENT

    def _note(self, node: yaml.Node, path: Path, sentence: str) -> _Absent:
        mark = node.start_mark
        place = Place(self.source, mark.line + 1, mark.column + 1)
        self.mistakes.append(Mistake(place, _path_text(path), sentence))
        if len(self.mistakes) >= MISTAKES_MAX:
            raise _Enough
        return _ABSENT

    def _value(self, node: yaml.Node, type_: Any, path: Path) -> Any:
        self.nodes += 1
        if self.nodes > NODES_MAX or len(path) > DEPTH_MAX:
            self._note(node, path, "the document grows beyond all bounds where its aliases are followed.")
            raise _Enough
        self.places[path] = Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)
        if node.tag not in _PLAIN_TAGS:
            return self._note(
                node, path, f"the YAML tag {_shown(node.tag)} is not allowed; write plain data."
            )
        inner, extras = _meta(type_)
        origin = get_origin(inner)
        if origin in (Union, types.UnionType):
            return self._union(node, inner, path)
        for extra in extras:
            if isinstance(extra, Parsed):
                return self._parsed(node, inner, extra.parse, path)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            return self._struct(node, inner, path)
        if origin in (list, tuple):
            return self._list(node, inner, origin, extras, path)
        if origin is dict:
            return self._dict(node, inner, extras, path)
        return self._scalar(node, type_, inner, path)

    def _union(self, node: yaml.Node, union: Any, path: Path) -> Any:
        options = [part for part in get_args(union) if part is not type(None)]
        if _is_null(node):
            if len(options) < len(get_args(union)):
                return None
            return self._note(node, path, f"expected {_expected(union)}, found nothing.")
        if isinstance(node, yaml.MappingNode):
            fitting = [part for part in options if _takes_mapping(part)]
            if len(fitting) > 1:
                return self._tagged(node, fitting, path)
        elif isinstance(node, yaml.SequenceNode):
            fitting = [part for part in options if get_origin(_meta(part)[0]) in (list, tuple)]
        else:
            fitting = [part for part in options if _takes_scalar(part)]
        if not fitting:
            return self._note(node, path, f"expected {_expected(union)}, found {_describe(node)}.")
        for part in fitting[:-1]:
            trial = _Decoder(self.source)
            value = trial._value(node, part, path)
            if not trial.mistakes:
                return value
        return self._value(node, fitting[-1], path)

    def _tagged(self, node: yaml.MappingNode, options: list[Any], path: Path) -> Any:
        by_tag = {str(part.__struct_config__.tag): part for part in options}
        field = options[0].__struct_config__.tag_field
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == field and isinstance(value, yaml.ScalarNode):
                if value.value in by_tag:
                    return self._struct(node, by_tag[value.value], path)
                listed = ", ".join(sorted(by_tag))
                close = nearest(value.value, by_tag)
                return self._note(
                    value, (*path, field), f"expected one of {listed}, found {_describe(value)}{close}."
                )
        return self._note(node, path, f"the key {field} is missing; it says which kind this is.")

    def _pairs(self, node: yaml.MappingNode, path: Path) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._note(key, path, "a key must be a single word or text.")
            elif key.value in found:
                first = found[key.value][0].start_mark.line + 1
                self._note(
                    key, (*path, key.value), f"this key stands here a second time; first on line {first}."
                )
            else:
                found[key.value] = (key, value)
        return found

    def _struct(self, node: yaml.Node, cls: type[msgspec.Struct], path: Path) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._note(node, path, f"expected a mapping (key: value), found {_describe(node)}.")
        before = len(self.mistakes)
        pairs = self._pairs(node, path)
        config = cls.__struct_config__
        if config.tag is not None and config.tag_field is not None:
            pairs.pop(config.tag_field, None)
        hints = _hints(cls)
        fields = {field.encode_name: field for field in msgspec.structs.fields(cls)}
        values: dict[str, Any] = {}
        for name, (key, value) in pairs.items():
            field = fields.get(name)
            if field is None:
                if name == "<<":
                    sentence = "merge keys are not supported; write the keys out."
                else:
                    close = nearest(name, fields) or f"; known keys: {', '.join(sorted(fields))}"
                    sentence = f"unknown key {_shown(name)}{close.removesuffix('.')}"
                    sentence += "" if sentence.endswith("?") else "."
                self._note(key, (*path, name[:SHOWN_CHARS_MAX]), sentence)
                continue
            values[field.name] = self._value(value, hints[field.name], (*path, name))
            # Where a part "stands" is where its key stands: that is the line a person looks for.
            mark = key.start_mark
            self.places[(*path, name)] = Place(self.source, mark.line + 1, mark.column + 1)
        for name, field in fields.items():
            if field.required and name not in pairs:
                wanted = _expected(hints[field.name])
                self._note(node, path, f"the key {name} is missing; expected {wanted}.")
        if len(self.mistakes) > before:
            return _ABSENT
        try:
            return cls(**values)
        except (FelixError, ValueError) as error:
            return self._note(node, path, _sentence(error))

    def _list(self, node: yaml.Node, type_: Any, origin: Any, extras: tuple[object, ...], path: Path) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            return self._note(node, path, f"expected a list, found {_describe(node)}.")
        element, *rest = get_args(type_)
        assert origin is list or rest == [Ellipsis], "a tuple of varying length: tuple[T, ...]"
        if not self._length(node, len(node.value), "entries", extras, path):
            return _ABSENT
        values = [self._value(part, element, (*path, index)) for index, part in enumerate(node.value)]
        return tuple(values) if origin is tuple else values

    def _dict(self, node: yaml.Node, type_: Any, extras: tuple[object, ...], path: Path) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._note(node, path, f"expected a mapping (key: value), found {_describe(node)}.")
        key_type, value_type = get_args(type_)
        pairs = self._pairs(node, path)
        if not self._length(node, len(pairs), "entries", extras, path):
            return _ABSENT
        values: dict[Any, Any] = {}
        for name, (key, value) in pairs.items():
            decoded_value = self._value(value, value_type, (*path, name))
            decoded = self._value(key, key_type, (*path, name))
            if not isinstance(decoded, _Absent):
                values[decoded] = decoded_value
        return values

    def _length(
        self, node: yaml.Node, length: int, what: str, extras: tuple[object, ...], path: Path
    ) -> bool:
        for extra in extras:
            if isinstance(extra, msgspec.Meta):
                least, most = extra.min_length or 0, extra.max_length
                if length < least:
                    self._note(node, path, f"expected at least {least} {what}, found {length}.")
                    return False
                if most is not None and length > most:
                    self._note(node, path, f"expected at most {most} {what}, found {length}.")
                    return False
        return True

    def _parsed(self, node: yaml.Node, inner: Any, parse: Callable[[str], object], path: Path) -> Any:
        if not isinstance(node, yaml.ScalarNode) or _is_null(node):
            return self._note(node, path, f"expected {_expected(inner)}, found {_describe(node)}.")
        try:
            return parse(node.value)
        except (FelixError, ValueError) as error:
            return self._note(node, path, _sentence(error))

    def _scalar(self, node: yaml.Node, type_: Any, inner: Any, path: Path) -> Any:
        parse = _parser(inner)
        if parse is not None:
            return self._parsed(node, inner, parse, path)
        value = _plain(node, inner)
        if isinstance(value, _Absent):
            close = ""
            if isinstance(node, yaml.ScalarNode) and not _is_null(node):
                close = nearest(node.value, _choices(inner))
                if inner is bool and node.value.lower() in ("yes", "no", "on", "off", "true", "false"):
                    close = "; YAML's yes, no, on and off are not taken"
            sentence = f"expected {_expected(inner)}, found {_describe(node)}{close}"
            return self._note(node, path, sentence if sentence.endswith("?") else f"{sentence}.")
        try:
            return msgspec.convert(value, type_)
        except msgspec.ValidationError as error:
            return self._note(node, path, f"{str(error).removesuffix('.')}, found {_describe(node)}.")


def _sentence(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if text.endswith((".", "?")) else f"{text}."


@cache
def _hints(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Of the program's own documents, which are few; callers must not change the result."""
    return typing.get_type_hints(cls, include_extras=True)


def _choices(inner: Any) -> list[str]:
    if get_origin(inner) is Literal:
        return [str(choice) for choice in get_args(inner)]
    if isinstance(inner, type) and issubclass(inner, Enum):
        return [str(member.value) for member in inner]
    return []


def _parser(inner: Any) -> Callable[[str], object] | None:
    if inner is NamePattern:
        return NamePattern
    if isinstance(inner, type) and not issubclass(inner, Enum):
        found = getattr(inner, "parse", None)
        return found if callable(found) else None
    return None


def _takes_mapping(type_: Any) -> bool:
    inner, _ = _meta(type_)
    return get_origin(inner) is dict or (isinstance(inner, type) and issubclass(inner, msgspec.Struct))


def _takes_scalar(type_: Any) -> bool:
    return not _takes_mapping(type_) and get_origin(_meta(type_)[0]) not in (list, tuple)


def _plain(node: yaml.Node, inner: Any) -> Any:
    """The scalar as a Python value of the type's own kind; `_ABSENT` where it is of another kind."""
    if not isinstance(node, yaml.ScalarNode):
        return _ABSENT
    text, quoted = node.value, _is_quoted(node)
    if inner is str:
        return text if quoted or text not in _NULLS else _ABSENT
    if inner is bool:
        return {"true": True, "false": False}.get(text, _ABSENT) if not quoted else _ABSENT
    if inner is int:
        return int(text) if not quoted and _INT.fullmatch(text) else _ABSENT
    if inner is float:
        return float(text) if not quoted and _FLOAT.fullmatch(text) else _ABSENT
    if get_origin(inner) is Literal:
        return next((choice for choice in get_args(inner) if str(choice) == text), _ABSENT)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return next((member.value for member in inner if str(member.value) == text), _ABSENT)
    raise AssertionError(f"a document's field cannot be of type {inner!r}")
