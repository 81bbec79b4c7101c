"""F20: JSON that costs the destination's event loop more than its length: numbers at the ends of the range, values without number.

Times are CPU times of this process's one thread, so other work on the machine is not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from bridge_mesh import Mesh, two_regions
from rogue_agent import Wild, granted, rogue_agent

from felix.errors import Code
from policy.inspection import Inspection, OutsideTermsError
from policy.transform import VALUES_MAX, TransformSpec, Withheld, compile_transform

Tally = Callable[[str, int], None]
ENGINES = ("qh3", "aioquic")
MIB = 1 << 20


def of_values(value: bytes, size: int = MIB) -> bytes:
    """An object as the transform writes it, of about `size` bytes: one list of these values."""
    return b'{"a":[' + b",".join([value] * ((size - 16) // (len(value) + 1))) + b"]}"


COSTLY = {
    "numbers at the end of the range": of_values(b"1e300"),
    "the smallest numbers": of_values(b"5e-324"),
    "lists": of_values(b"[]"),
    "objects": of_values(b"{}"),
    "small numbers": of_values(b"0"),
    "empty texts": of_values(b'""'),
    "texts of brackets": of_values(b'"[,{"'),
    "members": b"{" + b",".join(b'"%x":0' % number for number in range(MIB // 11)) + b"}",
}


@pytest.fixture
def inspection(tmp_path: Path) -> Inspection:
    return Inspection(Mesh.terms(None, transform=TransformSpec()))  # type: ignore[arg-type]


def spent_s(work: Callable[[], object]) -> float:
    """The least of three times."""
    found = []
    for _ in range(3):
        begun = time.thread_time()
        work()
        found.append(time.thread_time() - begun)
    return min(found)


@pytest.mark.parametrize("what", COSTLY)
def test_a_record_of_too_many_values_is_refused_before_it_is_decoded(
    inspection: Inspection, what: str, tally: Tally
) -> None:
    def look() -> None:
        with pytest.raises(OutsideTermsError, match="more than 32768 values"):
            inspection._check_payload(b"", COSTLY[what])

    assert spent_s(look) < 0.1
    # The source's half says the same, so an honest agent never sends one.
    assert isinstance(compile_transform(TransformSpec(), b"k" * 32, "scope")(COSTLY[what]), Withheld)
    tally("records of too many values", 1)


@pytest.mark.parametrize("number", [b"1e300", b"1.5e300", b"9e307", b"5e-324", b"2.2250738585072011e-308"])
def test_a_number_costs_the_same_whichever_it_is(inspection: Inspection, number: bytes, tally: Tally) -> None:
    # Both as the transform writes it and as it does not: it is decoded before that is known.
    for payload in (of_values(number, 20_000 * (len(number) + 1)), of_values(number.upper(), 100_000)):

        def look(payload: bytes = payload) -> None:
            with suppress(OutsideTermsError):
                inspection._check_payload(b"", payload)

        assert spent_s(look) < 0.1
        tally("numbers at the ends of the range", payload.count(b",") + 1)


def test_what_is_within_the_bound_crosses(inspection: Inspection) -> None:
    transform = compile_transform(TransformSpec(), b"k" * 32, "scope")
    for text in (
        b"x" * 900_000,
        b"[,{" * 300_000,
        b'\\"' * 200_000,
        b"\\\\" * 200_000,
        b'\\\\\\",[' * 100_000,
    ):
        payload = b'{"a":"' + text + b'"}'
        assert transform(payload) == payload
        inspection._check_payload(b"", payload)
    most = b'{"a":[' + b",".join([b"0"] * (VALUES_MAX - 1)) + b"]}"
    inspection._check_payload(b"", most)
    with pytest.raises(OutsideTermsError):
        inspection._check_payload(b"", most.replace(b"]}", b",0]}"))


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_envelope_of_costly_records_lets_others_have_their_turn(
    tmp_path: Path, engine: str, tally: Tally
) -> None:
    async with two_regions(tmp_path) as mesh:
        grant = await granted(mesh)
        longest = 0.0

        async def watch() -> None:
            nonlocal longest
            while True:
                begun = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - begun)

        async with rogue_agent(mesh, grant, engine=engine) as agent:
            for payloads, is_taken in (
                ([COSTLY["numbers at the end of the range"][: MIB - 100]] * 3, False),
                ([of_values(b"1e300", 16_000)] * 250, True),
                ([of_values(b"[]", 12_000)] * 250, True),
            ):
                await agent.open()
                watching = asyncio.ensure_future(watch())
                records = [Wild(payload) for payload in payloads]
                try:
                    if is_taken:
                        assert (await agent.cross(records, compress=True)).records == len(records)
                    else:
                        refused = await agent.refused(records, compress=True)
                        assert refused.code is Code.OUTSIDE_TERMS
                finally:
                    watching.cancel()
                assert longest < 0.25
                tally("envelopes of costly records", 1)
