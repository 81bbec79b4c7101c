"""`felix region offer` and `felix region trust`: what two organisations send each other, and how they tell it is theirs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from cli.form import chosen
from cli.grants import own_bundle
from cli.output import iso, lines, note, out, print_json, table
from cli.process import read_state
from cli.setting import JsonOption, RegionOption, connect, folder_of, read_file, run
from cli.terms import signed_text, signed_texts
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.files import PUBLIC, replace_file
from felix.messages import PutDocument
from felix.page import list_documents
from felix.runtime.real import now_ms
from keys.bundle import (
    FormerKeys,
    Known,
    RegionBundle,
    SignedBundle,
    brought_back,
    changes_beyond_fingerprint,
    check_bundle,
    check_not_ahead,
    check_update,
    decode_bundle,
)
from keys.offer import RegionOffer, SignedOffer, decode_offer, is_offer
from keys.pin import UNCOMPARED, SignedPin, continues, decode_pins
from region.folder import RegionFolder
from region.trust.offers import is_of_this_machine, keep_offer, kept_offer, make_offer

if TYPE_CHECKING:
    from audit.trust import RegionTrust
    from region.config import RegionConfig

_NOT_NAMED = "not named"


def offer(
    address: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port where others reach its brokers; may be repeated. Else where it listens."
        ),
    ] = None,
    contact: Annotated[
        str, typer.Option(help="Whom to ask, as in 'Data Office, +1 206 555 0100'; kept in region.yaml.")
    ] = "",
    output: Annotated[Path | None, typer.Option("--out", help="Where to write it.")] = None,
    region: RegionOption = "",
    json: JsonOption = False,
) -> None:
    """Write one signed file with all that another organisation needs: bundle, addresses, entity, contact.

    Send it by any way; nothing in it is secret. Read the fingerprint to their operator by another one.
    """
    from region.bootstrap import keep_contact

    folder, config = folder_of(region)
    if contact and contact != config.contact:
        keep_contact(folder, contact)
        note(f"{folder.config} names that contact from now on.")
    signed = make_offer(folder, config, address or (), contact, now_ms())
    made, bundle = signed.offer, signed.offer.bundle.bundle
    path = output or Path(f"{config.region}.offer")
    replace_file(path, signed.encode(), PUBLIC)
    if json:
        print_json(
            {
                "region": config.region, "mesh": config.mesh, "entity": made.entity, "contact": made.contact,
                "addresses": made.addresses, "issued_ms": made.issued_ms, "fingerprint": bundle.fingerprint(), "file": path,
            }
        )  # fmt: skip
        return
    out.print(f"The offer of {config.region} is in {path}")
    table("", ["", ""], _told(signed.offer.bundle, signed))
    if all(is_of_this_machine(each) for each in made.parsed_addresses()):
        note(f"{made.addresses[0]} is reached from this machine alone; say another with --address host:port.")
    if not made.entity:
        note(
            f"no entity is named in {folder.config}: who grants to {config.region} has to know its legal name."
        )
    out.print(
        f"They take it with: felix region trust {path.name}, and compare the fingerprint that you read them."
    )


def trust(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The other region's offer, or its bundle.json. Without one, what was compared already is handed over to the brokers, and taken from them.",
            show_default=False,
        ),
    ] = None,
    region: RegionOption = "",
    fingerprint: Annotated[
        str, typer.Option(help="The fingerprint its operator told you; refused if it differs.")
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask whether to trust what was compared.")
    ] = False,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Tell no broker: the first one that starts with this folder tells the others."
        ),
    ] = False,
) -> None:
    """Trust another region: its bridges may knock, its grants can be verified, its audit logs cosigned.

    What is trusted is the bundle with the fingerprint that you compared. A newer one that only names logs of new
    bridges needs no comparing; whatever else changes does. An offer says besides where the region is reached and which
    entity runs it: bridges and grants take that from it.
    """
    folder, config = folder_of(region)
    if file is None:
        if fingerprint or offline:
            raise RequestError(
                "There is nothing to compare without a file.", hint="Name the other region's offer."
            )
        _exchange(folder, config)
        return
    received = _read(file)
    other = received.bundle.bundle
    if other.region == config.region:
        raise RequestError(f"{file} is of {config.region} itself.", hint="Give the other region's.")
    _same_mesh(config, other)
    others = _others(folder, other)
    _has_own_keys(folder, received.bundle, others)
    table(f"{file.name} says", ["", ""], _told(received.bundle, received.offer))
    _not_older(folder, received)
    _none_brought_back(folder, other)
    for sentence in _skipped(folder, other):
        note(sentence)
    if not folder.policy_key.exists() and not offline:
        # Whoever has the key may have compared another one than this folder has.
        _take_compared(folder, config, other.region)
    asked = _compare(folder, received.bundle, fingerprint, _known(folder, config, others))
    if not yes and not asked:
        _ask(folder, received, bool(fingerprint))
    _believe(folder, config, received, is_compared=bool(fingerprint) or asked, offline=offline)
    out.print(f"{config.region} trusts {other.region}, fingerprint {other.fingerprint()}")


def _believe(
    folder: RegionFolder, config: RegionConfig, received: Received, *, is_compared: bool, offline: bool
) -> None:
    """Store what was compared, and tell the brokers. Raises RequestError, UnavailableError where no broker was told."""
    from region.bootstrap import trust_region
    from region.trust.trusted_bundles import read_pin

    other, own, has_key = received.bundle.bundle, own_bundle(folder), folder.policy_key.exists()
    pin = read_pin(folder, own, other.region)
    if not has_key and pin is not None and (pin.is_withdrawn or not continues(pin.bundle, received.bundle)):
        raise RequestError(
            f"{other.region} is {'trusted no more' if pin.is_withdrawn else 'trusted'} by a pin that {config.region} signed, and there is no policy key in {folder.secrets} to sign another one.",
            code=Code.CONFLICT,
            hint="Run it on the machine that has the key; all brokers and agents learn of it.",
        )
    before = Stood.read(
        *(folder.trusted / f"{other.region}.json", folder.pin(other.region), folder.offer(other.region))
    )
    # Pinned first: the broker takes what was compared, whatever it trusted before.
    trust_region(folder, received.bundle, now_ms(), is_compared=is_compared)
    if received.offer is not None:
        keep_offer(folder, received.offer)
    documents = []
    pin = read_pin(folder, own, other.region)
    if has_key and pin is not None:
        documents.append(PutDocument("pin", pin.encode()))
    if pin is None:
        note(f"there is no policy key in {folder.secrets}: only brokers with this folder believe it.")
        if read_state(folder.broker_pid) is not None:
            documents.append(PutDocument("bundle", received.bundle.encode()))
    elif pin.bundle != other:
        documents.append(PutDocument("bundle", received.bundle.encode()))
    if offline or not documents:
        return
    taken: list[PutDocument] = []
    try:
        run(put_documents(config.region, documents, taken))
    except FelixError as error:
        if error.told and not taken and not isinstance(error, UnavailableError):
            # The brokers go by something else: so does this folder, and the agents that read it.
            before.put_back()
        if error.told:
            raise
        raise not_told(folder, config.region, error) from error


class Stood(NamedTuple):
    """Files of a folder as they stood; None for one that was not there."""

    files: dict[Path, bytes | None]

    @classmethod
    def read(cls, *paths: Path) -> Stood:
        return cls({path: path.read_bytes() if path.exists() else None for path in paths})

    def put_back(self) -> None:
        """As they stood."""
        for path, data in self.files.items():
            if data is None:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != data:
                replace_file(path, data, PUBLIC)


def not_told(folder: RegionFolder, region: str, error: FelixError) -> FelixError:
    """For what a folder has, and no broker was told."""
    kind = UnavailableError if isinstance(error, UnavailableError) else RequestError
    return kind(
        f"What was compared is in {folder.trusted}, and no broker of {region} was told yet. {error.sentence}",
        code=error.code,
        hint=f"Where one answers: felix region trust --region {region}. A broker that starts with this folder tells the others, too.",
        retry_after_ms=error.retry_after_ms,
    )


def _exchange(folder: RegionFolder, config: RegionConfig) -> None:
    """Hand over what this folder's pins say, where the brokers go by earlier ones, and take theirs where those are later. Raises UnavailableError."""
    from region.trust.trusted_bundles import former_bundles, keep_pin, signed_pins

    own = own_bundle(folder)
    held = {pin.bundle.region: pin for pin in signed_pins(folder, own)}
    there = run(_pins(config.region, own))
    conflicts = [name for name, pin in held.items() if name in there and pin.conflicts_with(there[name])]
    # One that brokers go by is given again, too: the metadata store may have lost it.
    given = [
        pin
        for name, pin in held.items()
        if name not in conflicts and (name not in there or pin.is_at_least(there[name]))
    ]
    run(put_documents(config.region, [PutDocument("pin", pin.encode()) for pin in given]))
    taken = [pin for name, pin in there.items() if name not in held or not held[name].is_at_least(pin)]
    for pin in taken:
        keep_pin(folder, pin)
    if conflicts:
        raise _in_conflict(folder, config.region, conflicts)
    if chosen.is_data:
        told, found = {pin.bundle.region for pin in given}, {pin.bundle.region for pin in taken}
        trusted = [
            {**each._asdict(), "told": each.region in told, "taken": each.region in found}
            for each in _trusted(folder, own)
        ]
        print_json(trusted, kind="TrustedRegion")
        return
    for pin in given:
        out.print(f"the brokers of {config.region} were told of {_pinned_in_words(pin)}")
    for pin in taken:
        out.print(f"{folder.trusted} has {_pinned_in_words(pin)}, as the brokers do")
    for name in former_bundles(folder):
        note(f"{name} is not trusted any more; what it signed until then verifies.")
    if not given and not taken:
        note(f"neither {folder.trusted} nor the brokers of {config.region} have a signed pin.")
    if regions := _trusted(folder, own):
        table(
            f"{config.region} trusts",
            ["region", "compared", "former keys", "fingerprint"],
            [
                [each.region, each.compared_in_words, ended_in_words(each.former_keys), each.fingerprint]
                for each in regions
            ],
        )


