"""Founding a region: everything `felix region init` makes, and identities and bundles after it. Blocks on the disk.

Invariants: nothing that exists is overwritten; private files are private from their first byte on; the public
bundle names every audit log of the region, so it is signed again when a bridge joins, with its new log.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from audit.origin import Origin, egress_origin, region_origin, witness_name
from audit.signer_disk import held_keys
from felix.address import Address
from felix.certificate import RenewalTerms
from felix.errors import Code, RequestError, UnavailableError
from felix.files import PUBLIC, create_file, replace_file
from felix.identity import Identity
from felix.identity_file import load_identity, save_identity
from felix.names import SpiffeId, parse_region
from keys.authority import create_authority, load_authority, save_authority
from keys.bundle import AuditKey, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.hybrid import HybridKeyPair
from keys.key_file import (
    load_key_pair,
    load_ml_dsa_key,
    load_signing_key,
    save_key_pair,
    save_ml_dsa_key,
    save_signing_key,
)
from keys.keyring import create_keyring
from keys.pin import UNCOMPARED, Pin, SignedPin, sign_pin
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
from policy.approval import APPROVER
from policy.documents import decode_document
from region.config import IdentitiesConfig, RegionConfig
from region.folder import RegionFolder
from region.trust.begun_change import changes_bundle, require_none_begun
from region.trust.trusted_bundles import read_pin, trusted_file

OPERATOR: Final = "operator"
_COUNTRY: Final = re.compile("[A-Z]{2}")

_CONFIG: Final = """\
# One broker of the region {region}. Every key: docs/operations.md.
region: {region}
mesh: {mesh}
country: {country}
entity: {entity}
contact: {contact}
broker: b1
listen: {listen}
health: {health}
operators: [{operator}]
metadata:
  kind: embedded
"""


def found_region(
    folder: RegionFolder,
    *,
    region: str,
    mesh: str,
    country: str,
    jurisdiction: str,
    entity: str,
    contact: str = "",
    listen: Address,
    health: Address | None,
    now_ms: int,
) -> SignedBundle:
    """Make a new region in its folder. Raises RequestError(ALREADY_EXISTS, NAME_INVALID, CONFIG_INVALID); OSError, or UnavailableError of a root key, with the folder as empty as it was."""
    parse_region(region)
    parse_region(mesh)
    if not _COUNTRY.fullmatch(country):
        raise RequestError(
            f"{country!r} is not a country's code: expected two capital letters, as in DE (ISO 3166-1 alpha-2).",
            code=Code.CONFIG_INVALID,
        )
    if folder.root.exists() and any(folder.root.iterdir()):
        raise RequestError(
            f"{folder.root} is not empty; a region is founded once.",
            code=Code.ALREADY_EXISTS,
            hint=f"Start it with felix region up {region}, or remove the folder, keys and data with it.",
        )
    with _all_or_nothing(folder.root):
        for path in (folder.root, folder.secrets, folder.identities, folder.trusted, folder.run):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = create_authority(region, mesh, now_ms)
        save_authority(authority, folder.authority)
        create_keyring(folder.keys, region)
        policy_key = SigningKey.generate()
        made: dict[Path, SigningKey] = {
            folder.policy_key: policy_key,
            folder.receipt_key: SigningKey.generate(),
            folder.audit_key: SigningKey.generate(),
            folder.witness_key: SigningKey.generate(),
        }
        for path, key in made.items():
            save_signing_key(key, path)
        post_quantum = {
            path: MlDsaKey.generate() for path in (folder.audit_ml_dsa_key, folder.witness_ml_dsa_key)
        }
        for path, ml_dsa_key in post_quantum.items():
            save_ml_dsa_key(ml_dsa_key, path)
        log_name, cosigner_name = region_origin(region, mesh), witness_name(region, mesh)
        import_key = HybridKeyPair.generate()
        save_key_pair(import_key, folder.import_key)
        bundle = sign_bundle(
            RegionBundle(
                region=region,
                mesh=mesh,
                country=country,
                jurisdiction=jurisdiction,
                issued_ms=now_ms,
                root_pem=authority.anchor().root_pem.decode(),
                policy_keys=(policy_key.verify_key.public,),
                receipt_keys=(made[folder.receipt_key].verify_key.public,),
                audit_keys=(
                    AuditKey(log_name, "log", made[folder.audit_key].verify_key.public),
                    AuditKey(log_name, "log", post_quantum[folder.audit_ml_dsa_key].public, "ml-dsa-44"),
                    AuditKey(cosigner_name, "cosigner", made[folder.witness_key].verify_key.public),
                    AuditKey(
                        cosigner_name, "cosigner", post_quantum[folder.witness_ml_dsa_key].public, "ml-dsa-44"
                    ),
                ),
                import_key=import_key.public.encoded,
            ),
            policy_key,
        )
        create_file(folder.bundle, bundle.encode(), PUBLIC)
        operator = IdentitiesConfig().operator
        save_identity(
            authority.issue_identity(
                SpiffeId(region, mesh, "operator", OPERATOR),
                now_ms,
                renewal=RenewalTerms(now_ms + operator.renewable_for, operator.lifetime),
            ),
            folder.identity(OPERATOR),
        )
        text = _CONFIG.format(
            region=region,
            mesh=mesh,
            country=country,
            entity=json.dumps(entity),
            contact=json.dumps(contact),
            listen=json.dumps(str(listen)),
            health=json.dumps(str(health)) if health else "null",
            operator=OPERATOR,
        )
        create_file(folder.config, text.encode(), PUBLIC)
        write_profile(folder, region, mesh, listen)
        return bundle


@contextmanager
def _all_or_nothing(root: Path) -> Iterator[None]:
    """What finds no room or fails leaves the folder as empty as it was: a part of a region would be taken for one the next time. Nobody knows any of its keys yet."""
    try:
        yield
    except (OSError, UnavailableError):
        for each in root.iterdir() if root.exists() else ():
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            else:
                with suppress(OSError):
                    each.unlink()
        raise


def keep_contact(folder: RegionFolder, contact: str) -> None:
    """Write into the configuration whom to ask about the region; whatever else stands there stays. Raises RequestError(CONFIG_INVALID)."""
    text = folder.config.read_text(encoding="utf-8")
    line = f"contact: {json.dumps(contact)}"
    if re.search(r"^contact:", text, re.M):
        text = re.sub(r"^contact:.*$", lambda _: line, text, count=1, flags=re.M)
    else:
        text = f"{text.rstrip()}\n{line}\n"
    try:
        is_so = decode_document(text, RegionConfig, str(folder.config)).contact == contact
    except RequestError:
        is_so = False
    if not is_so:
        raise RequestError(
            f"The contact in {folder.config} is written over several lines.",
            code=Code.CONFIG_INVALID,
            hint="Change it there.",
        )
    replace_file(folder.config, text.encode(), PUBLIC)


def write_profile(folder: RegionFolder, region: str, mesh: str, *addresses: Address) -> None:
    """How clients on this machine reach the region: its brokers, tried in turn. Written again when the broker's address is known."""
    profile = {
        "region": region,
        "mesh": mesh,
        "addresses": [str(address) for address in addresses],
        "server_name": f"{region}.{mesh}",
        "authority": folder.bundle.name,
        "identity": f"{folder.identities.name}/{OPERATOR}.pem",
    }
    replace_file(folder.profile, (json.dumps(profile, indent=2) + "\n").encode(), PUBLIC)


