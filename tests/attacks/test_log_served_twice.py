"""A log that its owner serves, as from a bucket: it answers rightly while it is verified, and otherwise when the tables are read.

Every answer is whole in itself: tiles, bundle and level 1 agree with each other, and with no root that anybody cosigned.
"""

from __future__ import annotations

import msgspec
import pytest
from attacks.conftest import Tally
from attacks.test_one_party_alone import EGRESS, files_of, world
from audit_log import trust

from audit.bundle_roots import read_bundle_roots
from audit.checkpoint import Checkpoint
from audit.keys_in_log import keys_of_log
from audit.leaf import Leaf
from audit.note import parse_note
from audit.tile import CHECKPOINT_PATH
from audit.verify import verify_log
from felix.errors import TamperError


def test_what_the_tables_are_made_of_is_what_was_verified(tally: Tally) -> None:
    pytest.importorskip("pyspark")
    from audit.spark.source import check_bundle

    leaves = list(dict(world())[EGRESS])
    honest = files_of(EGRESS, leaves)
    assert verify_log(honest, trust()).ok
    checkpoint = Checkpoint.parse(parse_note(honest.read(CHECKPOINT_PATH) or b"").text)
    keys = keys_of_log(trust(), checkpoint, honest, {}, 0)
    bundles = read_bundle_roots(honest, checkpoint.size, checkpoint.root)
    assert not [
        found for found in check_bundle(honest, 0, checkpoint.size, keys, bundles.of(0)) if found.problem
    ]
    for at, leaf in enumerate(leaves):
        later = msgspec.structs.replace(leaf.header, time_ms=leaf.header.time_ms + 7)
        lying = files_of(EGRESS, [*leaves[:at], Leaf(later, leaf.entries), *leaves[at + 1 :]])
        # By itself it holds: nothing but the root of before shows anything.
        assert not [found for found in check_bundle(lying, 0, checkpoint.size, keys) if found.problem]
        assert [
            found for found in check_bundle(lying, 0, checkpoint.size, keys, bundles.of(0)) if found.problem
        ]
        with pytest.raises(TamperError, match="served differently"):
            bundles.read_bundle(lying, 0)
        with pytest.raises(TamperError, match="do not hash to the root"):
            read_bundle_roots(lying, checkpoint.size, checkpoint.root)
    tally("leaves served otherwise than they were verified", len(leaves))