def _pinned_in_words(pin: SignedPin) -> str:
    told = "not trusted any more" if pin.is_withdrawn else f"fingerprint {pin.bundle.fingerprint()}"
    return f"{pin.bundle.region}, {told}"


def _in_conflict(folder: RegionFolder, region: str, others: Sequence[str]) -> RequestError:
    named = " and ".join(others)
    return RequestError(
        f"{folder.trusted} and the brokers of {region} have pins of {named} with different bundles, and neither was compared later.",
        code=Code.CONFLICT,
        hint=f"Where {region}'s policy key is: felix region trust FILE --region {region} --fingerprint …, with the bundle that the other region's "
        "operator has now. All brokers and agents learn of it.",
    )


class Trusted(NamedTuple):
    """Another region, by the bundle that the folder has. `compared_ms`: None where nobody knows when people compared it."""

    region: str
    fingerprint: str
    issued_ms: int
    compared_ms: int | None
    former_keys: tuple[FormerKeys, ...]

    @property
    def compared_in_words(self) -> str:
        return "at an unknown time" if self.compared_ms is None else iso(self.compared_ms)


def _trusted(folder: RegionFolder, own: RegionBundle) -> list[Trusted]:
    """The regions that this folder trusts, by name. Raises RequestError, which names the file that cannot be read."""
    from region.trust.trusted_bundles import pinned_bundles, read_pin

    found = []
    for region, bundle in sorted(pinned_bundles(folder).items()):
        pin = read_pin(folder, own, region)
        compared_ms = pin.pin.number if pin is not None and pin.pin.number > UNCOMPARED else None
        found.append(Trusted(region, bundle.fingerprint(), bundle.issued_ms, compared_ms, bundle.former))
    return found


