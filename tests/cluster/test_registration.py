"""A broker joins under a number of its own; old copies of its folder, replaced folders and an old store are told apart."""

from __future__ import annotations

from cluster.samples import KEYS
from cluster.stage import Stage, refused

from region.cluster import registration
from region.cluster.records import BrokerRecord
from region.cluster.registration import FolderRecord, Step
from region.cluster.transactions import Reason, Refusal, Transaction
from region.metadata.transaction import Put


def replaced(stage: Stage, name: str) -> None:
    """A new disk, empty."""
    stage.files[name] = FolderRecord(folder=f"{ord(name) + 1000:032x}")


def test_each_start_has_a_number_of_its_own() -> None:
    stage = Stage("a")
    assert stage.registration("a") == 1
    stage.die("a")
    stage.start("a")
    assert stage.registration("a") == 2 and stage.files["a"].registration == 2


def test_r8c_a_start_whose_answer_was_lost_is_followed_by_another_number_whether_it_happened_or_not() -> None:
    for happened in (True, False):
        stage = Stage("a")
        stage.die("a")
        step = stage.intend("a")
        assert isinstance(step, Step)
        if happened:
            assert stage.do(step.transaction)
        # It crashed before the file could say that it was registered.
        stage.start("a")
        assert stage.registration("a") == 3
        assert not stage.do(step.transaction), "late, it does nothing"


def test_r8c_of_two_copies_of_a_folder_that_intend_the_same_number_one_is_registered_with_it() -> None:
    stage = Stage("a")
    stage.die("a")
    copy = stage.files["a"]
    first = stage.intend("a")
    stage.files["a"] = copy
    second = stage.intend("a", host="elsewhere", boot="another", lock="another")
    assert isinstance(first, Step) and isinstance(second, Step)
    assert stage.do(first.transaction) and not stage.do(second.transaction)
    # The second tries again, before the first is alive: it gets the next number, and the first never becomes alive.
    ahead = stage.intend("a", host="elsewhere", boot="another", lock="another")
    assert isinstance(ahead, Step) and stage.do(ahead.transaction)
    assert stage.registration("a") == 3
    stage.files["a"] = registration.registered(first.file)
    assert refused(stage.announce("a"), Reason.SUPERSEDED)


def test_r8b_a_copy_of_a_folder_does_not_start_beside_the_living_broker() -> None:
    stage = Stage("a")
    copy = registration.intend(stage.view(), stage.files["a"], stage.whole("a", lock="another"))
    assert refused(copy, Reason.STILL_ALIVE) and isinstance(copy, Refusal) and copy.retry
    assert refused(stage.intend("a", lock=""), Reason.STILL_ALIVE), "a lock over a network proves nothing"


def test_a_lock_of_ours_proves_that_who_held_it_is_dead() -> None:
    stage = Stage("a")
    step = stage.intend("a")
    assert isinstance(step, Step) and stage.do(step.transaction)
    assert "a" not in stage.view().alive and stage.registration("a") == 2


def test_r8a_a_folder_that_was_copied_within_a_registration_is_refused_once_a_pulse_has_passed() -> None:
    stage = Stage("a")
    snapshot = stage.files["a"]
    stage.pulse("a")
    stage.die("a")
    stage.files["a"] = snapshot
    assert refused(stage.intend("a"), Reason.OLD_FOLDER)
    stage.files["a"] = FolderRecord(folder=snapshot.folder, registration=1, intended=1, pulse=1)
    stage.start("a")


def test_a_pulse_whose_answer_was_lost_is_sent_again_and_is_no_reason_to_refuse() -> None:
    stage = Stage("a")
    step = registration.raise_pulse(stage.view(), stage.files["a"], "a")
    assert isinstance(step, Step)
    stage.files["a"] = step.file
    again = registration.raise_pulse(stage.view(), stage.files["a"], "a")
    assert isinstance(again, Step) and again.file.pulse == 1
    stage.die("a")
    stage.start("a")


