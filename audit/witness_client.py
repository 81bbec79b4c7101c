"""Asking an outside witness over HTTP to cosign a checkpoint. Blocks: for a thread of its own, never an event loop.

One POST per call, by the standard library; redirections are not followed, proxies of the environment not used. What a
witness can make the caller hold or wait for is bounded. Source: https://c2sp.org/tlog-witness. Caller: audit.submission.
"""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from audit.http_connection import HttpConnection
from audit.note import NOTE_BYTES_MAX, Signature, VerifierKey, parse_signatures
from audit.witness_protocol import ADD_CHECKPOINT, SIZE_TYPE, AddCheckpoint, decode_size, encode_request
from felix.errors import Code, RequestError, TamperError, UnavailableError

REQUEST_S: Final = 15.0
"""A whole call: connecting, asking, the answer. Witnesses are asked to answer while the log waits."""
URL_BYTES_MAX: Final = 1_024


class WitnessTarget(NamedTuple):
    """Where a witness is, and under which keys its cosignatures verify."""

    url: str
    """the submission prefix, http or https"""
    keys: tuple[VerifierKey, ...]
    ca: Path | None = None
    """certificates that its TLS certificate must lead to; the system's where left out"""


class Cosigned(NamedTuple):
    """The witness cosigned: its lines, unknown ones among them."""

    signatures: tuple[Signature, ...]


class Behind(NamedTuple):
    """The witness has cosigned so many leaves, and not the size that was started from."""

    size: int


def check_url(url: str) -> str:
    """The prefix without its last slash. Raises RequestError(CONFIG_INVALID)."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if (
        not fits
        or parts.query
        or parts.fragment
        or parts.username
        or len(url) > URL_BYTES_MAX
        or not url.isascii()
    ):
        raise RequestError(
            f"{url[:120]!r} is not a witness's submission prefix: expected http(s)://host[:port][/path].",
            code=Code.CONFIG_INVALID,
        )
    return url.rstrip("/")


class WitnessClient:
    """Calls one witness. One call at a time; `cancel` may come from another thread."""

    def __init__(self, target: WitnessTarget) -> None:
        self._parts = urlsplit(check_url(target.url))
        self._tls = None
        if self._parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=None if target.ca is None else str(target.ca))
            except OSError as error:
                raise RequestError(
                    f"The certificates {target.ca} cannot be read: {error.strerror or error}.",
                    code=Code.CONFIG_INVALID,
                ) from error
        self._connection: HttpConnection | None = None
        self._cancelled = False

    def add_checkpoint(self, request: AddCheckpoint, timeout_s: float = REQUEST_S) -> Cosigned | Behind:
        """Ask once. Raises UnavailableError where the witness does not answer, RequestError where it refuses,
        TamperError where its answer makes no sense."""
        body = encode_request(request)
        connection = self._connection = HttpConnection(self._parts, self._tls)
        try:
            if self._cancelled:
                raise UnavailableError("The caller stopped.")
            headers = {
                "Content-Type": "text/plain; charset=utf-8",
                "User-Agent": "felix",
                "Connection": "close",
            }
            with connection.within(timeout_s):
                answer = connection.ask(
                    "POST", f"{self._parts.path}/{ADD_CHECKPOINT}", headers, body, timeout_s
                )
                data = answer.read(NOTE_BYTES_MAX + 1)
                content_type = answer.headers.get_content_type()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnavailableError(
                f"{self._parts.netloc} does not answer: {error or type(error).__name__}."
            ) from error
        finally:
            connection.close()
            self._connection = None
        return _read(answer.status, content_type, data, self._parts.netloc)

    def cancel(self) -> None:
        """End a call that is under way, and refuse further ones."""
        self._cancelled = True
        connection = self._connection
        if connection is not None:
            connection.shut()


def _read(status: int, content_type: str, data: bytes, host: str) -> Cosigned | Behind:
    if len(data) > NOTE_BYTES_MAX:
        raise TamperError(f"{host} answered with more than {NOTE_BYTES_MAX} bytes.")
    if status == 200:
        return Cosigned(parse_signatures(data))
    if status == 409 and content_type == SIZE_TYPE:
        return Behind(decode_size(data))
    said = ascii(data[:200].decode("utf-8", "replace").strip())
    if status >= 500 or status in (408, 429):
        raise UnavailableError(f"{host} answered {status}: {said}.")
    raise RequestError(f"{host} refused the checkpoint with {status}: {said}.", code=Code.CONFLICT)