def ended_in_words(former: Sequence[FormerKeys]) -> Text:
    """Keys that a region gave up, a line for those that ended together: which, and in how many logs what they signed counts."""
    return lines(map(_ended, former) if former else ["none"])


def _ended(keys: FormerKeys) -> str:
    roles = [role for role, held in (("policy", keys.policy_keys), ("receipt", keys.receipt_keys)) if held]
    return f"{' and '.join(roles)}, up to their ends in {len(keys.ends):,} logs"


def _take_compared(folder: RegionFolder, config: RegionConfig, other: str) -> None:
    """Take what was compared on the machine with the policy key, as far as a broker says it."""
    from region.trust.trusted_bundles import keep_pin, read_pin

    own = own_bundle(folder)
    try:
        there = run(_pins(config.region, own)).get(other)
    except FelixError as error:
        note(f"what the brokers of {config.region} believe is not known here: {error.sentence}")
        return
    held = read_pin(folder, own, other)
    if there is not None and (held is None or not held.is_at_least(there)):
        keep_pin(folder, there)
        note(f"{other} was compared where the policy key is; this folder has that now.")


class Received(NamedTuple):
    """The file that another region's operator sent. `offer`: None if it was only a bundle."""

    bundle: SignedBundle
    offer: SignedOffer | None


