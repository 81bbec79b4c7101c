"""`felix bridge`: grant, accept and stop crossings; run the agent; see what the links do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer

from cli.agent import (
    AgentFiles,
    agent_files,
    agents_of,
    choose_agent,
    init,
    moved,
    start_agent,
    write_agent_config,
)
from cli.approval import approve, submit
from cli.exits import EXIT_REFUSED
from cli.grant_notes import (
    backlog_note,
    silent_notes,
    waiting_notes,
    what_it_waits_for,
    where_truncations_are,
)
from cli.grants import (
    add_right,
    default_bridge,
    fetch_book,
    fetch_said,
    known_bundles,
    operator_id,
    own_bundle,
    put_document,
    read_grant,
    stand,
)
from cli.moments import parse_moment
from cli.notify import Notifier
from cli.output import iso, note, out, print_json, styled, table
from cli.peer import entity_of
from cli.policy import fetch_policy
from cli.process import PidFile, stop
from cli.resend import resend
from cli.setting import (
    IdentityOption,
    JsonOption,
    RegionOption,
    choose_region,
    connect,
    folder_of,
    known_regions,
    preferred_region,
    run,
    stop_signals,
)
from cli.sign_again import sign_again
from cli.terms import confirm, short_tallies, show_terms, tally_rows, terms_rows
from felix.collector import start_kept
from felix.errors import Code, FelixError, RequestError
from felix.expiry import until_text
from felix.files import write_output
from felix.messages import ApprovalTally, CrossingExplained, ExpiryState, Start, Subscribe
from felix.names import NamePattern, SpiffeId
from felix.runtime.real import now_ms
from felix.visible import spelled_out
from keys.key_file import load_signing_key
from policy.access import Verb
from policy.approval import Tally
from policy.grant import (
    DenyEntry,
    GrantState,
    GrantView,
    RefusalKind,
    StandingAction,
    open_export,
    open_import,
    sign_deny,
    sign_export,
    sign_import,
)
from policy.quantity import Rate, Size
from policy.signed import SignedDocument
from policy.terms import Basis, GrantTerms
from policy.transform import KeyRule, Missing, build_spec
from policy.truncation import Truncation
from region.folder import RegionFolder

if TYPE_CHECKING:  # the agent and what samples a stream are loaded by the commands that run them
    from bridge.agent import Agent
    from bridge.config import BridgeConfig
    from bridge.sample import Sample, SampledRecord
    from region.config import RegionConfig

app = typer.Typer(no_args_is_help=True)
app.command("approve")(approve)
app.command("init")(init)
app.command("resend")(resend)
app.command("sign-again")(sign_again)
app.command("submit")(submit)

What = Annotated[Literal["stream"], typer.Argument(help="The word `stream`.")]
Name = Annotated[str, typer.Argument(help="tenant/namespace/name.")]
To = Annotated[str, typer.Option("--to", help="The destination region.")]
GrantId = Annotated[str, typer.Argument(help="A grant's id, as `felix bridge list` shows it.")]
Reason = Annotated[str, typer.Option(help="For the register and the audit log.")]

EXAMPLES = 3
"""Records named for each reason of a plan."""
TOKEN_CHARACTERS_MIN = 200
"""An id has 18; a token holds a signed document."""
LOOKED_AT = 50
"""Newest records that `allow` looks at, for fields that none of them has."""
CREDIT_BYTES = 2 << 20
"""For a subscription that is only tried: enough for any batch."""


# -- allow, accept -------------------------------------------------------------------------------------


@app.command()
def allow(
    what: What,
    name: Annotated[str, typer.Argument(help="The stream, or with --wildcard a pattern.")],
    to: To,
    purpose: Annotated[str, typer.Option(help="What the data is needed for there.")],
    basis: Annotated[Basis, typer.Option(help="The legal basis of the transfer.")],
    expires: Annotated[str, typer.Option(help="90d from now, or a date.")],
    reference: Annotated[str, typer.Option(help="The document that the basis stands in.")] = "",
    mechanism: Annotated[str, typer.Option(help="Which one exactly, as in 'module 1'.")] = "",
    assessment: Annotated[str, typer.Option(help="The transfer assessment's reference.")] = "",
    category: Annotated[list[str] | None, typer.Option(help="A category of data; may be repeated.")] = None,
    owner: Annotated[
        str,
        typer.Option(help="Who answers for the stream; the region's contact if left out, else the exporter."),
    ] = "",
    exporter: Annotated[str, typer.Option(help="The entity that sends.")] = "",
    importer: Annotated[str, typer.Option(help="The entity that receives.")] = "",
    destination: Annotated[
        str, typer.Option("--as-stream", help="Its name there; the same if left out.")
    ] = "",
    bridge: Annotated[str, typer.Option(help="The bridge identity that may carry it.")] = "",
    not_before: Annotated[str, typer.Option(help="From when it holds; now if left out.")] = "",
    keep: Annotated[list[str] | None, typer.Option(help="Only these fields cross; may be repeated.")] = None,
    drop: Annotated[list[str] | None, typer.Option(help="This field does not cross.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help="This field is masked; card:4 leaves four.")] = None,
    hash_: Annotated[
        list[str] | None, typer.Option("--hash", help="This field is hashed with a key.")
    ] = None,
    pseudonymize: Annotated[
        list[str] | None, typer.Option(help="This field becomes a stable pseudonym.")
    ] = None,
    missing: Annotated[
        Missing | None, typer.Option(help="What becomes of a record without such a field.")
    ] = None,
    filter_: Annotated[str, typer.Option("--filter", help="Only records for which this holds cross.")] = "",
    opaque: Annotated[
        bool, typer.Option(help="Payloads of any format cross unread; the policies must say opaque: true.")
    ] = False,
    key: Annotated[KeyRule, typer.Option(help="What becomes of the record's key.")] = KeyRule.PSEUDONYMIZE,
    header: Annotated[list[str] | None, typer.Option(help="This header crosses.")] = None,
    trace: Annotated[bool, typer.Option(help="Trace context crosses.")] = False,
    rate: Annotated[str, typer.Option(help="At most so much, as in 5MB/s.")] = "",
    budget: Annotated[str, typer.Option(help="At most so much in all, as in 10GB.")] = "",
    onward: Annotated[bool, typer.Option(help="Records from third regions may cross, too.")] = False,
    wildcard: Annotated[bool, typer.Option(help="The name is a pattern for several streams.")] = False,
    output: Annotated[Path | None, typer.Option("--out", help="Where to write the grant file.")] = None,
    identity: IdentityOption = "",
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Grant that a stream may leave this region: the export grant, signed with the region's policy key."""
    folder, config = folder_of(region)
    now = now_ms()
    carrier = _bridge_of(folder, config, to, bridge)
    parties = _parties(folder, config, to, exporter, importer)
    terms = GrantTerms(
        stream=name,
        destination_stream=destination,
        from_region=config.region,
        to_region=to,
        bridge=str(carrier),
        purpose=purpose,
        basis=basis,
        mechanism=mechanism,
        reference=reference,
        transfer_assessment=assessment,
        categories=tuple(category or ()),
        exporter=parties.exporter,
        importer=parties.importer,
        owner=owner or config.contact or parties.exporter,
        drawn_up_by=operator_id(config.region, identity),
        not_before=parse_moment(not_before, now) if not_before else now,
        expires=parse_moment(expires, now),
        transform=build_spec(
            keep=keep or (),
            drop=drop or (),
            mask=mask or (),
            hash_=hash_ or (),
            pseudonymize=pseudonymize or (),
            missing=missing,
            filter_=filter_,
            key=key,
            headers=header or (),
            trace=trace,
            opaque=opaque,
        ),
        rate_bytes=Rate.parse(rate) if rate else 0,
        budget_bytes=Size.parse(budget) if budget else 0,
        onward=onward,
        wildcard=wildcard,
    )
    policy = run(fetch_policy(config.region))
    document = sign_export(terms, policy, load_signing_key(folder.policy_key).private_key, now)
    if before := run(_offered_before(folder, terms)):
        note(
            f"with these terms {', '.join(before)} is offered already and waits for {to} to accept; this is another grant. Take back the one that is not wanted: "
            f"felix bridge revoke {before[0]}"
        )
    if wildcard:
        note(f"{name} is a pattern: every stream that fits it, now or later, is granted and reported as such")
    else:
        _look(folder, config.region, terms)
    run(put_document(config.region, "export", document, identity))
    run(add_right(config.region, terms.bridge, f"{Verb.BRIDGE_READ} {name}"))
    export = open_export(document, {config.region: own_bundle(folder).policy_keys})
    path = output or Path(f"{export.grant}.grant")
    write_output(path, document.encode_file())
    if json:
        print_json(
            {"grant": export.grant, "file": str(path), "token": document.encode_token(), "terms": terms}
        )
        return
    out.print(
        styled(
            (export.grant, "bold"), f"  {name} may leave {config.region} for {to} until {iso(terms.expires)}"
        )
    )
    out.print(f"  file   {path}")
    if export.approvals:
        separate = f", but not {SpiffeId.parse(terms.drawn_up_by).name}," if export.separate else ""
        people = "person has" if export.approvals == 1 else "people have"
        out.print(
            f"{export.approvals} {people} to approve it in {config.region}{separate} with an identity of kind approver:"
        )
        out.print(f"  felix bridge approve {export.grant} --as NAME --region {config.region}")
    out.print(f"Nothing crosses until {to} accepts it:  felix bridge accept {path} --region {to}")