def identity_file(folder: RegionFolder, wanted: SpiffeId) -> Path:
    """Where an identity is kept: under its name; an approver's under name and kind where an operator has that name. Whoever draws grants up and approves others has one
    name for both, by which `separate` knows them. Raises RequestError(ALREADY_EXISTS)."""
    path = folder.identity(wanted.name)
    apart = folder.approver(wanted.name)
    held = load_identity(path).spiffe_id if path.exists() else None
    if wanted.kind == APPROVER and (apart.exists() or (held is not None and held.kind == OPERATOR)):
        path, held = apart, load_identity(apart).spiffe_id if apart.exists() else None
    if held not in (None, wanted):
        raise RequestError(f"{path} holds {held}; {wanted} needs another name.", code=Code.ALREADY_EXISTS)
    return path


def _make_room(folder: RegionFolder, wanted: SpiffeId) -> None:
    """An operator's identity is under its name alone, where commands look for it: an approver's of that name is kept under its kind from then on."""
    path, apart = folder.identity(wanted.name), folder.approver(wanted.name)
    if wanted.kind == OPERATOR and path.exists() and not apart.exists():
        held = load_identity(path).spiffe_id
        if (held.kind, held.name) == (APPROVER, wanted.name):
            path.rename(apart)


def issue_identity(
    folder: RegionFolder,
    config: RegionConfig,
    kind: str,
    name: str,
    now_ms: int,
    *,
    lifetime: timedelta | None = None,
    renewable_for: timedelta | None = None,
) -> Identity:
    """A new identity of the region, or a renewed one where its file exists, saved in the folder.

    `lifetime` of its certificates, and how long it may renew itself, are those of its kind in the configuration unless given. A
    bridge also gets the keys of its egress log and for data keys, and the bundle is signed again.
    """
    authority = load_authority(folder.authority, config.region, config.mesh)
    spiffe_id = SpiffeId(config.region, config.mesh, kind, name)
    _make_room(folder, spiffe_id)
    path = identity_file(folder, spiffe_id)
    if kind == "bridge":
        _found_bridge(folder, config, name, now_ms)
    lifetime, terms = _terms(config, kind, now_ms, lifetime, renewable_for)
    identity = authority.issue_identity(spiffe_id, now_ms, lifetime=lifetime, renewal=terms)
    save_identity(identity, path)
    return identity