def _read(path: Path) -> Received:
    data = read_file(path, "The offer")
    if is_offer(data):
        offer = decode_offer(data)
        return Received(offer.offer.bundle, offer)
    return Received(decode_bundle(data), None)


def _party(offer: RegionOffer) -> list[list[str | Text]]:
    return [
        ["entity", signed_text(offer.entity, _NOT_NAMED)],
        ["contact", signed_text(offer.contact, _NOT_NAMED)],
    ]


def _told(signed: SignedBundle, offer: SignedOffer | None) -> list[list[str | Text]]:
    """The content of a bundle and an offer, as rows for people. Its texts are that region's, and whoever reads them has a pin signed: none looks like rows of its own."""
    bundle = signed.bundle
    rows: list[list[str | Text]] = [
        ["region", f"{bundle.region} of mesh {bundle.mesh}"],
        ["country", bundle.country],
        ["jurisdiction", signed_text(bundle.jurisdiction)],
    ]
    if offer is not None:
        rows += [
            *_party(offer.offer),
            ["reached at", signed_texts(offer.offer.addresses, "")],
        ]
    bridges = dict.fromkeys(key.name.rpartition("/")[2] for key in bundle.bridge_logs())
    rows.append(["bridges", signed_texts(bridges, "none yet")])
    if bundle.former:
        rows.append(["former keys", ended_in_words(bundle.former)])
    return [
        *rows,
        ["issued", iso(offer.offer.issued_ms if offer is not None else bundle.issued_ms)],
        ["fingerprint", bundle.fingerprint()],
    ]


def _skipped(folder: RegionFolder, other: RegionBundle) -> list[str]:
    """A sentence for each role of which a key that is trusted here is neither one of now nor a former one in that bundle, and for each log of which one is not in it."""
    path = folder.trusted / f"{other.region}.json"
    try:
        held = decode_bundle(path.read_bytes()).bundle
    except (FelixError, FileNotFoundError):
        return []
    policy = {key for former in other.former for key in former.policy_keys}.union(other.policy_keys)
    receipt = {key for former in other.former for key in former.receipt_keys}.union(other.receipt_keys)
    # A log's key stays in the bundle, up to its end, which does not move.
    spans = {(key.name, key.public): key.to_size for key in other.audit_keys if key.role == "log"}
    cut = dict.fromkeys(
        key.name
        for key in held.audit_keys
        if key.role == "log"
        and ((key.name, key.public) not in spans or _ends_below(spans[key.name, key.public], key.to_size))
    )
    return [
        f"A key of the log {name} that is trusted here is none of this bundle, or signs less than it did: what it signed there counts nowhere any more. Ask its operator: a bundle looks so that "
        "was made from one of before the last change of the log's keys."
        for name in cut
    ] + [
        f"The {role} key of {other.region} that is trusted here is neither one of now nor a former one in this bundle: what it signed counts nowhere any more. Ask its operator: "
        "a bundle looks so that was made from one of before the last change of keys."
        for role, before, named in (
            ("policy", held.policy_keys, policy),
            ("receipt", held.receipt_keys, receipt),
        )
        if not named.issuperset(before)
    ]


def _ends_below(size: int | None, held: int | None) -> bool:
    return size is not None and held is not None and size < held