async def _offered_before(folder: RegionFolder, terms: GrantTerms) -> list[str]:
    """Grants of the same terms, whenever they were drawn up, that nobody has accepted: such as a command that was ended has left."""

    def is_same(before: GrantTerms) -> bool:
        return terms == msgspec.structs.replace(
            before, not_before=terms.not_before, expires=terms.expires, drawn_up_by=terms.drawn_up_by
        )

    return [
        view.grant
        for view in (await fetch_book(terms.from_region, folder)).list(now_ms())
        if view.state is GrantState.OFFERED
        and view.accepted is None
        and view.export is not None
        and is_same(view.export.terms)
    ]


class Parties(NamedTuple):
    """The legal entities of a grant, as both regions sign them."""

    exporter: str
    importer: str


def _parties(folder: RegionFolder, config: RegionConfig, to: str, exporter: str, importer: str) -> Parties:
    """Who sends and who receives: as given, else as the regions say themselves. Raises RequestError where nobody said."""
    exporter = exporter or config.entity
    importer = importer or entity_of(folder, to)
    if not exporter:
        raise RequestError(
            f"Which entity runs {config.region} is not known: {folder.config} names none.",
            hint="Say its legal name there (entity: …), or with --exporter.",
        )
    if not importer:
        raise RequestError(
            f"Which entity runs {to} is not known: it has not said so in an offer.",
            hint="Say its legal name with --importer, or take an offer that names it: felix region trust FILE.",
        )
    return Parties(exporter, importer)