CERTIFIED_KINDS: Final = ("client", OPERATOR, APPROVER)
"""Those that are a key and its certificate, and no more."""


def certify_identity(
    folder: RegionFolder,
    config: RegionConfig,
    kind: str,
    name: str,
    public_key: ec.EllipticCurvePublicKey,
    now_ms: int,
    *,
    lifetime: timedelta | None = None,
    renewable_for: timedelta | None = None,
) -> tuple[SpiffeId, bytes]:
    """A certificate chain (PEM) for a key that somebody else holds; nothing is kept of it here. The rest as `issue_identity`.

    Raises RequestError(UNSUPPORTED) for kinds that have other keys besides.
    """
    if kind not in CERTIFIED_KINDS:
        raise RequestError(
            f"An identity of kind {kind} has more keys than the one that was requested for.",
            code=Code.UNSUPPORTED,
            hint=f"Issue it without --request; with one: {', '.join(CERTIFIED_KINDS)}.",
        )
    authority = load_authority(folder.authority, config.region, config.mesh)
    spiffe_id = SpiffeId(config.region, config.mesh, kind, name)
    lifetime, terms = _terms(config, kind, now_ms, lifetime, renewable_for)
    return spiffe_id, authority.issue(spiffe_id, public_key, now_ms, lifetime=lifetime, renewal=terms)


