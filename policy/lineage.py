"""Field lineage, told by a transform's rules alone: which field of the destination comes from which of the source.

For reports and OpenLineage's columnLineage facet (1-2-0): `subtype` and `masking` are that facet's words for a
transformation of type DIRECT. Values, no records: the same rules give the same lineage always.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from policy.fieldpath import FieldPath
from policy.predicate import parse_predicate, paths
from policy.transform import Action, Format, TransformSpec, effective_rule

_WORDS: Final = {
    Action.KEEP: "kept",
    Action.DROP: "dropped",
    Action.MASK: "masked",
    Action.HASH: "hashed",
    Action.PSEUDONYMIZE: "pseudonymized",
}


class FieldLineage(NamedTuple):
    """One field. A dropped one has no field at the destination: `crosses` is false."""

    field: str
    action: Action
    crosses: bool
    masking: bool
    """True where the value at the destination is not the value at the source."""
    subtype: str
    """IDENTITY or TRANSFORMATION."""
    last: int = 0
    """mask: how many characters at the end stay readable"""

    @property
    def word(self) -> str:
        """kept, dropped, masked, hashed or pseudonymized."""
        return _WORDS[self.action]

    @property
    def told(self) -> str:
        """The action, and what a mask leaves readable: `mask:4`, as the command line takes it."""
        return f"{self.action.value}:{self.last}" if self.last else self.action.value


class Lineage(NamedTuple):
    """All fields that are named, what becomes of the others, and the fields that decide whether a record crosses."""

    fields: tuple[FieldLineage, ...]
    others_kept: bool
    filter_fields: tuple[str, ...]


def field_lineage(spec: TransformSpec, fields: Iterable[str] = ()) -> Lineage:
    """The lineage of the fields that rules name and of `fields` besides (a schema's or a sample's field paths).

    Raises RequestError(INVALID) where one of `fields` is no field path.
    """
    named = dict.fromkeys([rule.path for rule in spec.fields] + [FieldPath.parse(field) for field in fields])
    found: list[FieldLineage] = []
    for path in named:
        rule = effective_rule(spec, path)
        action = rule.do
        kept = action is Action.KEEP
        found.append(
            FieldLineage(
                str(path),
                action,
                action is not Action.DROP,
                not kept,
                "IDENTITY" if kept else "TRANSFORMATION",
                rule.last,
            )
        )
    filtering = paths(parse_predicate(spec.filter)) if spec.filter else ()
    others_kept = spec.format is Format.OPAQUE or not spec.is_allowlist
    return Lineage(tuple(found), others_kept, tuple(map(str, filtering)))
