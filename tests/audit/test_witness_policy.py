"""Policy files of tlog-policy: the specification's own example, each rule of its text, and evaluation against an oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit.note import Algorithm, VerifierKey
from audit.witness_policy import ENTRIES_MAX, POLICY_BYTES_MAX, PolicyError, WitnessPolicy
from felix.errors import Code, FelixError
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey


def vkey(number: int, algorithm: Algorithm = Algorithm.COSIGNATURE, name: str = "") -> VerifierKey:
    name = name or f"key.example/{number}"
    if algorithm is Algorithm.ML_DSA_44:
        return VerifierKey(name, algorithm, MlDsaKey.from_seed(number.to_bytes(32, "big")).public)
    return VerifierKey(name, algorithm, SigningKey.from_seed(number.to_bytes(32, "big")).verify_key.public)


LOG = vkey(100, Algorithm.ED25519, "log.example/1")
X1, X2, X3, Y1, Y2, Y3 = (vkey(number) for number in range(1, 7))
EXAMPLE = f"""\
log {LOG}

witness X1 {X1}
witness X2 {X2}
witness X3 {X3}
group X-witnesses 2 X1 X2 X3

witness Y1 {Y1}
witness Y2 {Y2}
witness Y3 {Y3}
group Y-witnesses any Y1 Y2 Y3

