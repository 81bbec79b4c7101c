"""Shards are shared out without ever having two owners, evenly, and with as few moves as balance takes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from region.subscriptions.group import Group, Move, Step

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "stall", "resume", "release", "wait", "steal"]), st.integers(0, 9)
    ),
    max_size=40,
)


class Consumers:
    """Plays the consumers' part, and what they believe to have."""

    def __init__(self, group: Group, shards: int) -> None:
        self.group = group
        self.shards = shards
        self.now_ms = 0
        self.next_member = 1
        self.believe: dict[int, set[int]] = {}
        self.revoked: dict[int, int] = {}
        self.moved = 0

    def rebalance(self) -> list[Move]:
        moves = self.group.rebalance(self.now_ms)
        for step, shard, member in moves:
            match step:
                case Step.ASSIGN:
                    assert not any(shard in held for held in self.believe.values()), "two owners"
                    self.believe[member].add(shard)
                case Step.REVOKE:
                    assert shard in self.believe[member]
                    self.revoked[shard] = member
                case Step.FENCE:
                    self.believe[member].remove(shard)
                    self.revoked.pop(shard, None)
        return moves

    def join(self) -> None:
        self.group.join(self.next_member)
        self.believe[self.next_member] = set()
        self.next_member += 1

    def leave(self, member: int) -> None:
        lost = self.group.leave(member)
        assert set(lost) == self.believe.pop(member)
        for shard in lost:
            self.revoked.pop(shard, None)

    def release(self, shard: int) -> None:
        member = self.revoked.pop(shard)
        self.believe[member].remove(shard)
        assert self.group.released(member, shard)

    def settle(self) -> None:
        """Everybody gives back what was asked for, until nothing moves."""
        while self.rebalance() or self.revoked:
            for shard in list(self.revoked):
                self.release(shard)

    def check(self) -> None:
        owners = {shard: member for member, held in self.believe.items() for shard in held}
        assert owners == self.group.owners
        if self.believe:
            assert set(owners) == set(range(self.shards)), "a shard without an owner"


@given(shards=st.integers(1, 12), exclusive=st.booleans(), events=EVENTS)
def test_never_two_owners_never_none_and_even_in_the_end(
    shards: int, exclusive: bool, events: list[tuple[str, int]]
) -> None:
    group = Group(shards, drain_ms=100, exclusive=exclusive)
    all_of_them = Consumers(group, shards)
    for event, number in events:
        members = list(all_of_them.believe)
        chosen = members[number % len(members)] if members else 0
        match event:
            case "join":
                all_of_them.join()
            case "leave" if members:
                all_of_them.leave(chosen)
            case "stall" if members:
                group.stall(chosen)
            case "resume" if members:
                group.resume(chosen)
            case "release" if all_of_them.revoked:
                all_of_them.release(list(all_of_them.revoked)[number % len(all_of_them.revoked)])
            case "wait":
                all_of_them.now_ms += 60
            case "steal" if members:
                shard = number % shards
                if shard not in all_of_them.believe[chosen]:
                    assert not group.released(chosen, shard), "given back by somebody who did not have it"
            case _:
                continue
        all_of_them.rebalance()
        all_of_them.check()
    all_of_them.settle()
    all_of_them.check()
    counted = [member for member, stalled in group.members.items() if not stalled] or list(group.members)
    if counted:
        sizes = [len(all_of_them.believe[member]) for member in counted]
        if exclusive:
            assert sorted(sizes)[-1] == shards
        else:
            assert max(sizes) - min(sizes) <= 1


def settled(shards: int, members: int) -> Consumers:
    made = Consumers(Group(shards, drain_ms=100), shards)
    for _ in range(members):
        made.join()
    made.settle()
    return made


@given(shards=st.integers(1, 20), members=st.integers(1, 12))
def test_one_more_takes_only_its_part_and_one_less_moves_only_what_it_had(shards: int, members: int) -> None:
    group = settled(shards, members)
    before = dict(group.group.owners)
    group.join()
    group.settle()
    moved = {shard for shard, owner in group.group.owners.items() if before[shard] != owner}
    newcomer = group.next_member - 1
    assert all(group.group.owners[shard] == newcomer for shard in moved), "nobody else gets anything"
    assert len(moved) == shards // (members + 1)
    before = dict(group.group.owners)
    gone = next(iter(group.believe))
    had = set(group.believe[gone])
    group.leave(gone)
    group.settle()
    assert {shard for shard, owner in group.group.owners.items() if before[shard] != owner} == had


def test_more_consumers_than_shards_stand_by_and_step_in() -> None:
    group = settled(3, 5)
    assert Counter(len(held) for held in group.believe.values()) == {1: 3, 0: 2}
    first = group.group.owners[0]
    group.leave(first)
    moves = group.rebalance()
    assert [(step, shard) for step, shard, _ in moves] == [(Step.ASSIGN, 0)]


def test_one_that_does_not_give_back_in_time_is_fenced() -> None:
    group = settled(2, 1)
    group.join()
    (revoke,) = group.rebalance()
    assert revoke.step is Step.REVOKE and group.rebalance() == []
    group.now_ms = 100
    assert [step for step, _, _ in group.rebalance()] == [Step.FENCE, Step.ASSIGN]
    group.check()


def test_a_stalled_one_loses_its_shards_at_once_and_gets_some_back_when_it_resumes() -> None:
    group = settled(4, 2)
    group.group.stall(1)
    assert Counter(step for step, _, _ in group.rebalance()) == {Step.FENCE: 2, Step.ASSIGN: 2}
    group.settle()
    assert len(group.believe[2]) == 4
    assert group.group.resume(1) and not group.group.resume(1)
    group.settle()
    assert len(group.believe[1]) == 2


def test_where_all_are_stalled_they_keep_what_they_have() -> None:
    group = settled(4, 2)
    group.group.stall(1)
    group.group.stall(2)
    assert group.rebalance() == []


@pytest.mark.parametrize("leaver", [1, 2])
def test_exclusive_has_one_active_and_the_others_stand_by(leaver: int) -> None:
    group = Consumers(Group(3, drain_ms=100, exclusive=True), 3)
    for _ in range(3):
        group.join()
    group.settle()
    assert group.believe == {1: {0, 1, 2}, 2: set(), 3: set()}
    group.leave(leaver)
    group.settle()
    assert {len(held) for held in group.believe.values()} == {0, 3}
