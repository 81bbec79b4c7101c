"""F15: what stays cannot be tried out by the destination, which has the transfer key and may be given the egress log.

Tried as found: every candidate for a withheld record's key and payload is committed to under all that the destination
can derive, and compared with the entries of the WITHHELD leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from bridge_mesh import STREAM, Mesh, flight, two_regions

from audit.leaf import CommitmentKey, Committer, Kind, iter_entries, payload_commitment
from keys.key_id import KeyKind, check_key_id
from keys.link import commitment_secret, derive
from policy.transform import build_spec

Tally = Callable[[str, int], None]
SECRETS = [b"patient-4711@hospital.example", b"patient-4712@hospital.example"]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with two_regions(tmp_path) as mesh:
        yield mesh


async def test_what_is_withheld_is_not_found_by_trying(mesh: Mesh, tally: Tally) -> None:
    await mesh.create()
    payloads = [flight(number, origin="EWR" if number % 2 else "JFK") for number in range(20)]
    async with mesh.operator("us-east") as client:
        publisher = client.stream(STREAM)
        for number, payload in enumerate(payloads):
            await publisher.publish(payload, key=SECRETS[number % 2])
    grant = await mesh.grant(transform=build_spec(filter_='origin == "EWR"', pseudonymize=["tailnum"]))
    async with mesh.agent() as agent:
        await mesh.crossed(10)
        # What the destination has: it opened the ingest stream's transfer key, and nothing else of the link.
        (worker,) = agent._links.workers
        session = worker._session
        assert session is not None and session._route is not None
        key, secrets = session._route.key, session._secrets
        assert secrets is not None
    withheld = mesh.leaves(mesh.egress_folder, Kind.WITHHELD)
    crossed = mesh.leaves(mesh.egress_folder, Kind.INTENT)
    entries = [entry for leaf in withheld for entry in iter_entries(leaf)]
    assert len(entries) == 10 and grant
    assert {leaf.header.commitment_key_id for leaf in crossed} == {key.key_id}
    for leaf in withheld:
        assert leaf.header.commitment_key_id not in (key.key_id, b"")
        check_key_id(leaf.header.commitment_key_id, "us-east", KeyKind.WITHHELD)
    commitments, tags = {entry.commitment for entry in entries}, {entry.tag for entry in entries}
    derivable = {
        commitment_secret(key), key.secret, derive(key.secret, "withheld-secret", key.scope.encode()),
        *(derive(key.secret, purpose, key.key_id, key.scope.encode()) for purpose in ("withheld-secret", "link-secret")),
    }  # fmt: skip
    tried = 0
    for secret, key_id in itertools.product(derivable, {key.key_id, withheld[0].header.commitment_key_id}):
        committer = Committer(CommitmentKey(key_id, secret), STREAM, key.scope.incarnation, 0)
        for entry, plain, payload in itertools.product(entries, [b"", *SECRETS], payloads):
            assert committer.commit(entry.offset, entry.time_ms, plain, b"", payload) not in commitments
            assert not plain or committer.tag(plain) not in tags
            held = CommitmentKey(key_id, secret)
            assert (
                payload_commitment(held, STREAM, key.scope.incarnation, 0, entry.offset, payload)
                not in commitments
            )
            tried += 2
    # The same trial does find the records, for who has the link secret: so it was a trial.
    found = 0
    own = Committer(CommitmentKey(*secrets.withheld_key(key.scope)), STREAM, key.scope.incarnation, 0)
    for entry, plain, payload in itertools.product(entries, SECRETS, payloads):
        found += own.commit(entry.offset, entry.time_ms, plain, b"", payload) == entry.commitment
    assert found == 10
    tally("guesses at withheld records", tried)
