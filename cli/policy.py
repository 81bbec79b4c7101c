"""`felix policy`: check a residency policy, put it in force, show the one that is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from cli.grants import known_bundles
from cli.output import lines, note, out, print_json, styled, table, write_data
from cli.setting import JsonOption, RegionOption, choose_region, connect, folder_of, read_file, run
from felix.errors import Code, RequestError
from felix.messages import ListDocuments, PutDocument
from keys.bundle import RegionBundle
from keys.key_file import load_signing_key
from policy.residency import (
    ExportRule,
    ImportRule,
    ResidencyPolicy,
    Where,
    parse_policy,
    require_size_to_sign,
    require_visible,
    sign_policy,
)
from policy.signed import SignedDocument

app = typer.Typer(no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="A residency policy, YAML.")]


def load_policy(path: Path) -> ResidencyPolicy:
    """Read and check a policy file. Raises ConfigError with every mistake."""
    try:
        text = read_file(path, "The policy").decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}.", code=Code.CONFIG_INVALID) from error
    return parse_policy(text, str(path))


@app.command()
def check(file: File, json: JsonOption = False) -> None:
    """Check a policy; every mistake with file, line and what was expected."""
    policy = load_policy(file)
    require_size_to_sign(policy)
    require_visible(policy)
    _show(policy, json)
    if not json:
        out.print(f"{file} holds.")


@app.command()
def apply(file: File, region: RegionOption = "") -> None:
    """Sign a policy and put it in force; grants that it outlaws stop at once."""
    policy = load_policy(file)
    folder, config = folder_of(region or policy.region)
    if policy.region != config.region:
        raise RequestError(
            f"{file} is the policy of {policy.region}, not of {config.region}.", code=Code.WRONG_REGION
        )
    document = sign_policy(policy, load_signing_key(folder.policy_key).private_key)
    out.print(run(_put(config.region, document)))
    for sentence in placed_otherwise(policy, known_bundles(folder)):
        note(sentence)


def placed_otherwise(policy: ResidencyPolicy, bundles: Mapping[str, RegionBundle]) -> list[str]:
    """A sentence for each region that the policy places in another country than the region's bundle here names: registers have the policy's word."""
    return [
        f"The policy says that {name} is in {entry.country}, and {name}'s bundle, as it is trusted here, that it is in {bundles[name].country}. "
        "Registers name the country of the policy: find out which is right."
        for name, entry in policy.file.regions.items()
        if name in bundles and bundles[name].country != entry.country
    ]


async def _put(region: str, document: SignedDocument) -> str:
    async with connect(region) as client:
        answer = await client.request(PutDocument("policy", document.encode_file()))
        return answer.note


async def fetch_policy(region: str) -> ResidencyPolicy:
    """The policy in force. Raises RequestError(RESIDENCY_DENIED) where there is none."""
    async with connect(region) as client:
        answer = await client.request(ListDocuments("policy"))
    if not answer.documents:
        raise RequestError(
            f"{choose_region(region)} has no residency policy in force, and an empty policy allows nothing.",
            code=Code.RESIDENCY_DENIED,
            hint="Put one in force: felix policy apply FILE.",
        )
    ((_, body),) = answer.documents.items()
    return parse_policy(SignedDocument.parse(body).body.decode(), "the policy in force")


@app.command()
def show(
    text: Annotated[bool, typer.Option("--text", help="The document as it was signed.")] = False,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Show the policy in force."""
    policy = run(fetch_policy(region))
    if text:
        write_data(policy.text.encode())
        sys.stdout.flush()
    else:
        _show(policy, json)


def _show(policy: ResidencyPolicy, json: bool) -> None:
    file = policy.file
    if json:
        print_json(
            {
                "region": policy.region,
                "revision": policy.revision,
                "sha256": policy.hash.hex(),
                "policy": file,
            }
        )
        return
    out.print(
        styled(
            (file.name, "bold"),
            f" of {policy.region}, revision {policy.revision}, SHA-256 {policy.hash.hex()}",
        )
    )
    table(
        "Regions",
        ["region", "country", "jurisdiction"],
        [[n, r.country, r.jurisdiction] for n, r in file.regions.items()],
    )
    table(
        "Classes of data",
        ["class", "streams"],
        [[name, lines(map(str, held.streams))] for name, held in file.classes.items()],
    )
    for direction, rules in (("export", file.exports), ("import", file.imports)):
        for rule in rules:
            other = rule.to if isinstance(rule, ExportRule) else rule.from_
            table(
                f"Rule {rule.name}: {direction}",
                ["", ""],
                _rule_rows(rule, "to" if direction == "export" else "from", other),
            )
    for denied in file.deny:
        rows: list[list[object]] = [
            ["of", lines(map(str, denied.streams)) if denied.streams else ", ".join(denied.classes)],
            ["to", _where(denied.to) if denied.to else "everywhere" if not denied.from_ else ""],
            ["from", _where(denied.from_) if denied.from_ else "everywhere" if not denied.to else ""],
            ["because", denied.because],
        ]
        table(f"Rule {denied.name}: deny", ["", ""], [row for row in rows if row[1]])


def _rule_rows(rule: ExportRule | ImportRule, side: str, where: Where) -> list[list[object]]:
    """All that a rule says, what it does not limit included."""
    separate = ", none of them by who drew the terms up" if rule.separate else ""
    allowed = [name for name in ("trace", "opaque", "wildcards", "onward") if getattr(rule, name)]
    return [
        ["of", ", ".join(rule.classes)],
        ["only streams", lines(map(str, rule.streams)) if rule.streams else "all of these classes"],
        [side, _where(where)],
        ["bases", ", ".join(map(str, rule.bases))],
        ["purposes", ", ".join(rule.purposes) or "any"],
        [
            "transforms",
            lines(f"{each.do.value} {', '.join(each.fields)}" for each in rule.transforms)
            if rule.transforms
            else "none asked for",
        ],
        ["record keys", ", ".join(each.value for each in rule.keys)],
        ["headers", ", ".join(rule.headers) or "none"],
        ["also allowed", ", ".join(allowed) or "nothing"],
        ["assessment", "must be named" if rule.assessment else "need not be named"],
        ["lifetime", f"at most {rule.lifetime}"],
        [
            "approvals",
            f"{rule.approvals}{' of ' if rule.approvers else ''}{', '.join(rule.approvers)}{separate}",
        ],
    ]


def _where(where: Where) -> str:
    named = [*where.regions, *(f"any region of {each}" for each in where.jurisdictions)]
    return ", ".join(named) or "nowhere"
