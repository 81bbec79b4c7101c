"""Check a tlog-proof of a crossing without Felix: Python's standard library, and openssl for signatures.

    python check_tlog_proof.py record.tlog-proof policy

`policy` is a tlog-policy file of keys that the checker trusts (`felix audit policy` prints one; compare its keys with what the regions
published). Shown is that the leaf is in the log under a checkpoint that the log signed and a witness of the policy cosigned (C2SP
tlog-proof, tlog-checkpoint, tlog-cosignature, with Ed25519; RFC 9162 2.1.3.2). What can be read of the leaf without its format (docs/audit.md) is printed.
"""

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ED25519, COSIGNATURE = 1, 4
DER_PREFIX = bytes.fromhex("302a300506032b6570032100")  # of an Ed25519 public key (RFC 8410)


def verified(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether openssl finds the Ed25519 signature to hold."""
    with tempfile.TemporaryDirectory() as folder:
        key, signed, data = (Path(folder, name) for name in ("key", "signature", "message"))
        for path, content in ((key, DER_PREFIX + public), (signed, signature), (data, message)):
            path.write_bytes(content)
        words = (
            f"pkeyutl -verify -pubin -keyform DER -inkey {key} -rawin -sigfile {signed} -in {data}".split()
        )
        return not subprocess.run(["openssl", *words], capture_output=True, check=False).returncode


def root_of(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """The root that a leaf's inclusion path leads to. Raises ValueError where the path has another length than the tree asks for."""
    found, last = hashlib.sha256(b"\0" + leaf).digest(), size - 1
    for other in path:
        if not last:
            raise ValueError("the path is too long")
        if index % 2 or index == last:
            found = hashlib.sha256(b"\1" + other + found).digest()
            while not index % 2 and index:
                index, last = index >> 1, last >> 1
        else:
            found = hashlib.sha256(b"\1" + found + other).digest()
        index, last = index >> 1, last >> 1
    if last:
        raise ValueError("the path is too short")
    return found


def keys_of(policy: str) -> dict[tuple[str, bytes], tuple[int, bytes]]:
    """The Ed25519 keys of the policy: algorithm and public key by name and key id."""
    found = {}
    for line in policy.splitlines():
        words = line.split()
        if words and words[0] in ("log", "witness"):
            name, key_id, encoded = words[1 if words[0] == "log" else 2].split("+", 2)
            data = base64.b64decode(encoded)
            if data[0] in (ED25519, COSIGNATURE):
                found[name, bytes.fromhex(key_id)] = data[0], data[1:]
    return found


def check(proof: str, policy: str) -> tuple[bytes, list[str]]:
    """The leaf, and who signed for it. Raises ValueError with what does not hold."""
    head, _, note = proof.partition("\n\n")
    kind, extra, index, *path = head.splitlines()
    if kind != "c2sp.org/tlog-proof@v1":
        raise ValueError("this is no tlog-proof")
    data = base64.b64decode(extra.removeprefix("extra "))
    version, _, rest = data.partition(b"\0")
    leaf = rest[8:]
    if version != b"felix/tlog-proof/1":
        length = int.from_bytes(leaf[:4], "big")
        leaf = leaf[4 : 4 + length]
    text, _, signatures = note.partition("\n\n")
    origin, size, root = (text + "\n").splitlines()[:3]
    found = root_of(
        leaf, int(index.removeprefix("index ")), int(size), [base64.b64decode(each) for each in path]
    )
    if found != base64.b64decode(root):
        raise ValueError("the leaf is not in the tree that the checkpoint signs")
    keys, signed, cosigned = keys_of(policy), [], []
    for line in signatures.splitlines():
        name, encoded = line.removeprefix("— ").split()
        data = base64.b64decode(encoded)
        algorithm, public = keys.get((name, data[:4]), (0, b""))
        body = (text + "\n").encode()
        if algorithm == ED25519 and name == origin and verified(public, data[4:], body):
            signed.append(name)
        elif algorithm == COSIGNATURE and name.partition("/")[0] != origin.partition("/")[0]:
            # Of another party than the log's own.
            time = int.from_bytes(data[4:12], "big")
            if verified(public, data[12:], f"cosignature/v1\ntime {time}\n".encode() + body):
                cosigned.append(name)
    if not signed or not cosigned:
        raise ValueError(
            "the log's own signature, or every cosignature of the policy's witnesses, is missing"
        )
    return leaf, signed + cosigned


if __name__ == "__main__":
    try:
        leaf, names = check(Path(sys.argv[1]).read_text(), Path(sys.argv[2]).read_text())
    except ValueError as error:
        sys.exit(f"{sys.argv[1]} DOES NOT HOLD: {error}")
    print(f"{sys.argv[1]} holds. Signed by {', '.join(names)}")
    print("In the leaf stands:", " ".join(each.decode() for each in re.findall(rb"[!-~]{5,}", leaf)[:40]))
