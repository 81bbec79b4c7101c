"""`felix audit`: verify, show and prove what crossed; make reports."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import typer

from audit.checkpoint import origin_of
from audit.leaf import LEAF_COLUMNS, Header, Kind, decode_leaf, leaf_row
from audit.log_copy_disk import copy_log
from audit.merkle import HASH_BYTES
from audit.note import parse_note
from audit.origin import Origin, egress_origin, region_origin
from audit.proof import Proven, check_proof, looks_like_proof, prove
from audit.receipt import Receipt
from audit.tile import CHECKPOINT_PATH, COSIGNED_PATH, read_entries
from audit.tile_disk import Folder
from audit.tlog_proof import SUFFIX, ProvenLeaf, check_leaf, is_tlog_proof, prove_leaves
from audit.tree_head import parse_tree_head
from audit.trust import COSIGNATURES_MIN, Trust
from audit.unclean_leaf import told
from audit.verify import Report, verify_log
from audit.witness import DiskWitnessStore
from audit.witness_policy import PolicyError, WitnessPolicy, format_policy
from cli.audit_copies import furthest_copy
from cli.exits import EXIT_DAMAGED, EXIT_FAILED, EXIT_VERSION_1
from cli.grants import known_bundles
from cli.moments import parse_past
from cli.output import (
    counted,
    err,
    iso,
    lines,
    note,
    out,
    print_json,
    progress,
    styled,
    table,
    verdict,
    write_data,
)
from cli.process import read_state
from cli.setting import (
    JsonOption,
    RegionOption,
    folder_of,
    known_regions,
    preferred_region,
    read_file,
)
from cli.terms import terms_rows
from felix.errors import Code, CorruptionError, FelixError, RequestError, TamperError
from felix.files import write_output
from felix.names import StreamName
from felix.runtime.real import now_ms
from felix.visible import spelled_out
from keys.bundle import RegionBundle, changes_of, decode_bundle
from policy.quantity import Duration
from region.folder import RegionFolder

COSIGNATURE_POLL_S: Final = 1.0
"""Between two looks at a log that waits for its first cosignature."""

if TYPE_CHECKING:
    from region.config import RegionConfig

app = typer.Typer(no_args_is_help=True)

ProofFormat = Literal["json", "tlog-proof"]

Logs = Annotated[
    list[Path] | None, typer.Argument(help="Audit log folders; all of this machine's if left out.")
]
Cosignatures = Annotated[
    int,
    typer.Option(
        min=0,
        help="How many regions or outside witnesses must have cosigned one checkpoint; the log's own region never counts.",
    ),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy", help="A tlog-policy file: its logs, witnesses and quorum, in place of --cosignatures."
    ),
]
RememberedNotes = Annotated[
    list[Path] | None,
    typer.Option(help="A checkpoint that a witness remembered of the log elsewhere; may be repeated."),
]
AcceptVersion1 = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-version-1",
        metavar="ROOT",
        help="Take leaves of Felix 0.1 for old: those whose tree has this root, as `verify` shows it; may be repeated.",
    ),
]
Bundles = Annotated[
    list[Path] | None,
    typer.Option("--bundle", help="A region's bundle.json to trust; this machine's regions if left out."),
]


def trusted(bundles: list[Path] | None, policy: Path | None = None) -> Trust:
    """From the files that the user names, else from every region of this machine and those they trust; judged by a
    tlog-policy where one is named."""
    trust = _trusted(bundles)
    return trust if policy is None else trust.under(_policy(policy))


def _policy(file: Path) -> WitnessPolicy:
    try:
        return WitnessPolicy.parse(read_file(file, "The policy"))
    except PolicyError as error:
        raise PolicyError(f"{file}: {error.sentence}", hint=error.hint) from error


def _trusted(bundles: list[Path] | None) -> Trust:
    from region.trust.trusted_bundles import former_bundles

    if bundles:
        return Trust.of(decode_bundle(read_file(path, "The bundle")).bundle for path in bundles)
    found: dict[str, RegionBundle] = {}
    for region in known_regions():
        folder = RegionFolder.of(region)
        held = {**former_bundles(folder), **known_bundles(folder)}
        _require_as_brokers(region, folder, held)
        for name, bundle in held.items():
            found[name] = _newest(found.get(name, bundle), bundle)
    return Trust.of(found.values())


def _require_as_brokers(region: str, folder: RegionFolder, held: Mapping[str, RegionBundle]) -> None:
    """Raises RequestError(CONFLICT) where a broker of this region has believed a later bundle of another one than this folder has: people compared it on another machine, or the
    folder is of before. A key that was given up would count on here."""
    from region.trust.trust_store import believed_bundles

    try:
        data_folders = folder_of(region)[1].data_folders
    except (FelixError, OSError):
        return  # whoever needs the region says so
    for data in data_folders:
        for name, bundle in believed_bundles(folder.root / data / "governance").items():
            here = held.get(name, bundle)
            if bundle.issued_ms > here.issued_ms and (changed := changes_of(here, bundle)):
                raise RequestError(
                    f"The broker of {region} goes by a later bundle of {name} than {folder.trusted} has: it has {', '.join(changed)}.",
                    code=Code.CONFLICT,
                    hint=f"felix region trust --region {region} takes what people compared, while a broker runs. Or say which bundles to trust with --bundle.",
                )


def _newest(held: RegionBundle, other: RegionBundle) -> RegionBundle:
    """Of what two regions of this machine trust, the newer bundle, where people need not compare it with the older."""
    older, newer = sorted((held, other), key=lambda bundle: bundle.issued_ms)
    if older != newer and (changed := changes_of(older, newer)):
        raise RequestError(
            f"Two regions on this machine trust different bundles of {newer.region}: the newer one has "
            f"{', '.join(changed)}.",
            code=Code.CONFLICT,
            hint="Compare its fingerprint and trust it in both, or say which bundles to trust with --bundle.",
        )
    return newer


def require_log(path: Path) -> None:
    """Raises RequestError where no log is in this folder."""
    if not (path / CHECKPOINT_PATH).exists():
        raise RequestError(
            f"There is no audit log at {path}: it has no checkpoint.",
            code=Code.NOT_FOUND,
            hint="Name the folder that holds `checkpoint` and `tile/`.",
        )


def local_logs(region: str = "") -> list[Path]:
    """The audit logs of one region on this machine, or of all: the region's own, and its bridges'."""
    found = []
    for name in [region] if region else known_regions():
        folder, config = folder_of(name)
        own = own_log(folder, config)
        found += [own] if own.is_dir() else []
        found += sorted(path for path in folder.bridges.glob("*/egress") if path.is_dir())
    return found


def own_log(folder: RegionFolder, config: RegionConfig) -> Path:
    """The region's own log; of several brokers, the copy on this machine that goes furthest. Raises TamperError where two copies here are of
    different histories."""
    return furthest_copy([folder.root / data / "audit" for data in config.data_folders])


def choose_logs(logs: list[Path] | None, region: str) -> list[Path]:
    """The logs that the user names, else those on this machine. Raises RequestError if there are none."""
    chosen = logs or local_logs(region)
    if not chosen:
        raise RequestError(
            "There is no audit log on this machine.", code=Code.NOT_FOUND, hint="Name its folder."
        )
    return chosen


# What a report is about, and what forbids that it be: a log with one of these leaves is never left out of it.
_REPORTED: Final = frozenset(
    kind.name
    for kind in (
        Kind.INTENT, Kind.ACK, Kind.WITHHELD, Kind.GAP, Kind.DENY, Kind.REVOKE, Kind.STANDING, Kind.DENY_ENTRY,
    )
)  # fmt: skip


def to_report(paths: Sequence[Path], trust: Trust, notes: Sequence[bytes]) -> list[Path]:
    """Of this machine's logs, those that a report is made of: without regions that are founded and lead nowhere yet.

    Left out, with a sentence, is a log that nobody has cosigned, that is whole, and that tells of no crossing, no refusal and nothing that forbids one. A
    crossing into such a region stands in the log of its bridge, and is then one side's word alone.
    """
    kept = []
    for path in paths:
        if not (path / COSIGNED_PATH).exists():
            alone = verify_one(path, trust, 0, notes)
            if alone.ok and not _REPORTED & set(alone.leaves):
                note(
                    f"{alone.origin} is left out: nobody has cosigned it yet, and nothing has crossed by it. "
                    f"felix audit report --cosignatures 0 --log {path} reports it."
                )
                continue
        kept.append(path)
    return kept or list(paths)


# -- verify --------------------------------------------------------------------------------------------


@app.command()
def verify(
    logs: Logs = None,
    bundle: Bundles = None,
    cosignatures: Cosignatures = COSIGNATURES_MIN,
    policy: PolicyFile = None,
    remembered: RememberedNotes = None,
    accept_version_1: AcceptVersion1 = None,
    region: RegionOption = "",
    every: Annotated[
        bool, typer.Option("--all", help="The logs of all regions of this machine, whatever is set.")
    ] = False,
    wait: Annotated[
        str, typer.Option(help="Wait so long for cosignatures of a log that a region here is writing.")
    ] = "20s",
    json: JsonOption = False,
) -> None:
    """Verify logs from their files alone: every leaf, the tree, signatures, continuity. Exit code 5 if not, 13 where all is well but what
    crossed in leaves of Felix 0.1."""
    trust, held, old = trusted(bundle, policy), remembered_notes(remembered), _roots(accept_version_1)
    notes = [data for _, data in held]
    reports: list[tuple[Path, Report]] = []
    until_ms = now_ms() + Duration.parse(wait)
    for path in choose_logs(logs, "" if every else region or preferred_region()):
        require_log(path)
        report = verify_one(path, trust, cosignatures, notes, old)
        told = False
        while _awaits_cosignatures(path, report, trust, cosignatures) and now_ms() < until_ms:
            if not told:
                note(
                    f"{report.origin} is not cosigned yet; waiting up to {wait}: regions do it every few seconds."
                )
                told = True
            time.sleep(COSIGNATURE_POLL_S)
            report = verify_one(path, trust, cosignatures, notes, old)
        reports.append((path, report))
    if json:
        print_json(
            [
                {"path": str(path), "ok": report.ok, **msgspec.to_builtins(_plain(report))}
                for path, report in reports
            ]
        )
    else:
        for path, report in reports:
            _print_report(path, report)
        bad = sum(bool(report.findings) for _, report in reports)
        closing = f"{bad} of them {'does' if bad == 1 else 'do'} not verify" if bad else "verified"
        if any(is_of_version_1(report) for _, report in reports):
            closing += ", but for what crossed in leaves of version 0.1"
        out.print(f"{len(reports)} log{'s' if len(reports) > 1 else ''}: {closing}")
        if policy is None:
            hints = (cosignature_hint(report, trust, cosignatures) for _, report in reports)
            for hint in dict.fromkeys(filter(None, hints)):
                note(hint)
        if bad and (age := _age_of(trust)):
            note(age)
    unheld = _of_other_logs(held, {report.origin for _, report in reports})
    for sentence in unheld:
        note(sentence)
    if any(report.findings for _, report in reports):
        raise typer.Exit(EXIT_DAMAGED)
    if unheld:
        raise typer.Exit(EXIT_FAILED)
    if not all(report.ok for _, report in reports):
        raise typer.Exit(EXIT_VERSION_1)


@contextmanager
def _judged_by(trust: Trust) -> Iterator[None]:
    """Where what is verified here does not hold, say of when the bundles are."""
    try:
        yield
    except TamperError as error:
        error.hint = f"{error.hint} {_age_of(trust)}".strip()
        raise


def _age_of(trust: Trust) -> str:
    """Of when the bundles are that something was verified by and does not hold: an auditor may have had them for years."""
    found = (trust.region(name).bundle for name in trust.regions)
    issued = ", ".join(f"{bundle.region} of {iso(bundle.issued_ms)}" for bundle in found)
    return issued and (
        f"Verified by the bundles of {issued}. What is signed or cosigned under a key that is newer than its region's bundle here does not verify: "
        "where a region has changed its keys since, take its current one."
    )


def is_of_version_1(report: Report) -> bool:
    """Whether records crossed in leaves of version 1 that were not accepted."""
    return report.version_1 is not None and not report.version_1.accepted


def _roots(given: list[str] | None) -> frozenset[bytes]:
    """Raises RequestError where one is no root hash."""
    found = set()
    for text in given or ():
        try:
            root = bytes.fromhex(text)
        except ValueError:
            root = b""
        if len(root) != HASH_BYTES:
            raise RequestError(
                f"{text[:80]!r} is no root hash: 64 hexadecimal digits.",
                hint="`felix audit verify` shows the root of a log's leaves of version 0.1.",
            )
        found.add(root)
    return frozenset(found)


def _awaits_cosignatures(path: Path, report: Report, trust: Trust, cosignatures_min: int) -> bool:
    """Whether cosignatures are all that a log lacks, and a broker of this machine is writing it for others to cosign."""
    if not cosignature_hint(report, trust, cosignatures_min) or not trust.log(report.origin).witnesses:
        return False
    folders = [folder_of(region)[0] for region in known_regions()]
    return any(
        Path(os.path.realpath(path)).is_relative_to(folder.root.resolve())
        and read_state(folder.broker_pid) is not None
        for folder in folders
    )


def cosignature_hint(report: Report, trust: Trust, cosignatures_min: int) -> str:
    """The hint for a log that only lacks cosignatures; empty if it lacks something else."""
    lacks = report.root and cosignatures_min and not report.cosigned_size
    if not lacks or any(step.findings for step in report.steps[1:]):
        return ""
    without = "--cosignatures 0 verifies on the word of the log's own region alone."
    region = Origin.parse(report.origin).region
    if trust.log(report.origin).witnesses:
        return (
            f"{report.origin}: other regions cosign a log when their bridge next sees its checkpoint, outside witnesses when "
            f"it is submitted to them. Until then, {without}"
        )
    return (
        f"{report.origin}: nobody but {region} is trusted here, so nobody can have cosigned. Connect another region by a bridge, "
        f"or name an outside witness (docs/witnesses.md). Until then, {without}"
    )


def verify_one(
    path: Path,
    trust: Trust,
    cosignatures_min: int = COSIGNATURES_MIN,
    notes: Sequence[bytes] = (),
    accept_version_1: Collection[bytes] = (),
) -> Report:
    """Verify one log, with a progress bar. Findings are in the report; nothing raises for damage.

    `notes`: what witnesses elsewhere remember, of this log or of others; this machine's regions are asked besides.
    """
    with progress() as bar:
        task = bar.add_task(f"verifying {path}", total=None)

        def show_progress(done: int, size: int) -> None:
            bar.update(task, completed=done, total=size)

        return verify_log(
            Folder(path),
            trust,
            origin=place_of(path),
            cosignatures_min=cosignatures_min,
            remembered=(*notes, *remembered_here()),
            accept_version_1=accept_version_1,
            progress=show_progress,
        )


def remembered_notes(files: list[Path] | None) -> list[tuple[Path, bytes]]:
    """Checkpoints from files. Raises RequestError where a file cannot be read or holds none."""
    notes = [(path, read_file(path, "The remembered checkpoint")) for path in files or []]
    for path, data in notes:
        if not origin_of(data):
            raise RequestError(
                f"{path} holds no checkpoint.", hint="Ask the witness for the last note of this log."
            )
    return notes


def _of_other_logs(notes: Sequence[tuple[Path, bytes]], origins: Collection[str]) -> list[str]:
    """A sentence for each of these checkpoints that is of none of these logs: whoever gave it wanted a log held to it, and none was."""
    return [
        f"{path} is a checkpoint of {origin_of(data)}, which is none of these logs: nothing was held to it."
        for path, data in notes
        if origin_of(data) not in origins
    ]


def _require_of(notes: Sequence[tuple[Path, bytes]], logs: Iterable[str]) -> list[bytes]:
    """The checkpoints, of logs that are given by folder or URL. Raises RequestError where one is of none of them, TamperError as reading does."""
    if notes:
        from audit.spark.files import open_files

        origins = {origin_of(open_files(log).read(CHECKPOINT_PATH) or b"") for log in logs}
        if unheld := _of_other_logs(notes, origins):
            raise RequestError(
                unheld[0], code=Code.NOT_FOUND, hint="Give the log that it is of, too, or leave it out."
            )
    return [data for _, data in notes]


def remembered_here() -> list[bytes]:
    """The checkpoints that this machine's regions have cosigned, of all logs: a log that is shorter than its own was rolled back."""
    notes = list[bytes]()
    for region in known_regions():
        try:
            folder, config = folder_of(region)
            for path in (folder.root / data / "witness" for data in config.data_folders):
                # One by one: what was given before the error counts.
                for each in DiskWitnessStore(path).notes() if path.is_dir() else ():
                    notes.append(each)
        except (FelixError, OSError) as error:
            why = error.sentence if isinstance(error, FelixError) else str(error)
            note(f"Not all that {region} has cosigned is asked: {why}")
    return notes


