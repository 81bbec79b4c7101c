"""Each trace of the design's corrections that turns on a record: what is compared, who may lead, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.samples import DELETED, ELECTION, KEYS, SHARD, STREAM, changed, shard_record, view_of
from cluster.stage import Stage, refused

from region.cluster import membership, transactions
from region.cluster.election import JournalEnd, LogEnd, Unopened, candidates, longest
from region.cluster.records import Health, ShardId, Yielded
from region.cluster.registration import FolderRecord
from region.cluster.transactions import Reason, Refusal, Transaction
from region.log.companions import JournalKind
from region.metadata.transaction import OPERATIONS_MAX, Absent, Delete, ModRevision, Put


def test_a_leader_that_is_alive_is_replaced_only_by_its_own_word() -> None:
    stage = Stage()
    stage.place("abc")
    assert refused(stage.elect(), Reason.STILL_LEADS)
    assert stage.do(stage.change(membership.with_yield(stage.record(), "drain")))
    assert stage.led() == "b"
    record = stage.record()
    assert record.epoch == 8 and record.isr == {"a": 1, "b": 1, "c": 1} and record.yielded is None
    assert record.election != ELECTION


def test_a_dead_leader_is_followed_by_a_member_and_the_rest_stays_eligible_below_min() -> None:
    stage = Stage()
    stage.place("ab")
    stage.die("a")
    assert stage.led() == "b"
    assert (stage.record().isr, stage.record().elr) == ({"b": 1}, {"a": 1})


def test_an_election_is_void_where_the_leader_is_alive_again_or_the_record_changed() -> None:
    stage = Stage()
    stage.place("abc")
    stage.die("a")
    decided = stage.elect()
    assert stage.do(stage.announce("a"))
    assert not stage.do(decided), "its lease is back: it leads on"
    stage.die("a")
    decided, again = stage.elect(), stage.elect()
    assert stage.do(again) and not stage.do(decided), "late, it does nothing"
    assert stage.record().epoch == 8


def test_r6_nobody_leads_in_a_registration_that_was_not_elected() -> None:
    stage = Stage()
    stage.place("abc", durability="interval")
    stage.die("a")
    decided = stage.elect()
    stage.die("b", power=True)
    stage.start("b")
    assert not stage.do(decided), "b has been started since"
    assert stage.led() == "c"
    assert stage.record().isr == {"c": 1}
    assert stage.record().elr == {"a": 1, "b": 1}, "with the registrations that they left with"


def test_r6_a_leader_that_was_started_again_waits_for_the_next_epoch() -> None:
    stage = Stage()
    stage.place("a")
    stage.die("a")
    stage.start("a")
    before = stage.record()
    assert refused(stage.change(membership.with_expanded(before, "b", 1)), Reason.NO_LEASE)
    assert stage.led() == "a"
    assert (stage.record().epoch, stage.record().isr) == (8, {"a": 2})
    assert stage.do(stage.change(membership.with_expanded(stage.record(), "b", 1)))


def test_r5a_a_clean_stop_does_not_bring_back_what_a_power_cut_took_before_it() -> None:
    stage = Stage()
    stage.place("ab", durability="interval")
    stage.die("b", power=True)
    stage.start("b")
    stage.stop("b")
    stage.start("b")
    stage.die("a")
    assert stage.led() == "", "b may lack what it acknowledged as registration 1"
    assert stage.record().epoch == 7 and stage.record().isr == {"a": 1, "b": 1}
    stage.start("a")
    assert stage.led() == "a"


def test_fsync_outlives_a_power_cut() -> None:
    stage = Stage()
    stage.place("ab")
    stage.die("a")
    stage.die("b", power=True)
    stage.start("b")
    assert stage.led() == "b" and stage.record().isr == {"b": 2}


def replaced(stage: Stage, name: str) -> None:
    stage.files[name] = FolderRecord(folder=f"{ord(name) + 1000:032x}")
    stage.start(name, replace=True)


def test_r5b_an_expand_that_comes_after_its_member_was_replaced_does_nothing() -> None:
    stage = Stage()
    stage.place("a")
    expand = stage.change(membership.with_expanded(stage.record(), "b", 1))
    stage.die("b")
    replaced(stage, "b")
    assert not stage.do(expand)
    assert refused(stage.change(membership.with_expanded(stage.record(), "b", 1)), Reason.NOT_REGISTERED)
    assert refused(transactions.take_out_replaced(stage.view(), SHARD), Reason.CHANGED)


def test_r5b_a_replaced_folder_is_not_elected_and_is_taken_out() -> None:
    stage = Stage()
    stage.place("abc")
    stage.die("b")
    replaced(stage, "b")
    stage.die("c")
    stage.die("a")
    assert stage.led() == ""
    assert stage.do(transactions.take_out_replaced(stage.view(), SHARD))
    assert stage.record().isr == {"a": 1, "c": 1}
    stage.start("c")
    assert stage.led() == "c"


def test_r5b_a_replaced_leader_leaves_the_sets_with_its_successors_election() -> None:
    stage = Stage()
    stage.place("ab")
    stage.die("a")
    replaced(stage, "a")
    assert stage.led() == "b"
    assert stage.record().members() == {"b": 1}


def test_r7_a_member_that_was_started_again_is_silent_until_it_is_recorded_anew() -> None:
    stage = Stage()
    stage.place("abc")
    stage.die("b")
    stage.start("b")
    shrunk = membership.with_shrunk(stage.record(), ["c"])
    assert stage.do(stage.change(shrunk)), "an old registration that is not newly written is no obstacle"
    assert stage.record().isr == {"a": 1, "b": 1}
    assert stage.do(stage.change(membership.with_expanded(stage.record(), "b", 2)))
    assert stage.record().isr == {"a": 1, "b": 2}


def test_r2_the_same_record_written_again_settles_a_swap_whose_answer_was_lost() -> None:
    stage = Stage()
    stage.place("a")
    before = stage.record()
    expand = stage.change(membership.with_expanded(before, "b", 1))
    back = stage.change(before)
    assert stage.do(back) and stage.record() == before
    assert not stage.do(expand), "from now on it cannot be applied"


def test_r9_min_is_the_records_and_changes_together_with_elr() -> None:
    stage = Stage()
    stage.place("a", "b")
    lower = stage.change(membership.with_min(stage.record(), 1))
    assert stage.do(lower)
    assert (stage.record().min, stage.record().elr) == (1, {})
    # a commits alone now; b, which lacks that, must never lead.
    stage.die("a")
    assert stage.led() == ""
    assert "a is not alive" in transactions.why_vacant(stage.view(), SHARD)


def test_durability_is_the_records_and_eligibility_goes_by_it() -> None:
    stage = Stage()
    stage.place("ab", durability="interval")
    stage.die("b", power=True)
    stage.start("b")
    to_fsync = membership.with_durability(stage.record(), "fsync")
    assert refused(stage.change(to_fsync), Reason.NOT_REGISTERED), (
        "b's bytes of registration 1 were never synced"
    )
    assert stage.do(stage.change(membership.with_shrunk(stage.record(), ["b"])))
    assert stage.do(stage.change(membership.with_durability(stage.record(), "fsync")))
    assert stage.record().members() == {"a": 1}


def test_r11_a_copy_that_failed_is_not_elected_under_its_registration_but_under_the_next() -> None:
    stage = Stage()
    stage.place("a")
    assert stage.do(stage.change(membership.with_yield(stage.record(), "failed")))
    assert stage.led() == "", "no storm: nobody is elected"
    assert refused(stage.elect(), Reason.NOBODY_ELIGIBLE)
    assert "copy that failed" in transactions.why_vacant(stage.view(), SHARD)
    stage.die("a")
    stage.start("a")
    assert stage.led() == "a" and stage.record().failed == {}


def test_r11_another_member_follows_a_leader_whose_disk_failed_else_one_of_elr() -> None:
    for isr, elr in (("ab", ""), ("a", "b")):
        stage = Stage()
        stage.place(isr, elr)
        assert stage.do(stage.change(membership.with_yield(stage.record(), "failed")))
        assert stage.led() == "b"
        assert (stage.record().isr, stage.record().elr) == ({"b": 1}, {"a": 1})
        stage.die("b")
        assert stage.led() == "", "a is alive, but its copy failed under this registration"
        stage.die("a")
        stage.start("a")
        assert stage.led() == "a"


def test_r11_after_a_failed_sync_of_an_interval_stream_a_restart_does_not_make_it_whole() -> None:
    stage = Stage()
    stage.place("a", durability="interval", min=1)
    assert stage.do(stage.change(membership.with_yield(stage.record(), "failed")))
    stage.die("a")
    stage.start("a")
    assert stage.led() == "", "what it acknowledged without a sync is gone from the page cache"


def test_a_leader_that_yielded_changes_nothing_more() -> None:
    stage = Stage()
    stage.place("abc")
    assert stage.do(stage.change(membership.with_yield(stage.record(), "move")))
    assert refused(stage.change(membership.with_shrunk(stage.record(), ["c"])), Reason.NOT_LEADER)


def test_a_leader_without_its_lease_changes_nothing() -> None:
    stage = Stage()
    stage.place("abc")
    shrink = stage.change(membership.with_shrunk(stage.record(), ["c"]))
    stage.lose_lease("a")
    assert not stage.do(shrink)
    assert refused(stage.change(membership.with_shrunk(stage.record(), ["c"])), Reason.NO_LEASE)


def test_r19_order_of_election() -> None:
    everyone = {"a": 6, "b": 5, "c": 5}
    record = shard_record({"a": 5, "b": 5, "c": 5}, leader="")
    elected = candidates(record, view_of(everyone).brokers)
    assert elected == ["b", "c", "a"], "a was started again"
    closed = view_of(everyone, {"a": 6, "b": changed(broker_of(), health=Health()), "c": 5})
    assert candidates(record, closed.brokers) == ["c", "b", "a"], "b opens its logs"
    eligible = shard_record({"c": 4}, {"a": 6, "b": 5}, leader="")
    assert candidates(eligible, view_of(everyone).brokers) == ["c", "a", "b"], "isr before elr"
    yielded = shard_record({"b": 5, "c": 4}, yielded=Yielded(7, "stuck"))
    assert candidates(yielded, view_of(everyone).brokers) == ["c", "b"]
    moving = shard_record({"a": 5, "b": 5, "c": 5}, leader="", target=("c", "b"))
    assert candidates(moving, view_of(everyone).brokers) == ["c", "b", "a"]
    drained = view_of({"b": changed(view_of(everyone).nodes["b"], drain=True), "c": 5})
    assert candidates(record, drained.brokers) == ["c", "b"]


def broker_of() -> object:
    return view_of({"b": 5}).alive["b"]


def test_r21_whom_most_of_the_replicas_reach_follows_a_leader_that_was_cut_off() -> None:
    record = shard_record(
        {"a": 5, "b": 5}, {}, yielded=Yielded(7, "unreachable"), replicas=("a", "b", "c", "d")
    )
    record = changed(record, isr={"a": 5, "b": 5, "c": 5})
    reaching = {
        name: changed(broker_of(), health=Health(open=True, reaches=reaches))
        for name, reaches in {"a": (), "b": ("c", "d"), "c": ("d",), "d": ("c",)}.items()
    }
    view = view_of(dict.fromkeys("abcd", 5), reaching)
    assert candidates(record, view.brokers) == ["c", "b", "a"]


def test_r22_an_interval_shard_goes_on_with_its_longest_copy_once_all_are_back_from_a_power_cut() -> None:
    stage = Stage()
    stage.place("ab", durability="interval")
    for name in "ab":
        stage.die(name, power=True)
    stage.start("a")
    assert stage.led() == ""
    early = transactions.elect_longest(stage.view(), SHARD, "a", ELECTION)
    assert refused(early, Reason.CHANGED), "b may have all that is committed"
    stage.start("b")
    view = stage.view()
    ends = {"a": LogEnd(2, 7, ELECTION, (10, 0)), "b": LogEnd(2, 7, ELECTION, (12, 0))}
    assert longest(view.shards[SHARD], {"b": ends["b"]}, view.brokers) == ""
    assert longest(view.shards[SHARD], ends | {"a": LogEnd(1, 9, ELECTION, (99, 0))}, view.brokers) == ""
    assert longest(view.shards[SHARD], ends, view.brokers) == "b"
    equal = {
        "a": LogEnd(2, 7, ELECTION, (12, 0), (queue(7, 3),)),
        "b": LogEnd(2, 7, ELECTION, (12, 0), (queue(7, 9),)),
    }
    assert longest(view.shards[SHARD], equal, view.brokers) == "b"
    assert stage.do(transactions.elect_longest(view, SHARD, "b", ELECTION, ends["b"]))
    record = stage.record()
    assert (record.leader, record.epoch, record.unclean, record.isr, record.elr) == ("b", 8, 8, {"b": 2}, {})
    (said,) = stage.view().unclean.values()
    assert (said.cause, said.leader, said.end, said.by) == ("power-cut", "b", 12, "")
    assert (said.incarnation, said.shard, said.epoch, said.election) == (*SHARD, 8, record.election)


def test_r22_fsync_shards_and_replaced_folders_wait_for_whoever_has_everything() -> None:
    for durability in ("fsync", "interval"):
        stage = Stage()
        stage.place("a", durability=durability, min=1)
        stage.die("a")
        replaced(stage, "a")
        assert stage.led() == ""
        assert refused(transactions.elect_longest(stage.view(), SHARD, "a", ELECTION), Reason.CHANGED)


OPERATOR = "spiffe://us-east.acme/operator/alice"


def recover(
    stage: Stage,
    dead: str,
    *,
    silent_ms: int = 900_000,
    off: bool = False,
    winner: str = "c",
    ends: Mapping[str, LogEnd | Unopened] | None = None,
) -> Transaction | Refusal:
    return transactions.recover(
        stage.view(),
        SHARD,
        winner,
        list(dead),
        ELECTION,
        silent_ms=dict.fromkeys(dead, silent_ms),
        detached_ms=900_000,
        powered_off=off,
        ends=ends or {},
        by=OPERATOR,
    )


def test_r12_recovery_names_every_member_as_lost_and_waits_until_none_can_commit() -> None:
    stage = Stage()
    stage.place("a", "b")
    assert refused(recover(stage, "ab"), Reason.STILL_LEADS)
    stage.die("a")
    assert refused(recover(stage, "ab"), Reason.STILL_ALIVE), "b is alive, and eligible"
    stage.die("b")
    assert refused(recover(stage, "a"), Reason.NOT_NAMED)
    assert refused(recover(stage, "ab", silent_ms=899_999), Reason.TOO_EARLY)
    decided = recover(stage, "ab", silent_ms=0, off=True)
    stage.start("b")
    assert not stage.do(decided), "b is back in the last moment"
    stage.die("b")
    assert stage.do(recover(stage, "ab"))
    record = stage.record()
    assert (record.leader, record.epoch, record.unclean, record.members()) == ("c", 8, 8, {"c": 1})
    (said,) = stage.view().unclean.values()
    assert (said.cause, said.by, said.leader, said.end) == ("recovered", OPERATOR, "c", None)
    assert said.given_up == ("a", "b") and not said.powered_off


def end(epoch: int, offset: int, registration: int = 1, *journals: JournalEnd) -> LogEnd:
    return LogEnd(registration, epoch, ELECTION, (offset, 0), journals)


def emptied() -> Stage:
    """The leader, which was alone in sync, has come back in an empty folder; the others have what it had before."""
    stage = Stage()
    stage.place("a", min=1)
    stage.die("a")
    replaced(stage, "a")
    assert stage.led() == ""
    assert stage.do(transactions.take_out_replaced(stage.view(), SHARD))
    assert not stage.record().members()
    return stage


def test_r12_a_copy_is_not_recovered_from_while_another_that_is_alive_has_more() -> None:
    stage = emptied()
    ends: dict[str, LogEnd | Unopened] = {"a": end(0, 0, 2), "b": end(7, 200), "c": end(7, 190)}
    assert refused(recover(stage, "", winner="a"), Reason.NO_REPORT)
    empty = recover(stage, "bc", winner="a", ends=ends)
    assert refused(empty, Reason.BEHIND), "also where the others are named"
    assert empty.sentence.startswith(  # type: ignore[union-attr]
        "a has no records and lacks 200 of them: b is alive and has records to 199, c is alive and has records to 189"
    )
    assert refused(recover(stage, "", winner="c", ends=ends), Reason.BEHIND)
    assert refused(recover(stage, "", winner="b", ends=ends | {"b": end(7, 200, 2)}), Reason.NO_REPORT)
    decided = recover(stage, "", winner="b", ends=ends)
    stage.die("c")
    stage.start("c")
    assert not stage.do(decided), "c was started since it was heard"
    assert stage.do(recover(stage, "", winner="b", ends=ends | {"c": end(7, 190, 2)}))
    assert (stage.record().leader, stage.record().isr) == ("b", {"b": 1})


def queue(epoch: int, offset: int) -> JournalEnd:
    return JournalEnd(JournalKind.QUEUE, epoch, (offset, 0))


def test_r12_a_living_copy_whose_journal_goes_further_is_named_and_how_much_of_it_is_cut() -> None:
    stage = emptied()
    ends: dict[str, LogEnd | Unopened] = {
        "a": end(0, 0, 2),
        "b": end(7, 200, 1, queue(7, 50)),
        "c": end(7, 190, 1, queue(7, 60)),
    }
    told = recover(stage, "", winner="b", ends=ends)
    assert refused(told, Reason.NOT_NAMED)
    assert told.sentence.startswith("c has entries 50 to 59 of the queue journal, which would be cut")  # type: ignore[union-attr]
    newer = recover(stage, "", winner="b", ends=ends | {"c": end(7, 190, 1, queue(8, 40))})
    assert refused(newer, Reason.NOT_NAMED)
    assert "c has the entries of epoch 8 of the queue journal, which" in newer.sentence  # type: ignore[union-attr]
    equal = recover(stage, "", winner="b", ends=ends | {"c": end(7, 200, 1, queue(7, 60))})
    assert refused(equal, Reason.BEHIND), "of copies with the same records the longer journal counts"
    assert "c is alive and has records to 199 with entries 50 to 59 of the queue journal" in equal.sentence  # type: ignore[union-attr]
    assert stage.do(recover(stage, "c", winner="b", ends=ends))


def test_r12_nobody_leads_with_the_only_living_copy_where_that_cannot_be_opened() -> None:
    stage = Stage()
    stage.place("ab")
    for broker in "ab":
        stage.die(broker)
    damaged = recover(stage, "ab", winner="c", ends={"c": Unopened(1, "a segment does not hold")})
    assert refused(damaged, Reason.BEHIND)
    assert damaged.sentence == "c cannot open its copy: a segment does not hold"  # type: ignore[union-attr]


def test_r12_who_is_away_or_would_cut_or_cannot_open_its_copy_is_named() -> None:
    stage = emptied()
    ends: dict[str, LogEnd | Unopened] = {"a": end(0, 0, 2), "b": end(7, 200), "c": end(6, 300)}
    told = recover(stage, "", winner="b", ends=ends)
    assert refused(told, Reason.NOT_NAMED)
    assert "c has records 200 to 299, which would be cut" in told.sentence  # type: ignore[union-attr]
    assert refused(recover(stage, "", winner="c", ends=ends), Reason.BEHIND), "the last epoch counts first"
    unopened = ends | {"c": Unopened(1, "a segment does not hold")}
    assert refused(recover(stage, "", winner="b", ends=unopened), Reason.NOT_NAMED)
    assert refused(recover(stage, "ab", winner="c", ends=unopened), Reason.BEHIND)
    assert isinstance(recover(stage, "c", winner="b", ends=unopened), Transaction)
    assert isinstance(recover(stage, "c", winner="b", ends=ends), Transaction)
    stage.die("c")
    assert refused(recover(stage, "", winner="b", ends=ends), Reason.NOT_NAMED)
    decided = recover(stage, "c", winner="b", ends=ends)
    stage.start("c")
    assert not stage.do(decided), "c is back in the last moment"


def test_r12_a_member_that_is_alive_and_may_not_lead_is_given_up_once_it_has_said_what_it_has() -> None:
    stage = Stage()
    stage.place("a", min=1)
    yielded = membership.with_yield(stage.record(), "corrupt")
    assert stage.do(stage.change(yielded)) and stage.led() == ""
    broken: dict[str, LogEnd | Unopened] = {
        "a": Unopened(1, "it does not hold"),
        "b": end(7, 0),
        "c": end(7, 0),
    }
    assert refused(recover(stage, "a"), Reason.STILL_ALIVE)
    assert refused(recover(stage, "", ends=broken), Reason.NOT_NAMED)
    assert refused(recover(stage, "a", ends=broken | {"a": end(7, 9)}), Reason.BEHIND)
    assert stage.do(recover(stage, "a", ends=broken))
    assert stage.record().isr == {"c": 1}


def test_r12_the_audit_log_is_not_recovered_with_loss() -> None:
    stage = Stage()
    stage.place("a", "b", stream="felix/system/audit", leader="")
    assert refused(recover(stage, "ab"), Reason.SYSTEM_AUDIT)


def test_r10_an_epoch_of_another_election_is_told_from_the_one_that_is_known() -> None:
    record = shard_record({"a": 1})
    assert not transactions.went_back((7, ELECTION), record)
    assert not transactions.went_back((6, "0" * 16), record)
    assert transactions.went_back((7, "0" * 16), record) and transactions.went_back((8, ELECTION), record)


def test_r10_a_frozen_region_elects_nobody_and_leaders_change_nothing() -> None:
    stage = Stage()
    stage.place("abc")
    shrink = stage.change(membership.with_shrunk(stage.record(), ["c"]))
    assert stage.do(transactions.freeze(stage.view(), "b", "epoch 9 is known"))
    assert not stage.do(shrink)
    stage.die("a")
    elect = stage.elect()
    assert isinstance(elect, Transaction)
    assert not stage.do(transactions.join([transactions.in_term(stage.view(), 0), elect]))


def test_r10_a_mark_of_before_a_start_freezes_no_region_that_was_reconciled_meanwhile() -> None:
    stage = Stage()
    late = transactions.freeze(stage.view(), "b", "the store is at revision 15 and was at 21")
    stage.die("b")
    stage.start("b")
    assert not stage.do(late)
    assert stage.do(transactions.freeze(stage.view(), "b", "the store is at revision 15 and was at 21"))


def test_placing_needs_the_brokers_as_they_were_seen_and_the_stream_to_be_there() -> None:
    stage = Stage()
    record = shard_record({"a": 1, "b": 1}, epoch=1)
    placed = transactions.place(stage.view(), SHARD, record, DELETED)
    stage.store.transact([], [Put(DELETED, b"")])
    assert not stage.do(placed)
    stage.store.transact([], [Delete(DELETED)])
    stage.die("b")
    stage.start("b")
    assert not stage.do(placed)
    placed = transactions.place(stage.view(), SHARD, changed(record, isr={"a": 1, "b": 2}), DELETED)
    assert stage.do(placed) and not stage.do(placed)


def test_a_move_ends_with_the_target_as_replicas() -> None:
    stage = Stage("abcd")
    stage.place("ab", replicas=("a", "b"))
    assert stage.do(transactions.move(stage.view(), SHARD, ("d", "b")))
    assert refused(transactions.arrive(stage.view(), SHARD), Reason.CHANGED)
    assert stage.do(stage.change(membership.with_expanded(stage.record(), "d", 1)))
    assert refused(transactions.move(stage.view(), SHARD, ()), Reason.STILL_ALIVE), (
        "d would be in sync and no replica"
    )
    assert stage.do(stage.change(membership.with_yield(stage.record(), "move")))
    assert stage.led() == "d"
    assert stage.do(transactions.arrive(stage.view(), SHARD))
    record = stage.record()
    assert (record.replicas, record.target, record.isr) == (("d", "b"), (), {"b": 1, "d": 1})
    stage.die("c")
    assert refused(transactions.move(stage.view(), SHARD, ("c", "b")), Reason.NOT_REGISTERED)
    assert refused(transactions.move(stage.view(), SHARD, ("d",)), Reason.CHANGED), "fewer than min"


def test_a_removed_stream_takes_its_shards_along_only_with_its_mark() -> None:
    stage = Stage()
    stage.place("abc")
    stage.store.transact([], [Put(DELETED, b"")])
    revision = stage.store.revision
    stage.store.transact([], [Put(DELETED, b"another")])
    assert not stage.do(transactions.remove(stage.view(), SHARD, DELETED, revision))
    assert stage.do(transactions.remove(stage.view(), SHARD, DELETED, revision + 1))
    assert not stage.view().shards


def test_the_controller_is_one_broker_that_is_alive() -> None:
    stage = Stage()
    first = transactions.begin_term(stage.view(), "a", stage.leases["a"])
    second = transactions.begin_term(stage.view(), "b", stage.leases["b"])
    assert stage.do(second) and not stage.do(first)
    term = stage.view().revision_of(KEYS.controller)
    assert stage.do(transactions.join([transactions.in_term(stage.view(), term), put()]))
    stage.die("b")
    assert not stage.do(transactions.join([transactions.in_term(stage.view(), term), put()]))
    assert refused(transactions.begin_term(stage.view(), "b", 1), Reason.NO_LEASE)
    assert stage.do(transactions.begin_term(stage.view(), "a", stage.leases["a"]))
    assert stage.do(transactions.resign(stage.view(), stage.view().revision_of(KEYS.controller)))


def put() -> Transaction:
    return Transaction((), (Put("k", b""),))


def test_batches_stay_within_a_stores_bounds_and_compare_each_broker_once() -> None:
    names = [f"b{number}" for number in range(100)]
    view = view_of(dict.fromkeys(names, 5))
    common = transactions.in_term(view, 3)
    parts = []
    for number in range(200):
        record = shard_record(
            {names[number % 100]: 5, names[number % 7]: 5},
            epoch=1,
            replicas=tuple(dict.fromkeys((names[number % 100], names[number % 7]))),
        )
        parts.append(transactions.place(view, ShardId(STREAM, number), record, DELETED))
    made = transactions.batches(parts, common)
    assert sum(count for count, _ in made) == 200 and all(count <= 60 for count, _ in made)
    for count, batch in made:
        assert len(batch.writes) == count and len(batch.compares) <= OPERATIONS_MAX
        assert (
            batch.compares.count(ModRevision(KEYS.controller, 3))
            == 1
            == batch.compares.count(Absent(DELETED))
        )
    assert transactions.batches([], common) == []