def _bridge_of(folder: RegionFolder, config: RegionConfig, to: str, given: str) -> SpiffeId:
    """The bridge identity of a grant, with a notice where none of that name was ever issued."""
    name = given or default_bridge(config, to)
    identity = SpiffeId(config.region, config.mesh, "bridge", name)
    logs = own_bundle(folder).bridge_logs()
    if not any(key.name.endswith(f"/bridge/{name}") for key in logs):
        there = ", ".join(dict.fromkeys(key.name.rpartition("/")[2] for key in logs)) or "none"
        note(
            f"{config.region} has no bridge {name} yet, and the grant is for no other; there is {there}. "
            f"Make it: felix bridge init --to {to} --name {name}"
        )
    return identity


def _look(folder: RegionFolder, region: str, terms: GrantTerms) -> None:
    """Say which fields of the terms no recent record of the stream has, and what it holds that crosses, too. A stream that
    cannot be read is no hindrance."""
    try:
        found = run(_plan_as_reader(region, "", terms, LOOKED_AT, ""))
    except FelixError as error:
        note(f"no records of {terms.stream} were looked at: {error.sentence}")
        return
    for absent in found.absent:
        note(str(absent))
    if found.records and not found.count("crosses"):
        first = found.records[0]
        note(f"none of the newest {len(found.records)} records would cross: {first.outcome}. {first.reason}")
    if not terms.wildcard and (said := run(_backlog(folder, region, terms))):
        note(said)


async def _backlog(folder: RegionFolder, region: str, terms: GrantTerms) -> str:
    views = (await fetch_book(region, folder)).list(now_ms())
    async with connect(region) as client:
        return backlog_note(
            terms, views, await client.describe_stream(terms.stream), await client.list_links()
        )