def _same_mesh(config: RegionConfig, other: RegionBundle) -> None:
    """Raises RequestError(WRONG_REGION) for a region of another mesh, with what the two can do."""
    if other.mesh != config.mesh:
        raise RequestError(
            f"{other.region} belongs to mesh {other.mesh!r}, {config.region} to {config.mesh!r}; regions trust each other "
            "within one mesh.",
            code=Code.WRONG_REGION,
            hint="Agree on one name. It is part of every identity and does not change: the region with the least to lose moves its "
            f"folder away and is created again, as in felix region init {config.region} --mesh {other.mesh}.",
        )


def _others(folder: RegionFolder, other: RegionBundle) -> list[RegionTrust]:
    """This region, and those that it trusts besides this other one."""
    from audit.trust import RegionTrust

    found = []
    for path in (folder.bundle, *sorted(folder.trusted.glob("*.json"))):
        # A file that does not hold is told by whoever needs that region.
        with suppress(FelixError, OSError):
            held = decode_bundle(path.read_bytes()).bundle
            if held.region != other.region:
                found.append(RegionTrust(held))
    return found


def _has_own_keys(folder: RegionFolder, signed: SignedBundle, others: list[RegionTrust]) -> None:
    """Raises RequestError where one of its keys can be taken for another one, or others have the key of one of its witnesses (CONFLICT)."""
    from audit.trust import RegionTrust, check_cosigner_keys

    check_bundle(signed, _held(folder, signed.bundle.region))
    check_cosigner_keys((RegionTrust(signed.bundle), *others))


def _known(folder: RegionFolder, config: RegionConfig, others: list[RegionTrust]) -> Known:
    """Whose keys are known here, outside witnesses' among them."""
    from audit.trust import parties_of

    outside = [key for each in config.audit.witnesses for key in each.target(folder.root).keys]
    return parties_of((each.bundle for each in others), outside)


def _held(folder: RegionFolder, region: str) -> RegionBundle | None:
    """The bundle of this region that is trusted now. Raises RequestError."""
    path = folder.trusted / f"{region}.json"
    return decode_bundle(read_file(path, "The trusted bundle")).bundle if path.exists() else None


def _not_older(folder: RegionFolder, received: Received) -> None:
    """Raises RequestError(CONFLICT) for an offer that was overtaken by one that is kept: its addresses are those of before."""
    new = received.offer
    kept = kept_offer(folder, received.bundle.bundle.region)
    if (
        new is not None
        and kept is not None
        and new.is_by(kept.bundle.bundle)
        and new.offer.issued_ms < kept.issued_ms
    ):
        raise RequestError(
            f"This offer is of {iso(new.offer.issued_ms)}; a newer one, of {iso(kept.issued_ms)}, is kept.",
            code=Code.CONFLICT,
            hint="Have that region's operator make another one: felix region offer.",
        )


def _none_brought_back(folder: RegionFolder, other: RegionBundle) -> None:
    """Raises RequestError(CONFLICT) for a bundle of before the one that is trusted here, or one in which a key signs on that this one says was given up. People may have compared it,
    before the change: its fingerprint proves nothing of now, and who has a key of then has the bundle, too."""
    held = _held(folder, other.region)
    if held is None:
        return
    if other.issued_ms < held.issued_ms:
        why = f"is of {iso(other.issued_ms)}, and the one that is trusted here of {iso(held.issued_ms)}"
    elif back := brought_back(held, other):
        why = f"has {', '.join(back)} again, which it gave up by the one that is trusted here"
    else:
        return
    path = folder.trusted / f"{other.region}.json"
    raise RequestError(
        f"This bundle of {other.region} {why}.",
        code=Code.CONFLICT,
        hint=f"Ask its operator for the newest one, and compare that. Where the one that is trusted here is the wrong one, take {path} away, and run this again.",
    )


def _is_read() -> bool:
    """Whether a person reads what is shown, and can be asked: where the output is an object, neither rows nor fingerprint are shown before."""
    return sys.stdin.isatty() and not chosen.is_data


