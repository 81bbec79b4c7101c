"""Logs that can lie, and raw HTTP, for tests of outside witnesses."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from audit.merkle import Tree, consistency_proof, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note
from audit.tree_head import TreeHead
from audit.witness_admission import Network
from audit.witness_server import ServerLimits, WitnessServer
from audit.witness_service import WitnessService
from audit.witness_sqlite import WitnessState, init_witness
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey

NOW_S = 1_760_000_000
NAME = "witness.example/w1"


class Log:
    """A log whose leaves are a word and a number; two with other words are two histories."""

    def __init__(self, origin: str = "log.example/1", word: bytes = b"leaf", seed: int = 1) -> None:
        self.origin = origin
        self.word = word
        self.hashes: list[bytes] = []
        self.signer = NoteSigner.from_key(
            origin, SigningKey.from_seed(seed.to_bytes(32, "big")), Algorithm.ED25519
        )
        self.quantum = NoteSigner.from_ml_dsa(origin, MlDsaKey.from_seed(seed.to_bytes(32, "big")))

    def node(self, level: int, index: int) -> bytes:
        tree = Tree()
        for hash_ in self.hashes[index << level : (index + 1) << level]:
            tree.add(hash_)
        return tree.root()

    def head(self, size: int) -> TreeHead:
        for at in range(len(self.hashes), size):
            self.hashes.append(leaf_hash(b"%s %d" % (self.word, at)))
        tree = Tree()
        for hash_ in self.hashes[:size]:
            tree.add(hash_)
        return TreeHead(self.origin, size, tree.root())

    def note(self, size: int) -> bytes:
        text = self.head(size).text()
        return encode_note(Note(text, (self.signer.sign(text),)))

    def proof(self, old: int, new: int) -> list[bytes]:
        self.head(new)
        return consistency_proof(old, new, self.node)

    def request(self, old: int, new: int) -> bytes:
        return body(old, self.proof(old, new) if old else [], self.note(new))


def body(old: object, proof: list[bytes], checkpoint: bytes) -> bytes:
    """A request, written down here from the specification's text."""
    lines = b"".join(b64encode(hash_) + b"\n" for hash_ in proof)
    return b"old %s\n" % str(old).encode() + lines + b"\n" + checkpoint


class Reply(NamedTuple):
    status: int
    content_type: str
    body: bytes


def post(port: int, data: bytes, path: str = "/add-checkpoint", method: str = "POST") -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, data if method == "POST" else None)
        answer = connection.getresponse()
        return Reply(answer.status, answer.getheader("Content-Type") or "", answer.read())
    finally:
        connection.close()


class Running(NamedTuple):
    port: int
    state: WitnessState
    stop: Callable[[], None]
    """ends the server before its block does"""


@contextmanager
def serving(
    folder: Path,
    *logs: Log,
    limits: ServerLimits | None = None,
    prefix: str = "",
    now_s: int = NOW_S,
    name: str = NAME,
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    clients: Sequence[Network] = (),
) -> Iterator[Running]:
    """A witness over real HTTP on loopback, its event loop in a thread of its own."""
    if not folder.exists():
        init_witness(folder, name)
    state = WitnessState.open(folder, serve=True)
    for log in logs:
        state.add_log(log.origin, log.signer.key)
    server = WitnessServer(
        WitnessService(state, lambda: now_s),
        "127.0.0.1",
        port,
        limits=limits,
        prefix=prefix,
        tls=tls,
        clients=clients,
    )
    loop = new_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ended = threading.Event()

    def stop() -> None:
        if not ended.is_set():
            ended.set()
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
            state.close()

    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        yield Running(server.port, state, stop)
    finally:
        stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