def _plain(report: Report) -> dict[str, Any]:
    return {
        "origin": report.origin,
        "size": report.size,
        "root": report.root.hex(),
        "cosigned_by": report.cosigned_by,
        "cosigned_size": report.cosigned_size,
        "cosigners": report.cosigners,
        "documents": report.documents,
        "unsupported": report.unsupported,
        "version_1": None
        if report.version_1 is None
        else {
            "leaves": report.version_1.size,
            "root": report.version_1.root.hex(),
            "accepted": report.version_1.accepted,
        },
        "leaves": report.leaves,
        "records": report.records,
        "unanswered": report.unanswered,
        "skipped": report.skipped,
        "notices": [seen._asdict() for seen in report.notices],
        "notices_left_off": report.notices_left_off,
        "uncovered": report.uncovered,
        "steps": report.steps,
        "findings": [finding._asdict() for finding in report.findings],
        "findings_left_off": report.left_off,
    }


def _print_report(path: Path, report: Report) -> None:
    # Without a checkpoint of a trusted log nothing says what this is, or how long.
    told = f"  ({path})" if report.origin else ""
    if report.root:
        told = f": {report.size:,} leaves, root {report.root.hex()[:16]}…  ({path})"
    out.print(
        styled(
            (report.origin or str(path), "bold"),
            " ",
            verdict(report.ok, "verifies", "OF VERSION 0.1" if not report.findings else "DOES NOT VERIFY"),
            told,
        )
    )
    if not report.root:
        out.print("  nothing in it could be checked: see step 1")
    elif report.cosigners:
        by = ", ".join(f"{party} up to {size:,}" for party, size in sorted(report.cosigners.items()))
        rest = report.size - max(report.cosigners.values())
        out.print(
            f"  cosigned by {by} leaves"
            + (f"; the last {rest:,} have the log's own signature alone" if rest else "")
        )
    else:
        out.print("  not cosigned: a holder of the log's key may have rewritten all of it")
    table(
        "",
        ["step#", "what is checked", "checked#", "findings#", "note"],
        [[step.number, step.title, step.checked, step.findings, step.note] for step in report.steps],
    )
    if (old := report.version_1) is not None:
        out.print(
            f"  of version 0.1: records crossed in its first {old.size:,} leaves, root {old.root.hex()}"
        )
        if not old.accepted:
            out.print(f"  if these are known to be old, say so: --accept-version-1 {old.root.hex()}")
    if report.unsupported:
        out.print("  cannot support:")
        for each in report.unsupported:
            out.print(f"    - {each}")
    for seen in report.notices[:20]:
        out.print(f"  notice, leaf {seen.leaf}: {spelled_out(seen.sentence)}")
    if len(report.notices) + report.notices_left_off > 20:
        more = len(report.notices) + report.notices_left_off - 20
        out.print(f"  … and {more:,} more notices ({len(report.notices):,} of them with --json)")
    for finding in report.findings[:20]:
        where = f"leaf {finding.leaf}" if finding.leaf is not None else finding.path
        err.print(f"  step {finding.step}, {where}: {spelled_out(finding.sentence)}", style="red")
    if len(report.findings) + report.left_off > 20:
        err.print(f"  … and {len(report.findings) + report.left_off - 20} more (all of them with --json)")


