"""The add-checkpoint call of C2SP tlog-witness: what is sent and what is answered. Pure.

A request is an old size line, the lines of a consistency proof, an empty line, and a checkpoint note; an answer is
signature lines, or after a conflict the size that the witness has. Source: https://c2sp.org/tlog-witness. Invariant:
`decode_request(encode_request(r)) == r`. Callers: audit.witness_service, audit.witness_client.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Final, NamedTuple

from audit.note import NOTE_BYTES_MAX
from audit.tree_head import decode_hash, parse_size
from felix.errors import RequestError

PROOF_LINES_MAX: Final = 63
REQUEST_BYTES_MAX: Final = NOTE_BYTES_MAX + 4_096
"""A checkpoint, and 63 proof lines of 45 bytes with the size line before them."""
SIZE_TYPE: Final = "text/x.tlog.size"
"""The content type of a conflict's answer."""
ADD_CHECKPOINT: Final = "add-checkpoint"


class AddCheckpoint(NamedTuple):
    """A checkpoint note, and why it continues the tree of `old` leaves."""

    old: int
    proof: tuple[bytes, ...]
    checkpoint: bytes


def encode_request(request: AddCheckpoint) -> bytes:
    """The body of the POST."""
    assert len(request.proof) <= PROOF_LINES_MAX
    lines = [f"old {request.old}", *(b64encode(hash_).decode() for hash_ in request.proof), "", ""]
    return "\n".join(lines).encode() + request.checkpoint


def decode_request(body: bytes) -> AddCheckpoint:
    """Read a body; the checkpoint in it is not looked at. Raises RequestError with what is wrong."""
    if len(body) > REQUEST_BYTES_MAX:
        raise RequestError(f"A request of {len(body)} bytes; {REQUEST_BYTES_MAX} are allowed.")
    head, blank, checkpoint = body.partition(b"\n\n")
    try:
        first, *lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError("The lines before the checkpoint are not ASCII.") from error
    word, _, number = first.partition(" ")
    old = parse_size(number)
    if not blank or word != "old" or old is None:
        raise RequestError(
            "A request begins with the line `old <size>`; proof lines and an empty line follow."
        )
    if len(lines) > PROOF_LINES_MAX:
        raise RequestError(f"A proof has {PROOF_LINES_MAX} lines at most, this one {len(lines)}.")
    proof = []
    for line in lines:
        hash_ = decode_hash(line)
        if hash_ is None:
            raise RequestError(f"{line[:60]!r} is not a hash of 32 bytes in base64.")
        proof.append(hash_)
    return AddCheckpoint(old, tuple(proof), checkpoint)


def encode_size(size: int) -> bytes:
    """The body of a conflict's answer."""
    return f"{size}\n".encode()


def decode_size(body: bytes) -> int:
    """Read it. Raises RequestError."""
    try:
        text = body.decode("ascii")
    except UnicodeDecodeError:
        text = ""
    size = parse_size(text.removesuffix("\n")) if text.endswith("\n") else None
    if size is None:
        raise RequestError(f"{body[:40]!r} is not the size of a tree.")
    return size
