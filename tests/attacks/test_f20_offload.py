"""F20: whoever may set a stream's offload must not make the broker import the package of a URL that is not allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest

from felix.errors import Code, RequestError
from region.streams.offload import check_offload

NOT_ALLOWED = (
    "s3://elsewhere/felix",
    "gs://bucket/felix",
    "github://who:repo@/path",
    "http://internal/metadata",
    "reference://x/y",
    "file:///srv/other",
    "file:///srv/felix-evil",
    "file:///srv/felix/../../etc",
    "S3://elsewhere/felix",
    "simplecache::s3://elsewhere/felix",
)
ALLOWED = ("file:///srv/felix",)


def test_no_package_is_imported_for_a_url_that_the_operator_did_not_allow(
    monkeypatch: pytest.MonkeyPatch, tally: Callable[[str, int], None]
) -> None:
    asked: list[str] = []
    real: Any = fsspec.get_filesystem_class
    monkeypatch.setattr(
        fsspec, "get_filesystem_class", lambda scheme: (asked.append(scheme), real(scheme))[1]
    )
    for url in NOT_ALLOWED:
        with pytest.raises(RequestError) as raised:
            check_offload(url, ALLOWED)
        assert raised.value.code in (Code.FORBIDDEN, Code.CONFIG_INVALID), url
    assert asked == []
    check_offload("file:///srv/felix/streams", ALLOWED)
    assert asked == ["file"], "what is allowed is checked to the end"
    tally("URLs refused without an import", len(NOT_ALLOWED))
