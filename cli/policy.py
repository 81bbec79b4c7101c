"""`felix policy`: check a residency policy, put it in force, show the one that is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cli.output import out, print_json, styled, table, write_data
from cli.setting import JsonOption, RegionOption, choose_region, connect, folder_of, read_file, run
from felix.errors import Code, RequestError
from felix.messages import DocumentPage, Done, ListDocuments, PutDocument
from keys.signing import load_signing_key
from policy.residency import ResidencyPolicy, parse_policy, sign_policy
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


async def _put(region: str, document: SignedDocument) -> str:
    async with connect(region) as client:
        answer = await client.request(PutDocument("policy", document.encode_file()))
        assert isinstance(answer, Done)
        return answer.note


async def fetch_policy(region: str) -> ResidencyPolicy:
    """The policy in force. Raises RequestError(RESIDENCY_DENIED) where there is none."""
    async with connect(region) as client:
        answer = await client.request(ListDocuments("policy"))
    assert isinstance(answer, DocumentPage)
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
        [[name, "\n".join(map(str, held.streams))] for name, held in file.classes.items()],
    )
    rows = [
        [direction, rule.name, ", ".join(rule.classes), ", ".join(map(str, rule.bases))]
        for direction, rules in (("export", file.exports), ("import", file.imports))
        for rule in rules
    ]
    rows += [
        ["deny", rule.name, "\n".join(map(str, rule.streams)) or ", ".join(rule.classes), rule.because]
        for rule in file.deny
    ]
    table("Rules", ["direction", "rule", "of", "bases, reason"], rows)
