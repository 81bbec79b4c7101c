from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from felix.errors import Code
from felix.names import NamePattern, StreamName, parse_region
from policy.documents import (
    ALIASES_MAX,
    DOCUMENT_BYTES_MAX,
    MISTAKES_MAX,
    ConfigError,
    Parsed,
    decode_document,
    decode_placed,
)
from policy.quantity import Duration, Size


class Durability(StrEnum):
    FSYNC = "fsync"
    EPHEMERAL = "ephemeral"


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    name: StreamName
    shards: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    durability: Durability = Durability.FSYNC
    retention: Duration | None = None

    def __post_init__(self) -> None:
        if self.durability is Durability.EPHEMERAL and self.retention is not None:
            raise ValueError("an ephemeral stream keeps nothing, so it has no retention")


class File(msgspec.Struct, frozen=True, kw_only=True, tag="file", tag_field="kind"):
    path: str


class Vault(msgspec.Struct, frozen=True, kw_only=True, tag="vault", tag_field="kind"):
    url: str


class Region(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    region: Annotated[str, Parsed(parse_region)]
    country: str = ""
    port: int = 7443
    ratio: float = 1.0
    tls: bool = True
    mode: Literal["dev", "prod"] = "dev"
    memory_limit: Size = Size(0)
    streams: tuple[Stream, ...] = ()
    patterns: Annotated[list[NamePattern], msgspec.Meta(max_length=2)] = msgspec.field(default_factory=list)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    keys: File | Vault | None = None
    listen: int | str = 0


def read(text: str) -> Region:
    return decode_document(text, Region, "us-east.yaml")


def mistakes(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert caught.value.code is Code.CONFIG_INVALID
    return [str(mistake) for mistake in caught.value.mistakes]


def test_a_document_becomes_typed_values() -> None:
    region = read(
        """\
region: us-east
country: NO            # Norway, not "false"
port: 7444
ratio: 0.5
tls: false
mode: prod
memory-limit: 64MiB
streams:
  - {name: acme/ops/departures, shards: 4, retention: 7d}
  - name: acme/ops/crew
    durability: ephemeral
patterns: [acme/ops/*]
labels: {1: one, team: ops}
keys: {kind: vault, url: "https://vault.example"}
listen: 9000
"""
    )
    assert region.country == "NO"
    assert (region.port, region.ratio, region.tls, region.mode) == (7444, 0.5, False, "prod")
    assert region.memory_limit == 64 << 20
    assert region.streams[0] == Stream(
        name=StreamName.parse("acme/ops/departures"), shards=4, retention=Duration.parse("7d")
    )
    assert region.streams[1].durability is Durability.EPHEMERAL
    assert region.patterns == [NamePattern("acme/ops/*")]
    assert region.labels == {"1": "one", "team": "ops"}
    assert region.keys == Vault(url="https://vault.example")
    assert region.listen == 9000
    assert read("region: a\nlisten: any").listen == "any"
    assert read("region: a\nkeys: ~").keys is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("region: us-east\nprot: 1", "us-east.yaml:2:1: prot: unknown key 'prot'; did you mean port?"),
        ("region: us-east\nzzz: 1", "us-east.yaml:2:1: zzz: unknown key 'zzz'; known keys: "),
        ("port: 1", "us-east.yaml:1:1: the key region is missing; expected a text."),
        ("region: us-east\nport: 74x", "us-east.yaml:2:7: port: expected a whole number, found '74x'."),
        (
            "region: us-east\nport: '7443'",
            "us-east.yaml:2:7: port: expected a whole number, found '7443' (quoted, so a text).",
        ),
        ("region: us-east\nport: 0x1f", "port: expected a whole number"),
        ("region: us-east\nport: 1:30", "port: expected a whole number"),
        ("region: us-east\nport: []", "us-east.yaml:2:7: port: expected a whole number, found a list."),
        ("region: us-east\nport:", "port: expected a whole number, found nothing."),
        ("region: us-east\nratio: .inf", "ratio: expected a number"),
        (
            "region: us-east\ntls: yes",
            "tls: expected true or false, found 'yes'; YAML's yes, no, on and off are not taken.",
        ),
        (
            "region: us-east\nmode: prd",
            "us-east.yaml:2:7: mode: expected one of dev, prod, found 'prd'; did you mean prod?",
        ),
        ("region: us-east\ncountry:", "us-east.yaml:2:9: country: expected a text, found nothing."),
        ("region: US East", "us-east.yaml:1:9: region: 'US East' is not a region or mesh name"),
        (
            "region: us-east\nregion: eu-west",
            "us-east.yaml:2:1: region: this key stands here a second time; first on line 1.",
        ),
        ("region: us-east\nmemory-limit: 64", "memory-limit: '64' is not a size: expected a number with B"),
        ("region: us-east\nmemory-limit: {a: 1}", "memory-limit: expected a size, found a mapping"),
        (
            "region: us-east\nstreams: {}",
            "us-east.yaml:2:10: streams: expected a list, found a mapping (key: value).",
        ),
        (
            "region: us-east\nstreams: [x]",
            "us-east.yaml:2:11: streams[0]: expected a mapping (key: value), found 'x'.",
        ),
        (
            "region: us-east\nstreams:\n  - name: acme/ops",
            "us-east.yaml:3:11: streams[0].name: 'acme/ops' is not a name",
        ),
        (
            "region: us-east\nstreams:\n  - {name: a/b/c, shards: 65}",
            "streams[0].shards: Expected `int` <= 64, found '65'.",
        ),
        (
            "region: us-east\nstreams:\n  - {name: a/b/c, durability: ephemeral, retention: 7d}",
            "us-east.yaml:3:5: streams[0]: an ephemeral stream keeps nothing, so it has no retention.",
        ),
        (
            "region: us-east\npatterns: [a/b/c, a/b/d, a/b/e]",
            "patterns: expected at most 2 entries, found 3.",
        ),
        ("region: us-east\nkeys: {path: x}", "keys: the key kind is missing; it says which kind this is."),
        (
            "region: us-east\nkeys: {kind: valt}",
            "keys.kind: expected one of file, vault, found 'valt'; did you mean vault?",
        ),
        ("region: us-east\nkeys: []", "keys: expected a mapping"),
        ("region: us-east\n<<: {port: 1}", "merge keys are not supported"),
        (
            "region: !!python/object/apply:os.system ['true']",
            "us-east.yaml:1:9: region: the YAML tag 'tag:yaml.org,2002:python/object",
        ),
        ("region: !!binary aGk=", "the YAML tag 'tag:yaml.org,2002:binary' is not allowed"),
        ("region: us-east\n? [a]\n: 1", "a key must be a single word or text"),
        ("", "us-east.yaml:1:1: the document is empty."),
        ("region: a\n---\nregion: b", "us-east.yaml:2:1: not valid YAML: expected a single document"),
        ("region: [a\nport: 1", "not valid YAML"),
        ("region: a\n\tport: 1", "us-east.yaml:2:1: not valid YAML"),
        ("region: a\nlabels: {x: \x00}", "us-east.yaml:2:13: the character U+0000 is not allowed in YAML."),
        ("just text", "us-east.yaml:1:1: expected a mapping (key: value), found 'just text'."),
    ],
)
def test_a_mistake_says_where_it_is_and_what_was_expected(text: str, expected: str) -> None:
    found = mistakes(text)
    assert len(found) == 1
    assert expected in found[0]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file() -> None:
    found = mistakes("region: us-east\nport: x\nstreams:\n  - {name: a/b, shard: 2}\nmode: dev\ntls: on\n")
    assert [line.split(": ")[0] for line in found] == [
        "us-east.yaml:2:7",
        "us-east.yaml:4:12",
        "us-east.yaml:4:17",
        "us-east.yaml:6:6",
    ]
    with pytest.raises(ConfigError, match=r"us-east\.yaml has 4 mistakes:\n  us-east\.yaml:2:7"):
        read("region: us-east\nport: x\nstreams:\n  - {name: a/b, shard: 2}\nmode: dev\ntls: on\n")