def test_another_folder_is_refused_unless_it_replaces_and_then_has_nothing_from_before() -> None:
    stage = Stage("a")
    stage.pulse("a")
    stage.die("a")
    replaced(stage, "a")
    refusal = stage.intend("a")
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.OTHER_FOLDER
    assert "in its place, not into it" in refusal.sentence, "a start made a folder where the lost one was"
    stage.start("a", replace=True)
    node = stage.node("a")
    assert (node.registration, node.whole_since, node.kept_since) == (2, 2, 2)
    stage.pulse("a")
    stage.die("a")
    stage.start("a")
    assert (stage.node("a").registration, stage.node("a").whole_since) == (3, 2)


def test_a_replacement_whose_answer_was_lost_goes_on_as_a_start() -> None:
    stage = Stage("a")
    stage.die("a")
    replaced(stage, "a")
    step = stage.intend("a", replace=True)
    assert isinstance(step, Step) and stage.do(step.transaction)
    stage.start("a", replace=True)
    assert (stage.node("a").registration, stage.node("a").whole_since) == (3, 2)


def test_a_folder_that_was_in_use_replaces_none() -> None:
    stage = Stage("ab")
    stage.die("a")
    stage.files["a"] = stage.files["b"]
    assert refused(stage.intend("a", replace=True), Reason.OTHER_FOLDER)


def test_replacing_never_ends_a_living_broker() -> None:
    stage = Stage("a")
    replaced(stage, "a")
    assert refused(stage.intend("a", replace=True), Reason.STILL_ALIVE)


def test_r5a_unsynced_bytes_are_kept_by_a_clean_stop_and_by_a_crash_but_not_over_a_power_cut() -> None:
    stage = Stage("a")
    stage.die("a")
    stage.start("a")
    assert stage.node("a").kept_since == 1, "a crash of the process leaves the page cache"
    stage.die("a", power=True)
    stage.start("a")
    assert (stage.node("a").registration, stage.node("a").kept_since) == (3, 3)
    stage.stop("a")
    stage.boots["a"] += 1
    stage.start("a")
    assert (stage.node("a").registration, stage.node("a").kept_since) == (4, 3), (
        "what was lost before stays lost"
    )


def test_after_a_failed_sync_what_was_acknowledged_without_one_is_not_kept_by_a_restart() -> None:
    stage = Stage("a")
    stage.files["a"] = registration.after_failed_sync(stage.files["a"])
    stopped = registration.stop(stage.view(), stage.files["a"], "a")
    assert isinstance(stopped, Step) and len(stopped.transaction.writes) == 1, "no end in order"
    stage.die("a")
    stage.start("a")
    assert stage.node("a").kept_since == 2 and not stage.files["a"].sync_failed


def test_whoever_stopped_in_order_is_not_alive_and_starts_again() -> None:
    stage = Stage("a")
    stage.stop("a")
    assert "a" not in stage.view().alive and stage.node("a").clean == 1
    stage.start("a")


def test_r7_a_process_that_lost_its_lease_is_alive_again_with_its_number_until_another_has_started() -> None:
    stage = Stage("a")
    old = stage.files["a"]
    stage.lose_lease("a")
    assert stage.do(stage.announce("a")) and stage.view().alive["a"].registration == 1
    stage.lose_lease("a")
    late = stage.announce("a")
    stage.die("a")
    stage.start("a")
    assert not stage.do(late), "another has started since it was decided"
    stage.files["a"] = old
    for refusal in (stage.announce("a"), registration.raise_pulse(stage.view(), old, "a")):
        assert refused(refusal, Reason.SUPERSEDED)


def test_a_retired_broker_begins_with_a_new_folder_and_is_told_so_with_its_old_one() -> None:
    stage = Stage("ab")
    stage.stop("b")
    assert stage.do(registration.retire(stage.view(), "b"))
    refusal = stage.intend("b")
    assert isinstance(refusal, Refusal) and refusal.reason is Reason.OLD_STORE
    assert "If it was retired, move its data folder away" in refusal.sentence
    replaced(stage, "b")
    stage.start("b")
    assert stage.registration("b") == 1


