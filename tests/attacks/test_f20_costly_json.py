"""F20: JSON that costs the destination's event loop more than its length: numbers at the ends of the range, values without number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bridge_mesh import mesh_terms, two_regions
from rogue_agent import Wild, granted, rogue_agent

from felix.batch import Buffer, encode_headers
from felix.errors import Code
from felix.provenance import PATH_HEADER
from felix.runtime.real import now_ms
from felix.steps import Steps as RecordSteps
from felix.steps import finished
from policy.inspection import Inspection, OutsideTermsError
from policy.transform import VALUES_MAX, TransformSpec, Withheld, compile_transform, decode_json
from region.crossing.inspected import STEP_BYTES, Steps, inspect

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
    return Inspection(mesh_terms(now_ms(), transform=TransformSpec()))


HEADERS = encode_headers({PATH_HEADER: b"us-east"})


def not_to_be_decoded(data: object) -> object:
    raise AssertionError("it was decoded")


@pytest.mark.parametrize("what", COSTLY)
def test_a_record_of_too_many_values_is_refused_before_it_is_decoded(
    inspection: Inspection, what: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policy.inspection.decode_json", not_to_be_decoded)
    monkeypatch.setattr("policy.transform.decode_json", not_to_be_decoded)
    with pytest.raises(OutsideTermsError, match="more than 16384 values"):
        finished(inspection.steps(b"", HEADERS, COSTLY[what]))
    # The source's half says the same, so an honest agent never sends one.
    assert isinstance(compile_transform(TransformSpec(), b"k" * 32, "scope")(COSTLY[what]), Withheld)
    tally("records of too many values", 1)


@pytest.mark.parametrize("number", [b"1e300", b"1.5e300", b"9e307", b"5e-324", b"2.2250738585072011e-308"])
def test_a_number_is_read_as_by_any_reader_of_json(number: bytes, tally: Tally) -> None:
    payload = of_values(number, 1_000 * (len(number) + 1))
    for spelling in (payload, payload.replace(number, number.upper())):
        assert decode_json(spelling) == json.loads(spelling)
        tally("numbers at the ends of the range", spelling.count(b",") + 1)


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
        finished(inspection.steps(b"", HEADERS, payload))
    most = b'{"a":[' + b",".join([b"0"] * (VALUES_MAX - 1)) + b"]}"
    finished(inspection.steps(b"", HEADERS, most))
    with pytest.raises(OutsideTermsError):
        finished(inspection.steps(b"", HEADERS, most.replace(b"]}", b",0]}")))


@pytest.mark.parametrize("engine", ENGINES)
async def test_an_envelope_of_costly_records_is_looked_at_in_small_steps(
    tmp_path: Path, engine: str, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps others may have their turn; a step ends with the record that passes `STEP_BYTES`."""
    looked = longest = steps = 0
    check = Inspection.steps

    def counting(
        self: Inspection, key: Buffer, headers: Buffer, payload: Buffer
    ) -> RecordSteps[tuple[str, ...]]:
        nonlocal looked
        looked += len(payload)
        return check(self, key, headers, payload)

    def stepping(*args: Any) -> Steps[Any]:
        nonlocal looked, longest, steps
        work, looked = inspect(*args), 0
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                longest, steps, looked = max(longest, looked), steps + 1, 0
            yield

    monkeypatch.setattr(Inspection, "steps", counting)
    monkeypatch.setattr("region.crossing.ingest.inspect", stepping)
    async with two_regions(tmp_path) as mesh:
        grant = await granted(mesh)
        async with rogue_agent(mesh, grant, engine=engine) as agent:
            for payloads, is_taken in (
                ([COSTLY["numbers at the end of the range"][: MIB - 100]] * 3, False),
                ([of_values(b"1e300", 16_000)] * 250, True),
                ([of_values(b"[]", 12_000)] * 250, True),
            ):
                await agent.open()
                longest = steps = 0
                records = [Wild(payload) for payload in payloads]
                if is_taken:
                    assert (await agent.cross(records, compress=True)).records == len(records)
                    assert steps > sum(map(len, payloads)) // (STEP_BYTES + len(payloads[0]))
                else:
                    refused = await agent.refused(records, compress=True)
                    assert refused.code is Code.OUTSIDE_TERMS
                assert 0 < longest <= STEP_BYTES + len(payloads[0])
                tally("envelopes of costly records", 1)
