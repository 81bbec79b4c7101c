"""Link secrets: what a bridge derives a grant's transfer keys, commitments and pseudonyms from.

The source region's keyring gives one secret per stream incarnation and grant, derived from the stream key, so that it
is the same after every restart of the agent and dies with the stream key. The agent gets it sealed (keys.hybrid), as
it gets data keys. From it:

- transfer key (per shard and source epoch): id and secret, so that an envelope sent again has the same bytes;
- commitment secret (per transfer key; both sides derive it): what audit leaves commit to records with that cross;
- withheld key (per scope of a transfer key): what leaves commit to records with that stay. It comes from the link secret,
  which the destination never has: the transfer key alone does not suffice to test guesses about withheld records;
- field secret (per stream, destination and purpose): what hashes and pseudonyms are made with. It is the same under
  a renewed grant, and another for another destination or purpose, so two recipients cannot join their data.

Other things of one stream are derived alike (`derive`, `tag`).

Pure. The broker seals, the agent opens.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from felix.context import bind
from felix.errors import TamperError
from felix.names import SpiffeId, StreamName
from keys.errors import KeyScopeError
from keys.hybrid import HybridKeyPair, HybridPublicKey
from keys.key_id import RANDOM_BYTES, KeyKind, new_key_id
from keys.transfer import TransferKey, TransferScope

SECRET_BYTES: Final = 32


def derive(secret: bytes, purpose: str, *parts: bytes | str | int) -> bytes:
    """32 bytes for one purpose and these parts: HKDF-Expand with SHA-256 (RFC 5869)."""
    return HKDFExpand(SHA256(), SECRET_BYTES, bind(purpose, *parts)).derive(secret)


def tag(secret: bytes, purpose: str, data: bytes, *parts: bytes | str | int) -> bytes:
    """What only who has the secret can say of `data`: HMAC-SHA-256 under a key for this purpose and these parts."""
    return hmac.digest(derive(secret, purpose, *parts), data, "sha256")


@dataclass(frozen=True, slots=True)
class LinkSecrets:
    """Two secrets of 32 bytes, in no repr: `link` for transfer and commitments, `fields` for pseudonyms."""

    link: bytes = field(repr=False)
    fields: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.link) != SECRET_BYTES or len(self.fields) != SECRET_BYTES:
            raise KeyScopeError(f"A link has two secrets of {SECRET_BYTES} bytes.")

    @classmethod
    def of_stream(
        cls, stream_secret: bytes, grant_id: str, terms_hash: bytes, pseudonyms: str
    ) -> LinkSecrets:
        """From a stream key's secret. `pseudonyms` is what separates pseudonyms (policy.terms.pseudonym_scope)."""
        return cls(
            derive(stream_secret, "link-secret", grant_id, terms_hash),
            derive(stream_secret, "field-secret", pseudonyms),
        )

    def transfer_key(self, scope: TransferScope) -> TransferKey:
        """The transfer key of this scope: always the same one."""
        encoded = scope.encode()
        key_id = new_key_id(
            scope.source_region,
            KeyKind.TRANSFER,
            derive(self.link, "transfer-key-id", encoded)[:RANDOM_BYTES],
        )
        return TransferKey(key_id, scope, derive(self.link, "transfer-key-secret", encoded))

    def withheld_key(self, scope: TransferScope) -> tuple[bytes, bytes]:
        """Id and 32-byte secret of the key that commits to what stays; only the source's side derives it."""
        encoded = scope.encode()
        key_id = new_key_id(
            scope.source_region,
            KeyKind.WITHHELD,
            derive(self.link, "withheld-key-id", encoded)[:RANDOM_BYTES],
        )
        return key_id, derive(self.link, "withheld-secret", encoded)


def commitment_secret(key: TransferKey) -> bytes:
    """32 bytes that both ends of a link derive; its id in audit leaves is the transfer key's."""
    return derive(key.secret, "commitment-secret", key.key_id, key.scope.encode())


@dataclass(frozen=True, slots=True)
class LinkSecretScope:
    """What link secrets are handed over for. Sizes: `incarnation` 16 bytes, `terms_hash` 32."""

    region: str
    stream: StreamName
    incarnation: bytes
    grant_id: str
    terms_hash: bytes
    bridge: SpiffeId

    def info(self) -> bytes:
        """All of it, as HPKE's `info`."""
        return bind(
            "link-secret-handoff",
            self.region,
            str(self.stream),
            self.incarnation,
            self.grant_id,
            self.terms_hash,
            str(self.bridge),
        )


def seal_link_secrets(secrets: LinkSecrets, scope: LinkSecretScope, recipient: HybridPublicKey) -> bytes:
    """For `recipient` alone. Raises KeyScopeError where the bridge is foreign."""
    if scope.bridge.kind != "bridge" or scope.bridge.region != scope.region:
        raise KeyScopeError(
            f"Secrets of {scope.region} go to bridges of {scope.region} only, not to {scope.bridge}.",
            hint="A bridge agent runs in the source region's trust domain.",
        )
    return recipient.seal(secrets.link + secrets.fields, scope.info())


def open_link_secrets(sealed: bytes, scope: LinkSecretScope, pair: HybridKeyPair) -> LinkSecrets:
    """Raises TamperError(TAMPERED) where they were sealed for anything but `scope`."""
    what = f"the secrets of the link of {scope.stream} under grant {scope.grant_id}"
    opened = pair.open(sealed, scope.info(), what)
    if len(opened) != 2 * SECRET_BYTES:
        raise TamperError(f"What was sealed as {what} has {len(opened)} bytes.")
    return LinkSecrets(opened[:SECRET_BYTES], opened[SECRET_BYTES:])