def _ask(folder: RegionFolder, received: Received, is_compared: bool) -> None:
    """Ask where there is something to agree to besides the fingerprint. Raises RequestError where the answer is no.

    Without a terminal, a fingerprint that was given is the answer. An update that came without one is taken, too, unless it
    names another entity or contact than before: these go into grants and registers.
    """
    bundle, new = received.bundle.bundle, received.offer
    kept = kept_offer(folder, bundle.region)
    changed = (
        new is not None
        and kept is not None
        and (new.offer.entity, new.offer.contact) != (kept.entity, kept.contact)
    )
    if kept is not None and changed:
        table("Until now", ["", ""], _party(kept))
    if _is_read():
        if not typer.confirm(f"Trust {bundle.region} as it stands above?", err=True):
            raise RequestError(f"{bundle.region} is not trusted; nothing was changed.")
    elif changed and not is_compared:
        raise RequestError(
            f"The offer of {bundle.region} names another entity or contact than before, and there is no terminal to ask at.",
            hint="Read what it says, then call it with --yes.",
        )


def _compare(folder: RegionFolder, signed: SignedBundle, fingerprint: str, known: Known) -> bool:
    """Whether a person was asked. Raises unless people compared the bundle's fingerprint, or it is a successor that needs no
    comparing. After a change of the own policy key they compare again.

    The fingerprint says nothing of bridges' logs. Where one that is trusted has another key now, or a new one the key of somebody else,
    the whole bundle's is compared. `known`: whose keys are known here.
    """
    from region.trust.trusted_bundles import is_pinned_before, is_withdrawn

    new = signed.bundle
    held = _held(folder, new.region)
    beyond = changes_beyond_fingerprint(held, new, known)
    found, option = new.fingerprint(), "--fingerprint"
    if beyond:
        found, option = new.whole_fingerprint(), "--fingerprint --whole"
    given = fingerprint.replace(" ", "").lower()
    if given:
        # Comparing the whole bundle includes comparing what founds the region.
        if given in (found.replace(" ", ""), new.whole_fingerprint().replace(" ", "")):
            return False
        if given == new.fingerprint().replace(" ", ""):
            raise RequestError(
                f"The fingerprint is that of {new.region}, but the new bundle has {', '.join(beyond)}.",
                hint=f"Ask that region's operator. If it is so, compare the whole bundle: felix region bundle {option}.",
            )
        raise RequestError(
            f"The bundle's fingerprint is {found}, not the one given.",
            hint="Do not trust it. Get the bundle again from that region's operator.",
        )
    changed, own = "", own_bundle(folder)
    if folder.policy_key.exists() and is_pinned_before(folder, own, new.region):
        # What was compared last, and on which machine, only the numbers of the former key's pins say, and a thief of it may have chosen those.
        changed = (
            f" {own.region} changed its policy key, and no pin of {new.region} here is under the one of now."
        )
    elif is_withdrawn(folder, new.region):
        changed = f" {own.region} took its trust in {new.region} back."
    elif held is not None:
        try:
            if held != new:
                check_update(held, signed, known)
                check_not_ahead(new, now_ms())
            return False
        except FelixError as error:
            changed = f" {error.sentence}"
    if not _is_read():
        raise RequestError(
            f"Nobody compared the fingerprint of {new.region}'s bundle.{changed}",
            hint="Ask that region's operator for it by another way than the file came (`felix region bundle "
            f"{option}` there), and give it with --fingerprint.",
        )
    if changed:
        note(changed.strip())
    out.print(f"The bundle of {new.region} has the fingerprint")
    out.print(f"  {found}")
    if not typer.confirm(f"Does the operator of {new.region} read you the same?", err=True):
        raise RequestError(f"{new.region} is not trusted.", hint="Get the bundle again from its operator.")
    return True


async def put_documents(
    region: str, documents: Sequence[PutDocument], taken: list[PutDocument] | None = None
) -> None:
    """Hand these to a broker of the region. `taken`: gets those that it took. Raises what it is refused with."""
    async with connect(region) as client:
        for each in documents:
            await client.request(each)
            if taken is not None:
                taken.append(each)


async def _pins(region: str, own: RegionBundle) -> dict[str, SignedPin]:
    """The pins that a broker goes by and this region's policy key signed, by region."""
    async with connect(region) as client:
        found = await list_documents(client, "pin")
    return decode_pins(found, own)