group X-and-Y all X-witnesses Y-witnesses
quorum X-and-Y
"""


def parse(text: str) -> WitnessPolicy:
    return WitnessPolicy.parse(text.encode())


def test_the_specification_example_asks_for_two_of_three_and_one_of_three() -> None:
    policy = parse(EXAMPLE)
    assert policy.log_keys == (LOG,) and len(policy.witnesses) == 6
    everybody = (X1, X2, X3, Y1, Y2, Y3)
    for chosen in product((False, True), repeat=6):
        cosigned = [key for key, is_in in zip(everybody, chosen, strict=True) if is_in]
        assert policy.is_met(cosigned) == (sum(chosen[:3]) >= 2 and any(chosen[3:]))
        assert bool(policy.missing(cosigned)) != policy.is_met(cosigned)
    assert "X1 cosigned" in policy.missing([X1]) and "2 of X-witnesses, Y-witnesses" in policy.missing([X1])


def test_a_quorum_can_be_nobody_or_one_witness() -> None:
    assert parse("quorum none\n").is_met([])
    single = parse(f"witness w {X1} https://witness.example/\nquorum w\n")
    assert single.witnesses[0].url == "https://witness.example/"
    assert single.is_met([X1, X2]) and not single.is_met([X2])


def test_a_key_of_the_same_name_is_not_the_key() -> None:
    policy = parse(f"witness w {X1}\nquorum w\n")
    assert not policy.is_met([vkey(9, name=X1.name)])


def test_ml_dsa_keys_are_taken_for_logs_and_witnesses() -> None:
    log, witness = vkey(1, Algorithm.ML_DSA_44, "log.example/1"), vkey(2, Algorithm.ML_DSA_44)
    policy = parse(f"log {log}\nwitness w {witness}\nquorum w\n")
    assert policy.log_keys == (log,) and policy.is_met([witness])


def test_white_space_comments_and_octets_that_are_no_text_are_taken() -> None:
    data = (
        b"  \t# a comment \xff\xfe\n\n\t\n"
        + f"\twitness\t\u00e9 \t {X1}  \t\n".encode()
        + b"witness \xff "
        + str(X2).encode()
        + b"\ngroup \xe2\x84\xaa all \xc3\xa9 \xff\n quorum \xe2\x84\xaa"
    )
    policy = WitnessPolicy.parse(data)
    assert policy.is_met([X1, X2]) and not policy.is_met([X1])
    assert "\\xff" in policy.missing([X1])
    with pytest.raises(PolicyError, match="not defined"):
        WitnessPolicy.parse(data.replace(b" quorum \xe2\x84\xaa", b" quorum K"))


def test_names_may_be_defined_after_the_quorum_line() -> None:
    assert parse(f"witness w {X1}\nquorum w\nwitness v {X2}\nlog {LOG}\n").is_met([X1])


BAD = {
    "": "no quorum line",
    f"log {LOG}\n": "no quorum line",
    "quorum none\nquorum none\n": "a quorum line already",
    "quorum w\n": "not defined on a line before",
    f"quorum w\nwitness w {X1}\n": "not defined on a line before",
    "quorum\n": "none of its lines",
    "quorum a b\n": "none of its lines",
    "Quorum none\n": "none of its lines",
    "logs x\nquorum none\n": "none of its lines",
    "log\nquorum none\n": "none of its lines",
    "log nonsense\nquorum none\n": "not a verifier key",
    f"log {X1}\nquorum none\n": "type 0x04",
    f"witness w {LOG}\nquorum w\n": "type 0x01",
    f"log {LOG} https://a b\nquorum none\n": "none of its lines",
    f"witness w {X1} url more\nquorum w\n": "none of its lines",
    f"witness w {X1}\nwitness w {X2}\nquorum w\n": "defined already",
    f"witness w {X1}\nwitness v {vkey(1, name='other.example')}\nquorum w\n": "public key of another witness",
    f"log {LOG}\nlog {vkey(100, Algorithm.ED25519, 'other.example')}\nquorum none\n": "public key of another log",
    f"witness none {X1}\nquorum none\n": "the name of no witness",
    f"witness w {X1}\ngroup none any w\nquorum none\n": "the name of no witness",
    f"witness w {X1}\ngroup g any none\nquorum g\n": "cannot be a member",
    f"witness w {X1}\ngroup g any w v\nquorum g\n": "v is not defined",
    f"witness w {X1}\ngroup g any g\nquorum g\n": "g is not defined",
    f"witness w {X1}\ngroup g any\nquorum g\n": "none of its lines",
    f"witness w {X1}\ngroup w any w\nquorum w\n": "defined already",
    f"witness w {X1}\ngroup g 2 w w\nquorum g\n": "a member already",
    f"witness w {X1}\nwitness v {X2}\ngroup g any w\ngroup h any w v\nquorum h\n": "a member already",
    f"witness w {X1}\ngroup g 0 w\nquorum g\n": "number from 1 to 1",
    f"witness w {X1}\ngroup g 2 w\nquorum g\n": "number from 1 to 1",
    f"witness w {X1}\ngroup g 01 w\nquorum g\n": "number from 1 to 1",
    f"witness w {X1}\ngroup g -1 w\nquorum g\n": "number from 1 to 1",
    f"witness w {X1}\ngroup g \u0661 w\nquorum g\n": "number from 1 to 1",
    f"witness w {X1}\ngroup g ALL w\nquorum g\n": "number from 1 to 1",
    "quorum none\r\n": "0x0d",
    "quorum none\x00\n": "0x00",
    "# \x7f\nquorum none\n": "0x7f",
    "quorum\u00a0none\n": "none of its lines",
    f"log \u00a0{LOG}\nquorum none\n": "no spaces",
    f"witness w {X1}\u3000\nquorum w\n": "not a verifier key",
    "#" * (POLICY_BYTES_MAX + 1): "are allowed",
}


@pytest.mark.parametrize(("text", "expected"), BAD.items(), ids=range(len(BAD)))
def test_what_is_no_policy_is_refused_and_the_line_is_named(text: str, expected: str) -> None:
    with pytest.raises(PolicyError, match=expected) as caught:
        parse(text)
    assert caught.value.code is Code.CONFIG_INVALID


def test_thirty_two_of_each_are_taken_and_there_is_an_end() -> None:
    def text(number: int) -> str:
        lines = [f"log {vkey(1000 + at, Algorithm.ED25519)}\n" for at in range(number)]
        lines += [f"witness w{at} {vkey(2000 + at)}\ngroup g{at} any w{at}\n" for at in range(number)]
        return "".join(lines) + "quorum g0\n"

    assert len(parse(text(32)).groups) == 32
    with pytest.raises(PolicyError, match="more than 256"):
        parse(text(ENTRIES_MAX + 1))


KEYS = [vkey(number) for number in range(12)]
Rule = Callable[[set[int]], bool]


@st.composite
def policies(draw: st.DrawFn) -> tuple[str, Rule]:
    """A policy and what it means, as a function written down beside it."""
    witnesses = draw(st.integers(1, len(KEYS)))
    lines = [f"witness w{at} {KEYS[at]}" for at in range(witnesses)]
    rules: dict[str, Rule] = {f"w{at}": (lambda have, at=at: at in have) for at in range(witnesses)}
    free = list(rules)
    for number in range(draw(st.integers(0, 6))):
        if not free:
            break
        members = draw(st.lists(st.sampled_from(free), min_size=1, max_size=5, unique=True))
        kind = draw(st.sampled_from(["all", "any", "k"]))
        least = {"all": len(members), "any": 1}.get(kind) or draw(st.integers(1, len(members)))
        lines.append(f"group g{number} {least if kind == 'k' else kind} {' '.join(members)}")
        parts = [rules[member] for member in members]
        rules[f"g{number}"] = lambda have, parts=parts, least=least: sum(p(have) for p in parts) >= least
        free = [name for name in free if name not in members] + [f"g{number}"]
    quorum = draw(st.sampled_from([*rules, "none"]))
    lines.append(f"quorum {quorum}")
    return "\n".join(lines) + "\n", rules.get(quorum, lambda have: True)


@settings(max_examples=300)
@given(policies(), st.sets(st.integers(0, len(KEYS) - 1)))
def test_a_policy_means_what_an_oracle_says(policy: tuple[str, Rule], have: set[int]) -> None:
    text, rule = policy
    assert parse(text).is_met([KEYS[at] for at in have]) == rule(have)


def damaged() -> Iterator[bytes]:
    for at in range(0, len(EXAMPLE), 3):
        yield EXAMPLE[:at].encode()
        yield EXAMPLE[:at].encode() + b"\xff" + EXAMPLE[at:].encode()


def test_damaged_files_raise_policy_errors_alone() -> None:
    for data in damaged():
        try:
            WitnessPolicy.parse(data)
        except PolicyError:
            continue


@given(
    st.lists(
        st.sampled_from(
            ["log", "witness", "group", "quorum", "any", "all", "2", "w", "v", "none", "\n", "#"]
        ),
        max_size=40,
    ),
    st.binary(max_size=10),
)
def test_arbitrary_words_raise_policy_errors_alone(words: list[str], tail: bytes) -> None:
    try:
        WitnessPolicy.parse(" ".join(words).encode() + tail)
    except FelixError as error:
        assert isinstance(error, PolicyError)