@app.command()
def accept(
    grant: Annotated[str, typer.Argument(help="The grant file of `felix bridge allow`, or its token.")],
    yes: Annotated[bool, typer.Option("--yes", help="Accept without asking.")] = False,
    output: Annotated[Path | None, typer.Option("--out", help="Where to write the acceptance.")] = None,
    identity: IdentityOption = "",
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Accept another region's grant: show all its terms, ask, and sign the import grant with this region's policy key."""
    document = read_grant(grant)
    chosen = region or preferred_region() or _destination(document)
    folder, config = folder_of(chosen)
    trusted = {name: bundle.policy_keys for name, bundle in known_bundles(folder).items()}
    export = open_export(document, trusted)
    if not json:
        show_terms(export)
    confirm(f"Accept these terms for {config.region}?", yes)
    policy = run(fetch_policy(config.region))
    key = load_signing_key(folder.policy_key).private_key
    accepted = sign_import(document, policy, key, trusted, operator_id(config.region, identity), now_ms())
    run(put_document(config.region, "export", document, identity))
    run(put_document(config.region, "import", accepted, identity))
    asked = open_import(accepted, trusted).approvals
    path = output or Path(f"{export.grant}.acceptance")
    write_output(path, accepted.encode_file())
    if json:
        print_json(
            {
                "grant": export.grant, "file": str(path), "token": accepted.encode_token(),
                "terms": export.terms,
            }
        )  # fmt: skip
        return
    terms = export.terms
    out.print(
        styled(
            (export.grant, "bold"),
            f"  {config.region} takes {terms.stream} from {terms.from_region} until {iso(terms.expires)}",
        )
    )
    out.print(f"  file   {path}")
    if asked:
        people = "person has" if asked == 1 else "people have"
        out.print(f"{asked} {people} to approve it in {config.region}, too:")
        out.print(f"  felix bridge approve {export.grant} --as NAME --region {config.region}")
    out.print("The bridge carries the acceptance back by itself.")


def _destination(document: SignedDocument) -> str:
    """The region a grant names, where its folder is on this machine; signatures are checked later."""
    try:
        to = msgspec.json.decode(document.body)["terms"]["to_region"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return ""
    return to if to in known_regions() else ""


# -- deny, revoke, pause, resume -----------------------------------------------------------------------


@app.command()
def deny(
    what: What,
    name: Annotated[str, typer.Argument(help="The stream, or a pattern.")],
    to: Annotated[str, typer.Option("--to", help="The other region, or * for every one.")] = "*",
    reason: Reason = "",
    lift: Annotated[bool, typer.Option(help="Take an earlier denial back.")] = False,
    region: RegionOption = "",
) -> None:
    """Deny that a stream crosses, in either direction. It wins over every grant, at once."""
    folder, config = folder_of(region)
    said, now = run(fetch_said(config.region, folder)), now_ms()
    streams = str(NamePattern(name))
    entry = DenyEntry(
        streams=streams,
        peer=to,
        region=config.region,
        sequence=said.next_deny_sequence(config.region, streams, to, now),
        at=now,
        by=operator_id(config.region),
        reason=reason,
        lifted=lift,
    )
    document = sign_deny(entry, load_signing_key(folder.policy_key).private_key)
    out.print(run(put_document(config.region, "deny", document)))


def _stand(action: StandingAction, grant: str, reason: str, region: str, *, ask: bool = False) -> None:
    folder, config = folder_of(region)
    view = run(fetch_book(config.region, folder)).get(grant, now_ms())
    if view.state is GrantState.REVOKED:
        raise RequestError(
            f"{view.grant} is revoked{' already' if action is StandingAction.REVOKE else ', for good'}; nothing was signed.",
            code=Code.GRANT_REVOKED,
            hint=""
            if action is StandingAction.REVOKE
            else "What is to cross again needs a new grant: felix bridge allow.",
        )
    if action is StandingAction.RESUME and config.region not in view.paused_by:
        paused = f"; {', '.join(view.paused_by)} paused it" if view.paused_by else ""
        raise RequestError(
            f"{view.grant} is {view.state.value}, and not paused by {config.region}{paused}.",
            code=Code.CONFLICT,
        )
    if ask:
        note(_in_words(view))
        typer.confirm(f"Revoke {view.grant} for good?", abort=True, err=True)
    out.print(stand(folder, config, view.grant, action, reason))


def _in_words(view: GrantView) -> str:
    """What a grant is about, for who is to say something of it."""
    if view.export is None:
        stream = f", into {view.accepted.stream}" if view.accepted else ""
        return f"{view.grant}: {view.state.value}{stream}; its terms are not here"
    terms = view.export.terms
    return (
        f"{view.grant}: {view.state.value}, {terms.stream} from {terms.from_region} to {terms.to_region} until {iso(terms.expires)}, "
        f"{terms.basis.value}, {spelled_out(terms.purpose)}"
    )


@app.command()
def revoke(
    grant: GrantId,
    reason: Reason = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask, where somebody sits at a terminal.")
    ] = False,
    region: RegionOption = "",
) -> None:
    """End a grant for good; what crosses under it stops within seconds."""
    _stand(StandingAction.REVOKE, grant, reason, region, ask=not yes and sys.stdin.isatty())


@app.command()
def pause(grant: GrantId, reason: Reason = "", region: RegionOption = "") -> None:
    """Let nothing cross under a grant until this region resumes it."""
    _stand(StandingAction.PAUSE, grant, reason, region)


@app.command()
def resume(
    grant: GrantId,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept-truncation",
            help="What had crossed is gone at one end; go on from there, on the record.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Accept a truncation without asking.")] = False,
    reason: Reason = "",
    region: RegionOption = "",
) -> None:
    """Take this region's pause back; the link goes on where it stood. Or accept what a truncated link lost."""
    if accept:
        _accept_truncation(grant, reason, region, yes=yes)
    else:
        _stand(StandingAction.RESUME, grant, reason, region)


def _accept_truncation(grant: str, reason: str, region: str, *, yes: bool) -> None:
    """Sign where each truncated link of the grant goes on, as its agent says; in the source region."""
    folder, config = folder_of(region)
    view = run(fetch_book(config.region, folder)).get(grant, now_ms())
    stopped = [
        link
        for link in run(_links(config.region))[0]
        if link.grant == view.grant and link.state == "truncated"
    ]
    links = [link for link in stopped if link.cut is not None]
    for link in stopped:
        if link.cut is None:
            note(f"{link.stream} shard {link.shard}: {spelled_out(link.reason)}")
    if not links:
        raise RequestError(
            f"There is no truncation to accept on the links of {view.grant}."
            if stopped
            else f"No link of {view.grant} is truncated, as far as {config.region} knows.",
            code=Code.CONFLICT if stopped else Code.NOT_FOUND,
            hint=f"What had crossed crossed under one that does not count any more: felix bridge sign-again {view.grant}, in the source region."
            if stopped
            else where_truncations_are(view, config.region),
        )
    for link in links:
        out.print(f"{link.stream} shard {link.shard}: {spelled_out(link.reason)}")
        out.print(f"It would go on at source offset {link.cut.offset}, epoch {link.cut.epoch}.")
    confirm("Accept that, on the record of both regions?", yes)
    for link in links:
        cut = Truncation(
            stream=link.stream,
            shard=link.shard,
            incarnation=link.cut.incarnation.hex(),
            epoch=link.cut.epoch,
            offset=link.cut.offset,
        )
        out.print(stand(folder, config, view.grant, StandingAction.ACCEPT_TRUNCATION, reason, cut))


# -- list, show, explain -------------------------------------------------------------------------------


@app.command("list")
def list_(region: RegionOption = "", json: JsonOption = False) -> None:
    """List grants and denials with their state."""
    folder, config = folder_of(region)
    book = run(fetch_book(config.region, folder))
    views = book.list(now_ms())
    connected = run(_connected(config.region))
    if json:
        waits = [what_it_waits_for(view, config.region, connected) for view in views]
        print_json(
            [_view(view, found) for view, found in zip(views, waits, strict=True)], denials=book.denies()
        )
        return
    table(
        f"Grants of {config.region}",
        ["grant", "state", "approvals", "stream", "from", "to", "basis", "purpose", "until"],
        [
            [
                view.grant,
                view.state.value,
                short_tallies(view.approvals),
                view.export.terms.stream,
                view.export.terms.from_region,
                view.export.terms.to_region,
                view.export.terms.basis.value,
                spelled_out(view.export.terms.purpose),
                iso(view.export.terms.expires),
            ]
            if view.export
            else [view.grant, view.state.value, "", view.accepted.stream if view.accepted else ""] + [""] * 5
            for view in views
        ],
    )
    denials = book.denies()
    if denials:
        table(
            "Denials",
            ["streams", "other region", "by", "reason"],
            [[d.streams, d.peer, d.region, spelled_out(d.reason)] for d in denials],
        )
    for sentence in waiting_notes(views, config.region, connected):
        note(sentence)
    for problem in book.problems:
        note(f"not believed: a document signed as {problem.document.region}: {spelled_out(problem.sentence)}")
    for claim in book.left_out:
        note(f"left out, because there are more documents than one book takes: {claim.grant}")


async def _connected(region: str) -> list[str]:
    """The region's bridges that have a session with it."""
    async with connect(region) as client:
        return (await client.describe()).bridges


def _view(view: GrantView, waits_for: list[str]) -> dict[str, Any]:
    return {
        "grant": view.grant,
        "state": view.state.value,
        "waits_for": waits_for,
        "export": view.export,
        "import": view.accepted,
        "paused_by": view.paused_by,
        "approvals": _approvals(view),
    }


def _approvals(view: GrantView) -> list[dict[str, Any]]:
    return [_approval(found) for found in view.approvals]


def _approval(found: Tally | ApprovalTally) -> dict[str, Any]:
    return {
        "region": found.region,
        "needed": found.needed,
        "approved": found.approved,
        "missing": found.missing,
        "not_counted": [{"approver": name, "why": why} for name, why in found.not_counted],
    }


@app.command()
def show(
    grant: Annotated[
        str, typer.Argument(help="A grant's id, or the file or token of an offer, before it is accepted.")
    ],
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Show one grant in full; of a file, what was signed there."""
    folder, config = folder_of(region)
    if Path(grant).is_file() or len(grant) > TOKEN_CHARACTERS_MIN:
        trusted = {name: bundle.policy_keys for name, bundle in known_bundles(folder).items()}
        export = open_export(read_grant(grant), trusted)
        if json:
            print_json({**dict.fromkeys(("state", "import")), "grant": export.grant, "export": export,
                        "waits_for": [], "paused_by": [], "approvals": []})  # fmt: skip
        else:
            show_terms(export)
        return
    view = run(fetch_book(config.region, folder)).get(grant, now_ms())
    connected = run(_connected(config.region))
    if json:
        print_json(_view(view, what_it_waits_for(view, config.region, connected)))
        return
    rows = [("state", view.state.value), *tally_rows(view.approvals)]
    if view.export is not None:
        rows += [
            *terms_rows(view.export.terms),
            ("policy", f"revision {view.export.policy_revision}, {view.export.policy_hash}"),
        ]
    if view.accepted is not None:
        rows.append(("accepted", f"by {view.accepted.accepted_by}, {iso(view.accepted.signed_at)}"))
    table(grant, ["", ""], rows)
    for sentence in waiting_notes([view], config.region, connected):
        note(sentence)


@app.command()
def explain(
    what: What,
    name: Name,
    to: Annotated[str, typer.Option("--to", help="The destination region.")] = "",
    from_: Annotated[str, typer.Option("--from", help="The source region; this one if left out.")] = "",
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Say whether a stream may cross, by which rule, and why; exit code 0 if it may, 3 if not."""
    _, config = folder_of(region)
    source, destination = from_ or config.region, to or (config.region if from_ else "")
    if config.region not in (source, destination) or not destination or source == destination:
        raise RequestError(
            f"{config.region} answers for crossings from it or to it.",
            hint="Say where to: --to eu-west; or where from: --from us-east.",
        )
    found = run(_explain(config.region, name, source, destination))
    if json:
        print_json(
            {
                "stream": name, "from": source, "to": destination, "crosses": found.crosses,
                "policy_allows": found.policy_allows, "rule": found.rule, "reasons": found.reasons,
                "refused": found.refused or None, "sentence": found.sentence,
                "grant": found.grant or None,
                "grant_state": found.grant_state, "approvals": [_approval(each) for each in found.approvals],
            }
        )  # fmt: skip
    else:
        out.print(
            styled(
                f"{name} from {source} to {destination}: ",
                ("crosses" if found.crosses else "does not cross", "bold"),
            )
        )
        out.print(
            f"  policy: {'allows it' if found.policy_allows else 'does not allow it'}"
            + (f", rule {found.rule}" if found.rule else "")
        )
        for reason in found.reasons:
            out.print(f"    - {spelled_out(reason)}")
        out.print(f"  grant:  {found.grant + ', ' if found.grant else ''}{found.grant_state}")
        if found.refused and found.refused != RefusalKind.AGAINST_POLICY:
            out.print(f"  why:    {spelled_out(found.sentence)}")
        tallies = [
            Tally(each.region, each.needed, tuple(each.approved), tuple(each.not_counted))
            for each in found.approvals
        ]
        for label, told in tally_rows(tallies):
            out.print(f"  {label}: {told}")
        if found.crosses:
            sample = f" (felix bridge plan {found.grant} shows which)" if source == config.region else ""
            out.print(
                f"  records: those that its field rules, its filter or their path keep back stay{sample}"
            )
    if not found.crosses:
        raise typer.Exit(EXIT_REFUSED)


async def _explain(region: str, stream: str, source: str, destination: str) -> CrossingExplained:
    async with connect(region) as client:
        return await client.explain_crossing(stream, source, destination)


@app.command()
def plan(
    grant: GrantId,
    sample: Annotated[int, typer.Option(help="How many of the newest records to look at.")] = 20,
    stream: Annotated[str, typer.Option(help="Which stream, where the grant is a pattern.")] = "",
    exact: Annotated[
        bool, typer.Option(help="Read as the bridge, with the link's own keys; the grant must hold.")
    ] = False,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Show what would cross under a grant, record by record and field by field. Nothing moves."""
    folder, config = folder_of(region)
    if exact:
        found = run(_plan_as_bridge(folder, grant, sample, stream))
    else:
        view = run(fetch_book(config.region, folder)).get(grant, now_ms())
        if view.export is None:
            raise RequestError(f"{config.region} has no export grant {grant}.", code=Code.GRANT_MISSING)
        found = run(_plan_as_reader(config.region, grant, view.export.terms, sample, stream))
    if json:
        print_json(plan_rows(found))
        return
    out.print(
        f"{found.stream} to {found.destination_region}, as {found.destination_stream}: of {len(found.records):,} records, "
        f"{found.count('crosses'):,} would cross, {found.count('withheld'):,} would be withheld, {found.count('filtered'):,} filtered"
    )
    for absent in found.absent:
        note(str(absent))
    table(
        "Fields",
        ["field", "what happens", "records#", "for example", "becomes"],
        [
            [each.path, each.action, each.records, each.before[:60], each.after[:60]]
            for each in found.fields()
        ],
    )
    rest = [record for record in found.records if record.outcome != "crosses"]
    if rest:
        table(
            "What stays",
            ["records#", "outcome", "reason", "for example"],
            [
                [
                    len(some),
                    outcome,
                    why,
                    ", ".join(f"{each.shard}:{each.offset}" for each in some[:EXAMPLES]),
                ]
                for (outcome, why), some in _by_reason(rest).items()
            ],
        )
    if not found.is_exact and found.records:
        note(
            "hashes and pseudonyms are made with a key that was thrown away; --exact shows those that would cross"
        )


async def _plan_as_reader(region: str, grant: str, terms: GrantTerms, count: int, stream: str) -> Sample:
    from bridge.sample import sample_as_reader

    async with connect(region) as client:
        return await sample_as_reader(client, grant, terms, count, stream)


async def _plan_as_bridge(folder: RegionFolder, grant: str, count: int, stream: str) -> Sample:
    from bridge.config import load_config as load_agent_config
    from bridge.sample import sample_as_bridge

    path = choose_agent("", folder.root.name).config
    return await sample_as_bridge(load_agent_config(path), path.parent, grant, count, stream)


def _by_reason(records: Iterable[SampledRecord]) -> dict[tuple[str, str], list[SampledRecord]]:
    found: dict[tuple[str, str], list[SampledRecord]] = {}
    for record in records:
        found.setdefault((record.outcome, record.reason), []).append(record)
    return found


def plan_rows(found: Sample) -> dict[str, Any]:
    """A sample as JSON takes it: payload fields as they are, keys and headers as text."""
    return {
        "grant": found.grant,
        "stream": found.stream,
        "destination_region": found.destination_region,
        "destination_stream": found.destination_stream,
        "exact": found.is_exact,
        "absent": [each._asdict() for each in found.absent],
        "records": [
            {
                "shard": record.shard,
                "offset": record.offset,
                "outcome": record.outcome,
                "reason": record.reason,
                "fields": [each._asdict() for each in record.fields],
                "key_before": None
                if record.key_before is None
                else record.key_before.decode(errors="replace"),
                "key_after": None if record.key_after is None else record.key_after.decode(errors="replace"),
            }
            for record in found.records
        ],
    }


@app.command()
def status(region: RegionOption = "", json: JsonOption = False) -> None:
    """Show what each link does: state and reason, position, lag in records, bytes and seconds."""
    from cli.expiry import expiring

    links, told = run(_links(region))
    agents = agents_of(choose_region(region))
    folder, config = folder_of(region)
    ending = [each for each in expiring(folder, config, now_ms(), told) if each["type"].endswith("bridge")]
    if json:
        print_json(links, agents=agents, expiring=ending)
        return
    table(
        f"Links of {choose_region(region)}",
        [
            "grant",
            "stream",
            "shard#",
            "to",
            "state",
            "position#",
            "lag records#",
            "lag bytes#",
            "lag s#",
            "crossed#",
            "withheld#",
            "filtered#",
            "reason",
        ],
        [
            [
                link.grant,
                link.stream,
                link.shard,
                link.to_region,
                link.state,
                None if link.position < 0 else link.position,
                None if link.lag_records < 0 else link.lag_records,
                None if link.lag_bytes < 0 else link.lag_bytes,
                None if link.lag_ms < 0 else link.lag_ms / 1000,
                link.crossed,
                link.withheld,
                link.filtered,
                spelled_out(link.reason),
            ]
            for link in links
        ],
    )
    if agents:
        table(
            "Agents on this machine",
            ["bridge", "state", "to", "valid until", "configuration"],
            [
                [
                    each.name,
                    each.state if each.pid is None else f"process {each.pid}",
                    ", ".join(each.leads_to),
                    iso(each.not_after_ms or 0),
                    str(each.config),
                ]
                for each in agents
            ],
        )
    if not links:
        note(
            "No link has been reported. Links are shown in the region that records leave, a second or two after its bridge runs with an "
            "active grant (felix bridge list)"
        )
    for sentence in silent_notes(links, now_ms()):
        note(sentence)
    for agent in agents:
        for problem in agent.problems:
            note(problem)
    for notice in ending:
        note(f"{notice['name']} {until_text(notice['not_after_ms'], now_ms())}: {notice['advice']}")


async def _links(region: str) -> tuple[list[Any], list[ExpiryState]]:
    async with connect(region) as client:
        return await client.list_links(), (await client.describe()).expiring


# -- the agent -----------------------------------------------------------------------------------------

BridgeName = Annotated[
    str, typer.Argument(help="The bridge's name; that of the only one on this machine if left out.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="The bridge.yaml of an agent that is deployed apart from a region's folder."
    ),
]


@app.command()
def up(
    name: BridgeName = "",
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to", help="A destination whose offer was trusted, or that is on this machine; may be repeated."
        ),
    ] = None,
    config_file: ConfigFile = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run apart from this terminal.")] = False,
    region: RegionOption = "",
) -> None:
    """Run a bridge agent: it carries what both regions granted, and nothing else."""
    from bridge.config import load_config as load_agent_config
    from cli.clash import told

    if config_file is not None:
        if to:
            raise RequestError("--to and --config both say where the agent leads.", hint="Leave one away.")
        files = AgentFiles.beside(config_file)
    elif to:
        folder, config = folder_of(region)
        name = name or default_bridge(config, to[0])
        if not folder.identity(name).exists():
            raise RequestError(
                f"There is no bridge {name} in {config.region} yet.",
                code=Code.NOT_FOUND,
                hint="Make its identity and configuration: felix bridge init "
                f"{' '.join(f'--to {each}' for each in to)} --name {name} --region {config.region}",
            )
        write_agent_config(folder, config, name, to)
        files = agent_files(folder, name)
    else:
        files = choose_agent(name, region)
    if not to:
        for each in moved(load_agent_config(files.config)):
            note(each)
    if detach:
        called = load_agent_config(files.config).name
        state = start_agent(files, called)
        out.print(f"bridge {called} runs, process {state['pid']}, log {files.log}")
        return
    config_file = files.config
    logging.getLogger("felix").setLevel(logging.INFO)
    agent_config = load_agent_config(config_file)
    pid = PidFile(files.pid, f"The bridge {agent_config.name}", files.how_to_stop)
    try:
        with told(f"set another address in {config_file} (health:, with port 0 for any)."):
            run(_run_agent(agent_config, config_file, pid))
    finally:
        pid.close()


async def _run_agent(config: BridgeConfig, path: Path, pid: PidFile) -> None:
    from bridge.agent import Agent
    from felix.telemetry import configure_tracing

    stop_tracing = configure_tracing(
        config.tracing, path.parent, service="felix-bridge", instance=config.name, region=config.source
    )
    ended = stop_signals()
    async with Notifier.from_environment() as notifier:
        with start_kept():
            agent = await Agent.start(config, path.parent)
        try:
            health = agent.health.address if agent.health is not None else None
            pid.announce(health="" if health is None else f"{health[0]}:{health[1]}", started_ms=now_ms())
            notifier.serving(lambda: _status_line(agent))
            note(f"bridge {config.name} runs; end it with Ctrl-C or: felix bridge down {config.name}")
            await ended.wait()
        finally:
            notifier.stopping()
            await agent.stop()
            stop_tracing()


def _status_line(agent: Agent) -> str:
    """What the service manager shows of an agent that runs."""
    moving, links = agent.counts()
    return agent.not_ready() or f"{agent.config.name}: {moving} of {links} links active"


@app.command()
def down(name: BridgeName = "", config_file: ConfigFile = None, region: RegionOption = "") -> None:
    """Stop a bridge agent, without a name the one that runs; what is on its way arrives, and the last checkpoint is cosigned."""
    files = (
        AgentFiles.beside(config_file)
        if config_file is not None
        else choose_agent(name, region, running=True)
    )
    pid = stop(files.pid, f"The bridge {files.name}")
    out.print(f"bridge {files.name} stopped (process {pid})")


@app.command()
def ready(
    name: BridgeName = "",
    config_file: ConfigFile = None,
    region: RegionOption = "",
) -> None:
    """Say whether a bridge agent on this machine does its work; exit code 4, with the reason, if not. For health checks."""
    from cli.ready import check_ready

    files = AgentFiles.beside(config_file) if config_file is not None else choose_agent(name, region)
    check_ready(files.pid, f"The bridge {files.name}")


async def attempt(region: str, bridge: str, stream: str, grant: str) -> None:
    """Ask for a stream's sealed batches as a bridge. Raises the refusal, which then stands in the audit log."""
    async with connect(region, bridge) as client:
        await client.request(Subscribe(stream, Start("earliest"), credit_bytes=CREDIT_BYTES, grant=grant))