# -- copy ----------------------------------------------------------------------------------------------


@app.command("copy")
def copy_(
    log: Annotated[
        str,
        typer.Argument(help="An audit log: its folder, or a URL: of a web server, or one that fsspec opens."),
    ],
    to: Annotated[
        Path, typer.Argument(help="The copy's folder: empty, or an earlier copy, which is gone on with.")
    ],
    bundle: Bundles = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            help="A tlog-policy file: cosignatures of its witnesses are verified and kept, as those of the trusted regions are.",
        ),
    ] = None,
) -> None:
    """Copy a log, also while it is written, as of its newest checkpoint. Nothing is written that does not hold; exit code 5 then."""
    from audit.spark.files import open_files

    trust = trusted(bundle)
    witnesses = () if policy is None else _policy(policy).witness_keys
    with progress() as bar:
        task = bar.add_task(f"copying {log}", total=None)
        made = copy_log(
            open_files(log),
            Folder(to),
            trust,
            lambda done, of: bar.update(task, completed=done, total=of),
            witnesses,
        )
    out.print(f"{to}: {made.origin}, {made.size:,} leaves, {made.size - made.before:,} of them new")
    if made.missing:
        note(f"{made.missing:,} documents are not beside the log, and so not in the copy either.")
    if made.unverified:
        note(
            f"Cosigned under names whose keys neither a bundle nor --policy has, which was not verified: {', '.join(sorted(made.unverified))}."
        )
    if made.let_go:
        note(
            f"Older cosignatures under such names were let go, since the log serves ever others: {', '.join(sorted(made.let_go))}. "
            "Give a tlog-policy that has their keys, with --policy."
        )
    out.print(f"What it says is verified as any log is:  felix audit verify {to}")


