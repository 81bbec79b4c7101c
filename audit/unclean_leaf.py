"""Leaves of unclean elections: that a shard of the region is led from a copy that may lack what was acknowledged. Pure.

Of a shard that nobody can lead by rule, an operator may have a copy lead all the same (`felix region recover-shard`, `felix region reconcile`); of one whose
acknowledgements are not synced, the longest copy leads after a power cut. Whatever was given up with that was promised to somebody, so it stands in the region's audit log:
the kind UNCLEAN, with the statement as its document, as it stood in the metadata store. Nobody signed that but the log. The leaf repeats what finds it,
and whoever verifies holds it to the statement.

Callers: region (which writes them), audit.verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Final, Literal, Self

import msgspec

from audit.leaf import INCARNATION_BYTES, SENTENCE_CHARS_MAX, Header, Kind, Leaf, Side
from felix.errors import CorruptionError, RequestError, of_later_release, why_undecoded
from felix.names import SpiffeId, StreamName, parse_region

UncleanCause = Literal["recovered", "reconciled", "power-cut"]
"""recovered, reconciled: by an operator's command; power-cut: by rule."""

BROKERS_MAX: Final = 128
"""Named as given up in one statement: as many as a region has."""
WHY_CHARS_MAX: Final = 1_000
WHY_SHOWN_CHARS: Final = 300
"""Of it in a sentence that would be too long for a leaf: there is room for fifteen of the longest names besides."""
_INCARNATION_CHARS: Final = 2 * INCARNATION_BYTES

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

_DONE: Final[Mapping[UncleanCause, str]] = {
    "recovered": "recover-shard",
    "reconciled": "reconcile",
    "power-cut": "elect-longest",
}
"""What the leaf calls what was done (`action`)."""


class UncleanElection(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The statement. `leader` leads from `epoch` on; `end`: the offset of its copy's next record, as it said just before (None: it was not
    asked, or did not say). `given_up`: the brokers whose copies may have had more, or were named as lost; `powered_off`: of which the operator said that they surely run no more.
    `by`: the operator (SPIFFE id); empty where it was a rule, or a command that needs no broker. `election`: random id of the epoch (hex). `why`: more in words."""

    stream: Annotated[str, msgspec.Meta(max_length=512)]
    incarnation: Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{_INCARNATION_CHARS}}}$")]
    shard: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
    epoch: Annotated[int, msgspec.Meta(ge=1, le=(1 << 32) - 1)]
    election: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
    cause: UncleanCause
    leader: _Name
    end: _Natural | None = None
    given_up: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=BROKERS_MAX)] = ()
    powered_off: bool = False
    by: Annotated[str, msgspec.Meta(max_length=512)] = ""
    why: Annotated[str, msgspec.Meta(max_length=WHY_CHARS_MAX)] = ""

    def encode(self) -> bytes:
        """JSON. Raises CorruptionError where no reader would accept it: nothing such is written."""
        data = msgspec.json.encode(self)
        self.decode(data, "what was about to be written")
        return data

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """As it stands in `where`. Raises CorruptionError."""
        try:
            found = msgspec.json.decode(data, type=cls)
            StreamName.parse(found.stream)
            for broker in (found.leader, *found.given_up):
                parse_region(broker)
            if found.by:
                SpiffeId.parse(found.by)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptionError(
                f"{where} is no statement of an unclean election: {why_undecoded(error)}.",
                hint=of_later_release(error),
            ) from error
        except RequestError as error:
            raise CorruptionError(
                f"{where} is no statement of an unclean election: {error.sentence}"
            ) from error
        return found

    @property
    def sentence(self) -> str:
        """For a person: as much as a leaf holds of it. Whole names, how many others there are, and what is said of all of them; the statement has the rest."""
        whole = self._sentence(len(self.given_up), self.why)
        if len(whole) <= SENTENCE_CHARS_MAX:
            return whole
        why = self.why if len(self.why) <= WHY_SHOWN_CHARS else f"{self.why[:WHY_SHOWN_CHARS]}…"
        named = len(self.given_up)
        while named > 1 and len(self._sentence(named, why)) > SENTENCE_CHARS_MAX:
            named -= 1
        return self._sentence(named, why)

    def _sentence(self, named: int, why: str) -> str:
        """With so many of those that were given up by name."""
        has = "" if self.end is None else f", whose copy ends before record {self.end},"
        others = len(self.given_up) - named
        up = ", ".join(self.given_up[:named]) or "nobody's copy"
        if others:
            up = f"{up} and {others} more"
        off = " (said to be powered off)" if self.powered_off and self.given_up else ""
        why = f" {why[:1].upper()}{why[1:]}." if why else ""
        return (
            f"Broker {self.leader}{has} leads shard {self.shard} of {self.stream} from epoch {self.epoch} on, and may lack what was acknowledged before. "
            f"Given up: {up}{off}.{why}"
        )


def unclean_leaf(said: UncleanElection, *, region: str, time_ms: int, writer: str) -> Leaf:
    """The leaf of a statement, in the log of its region. `writer`: the broker that writes it (SPIFFE id), who stands for where nobody is named."""
    document = said.encode()
    return Leaf(
        Header(
            kind=Kind.UNCLEAN,
            side=Side.INGRESS,
            time_ms=time_ms,
            source_region=region,
            destination_region=region,
            stream=said.stream,
            shard=said.shard,
            source_epoch=said.epoch,
            incarnation=bytes.fromhex(said.incarnation),
            actor=said.by or writer,
            action=_DONE[said.cause],
            sentence=said.sentence,
            document=document,
            document_sha256=sha256(document).digest(),
        )
    )


def mistake(header: Header) -> str:
    """Why a leaf of the kind UNCLEAN is not what its statement says; or an empty string. Of its sentence nothing is asked: whoever shows the leaf takes the statement's (`told`)."""
    try:
        said = UncleanElection.decode(header.document, "Its document")
    except CorruptionError as error:
        return f"UNCLEAN: {error.sentence}"
    if said.encode() != header.document:
        # Of a name that stands twice in a JSON object one reader takes the last, and another the first.
        return "UNCLEAN: Its document is not written as a statement is."
    leaf = unclean_leaf(
        said, region=header.destination_region, time_ms=header.time_ms, writer=header.actor
    ).header
    names = ("stream", "shard", "source_epoch", "incarnation", "actor", "action")
    differing = [name for name in names if getattr(header, name) != getattr(leaf, name)]
    return f"UNCLEAN: leaf and statement differ in {', '.join(differing)}." if differing else ""


def told(header: Header) -> dict[str, str]:
    """What is shown of a leaf in place of its own fields: of one of the kind UNCLEAN what its statement says in words. Its own sentence is another text by the same hand, and holds
    less. Nothing of other leaves, nor where the statement cannot be read, which the verification finds."""
    if header.kind is not Kind.UNCLEAN:
        return {}
    try:
        return {"sentence": UncleanElection.decode(header.document, "Its document").sentence}
    except CorruptionError:
        return {}
