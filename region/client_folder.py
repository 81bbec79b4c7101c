"""What an identity needs on another machine, as a folder to be copied there: how to reach the region, whom to trust, and who it is.

It is a home of its own (`FELIX_HOME`), with nothing of the region that is private. An identity whose key was made on that machine has its
certificate alone here; the key stands beside it there, as `NAME.key`. Blocks on the disk.
"""

from __future__ import annotations

import json
from pathlib import Path

from felix.certificate import read_certificates
from felix.errors import Code, RequestError
from felix.files import PRIVATE, PUBLIC, read_file, replace_file
from felix.identity import sole_id
from felix.names import SpiffeId
from region.folder import RegionFolder


def write_client_folder(
    folder: RegionFolder, home: Path, spiffe_id: SpiffeId, chain_pem: bytes, key_pem: bytes = b""
) -> Path:
    """Put the region's profile and bundle, and this identity, into `home`; the identity's file. Programs that name no identity come as the
    first one that was put there. Raises RequestError: CONFLICT where the region itself has its folder there, ALREADY_EXISTS where another identity has the name."""
    target = RegionFolder.of(spiffe_id.region, home)
    if target.config.exists():
        raise RequestError(
            f"{target.root} is the folder of the region itself, with its keys.",
            code=Code.CONFLICT,
            hint="Name another folder, to be copied to the machine of the identity.",
        )
    path = target.identity(spiffe_id.name)
    if path.exists():
        held = sole_id(read_certificates(path.read_bytes())[0].uris)
        if held != spiffe_id:
            raise RequestError(
                f"{path} holds {held}; {spiffe_id} needs another folder.", code=Code.ALREADY_EXISTS
            )
    target.identities.mkdir(parents=True, exist_ok=True, mode=0o700)
    profile = json.loads(read_file(folder.profile, "the profile of the region"))
    named = f"{target.identities.name}/{path.name}"
    if target.profile.exists():
        named = json.loads(read_file(target.profile, "the profile of the region"))["identity"]
    profile |= {"authority": target.bundle.name, "identity": named}
    replace_file(target.bundle, read_file(folder.bundle, "the bundle of the region"), PUBLIC)
    replace_file(path, chain_pem + key_pem, PRIVATE if key_pem else PUBLIC)
    replace_file(target.profile, (json.dumps(profile, indent=2) + "\n").encode(), PUBLIC)
    return path
