"""Profiles: what a region's folder says, and what is wrong with it in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client.scripted_broker import authority, identity

from felix import Code, Profile, RequestError, load_profile
from felix.identity_file import save_identity
from felix.profile import felix_home, load_credentials, parse_address


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "us-east"
    (folder / "identities").mkdir(parents=True)
    root = authority().anchor().root_pem.decode()
    (folder / "bundle.json").write_text(
        json.dumps({"bundle": {"region": "us-east", "root_pem": root, "more": 1}, "signature": ""})
    )
    save_identity(identity("operator"), folder / "identities" / "operator.pem")
    save_identity(identity("orders-svc"), folder / "identities" / "orders-svc.pem")
    write(folder, addresses=["127.0.0.1:7443"], server_name="localhost")
    return tmp_path


def write(folder: Path, **fields: object) -> None:
    said = {"region": "us-east", "mesh": "acme", **fields}
    (folder / "profile.json").write_text(json.dumps(said))


def test_a_profile_is_found_by_the_regions_name(home: Path) -> None:
    found = load_profile("us-east", home=home)
    assert (found.addresses, found.tls_name, found.mesh) == (("127.0.0.1:7443",), "localhost", "acme")
    credentials = load_credentials(found)
    assert credentials.root_pem == authority().anchor().root_pem
    assert credentials.identity.spiffe_id.name == "operator"


def test_another_identity_is_chosen_by_name_or_path(home: Path) -> None:
    assert load_credentials(
        load_profile("us-east", identity="orders-svc", home=home)
    ).identity.spiffe_id.name == ("orders-svc")
    path = str(home / "us-east" / "identities" / "orders-svc.pem")
    assert load_credentials(load_profile("us-east", identity=path, home=home)).identity.spiffe_id.name == (
        "orders-svc"
    )


def test_home_is_where_the_environment_says(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FELIX_HOME", str(home))
    assert felix_home() == home
    assert load_profile("us-east").region == "us-east"
    monkeypatch.delenv("FELIX_HOME")
    assert felix_home() == Path.home() / ".felix"


def test_a_region_that_is_not_there_is_told_with_what_is(home: Path) -> None:
    with pytest.raises(RequestError, match=r"there are us-east.*felix region init eu-west") as caught:
        load_profile("eu-west", home=home)
    assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(RequestError) as caught:
        load_profile("../etc", home=home)
    assert caught.value.code is Code.NAME_INVALID


def test_an_identity_that_is_not_there_is_told_with_what_is(home: Path) -> None:
    with pytest.raises(RequestError, match=r"there are operator, orders-svc.*felix identity issue nobody"):
        load_credentials(load_profile("us-east", identity="nobody", home=home))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"addresses": []}, "1 to 64 addresses"),
        ({"addresses": ["here:there"]}, "'here:there' is not an address"),
        ({"addresses": "127.0.0.1"}, "Expected `array`"),
        ({}, "missing required field `addresses`"),
        ({"addresses": ["h:1"], "adress": 1}, "unknown field `adress`"),
        ({"addresses": ["h:1"], "region": "eu-west"}, "is of region 'eu-west'"),
        ({"addresses": ["h:1"], "mesh": "A"}, "not a region or mesh name"),
    ],
)
def test_a_profile_with_a_mistake_says_which(home: Path, fields: dict[str, object], said: str) -> None:
    write(home / "us-east", **fields)
    with pytest.raises(RequestError, match=said):
        load_profile("us-east", home=home)


def test_an_authority_of_another_region_is_not_taken(home: Path) -> None:
    write(home / "us-east", addresses=["h:1"], mesh="globex")
    with pytest.raises(RequestError, match="globex"):
        load_credentials(load_profile("us-east", home=home))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"-----BEGIN nothing"])
def test_a_damaged_authority_is_told(home: Path, content: bytes) -> None:
    (home / "us-east" / "bundle.json").write_bytes(content)
    with pytest.raises(RequestError):
        load_credentials(load_profile("us-east", home=home))
    (home / "us-east" / "bundle.json").unlink()
    with pytest.raises(RequestError, match="felix region init"):
        load_credentials(load_profile("us-east", home=home))


def test_an_authority_may_be_a_pem_file_or_bytes(home: Path) -> None:
    pem = home / "root.pem"
    pem.write_bytes(authority().anchor().root_pem)
    for source in (pem, authority().anchor().root_pem):
        made = Profile(
            region="us-east", mesh="acme", addresses=("h:1",), authority=source, identity=identity("operator")
        )
        assert load_credentials(made).root_pem == authority().anchor().root_pem
        assert made.tls_name == "us-east.acme"
        assert "MII" not in repr(made).split("identity=")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", 7443)),
        ("b1.example:9", ("b1.example", 9)),
        ("[::1]:9", ("::1", 9)),
        ("[::1]", ("::1", 7443)),
        ("::1", ("::1", 7443)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert parse_address(str(parse_address(text))) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:0", "h:65536", "h:x", "[::1]x", "h:²"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(RequestError):
        parse_address(text)
