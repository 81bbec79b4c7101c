"""A log that a web server has: its files by GET, whatever the server answers. Blocks.

Whose log it is chooses what the server says. Invariants, of each file: no more bytes are taken than a file of its kind has, and no more time than
REQUEST_S; they count as they were sent (nothing is decompressed); nobody else is asked in the server's name (redirections are not followed, proxies of the environment not used).
By the standard library: what fsspec has for this reads an answer to its end, however long it is.
Source: https://c2sp.org/tlog-tiles. Caller: audit.spark.files.
"""

from __future__ import annotations

import http.client
import re
import ssl
from base64 import b64encode
from contextlib import suppress
from typing import Final
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from audit.file_size import WAL_FILE_BYTES_MAX, file_bytes_max, too_long
from audit.http_connection import HttpConnection
from felix.errors import Code, RequestError, UnavailableError

SCHEMES: Final = ("http", "https")
REQUEST_S: Final = 300.0
"""One file, from connecting to its last byte: the longest has some megabytes."""
ANSWER_S: Final = 30.0
"""How long nothing may come of it."""
LISTING_BYTES_MAX: Final = 1 << 20
"""A folder's page. Of a log's folders that are listed, the largest has 255 partial tiles."""
PART_BYTES: Final = 1 << 20
"""Of an answer, taken at once."""
_NOT_THERE: Final = (404, 410)
_HREF: Final = re.compile(
    rb"""\shref\s{0,8}=\s{0,8}(?:"([^"<>]{1,1000})"|'([^'<>]{1,1000})')""", re.IGNORECASE
)


def is_http(path: str) -> bool:
    """Whether a log's path is for this module."""
    return path.partition("://")[0].lower() in SCHEMES


class HttpFiles:
    """`audit.tile.Files` under an http or https URL. May be called from several threads."""

    def __init__(self, url: str) -> None:
        """Raises RequestError where it is no such URL; asks nothing yet."""
        self._parts = _checked(url)
        self._root = self._parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if self._parts.scheme == "https" else None
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "felix"}
        if self._parts.username is not None:
            said = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(said.encode()).decode()}"
        self._idle: HttpConnection | None = None
        """a connection that was not ended behind an answer"""

    def read(self, path: str) -> bytes | None:
        """The file's bytes, None where there is none. Raises TamperError of a longer one than any of its kind; UnavailableError where the server does not
        give it, RequestError where it sends whoever asks elsewhere."""
        bytes_max = file_bytes_max(path) or WAL_FILE_BYTES_MAX
        status, headers, data = self._get(path, bytes_max)
        if status in _NOT_THERE:
            return None
        if 300 <= status < 400:
            raise RequestError(
                f"{self._where(path)} was answered with {status}: it is said to be elsewhere, and redirections are not followed.",
                hint="Name the address that the log's files are at.",
            )
        if status != 200:
            raise UnavailableError(f"{self._where(path)} was answered with {status}.")
        if len(data) > bytes_max:
            raise too_long(path, bytes_max)
        if (headers.get("Content-Encoding") or "identity").lower() != "identity":
            raise UnavailableError(f"{self._where(path)} was answered compressed, which was not asked for.")
        return data

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted, as far as the server shows them: empty where it does not."""
        path = f"{folder}/"
        status, headers, data = self._get(path, LISTING_BYTES_MAX)
        if status != 200 or headers.get_content_type() != "text/html" or len(data) > LISTING_BYTES_MAX:
            return []
        base, found = f"http://host{self._root}/{path}", set[str]()
        for links in _HREF.findall(data):
            with suppress(ValueError):
                link = urljoin(base, (links[0] or links[1]).decode("ascii"))
                name = unquote(link.removeprefix(base).rstrip("/"))
                if link.startswith(base) and name not in ("", ".", "..") and not {"/", "?", "#"} & set(name):
                    found.add(name)
        return sorted(found)

    def _where(self, path: str) -> str:
        return f"{self._parts.hostname}{self._root}/{path}"

    def _get(self, path: str, bytes_max: int) -> tuple[int, http.client.HTTPMessage, bytes]:
        """The answer's status, headers and body, of which a longer one is cut behind one byte more. Raises UnavailableError."""
        idle, self._idle = self._idle, None
        if idle is not None:
            # The server may have ended it since.
            with suppress(UnavailableError):
                return self._ask(idle, path, bytes_max)
        return self._ask(HttpConnection(self._parts, self._tls), path, bytes_max)

    def _ask(
        self, connection: HttpConnection, path: str, bytes_max: int
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        goes_on = False
        try:
            with connection.within(REQUEST_S):
                answer = connection.ask("GET", f"{self._root}/{path}", self._headers, None, ANSWER_S)
                parts, left = list[bytes](), bytes_max + 1
                while left and (part := answer.read(min(left, PART_BYTES))):
                    parts.append(part)
                    left -= len(part)
                if left and answer.length:
                    raise http.client.IncompleteRead(b"", answer.length)
            goes_on = left > 0 and not answer.will_close
            return answer.status, answer.headers, b"".join(parts)
        except (OSError, http.client.HTTPException, ValueError) as error:
            said = f"{error}".strip() or type(error).__name__
            raise UnavailableError(f"{self._where(path)} could not be read: {said[:200]}.") from error
        finally:
            if goes_on:
                before, self._idle = self._idle, connection
            else:
                before = connection
            if before is not None:
                before.close()


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        fits = url.isascii() and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment or re.search(r"[\x00-\x20\x7f]", url):
        raise RequestError(
            "That is not the URL of a log: expected http(s)://host[:port][/path], without a query.",
            code=Code.UNSUPPORTED,
        )
    return parts
