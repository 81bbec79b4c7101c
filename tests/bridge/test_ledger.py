"""The ledger follows the egress log's leaves, and a snapshot gives it back."""

from __future__ import annotations

from audit_log import INCARNATION, Link

from audit.leaf import Kind
from bridge.ledger import Ledger


def test_it_accounts_for_what_crossed_what_stayed_and_what_is_gone() -> None:
    link, ledger = Link(), Ledger()
    assert ledger.shard(link.key, INCARNATION) is None
    first = link.intent(10, withhold=(2, 3))
    leaves = [
        link.grant(),
        *first,
        link.gap(5),
        *link.intent(3, withhold=(0, 1, 2)),
    ]
    for leaf in leaves:
        ledger.apply(leaf.header)
    account = ledger.shard(link.key, INCARNATION)
    assert account is not None
    assert account.crossed == 0, "without a receipt"
    ledger.apply(link.ack(first).header)
    assert (account.accounted_to, account.crossed, account.withheld, account.gaps) == (18, 8, 5, 5)
    assert ledger.grant(link.grant_id).granted
    assert not ledger.grant(link.grant_id).revoked
    charged = sum(leaf.header.charged_bytes for leaf in leaves if leaf.header.kind is Kind.INTENT)
    assert (ledger.grant(link.grant_id).crossed_records, ledger.grant(link.grant_id).charged_bytes) == (
        8,
        charged,
    )
    ledger.apply(link.revoke().header)
    assert ledger.grant(link.grant_id).revoked


def test_another_grant_may_begin_before_what_was_announced() -> None:
    link, ledger = Link(), Ledger()
    for leaf in link.intent(10):
        ledger.apply(leaf.header)
    link.grant_id, link.offset = "g-2", 4
    for leaf in link.intent(2):
        ledger.apply(leaf.header)
    account = ledger.shard(link.key, INCARNATION)
    assert account is not None
    assert (account.grant_id, account.accounted_to) == ("g-2", 6)


def test_a_snapshot_gives_it_back() -> None:
    link, ledger = Link(), Ledger()
    for leaf in (link.grant(), *link.intent(10), link.revoke()):
        ledger.apply(leaf.header)
    again, size, last = Ledger.decode(ledger.encode(3, b"h" * 32))
    assert (size, last) == (3, b"h" * 32)
    assert again.encode(3, last) == ledger.encode(3, last)