# -- restore -------------------------------------------------------------------------------------------


@app.command("restore")
def restore_(
    copy: Annotated[
        str,
        typer.Argument(
            help="A copy that `felix audit copy` made: its folder, or a URL: of a web server, or one that fsspec opens."
        ),
    ],
    to: Annotated[Path, typer.Argument(help="The log's own folder, lost, damaged or older.")],
    bundle: Bundles = None,
    remembered: RememberedNotes = None,
) -> None:
    """Put a copy of a log in the log's place, where no process has it open. Nothing is put there that does not hold, or is shorter than
    what was signed before; exit code 5 then. What stood there is moved aside."""
    from audit.log_restore_disk import restore_log
    from audit.spark.files import open_files
    from felix import __version__
    from felix.storage.disk import PRIVATE_FILES
    from felix.storage.release_mark import require_release

    place = place_of(to)
    if place:
        # An agent marks its log's own folder, a broker the one around it.
        require_release(
            PRIVATE_FILES, to.resolve() if to.name == "egress" else to.resolve().parent, __version__
        )
    source = open_files(copy)
    with progress() as bar:
        task = bar.add_task(f"restoring {to}", total=None)
        made = restore_log(
            source,
            to.resolve(),
            trusted(bundle),
            (*_require_of(remembered_notes(remembered), [copy]), *remembered_here()),
            lambda done, of: bar.update(task, completed=done, total=of),
            origin=place,
        )
    more = f", and {made.carried:,} behind them of what stood there" if made.carried else ""
    out.print(f"{to}: {made.origin}, {made.size:,} leaves{more}")
    if made.replaced is not None:
        note(f"What stood there is in {made.replaced} now. Keep it until the log's copies verify.")
    if made.missing:
        note(f"{made.missing:,} documents are neither in the copy nor in what stood there.")
    out.print(
        "What others cosigned of it is compared when the next link opens: start it, and look at  felix bridge status"
    )


