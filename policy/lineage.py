"""Field lineage, derived from a transform's rules alone: which field of the destination comes from which of the source.

For reports, and for OpenLineage's columnLineage facet (1-2-0). Values, no records: the same rules give the same lineage always.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from policy.fieldpath import FieldPath
from policy.transform import Action, Format, TransformSpec, effective_rule


class Effect(NamedTuple):
    """What a rule makes of a value: in a word for people, and as `subtype` and `masking` of a DIRECT transformation."""

    word: str
    subtype: str
    masking: bool
    """True where the value at the destination is not the value at the source."""


EFFECTS: Final[Mapping[str, Effect]] = {
    Action.KEEP: Effect("kept", "IDENTITY", False),
    Action.DROP: Effect("dropped", "TRANSFORMATION", False),
    Action.MASK: Effect("masked", "MASKING", True),
    Action.HASH: Effect("hashed", "HASHING", True),
    Action.PSEUDONYMIZE: Effect("pseudonymized", "MASKING", True),
}
"""By the rule's name, as it stands in terms and leaves; reports take their words from here."""


class FieldLineage(NamedTuple):
    """One field, and the rule that decides about it. A dropped one has no field at the destination."""

    field: str
    action: Action
    last: int = 0
    """mask: how many characters at the end stay readable"""

    @property
    def told(self) -> str:
        """The action, and what a mask leaves readable: `mask:4`, as the command line takes it."""
        return f"{self.action.value}:{self.last}" if self.last else self.action.value


class Lineage(NamedTuple):
    """All fields that are named, and what becomes of the others."""

    fields: tuple[FieldLineage, ...]
    others_kept: bool


def field_lineage(spec: TransformSpec, fields: Iterable[str] = ()) -> Lineage:
    """The lineage of the fields that rules name and of `fields` besides (a schema's or a sample's field paths).

    Raises RequestError(INVALID) where one of `fields` is no field path.
    """
    named = dict.fromkeys([rule.path for rule in spec.fields] + [FieldPath.parse(field) for field in fields])
    found: list[FieldLineage] = []
    for path in named:
        rule = effective_rule(spec, path)
        found.append(FieldLineage(str(path), rule.do, rule.last))
    others_kept = spec.format is Format.OPAQUE or not spec.is_allowlist
    return Lineage(tuple(found), others_kept)
