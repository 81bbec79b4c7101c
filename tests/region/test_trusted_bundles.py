"""Bundles in a region's folder that an operator trusts."""

from __future__ import annotations

from pathlib import Path

import pytest
from region_home import make_region

from cli.grants import known_bundles
from felix.errors import RequestError
from region.trust.trusted_bundles import pinned_bundles


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
def test_a_bundle_that_cannot_be_read_is_named(tmp_path: Path, data: bytes) -> None:
    folder = make_region(tmp_path, "us-east")
    path = folder.trusted / "eu-west.json"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    for read in (pinned_bundles, known_bundles):
        with pytest.raises(RequestError, match=r"eu-west\.json") as refused:
            read(folder)
        assert "felix region trust" in refused.value.hint