def place_of(path: Path) -> str:
    """Which log has this folder, of a region of this machine; empty for any other folder. So no other log passes for it."""
    wanted = Path(os.path.realpath(path))  # which takes links in a circle as they are
    for region in known_regions():
        try:
            folder, config = folder_of(region)
        except (FelixError, OSError):
            continue  # whoever needs the region says so
        if wanted in [(folder.root / data / "audit").resolve() for data in config.data_folders]:
            return region_origin(config.region, config.mesh)
        if wanted.name == "egress" and wanted.parent.parent == folder.bridges.resolve():
            return egress_origin(config.region, config.mesh, wanted.parent.name)
    return ""


class MisplacedLogError(TamperError):
    """Another log than its own lies in the folder of a log of this machine."""

    exit_code: Final = 20
    """As where a log does not verify: there is no report (audit.spark.report)."""


def _require_place(log: str, trust: Trust) -> None:
    """Raises MisplacedLogError. What is no log of a trusted region is for the report to refuse."""
    expected = place_of(Path(log))
    data = b"" if not expected else Folder(Path(log)).read(CHECKPOINT_PATH) or b""
    try:
        found = trust.log_of(data).name if data else expected
    except TamperError:
        return
    if found != expected:
        raise MisplacedLogError(
            f"No report was made: {log} is the folder of {expected}, and the log there is {found}.",
            hint="Put the right log back (felix audit restore), or give this one from another folder.",
        )


