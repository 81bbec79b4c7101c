"""bridge.yaml: what it may say, and where mistakes are."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.config import load_config, paths_of
from bridge.failpoint import Failpoints
from felix.address import Address
from felix.errors import RequestError

TEXT = """\
name: us-to-eu
mesh: acme
source: us-east
source_addresses: [127.0.0.1:7443]
destinations:
  - region: eu-west
    addresses: [127.0.0.1:7444]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "bridge.yaml"
    path.write_text(text)
    return path


def test_the_smallest_configuration_finds_its_files_in_the_regions_folder(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, TEXT + "health: 127.0.0.1:0\nhome: ../us-east\nlimits: {read_ahead: 8MiB}\n")
    )
    assert config.health == Address("127.0.0.1", 0)
    assert config.limits.read_ahead == 8 << 20
    paths = paths_of(config, tmp_path)
    assert paths.identity == tmp_path / "../us-east/identities/us-to-eu.pem"
    assert paths.egress == tmp_path / "../us-east/bridges/us-to-eu/egress"
    assert paths.trusted == {"eu-west": tmp_path / "../us-east/trusted/eu-west.json"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace("name:", "nmae:"), "nmae"),
        (TEXT.replace("eu-west", "us-east"), "other than the source"),
        (TEXT.replace("127.0.0.1:7444", "nowhere:x"), "not an address"),
        (TEXT + "limits: {read_ahead: 1MiB}\n", "2MiB"),
        (TEXT + "limits: {links: 1000}\n", "limits.links"),
    ],
)
def test_a_mistake_says_where_it_is(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_config(write(tmp_path, text))


def test_an_unknown_failpoint_is_refused_and_none_is_none() -> None:
    with pytest.raises(RequestError, match="steps are read"):
        Failpoints.of({"FELIX_FAILPOINT": "somewhere:2"})
    idle = Failpoints.of({})
    idle.at("read")
    assert not idle.is_at("read")
    assert Failpoints.of({"FELIX_FAILPOINT": "sent:2"}).is_at("sent")