def test_anchors_work_within_bounds() -> None:
    assert read("region: &r us-east\ncountry: *r").country == "us-east"
    many = "region: a\nlabels: {k: &x v, " + ", ".join(f"k{i}: *x" for i in range(ALIASES_MAX + 1)) + "}"
    assert "more than 100 aliases" in mistakes(many)[0]


def test_aliases_cannot_stand_for_more_than_the_document_may_hold() -> None:
    class Deep(msgspec.Struct):
        a: list[list[list[list[str]]]]

    ten = ", ".join(["{}"] * 24)
    text = (
        "a:\n- - - &x [" + ", ".join(["s"] * 24) + "]\n"
        "    - *x\n" + "  - &y [" + ten.format(*["*x"] * 24) + "]\n- [" + ten.format(*["*y"] * 24) + "]\n"
        "- [" + ten.format(*["*y"] * 24) + "]\n"
    )
    with pytest.raises(ConfigError, match="beyond all bounds"):
        decode_document(text, Deep, "deep.yaml")


def test_a_document_that_contains_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="beyond all bounds"):
        decode_document("&a\nnext: *a", Chain, "loop.yaml")


class Chain(msgspec.Struct):
    next: Chain | None = None


def test_size_and_depth_are_bounded() -> None:
    assert "are allowed" in mistakes("# " + "x" * DOCUMENT_BYTES_MAX)[0]
    assert "nested deeper than 32 levels" in mistakes("region: " + "[" * 5000)[0]


def test_a_flood_of_mistakes_is_cut() -> None:
    assert len(mistakes("region: a\n" + "\n".join(f"k{i}: 1" for i in range(500)))) == MISTAKES_MAX


def test_places_are_kept_for_those_who_explain() -> None:
    document = decode_placed("region: a\nstreams:\n  - name: a/b/c\n", Region, "x.yaml")
    assert str(document.place("streams", 0)) == "x.yaml:3:5"
    assert str(document.place("streams", 0, "shards")) == "x.yaml:3:5"
    assert str(document.place("nowhere")) == "x.yaml:1:1"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=200), st.text(alphabet="region: abc[]{}&*!|>-'\"\n,#%@`~?", max_size=120)))
def test_any_text_is_decoded_or_refused_as_a_config_error(text: str) -> None:
    try:
        read(text)
    except ConfigError as error:
        assert error.mistakes