# -- show ----------------------------------------------------------------------------------------------


@app.command()
def show(
    log: Annotated[
        Path | None, typer.Argument(help="An audit log's folder; the region's own if left out.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="INTENT, ACK, DENY …; may be repeated.")] = None,
    stream: Annotated[str, typer.Option(help="Only leaves about this stream.")] = "",
    last: Annotated[int, typer.Option(min=0, help="So many leaves from the end; 0: all.")] = 20,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Show leaves, the newest last. This does not verify them."""
    try:
        wanted = {Kind[name.upper()] for name in kind or []}
    except KeyError as error:
        raise RequestError(
            f"There are no {error.args[0]} leaves.", hint=f"Kinds: {', '.join(Kind.__members__)}."
        ) from error
    if log is None:
        folder, config = folder_of(region)
        log = own_log(folder, config)
    rows = list(deque(_rows(log, wanted, stream), maxlen=last or None))
    if json:
        print_json(rows)
        return
    table(
        str(log),
        ["leaf#", "time", "kind", "stream", "shard#", "source offsets", "records#", "grant", "says"],
        [
            [
                row["index"],
                "" if row["time_ms"] is None else iso(row["time_ms"]),
                row["kind"],
                spelled_out(row["stream"] or ""),
                row["shard"] if row["stream"] else None,
                "" if row["first_offset"] is None else f"{row['first_offset']}–{row['last_offset']}",
                row["records"] or None,
                spelled_out(row["grant_id"] or ""),
                spelled_out(row["sentence"] or row["reason"] or row["action"] or ""),
            ]
            for row in rows
        ],
    )


def _rows(path: Path, wanted: set[Kind], stream: str) -> Iterator[dict[str, Any]]:
    folder = Folder(path)
    data = folder.read(CHECKPOINT_PATH) if path.is_dir() else None
    if data is None:
        raise RequestError(f"There is no audit log at {path}: it has no checkpoint.", code=Code.NOT_FOUND)
    # It may be anybody's: whoever shows a log has not verified it.
    size = parse_tree_head(parse_note(data).text).size
    for index, entry in read_entries(folder, 0, size, size):
        try:
            leaf = decode_leaf(entry)
        except CorruptionError as error:
            if not wanted and not stream:
                unknown = dict.fromkeys(name for name, _ in LEAF_COLUMNS)
                yield {"index": index, **unknown, "kind": "UNREADABLE", "sentence": error.sentence}
            continue
        if (wanted and leaf.header.kind not in wanted) or (stream and leaf.header.stream != stream):
            continue
        yield {"index": index, **leaf_row(leaf), **told(leaf.header)}


# -- prove ---------------------------------------------------------------------------------------------


@app.command("prove")
def prove_(
    stream: Annotated[str, typer.Option(help="The source stream.")],
    offset: Annotated[int, typer.Option(help="The record's offset at the source.")],
    shard: Annotated[int, typer.Option(help="Its shard.")] = 0,
    to: Annotated[str, typer.Option(help="The destination region, where it crossed to several.")] = "",
    leaf: Annotated[
        int | None, typer.Option(help="The INTENT leaf, where it crossed more than once to one region.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--out", help="Where to write the proof.")] = None,
    log: Annotated[
        Path | None, typer.Option(help="The egress log; the region's only one if left out.")
    ] = None,
    form: Annotated[
        ProofFormat,
        typer.Option("--format", help="json: one file; tlog-proof: one file for each of two leaves."),
    ] = "json",
    bundle: Bundles = None,
    policy: PolicyFile = None,
    region: RegionOption = "",
) -> None:
    """Write a proof that one record crossed, which verifies without the log."""
    name = StreamName.parse(stream)
    path = log or _egress_log(region)
    require_log(path)
    trust = trusted(bundle, policy)
    if form == "tlog-proof":
        proofs = prove_leaves(Folder(path), trust, str(name), shard, offset, destination_region=to, leaf=leaf)
        target = output or Path(f"{name.name}-{shard}-{offset}{SUFFIX}")
        written = []
        for kind, data in zip(("", ".ack"), proofs, strict=False):
            written.append(target.with_name(f"{target.name.removesuffix(SUFFIX)}{kind}{SUFFIX}"))
            write_output(written[-1], data)
            out.print(f"{written[-1]}: {'ACK' if kind else 'INTENT'} leaf, {len(data):,} bytes")
    else:
        data = prove(Folder(path), trust, str(name), shard, offset, destination_region=to, leaf=leaf)
        target = output or Path(f"{name.name}-{shard}-{offset}.proof.json")
        write_output(target, data)
        written = [target]
        out.print(f"{target}: {stream} shard {shard} offset {offset}, {len(data):,} bytes")
    out.print("Anybody who has the bundles of both regions can check it:")
    for file in written:
        out.print(f"  felix audit check-proof {file} --bundle BUNDLE --bundle BUNDLE")


@app.command("policy")
def policy_(
    post_quantum: Annotated[
        bool, typer.Option("--post-quantum", help="Only ML-DSA-44 keys: a verifier then demands them.")
    ] = False,
    signing: Annotated[
        bool,
        typer.Option(
            "--signing",
            help="Only keys of logs that sign now, for a witness: it does not know up to where ended ones sign.",
        ),
    ] = False,
    bundle: Bundles = None,
) -> None:
    """Print a tlog-policy file of the trusted regions: their logs, their witnesses, any one of which is a quorum."""
    trust = trusted(bundle)
    regions = [trust.region(name) for name in trust.regions]
    logs = [(region, key) for region in regions for key in region.logs if key.to_size is None or not signing]
    # A key that a region names as a bridge's log, by itself, takes no line from a log that people compared.
    logs.sort(key=lambda each: each[1].public not in each[0].compared_keys)
    # A name of another region's key may hold what a terminal obeys.
    text = format_policy(
        [key for _, key in logs],
        {region.region: region.witnesses for region in regions},
        post_quantum=post_quantum,
    )
    write_data(text.encode())


def _egress_log(region: str) -> Path:
    folder, config = folder_of(region)
    found = sorted(path for path in folder.bridges.glob("*/egress") if path.is_dir())
    if len(found) != 1:
        raise RequestError(
            f"{config.region} has {len(found)} egress logs on this machine.",
            code=Code.NOT_FOUND,
            hint="Say which with --log.",
        )
    return found[0]


@app.command("check-proof")
def check_proof_(
    file: Annotated[Path, typer.Argument(help="A proof that `felix audit prove` wrote.")],
    bundle: Bundles = None,
    cosignatures: Cosignatures = COSIGNATURES_MIN,
    policy: PolicyFile = None,
    json: JsonOption = False,
) -> None:
    """Check a proof against trusted bundles; no log is needed. Exit code 5 if it does not hold, 13 if it holds and the record crossed in a
    leaf of Felix 0.1."""
    data = read_file(file, "The proof")
    trust = trusted(bundle, policy)
    if is_tlog_proof(data):
        with _judged_by(trust):
            leaf = check_leaf(data, trust, cosignatures_min=cosignatures)
        _show_leaf(file, leaf, json)
        return
    if not looks_like_proof(data):
        raise RequestError(
            f"{file} is no proof.",
            hint="Give a file that `felix audit prove` wrote, or one of c2sp.org/tlog-proof.",
        )
    with _judged_by(trust):
        proven = check_proof(data, trust, cosignatures_min=cosignatures)
    if json:
        print_json(proven)
        if proven.intent_version == 1:
            raise typer.Exit(EXIT_VERSION_1)
        return
    out.print(styled(("The proof holds.", "green"), f" {file}"))
    intent, receipt = proven.intent, proven.receipt
    rows: list[list[object]] = [
        [
            "record",
            f"{spelled_out(proven.stream)} shard {proven.shard} offset {proven.offset}, {proven.entry.size} bytes as it crossed",
        ],
        *_link(intent),
        *_approval(proven),
        ["about to cross", f"{iso(intent.time_ms)}, leaf {proven.intent_index}"],
        ["arrived", _arrival(receipt, proven.ack_index)],
        ["commitment", proven.entry.commitment.hex()],
        ["log", f"{proven.origin}, {proven.size:,} leaves"],
        ["cosigned", _cosigners(proven.cosigned)],
    ]
    if proven.unsupported:
        rows.append(["cannot support", "; ".join(proven.unsupported)])
    table("What it proves", ["", ""], rows)
    if proven.intent_version == 1:
        raise typer.Exit(EXIT_VERSION_1)


def _cosigners(cosigned: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} at {iso(seconds * 1000)}" for name, seconds in cosigned) or "by nobody"


def _show_leaf(file: Path, proven: ProvenLeaf, json: bool) -> None:
    if json:
        print_json(proven)
    else:
        _print_leaf(file, proven)
    if proven.version == 1:
        raise typer.Exit(EXIT_VERSION_1)


def _print_leaf(file: Path, proven: ProvenLeaf) -> None:
    out.print(styled(("The proof holds.", "green"), f" {file}"))
    header, entry = proven.header, proven.entry
    size = "" if entry is None else f", {entry.size} bytes as it crossed"
    arrived = "" if proven.receipt is None else _arrival(proven.receipt, proven.index)
    rows: list[list[object]] = [
        ["record", f"{spelled_out(header.stream)} shard {header.shard} offset {proven.offset}{size}"],
        *_link(header),
        ["leaf", f"{proven.index}, {proven.kind}, {iso(header.time_ms)}"],
        ["envelope", header.envelope_sha256.hex()],
        [
            "arrived",
            arrived or "not shown here: a proof of the ACK leaf with this envelope says so, if there is one",
        ],
        ["commitment", "" if entry is None else entry.commitment.hex()],
        ["log", f"{proven.origin}, {proven.size:,} leaves"],
        ["cosigned", _cosigners(proven.cosigned)],
    ]
    if proven.unsupported:
        rows.append(["does not show", "; ".join(proven.unsupported)])
    table("What it proves", ["", ""], rows)


_PURPOSE_ROWS: Final = ("purpose", "basis", "mechanism", "reference")


def _link(header: Header) -> list[list[object]]:
    """Where it went, by whom and under which grant. Texts of a leaf: whoever wrote the log chose them."""
    return [
        ["from, to", f"{spelled_out(header.source_region)} → {spelled_out(header.destination_region)}"],
        ["arrives as", spelled_out(header.destination_stream)],
        ["carried by", spelled_out(header.bridge)],
        ["grant", spelled_out(header.grant_id)],
        ["terms hash", header.terms_hash.hex()],
    ]


def _approval(proven: Proven) -> list[list[object]]:
    """Under which approval, where the proof shows it. Each text has a row, as whoever signs reads them (cli.terms): whatever stood between two could be in one of them."""
    approved = proven.approved
    if approved is None:
        return []
    why: list[list[object]] = [
        [name, value] for name, value in terms_rows(approved.terms) if name in _PURPOSE_ROWS
    ]
    differs: list[list[object]] = [
        ["countries differ", f"{sentence}."] for sentence in approved.placed_otherwise
    ]
    return [
        *why,
        [
            "approved by",
            lines(approved.approvers) if approved.approvers else "nobody, as both policies allow",
        ],
        ["accepted by", approved.accepted_by],
        ["countries", f"{approved.source_country} → {approved.destination_country}"],
        *differs,
    ]


def _arrival(receipt: Receipt | None, leaf: int | None) -> str:
    if receipt is None:
        return "not shown: this proof has no receipt"
    return (
        f"{iso(receipt.time_ms)}, destination offsets {receipt.destination_first_offset}–"
        f"{receipt.destination_last_offset}, leaf {leaf}, receipt signed by {receipt.destination_region}"
    )


# -- report --------------------------------------------------------------------------------------------


@app.command()
def report(
    log: Annotated[
        list[str] | None, typer.Option(help="An audit log: folder or URL; may be repeated.")
    ] = None,
    output: Annotated[Path, typer.Option("--out", help="The folder to write into.")] = Path("felix-report"),
    master: Annotated[str, typer.Option(help="A Spark master; this machine if left out.")] = "",
    since: Annotated[
        str, typer.Option(help="Only leaves from this time on: a date, or so long ago, as in 30d.")
    ] = "",
    until: Annotated[str, typer.Option(help="Only leaves before this time: a date, or so long ago.")] = "",
    openlineage_url: Annotated[str, typer.Option(help="Post lineage events there.")] = "",
    bundle: Bundles = None,
    cosignatures: Cosignatures = COSIGNATURES_MIN,
    policy: PolicyFile = None,
    remembered: RememberedNotes = None,
    accept_version_1: AcceptVersion1 = None,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Turn audit logs into the transfer register, reconciliation, exceptions, volumes and lineage, with Spark."""
    from audit.spark.session import require_spark

    require_spark()
    from audit.spark.report import EXIT_DIFFERENCES, run_report

    trust = trusted(bundle, policy)
    now = now_ms()
    moments = [parse_past(text, now) if text else None for text in (since, until)]
    held = remembered_notes(remembered)
    logs: list[str] = list(log or ())
    if not logs:
        found = choose_logs(None, region)
        notes = [data for _, data in held]
        logs = [str(path) for path in (to_report(found, trust, notes) if cosignatures else found)]
    told = _require_of(held, logs)
    for name in logs:
        _require_place(name, trust)
    notes = [*told, *remembered_here()]
    old = _roots(accept_version_1)
    with _judged_by(trust), progress(counted=False) as bar:
        task = bar.add_task("starting", total=None)
        result = run_report(
            logs,
            output,
            trust=trust,
            master=master or None,
            since=moments[0],
            until=moments[1],
            openlineage_url=openlineage_url or None,
            cosignatures_min=cosignatures,
            remembered=notes,
            accept_version_1=old,
            tell=lambda sentence: bar.update(task, description=sentence),
        )
    if json:
        print_json({"page": str(result.page), "seconds": result.seconds, "leaves": result.leaves,
                    "record_entries": result.record_entries, "totals": result.report.totals})  # fmt: skip
    else:
        out.print(
            f"{result.page}: {result.report.totals.records:,} records crossed, {result.leaves:,} leaves of "
            f"{counted(len(result.report.logs), 'log')}, {result.seconds:.1f} s"
        )
    missing = result.report.missing
    for sentence in (*missing.counterparts, *missing.region_logs, *missing.granted):
        note(sentence)
    for name, rows in result.report.left_off.items():
        note(f"The table {name} has {rows:,} rows more than a report lists; the totals count them.")
    for log_ in result.report.logs:
        if log_.version_1 is not None and log_.is_of_version_1:
            note(
                f"{log_.origin}: of version 0.1. If its first {log_.version_1.size:,} leaves are known to be old, say so: "
                f"--accept-version-1 {log_.version_1.root.hex()}. They cannot support {'; '.join(log_.unsupported)}."
            )
    if result.exit_code == EXIT_DIFFERENCES:
        note(
            "The logs differ, or something crossed outside its terms: see the reconciliation and the exceptions."
        )
    if result.is_long_open:
        note(
            "Records arrived that an egress log as given does not announce, an hour and more before a log of the link ends: give a later egress log."
        )
    if result.exit_code:
        raise typer.Exit(result.exit_code)