def test_r10_a_store_that_went_back_is_told_from_its_numbers_and_pulses() -> None:
    stage = Stage("a")
    empty, first = Stage("").store.backup(), stage.store.backup()
    stage.die("a")
    stage.start("a")
    second = stage.store.backup()
    for _ in range(2):
        stage.pulse("a")
    for backup in (empty, first, second):
        stage.store.restore(backup)
        for refusal in (
            stage.announce("a"),
            registration.raise_pulse(stage.view(), stage.files["a"], "a"),
        ):
            assert refused(refusal, Reason.OLD_STORE)
    for backup in (empty, first, second):
        stage.store.restore(backup)
        assert refused(stage.intend("a"), Reason.OLD_STORE)


def test_a_store_from_before_a_folder_was_replaced_is_called_old_and_not_the_folder_wrong() -> None:
    stage = Stage("ab")
    before = stage.store.backup()
    stage.die("a")
    replaced(stage, "a")
    stage.start("a", replace=True)
    stage.die("a")
    stage.store.restore(before)
    for replace in (False, True):
        refusal = stage.intend("a", replace=replace)
        assert isinstance(refusal, Refusal) and refusal.reason is Reason.OLD_STORE
        assert "older than the data folder of broker a" in refusal.sentence
        assert "felix region reconcile" in refusal.sentence and "replace-folder" not in refusal.sentence


def test_another_brokers_folder_is_called_that_however_often_it_was_started() -> None:
    stage = Stage("ab")
    for _ in range(3):
        stage.die("b")
        stage.start("b")
    stage.die("a")
    stage.files["a"] = stage.files["b"]
    assert refused(stage.intend("a"), Reason.OTHER_FOLDER)


def test_a_broker_that_serves_a_region_alone_keeps_a_cluster_out_and_the_other_way_round() -> None:
    stage = Stage("a")
    alone_starts = stage.view().revision_of(KEYS.alone)
    stage.lose_lease("a")
    late = stage.announce("a")
    stage.store.transact([], [Put(KEYS.alone, b"{}"), Put(KEYS.broker("b"), b'{"broker":"b"}')])
    assert not stage.do(late) and stage.view().revision_of(KEYS.alone) != alone_starts
    assert refused(stage.announce("a"), Reason.OLD_BROKER) and refused(stage.intend("a"), Reason.OLD_BROKER)


def test_draining_is_said_once_and_outlives_a_restart() -> None:
    stage = Stage("a")
    assert stage.do(registration.drain(stage.view(), "a", on=True))
    stage.die("a")
    stage.start("a")
    assert stage.node("a").drain
    assert stage.do(registration.drain(stage.view(), "a", on=False)) and not stage.node("a").drain
    assert refused(registration.drain(stage.view(), "x", on=True), Reason.NOT_REGISTERED)


def test_what_is_announced_is_what_was_registered() -> None:
    stage = Stage("a")
    record = stage.view().alive["a"]
    assert (
        isinstance(record, BrokerRecord)
        and record.registration == 1
        and record.folder == stage.files["a"].folder
    )
    assert isinstance(stage.announce("a"), Transaction)


def test_a_broker_with_the_folder_of_another_is_told_whose_it_is() -> None:
    stage = Stage("ab")
    stage.die("a")
    stage.die("b")
    stage.files["a"], stage.files["b"] = stage.files["b"], stage.files["a"]
    for name, owner in (("a", "b"), ("b", "a")):
        for replace in (False, True):
            found = stage.intend(name, replace=replace)
            assert isinstance(found, Refusal) and found.reason is Reason.OTHER_FOLDER
            assert f"The data folder of broker {name} is that of broker {owner}" in found.sentence
            assert "--replace-folder" not in found.sentence, "it would give up what is only mislaid"


def test_a_new_broker_with_the_folder_of_another_is_told_whose_it_is() -> None:
    stage = Stage("a")
    stage.die("a")
    stage.files["c"], stage.boots["c"] = stage.files["a"], 1
    found = stage.intend("c")
    assert isinstance(found, Refusal) and "is that of broker a" in found.sentence