def _terms(
    config: RegionConfig, kind: str, now_ms: int, lifetime: timedelta | None, renewable_for: timedelta | None
) -> tuple[timedelta | None, RenewalTerms | None]:
    """How long a certificate of this kind holds, and what it says of renewal."""
    settings = config.identities.of(kind)
    if settings is None:
        return lifetime, None
    life = timedelta(milliseconds=settings.lifetime) if lifetime is None else lifetime
    span = timedelta(milliseconds=settings.renewable_for) if renewable_for is None else renewable_for
    return life, RenewalTerms(now_ms + span // timedelta(milliseconds=1), life // timedelta(milliseconds=1))


@changes_bundle
def _found_bridge(folder: RegionFolder, config: RegionConfig, name: str, now_ms: int) -> None:
    _require_named_keys(folder, config, name)
    if not folder.handoff_key(name).exists():
        save_key_pair(HybridKeyPair.generate(), folder.handoff_key(name))
    if not folder.egress_key(name).exists():
        save_signing_key(SigningKey.generate(), folder.egress_key(name))
    if not folder.egress_ml_dsa_key(name).exists():
        save_ml_dsa_key(MlDsaKey.generate(), folder.egress_ml_dsa_key(name))
    egress, ml_dsa = (
        load_signing_key(folder.egress_key(name)),
        load_ml_dsa_key(folder.egress_ml_dsa_key(name)),
    )
    load_key_pair(folder.handoff_key(name))
    origin = egress_origin(config.region, config.mesh, name)
    signed = _naming(
        folder,
        (
            AuditKey(origin, "log", egress.verify_key.public),
            AuditKey(origin, "log", ml_dsa.public, "ml-dsa-44"),
        ),
        now_ms,
    )
    if signed is not None:
        replace_file(folder.bundle, signed.encode(), PUBLIC)


def _require_named_keys(folder: RegionFolder, config: RegionConfig, name: str) -> None:
    """Raises RequestError(CONFLICT) where the bundle names keys of the bridge's log, and one of them is not here: other ones would sign what nobody believes."""
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    origin = egress_origin(config.region, config.mesh, name)
    held = held_keys(origin, folder.egress_key(name), folder.egress_ml_dsa_key(name))
    lost = [
        key.algorithm
        for key in bundle.audit_keys
        if (key.role, key.name) == ("log", origin) and key.to_size is None and key.public not in held
    ]
    if lost:
        raise RequestError(
            f"The bundle of {bundle.region} names keys of the log {origin} that are not in {folder.egress_key(name).parent}: {', '.join(lost)}.",
            code=Code.CONFLICT,
            hint=f"Put them there from a backup. Where they are lost: felix region change-log-keys --region {bundle.region} --bridge {name} --lost-keys, beside the log; then run this again. Where the log is lost, too: issue a bridge of another name.",
        )


def _naming(folder: RegionFolder, wanted: tuple[AuditKey, ...], now_ms: int) -> SignedBundle | None:
    """The region's bundle with those of these keys that it does not name yet, signed again; None if it names them all. Raises
    RequestError(CONFLICT) where a change of signing keys was cut off."""
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    named = {(key.name, key.algorithm) for key in bundle.audit_keys}
    missing = tuple(key for key in wanted if (key.name, key.algorithm) not in named)
    if not missing:
        return None
    require_none_begun(folder, bundle)
    renewed = msgspec.structs.replace(
        bundle,
        issued_ms=max(now_ms, bundle.issued_ms + 1),
        audit_keys=(*bundle.audit_keys, *missing),
    )
    return sign_bundle(renewed, load_signing_key(folder.policy_key))


@changes_bundle
def add_log_keys(folder: RegionFolder, config: RegionConfig, now_ms: int) -> SignedBundle | None:
    """Give the region's log and witness, and the logs of its bridges, the ML-DSA-44 keys that they lack, as those of regions
    founded by version 0.1 do. The new bundle; None where nothing was missing.

    The Ed25519 keys stay, so what they signed holds as before. Raises RequestError where the bundle has no room.
    """
    region, mesh = config.region, config.mesh
    roles: list[tuple[Path, str, Literal["log", "cosigner"]]] = [
        (folder.audit_ml_dsa_key, region_origin(region, mesh), "log"),
        (folder.witness_ml_dsa_key, witness_name(region, mesh), "cosigner"),
    ]
    for key in decode_bundle(folder.bundle.read_bytes()).bundle.audit_keys:
        bridge = Origin.parse(key.name).bridge if key.role == "log" else None
        if bridge is not None and folder.egress_key(bridge.name).exists():
            roles.append((folder.egress_ml_dsa_key(bridge.name), key.name, "log"))
    made: dict[Path, MlDsaKey] = {}
    wanted = []
    for path, name, role in dict.fromkeys(roles):
        key_pair = load_ml_dsa_key(path) if path.exists() else made.setdefault(path, MlDsaKey.generate())
        wanted.append(AuditKey(name, role, key_pair.public, "ml-dsa-44"))
    signed = _naming(folder, tuple(wanted), now_ms)
    for path, key_pair in made.items():
        save_ml_dsa_key(key_pair, path)
    if signed is not None:
        replace_file(folder.bundle, signed.encode(), PUBLIC)
    return signed


def trust_region(
    folder: RegionFolder, signed: SignedBundle, now_ms: int, *, is_compared: bool = True
) -> SignedPin | None:
    """Store another region's bundle among the trusted ones, and sign its pin with the region's policy key. A running broker must be notified
    separately (PutDocument "pin"; "bundle", where there is no new one).

    `is_compared`: people did it now. Else the bundle was trusted here before, or follows one that was: the pin that stands is kept; where none was
    signed yet, its number is below that of whatever was compared elsewhere: a bundle's own time of issue is the word of whoever has the other
    region's key. None without a new pin, as where the folder has no policy key: then this folder's broker alone believes the bundle. Raises
    RequestError where no pin can be signed; then nothing was stored.
    """
    bundle = signed.bundle
    path = folder.trusted / f"{bundle.region}.json"
    made = _sign_pin(folder, signed, now_ms if is_compared else None) if folder.policy_key.exists() else None
    replace_file(path, signed.encode(), PUBLIC)
    if made is not None:
        replace_file(folder.pin(bundle.region), made.encode(), PUBLIC)
    return made


def withdraw_trust(folder: RegionFolder, region: str, now_ms: int) -> SignedPin:
    """Sign, and keep in the folder, that another region is not trusted any more. Its bundle stays, for what it signed until now. A running broker must be
    notified separately (PutDocument "pin"). Raises RequestError(NOT_FOUND) where the folder has no bundle of it; then nothing was stored."""
    own, signed = (
        decode_bundle(folder.bundle.read_bytes()).bundle,
        decode_bundle(trusted_file(folder, region).read_bytes()),
    )
    number = _later(read_pin(folder, own, region), now_ms)
    pin = Pin(format=2, by=own.region, mesh=own.mesh, number=number, bundle=signed, withdrawn=True)
    made = sign_pin(pin, load_signing_key(folder.policy_key))
    replace_file(folder.pin(region), made.encode(), PUBLIC)
    return made


def _later(before: SignedPin | None, at_ms: int) -> int:
    """The number of a pin of that moment, behind the one in the folder."""
    return at_ms if before is None else max(at_ms, before.pin.number + 1)


def _sign_pin(folder: RegionFolder, signed: SignedBundle, compared_ms: int | None) -> SignedPin | None:
    """The pin of a bundle that people compared then, later than the one in the folder; None: of one that was trusted already, unless that has one."""
    own = decode_bundle(folder.bundle.read_bytes()).bundle
    before = read_pin(folder, own, signed.bundle.region)
    if compared_ms is None and before is not None:
        return None
    number = UNCOMPARED if compared_ms is None else _later(before, compared_ms)
    pin = Pin(by=own.region, mesh=own.mesh, number=number, bundle=signed)
    return sign_pin(pin, load_signing_key(folder.policy_key))
