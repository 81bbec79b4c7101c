"""All terms of a grant, shown to people before they sign, and the question whether they sign.

Their texts were chosen by whoever drew the grant up, who may gain from a row that is read as another one: they are spelled out, so that none of them looks like rows of its own
(`felix.visible.spelled_out`), nor like what stands where nothing is named. Below a text with letters that may look like others stands the same in escapes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer
from rich.text import Text

from cli.form import chosen
from cli.output import err, iso, lines, table
from felix.errors import RequestError
from felix.visible import in_ascii, is_plain, spelled_out
from policy.approval import Tally
from policy.grant import ExportGrant
from policy.quantity import Size
from policy.terms import GrantTerms
from policy.transform import FieldRule, TransformSpec

Row = tuple[str, str | Text]

_NONE_NAMED = "none named"
_NO_HEADERS = "none"
_NO_FILTER = "none: every record crosses"


def _lines(text: str, nothing: str = "") -> list[str]:
    """A text that somebody signs, or the words for none; in quotes where it is those words. In a second line as ASCII, where its letters may look like others."""
    if not text:
        return [nothing]
    shown = spelled_out(text)
    if nothing and shown.strip('"') == nothing:
        # With quotes of its own it would be the text without them.
        return [f'"{shown}"']
    return [shown] if is_plain(shown) else [shown, f"that is, {in_ascii(text)}"]


def signed_text(text: str, nothing: str = "") -> str | Text:
    """A cell: a text that somebody else chose, as whoever signs it reads it; `nothing` where it is empty."""
    found = _lines(text, nothing)
    return lines(found) if len(found) > 1 else found[0]


def signed_texts(texts: Iterable[str], nothing: str) -> str | Text:
    """Several texts, a line for each: whatever stood between them could be in one of them."""
    found = [line for text in texts for line in _lines(text, nothing)]
    return lines(found) if found else nothing


def terms_rows(terms: GrantTerms) -> list[Row]:
    """Every term, those that allow nothing included: who signs sees what is not limited, too."""
    article = f" (GDPR {terms.basis.article})" if terms.basis.article else ""
    return [
        ("stream", terms.stream),
        ("arrives as", terms.destination_stream),
        ("wildcard", "YES: every stream that fits the pattern, now and later" if terms.wildcard else "no"),
        ("from, to", f"{terms.from_region} → {terms.to_region}"),
        ("bridge", terms.bridge),
        ("purpose", signed_text(terms.purpose)),
        ("basis", f"{terms.basis.value}{article}"),
        ("mechanism", signed_text(terms.mechanism, _NONE_NAMED)),
        ("reference", signed_text(terms.reference, _NONE_NAMED)),
        ("assessment", signed_text(terms.transfer_assessment, _NONE_NAMED)),
        ("categories", signed_texts(terms.categories, _NONE_NAMED)),
        ("exporter", signed_text(terms.exporter)),
        ("importer", signed_text(terms.importer)),
        ("owner", signed_text(terms.owner)),
        ("drawn up by", terms.drawn_up_by),
        ("valid", f"{iso(terms.not_before)} to {iso(terms.expires)}"),
        *_transform_rows(terms.transform),
        ("rate", f"{Size(terms.rate_bytes)}/s" if terms.rate_bytes else "no limit"),
        ("budget", str(Size(terms.budget_bytes)) if terms.budget_bytes else "no limit"),
        ("onward", "YES: records of third regions cross, too" if terms.onward else "no"),
        ("terms of version", str(terms.version)),
        ("terms hash", terms.hash().hex()),
    ]


def _transform_rows(spec: TransformSpec) -> list[Row]:
    others = "every other field is dropped" if spec.is_allowlist else "every other field crosses as it is"
    if spec.format == "opaque":
        others = "payloads cross unread"
    return [
        ("format", spec.format.value),
        ("fields", lines([*(line for rule in spec.fields for line in _field(rule)), others])),
        ("filter", signed_text(spec.filter, _NO_FILTER)),
        ("record key", spec.key.value),
        ("headers", signed_texts(spec.headers, _NO_HEADERS)),
        ("trace context", "crosses" if spec.trace else "does not cross"),
    ]


def _field(rule: FieldRule) -> list[str]:
    details = []
    if rule.do == "mask":
        details.append(f"last {rule.last} characters stay" if rule.last else "nothing stays readable")
    if rule.do in ("hash", "pseudonymize"):
        details.append(f"{rule.digest_bytes} bytes, {rule.encoding.value}")
    if rule.missing is not None:
        details.append(f"missing: {rule.missing.value}")
    shown, *as_ascii = _lines(rule.field)
    return [f"{rule.do.value} {shown}" + (f" ({', '.join(details)})" if details else ""), *as_ascii]


def show_terms(export: ExportGrant) -> None:
    """Print the terms and what the source's half asks, on standard output."""
    separate = ", none of them by who drew it up" if export.separate else ""
    rows = [
        *terms_rows(export.terms),
        ("approvals there", f"{export.approvals} of {export.terms.from_region}{separate}"),
        ("policy there", f"revision {export.policy_revision}, {export.policy_hash}"),
    ]
    table(f"Grant {export.grant}", ["", ""], rows)


def tally_rows(tallies: Iterable[Tally]) -> list[Row]:
    """One row for each side's approvals."""
    return [(f"approvals of {found.region}", str(found).partition(": ")[2]) for found in tallies]


def short_tallies(tallies: Iterable[Tally]) -> str:
    """`us-east 1/2, eu-west 0/1`."""
    return ", ".join(f"{found.region} {len(found.approved)}/{found.needed}" for found in tallies)


def confirm(question: str, yes: bool) -> None:
    """Ask a person; `--yes` answers. Raises RequestError if there is no terminal to ask at, or the form of the output shows no person what is signed, Exit if the answer is no."""
    if yes:
        return
    if chosen.is_data:
        raise RequestError(
            f"This is signed only after a person read it and said yes, and with -o {chosen.form} nothing is shown before.",
            hint="Call it without -o or --json to read it, or with --yes.",
        )
    if not sys.stdin.isatty():
        raise RequestError(
            "This is signed only after a person said yes, and there is no terminal to ask at.",
            hint="Read the terms above, then call it with --yes.",
        )
    err.print(f"{question} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        err.print("Nothing was signed.")
        raise typer.Exit(1)
