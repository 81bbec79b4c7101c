"""All terms of a grant, shown to people before they sign, and the question whether they sign."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import typer
from rich.text import Text

from cli.output import err, iso, lines, table
from felix.errors import RequestError
from policy.approval import Tally
from policy.grant import ExportGrant
from policy.quantity import Size
from policy.terms import GrantTerms
from policy.transform import FieldRule, TransformSpec

Row = tuple[str, str | Text]


def terms_rows(terms: GrantTerms) -> list[Row]:
    """Every term, those that allow nothing included: who signs sees what is not limited, too."""
    article = f" (GDPR {terms.basis.article})" if terms.basis.article else ""
    return [
        ("stream", terms.stream),
        ("arrives as", terms.destination_stream),
        ("wildcard", "YES: every stream that fits the pattern, now and later" if terms.wildcard else "no"),
        ("from, to", f"{terms.from_region} → {terms.to_region}"),
        ("bridge", terms.bridge),
        ("purpose", terms.purpose),
        ("basis", f"{terms.basis.value}{article}"),
        ("mechanism", terms.mechanism or "none named"),
        ("reference", terms.reference or "none named"),
        ("assessment", terms.transfer_assessment or "none named"),
        ("categories", ", ".join(terms.categories) or "none named"),
        ("exporter, importer", f"{terms.exporter} → {terms.importer}"),
        ("owner", terms.owner),
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
        ("fields", lines([*(_field(rule) for rule in spec.fields), others])),
        ("filter", spec.filter or "none: every record crosses"),
        ("record key", spec.key.value),
        ("headers", ", ".join(spec.headers) or "none"),
        ("trace context", "crosses" if spec.trace else "does not cross"),
    ]


def _field(rule: FieldRule) -> str:
    details = []
    if rule.do == "mask":
        details.append(f"last {rule.last} characters stay" if rule.last else "nothing stays readable")
    if rule.do in ("hash", "pseudonymize"):
        details.append(f"{rule.digest_bytes} bytes, {rule.encoding.value}")
    if rule.missing is not None:
        details.append(f"missing: {rule.missing.value}")
    return f"{rule.do.value} {rule.field}" + (f" ({', '.join(details)})" if details else "")


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
    """Ask a person; `--yes` answers. Raises RequestError if there is no terminal to ask at, Exit if the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestError(
            "This is signed only after a person said yes, and there is no terminal to ask at.",
            hint="Read the terms above, then call it with --yes.",
        )
    err.print(f"{question} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        err.print("Nothing was signed.")
        raise typer.Exit(1)
