"""The quorum that a bridge waits for, and what becomes of it where its policy is changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from audit_log import witness_signer

from audit.checkpoint import SignedCheckpoint
from audit.note import VerifierKey
from audit.quorum import Quorum
from audit.witness_policy import WitnessPolicy

ONE, TWO = (witness_signer(f"witness.example/w{seed}", seed=seed).key for seed in (71, 72))
MAX_LAG_MS = 1_000


def policy(*keys: VerifierKey) -> WitnessPolicy:
    """All of them."""
    lines = [f"witness w{at} {key}" for at, key in enumerate(keys)]
    members = " ".join(f"w{at}" for at in range(len(keys)))
    return WitnessPolicy.parse("\n".join([*lines, f"group all all {members}", "quorum all", ""]).encode())


def cosigned(size: int, *keys: VerifierKey) -> SignedCheckpoint:
    """A checkpoint of so many leaves, as far as a quorum asks for it."""
    found: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(size=size), cosigned=tuple(SimpleNamespace(key=key) for key in keys)
    )
    return cast(SignedCheckpoint, found)


def test_a_leaf_that_was_waited_for_is_waited_for_as_long_by_the_next_policy() -> None:
    quorum, kept = Quorum(policy(ONE), MAX_LAG_MS), [cosigned(5, TWO)]
    for now_ms in (0, 900):
        quorum.update(now_ms, kept, 5)
        assert not quorum.refuses(now_ms)
    # To and fro, to what no checkpoint has either: nothing is won by it.
    for now_ms, keys in ((950, (ONE, TWO)), (1_000, (ONE,)), (1_500, (ONE, TWO))):
        quorum.take(policy(*keys))
        quorum.update(now_ms, kept, 5)
    assert quorum.lag_ms(1_500) == 1_500 and "w0" in quorum.refuses(1_500)
    quorum.take(policy(TWO))
    quorum.update(1_600, kept, 5)
    assert quorum.size == 5 and not quorum.refuses(1_600), "what is kept has it already"


def test_what_the_former_policy_alone_covered_is_waited_for_from_then_on() -> None:
    quorum, kept = Quorum(policy(ONE), MAX_LAG_MS), [cosigned(5, ONE), cosigned(3, ONE, TWO)]
    quorum.update(0, kept, 5)
    assert quorum.size == 5 and quorum.lag_ms(10_000) == 0
    quorum.take(policy(ONE, TWO))
    assert not quorum.refuses(10_000)
    quorum.update(10_000, kept, 5)
    assert quorum.size == 3 and not quorum.refuses(11_000)
    assert "w0, w1" in quorum.refuses(11_001)
    quorum.update(11_100, [cosigned(5, ONE, TWO)], 5)
    assert quorum.size == 5 and not quorum.refuses(11_100)
