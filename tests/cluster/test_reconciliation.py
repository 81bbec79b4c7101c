"""What is planned for a store that went back, from what folders told: which copies lead, what is refused, and what may be lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from cluster.samples import ELECTION, KEYS, SHARD, STREAM
from cluster.stage import Stage, refused

from felix.settings import Durability
from region import reconciliation
from region.cluster.records import EPOCH_MAX
from region.cluster.registration import FolderRecord
from region.cluster.transactions import Reason, Refusal
from region.log.point import LogPoint
from region.metadata.records import AUDIT_STREAM, Stream, StreamConfig
from region.reconciliation import AuditTold, FolderReport, LogTold, Plan, ShardTold
from region.replication.history import EpochStart

OTHER = "1" * 16
NAME = "acme/payments/orders"


def log(epoch: int, end: int, kind: int = 0, kept: int = 0, election: str = ELECTION) -> LogTold:
    return LogTold(kind=kind, epoch=epoch, election=election, end=LogPoint(end), kept=LogPoint(kept))


def report(stage: Stage, broker: str, *logs: LogTold, **changed: Any) -> FolderReport:
    file = stage.files[broker]
    told = FolderReport(
        region="us-east",
        broker=broker,
        folder=file.folder,
        registration=file.registration,
        intended=file.intended,
        pulse=file.pulse,
        host=f"h-{broker}",
        boot=stage.boot(broker),
        version="",
        made_ms=0,
        shards=(ShardTold(stream=NAME, incarnation=STREAM, number=0, logs=logs),) if logs else (),
    )
    return msgspec.structs.replace(told, **changed)


def planned(
    stage: Stage,
    told: dict[str, tuple[LogTold, ...]],
    without: Collection[str] = (),
    *,
    retired: Collection[str] = (),
    stream: str = NAME,
    replicas: int = 3,
    marks: Mapping[str, str] = MappingProxyType({}),
    expected: Collection[str] = (),
    configured: Collection[str] = (),
    noted: Mapping[str, tuple[int, Mapping[str, str]]] = MappingProxyType({}),
) -> Plan | Refusal:
    """`noted`: in which epoch of the audit log, and by which brokers with which folders, a broker saw copies of it in sync last."""
    config = StreamConfig(durability=Durability("fsync"), replicas=replicas)
    streams = {STREAM: Stream(name=stream, incarnation=STREAM, created_ms=0, config=config)}
    reports = {broker: report(stage, broker, *logs) for broker, logs in told.items()}
    for broker, (epoch, copies) in noted.items():
        reports[broker] = msgspec.structs.replace(
            reports[broker], audit_copies=dict(copies), audit_epoch=epoch
        )
    if marks:
        reports["a"] = msgspec.structs.replace(reports["a"], retired=dict(marks))
    return reconciliation.reconcile(
        stage.view(),
        streams,
        (),
        reports,
        expected,
        without=without,
        retired=retired,
        configured=configured,
        election=lambda: "2" * 16,
    )


def is_led_by_nobody(made: Plan) -> bool:
    """Whoever is alive then: by the record of the backup one would be elected that lacks what is away."""
    (shard,) = made.shards
    return shard.changes and not (
        shard.copies or shard.after.leader or shard.after.members() or shard.after.target
    )


@pytest.fixture
def stage() -> Stage:
    """The store is older than what the folders know: it has each broker's first registration, and epoch 7."""
    stage = Stage()
    stage.place("abc")
    for name in "abc":
        stage.die(name)
        stage.files[name] = msgspec.structs.replace(stage.files[name], registration=4, intended=5, pulse=9)
    return stage


def test_the_copies_that_have_all_lead_in_an_epoch_above_every_one_that_was_seen(stage: Stage) -> None:
    made = planned(stage, {"a": (log(7, 90),), "b": (log(9, 50),), "c": (log(9, 50),)})
    assert isinstance(made, Plan) and not made.losses
    freeze = reconciliation.freeze(stage.view(), "a", made)
    assert freeze is not None and stage.do(freeze) and reconciliation.freeze(stage.view(), "a", made) is None
    assert all(stage.do(each) for each in reconciliation.brokers(stage.view(), made))
    assert all(stage.do(each) for each in reconciliation.shards(stage.view(), made))
    assert stage.do(reconciliation.thaw(stage.view()))
    record = stage.record()
    assert (record.epoch, record.leader, record.unclean) == (9 + reconciliation.RECONCILE_GAP, "", 0)
    assert record.isr == {"b": 5, "c": 5} and set(record.replicas) == set("abc")
    again = planned(stage, {"a": (log(7, 90),), "b": (log(9, 50),), "c": (log(9, 50),)})
    assert (
        isinstance(again, Plan)
        and not again.shards[0].changes
        and not reconciliation.brokers(stage.view(), again)
    )
    for name in "abc":
        stage.start(name)
    assert stage.led() == "b", "each goes on from the folder that was heard"


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_a_copy_that_was_heard_is_eligible_after_its_next_start_whatever_its_durability(
    stage: Stage, durability: Any
) -> None:
    stage.place("abc", durability=durability)
    made = planned(stage, {name: (log(9, 50),) for name in "abc"})
    assert isinstance(made, Plan)
    for step in (reconciliation.brokers, reconciliation.shards):
        assert all(stage.do(each) for each in step(stage.view(), made))
    stage.boots["a"] += 1
    stage.start("a")
    assert stage.led() == "a" and not stage.record().unclean


def test_every_folder_is_needed_or_named(stage: Stage) -> None:
    heard = {"a": (log(9, 5),), "b": (log(9, 5),)}
    assert refused(planned(stage, heard), Reason.NO_REPORT)
    assert refused(planned(stage, heard, ["b", "c"]), Reason.CHANGED)
    made = planned(stage, heard, ["c"])
    assert isinstance(made, Plan) and not made.losses, "c alone had nothing that was acknowledged: min is 2"
    lone = planned(stage, {"a": heard["a"]}, ["b", "c"])
    assert isinstance(lone, Plan) and "may have been b, c" in lone.losses[0]
    assert lone.shards[0].after.unclean == lone.shards[0].after.epoch
    for step in (reconciliation.brokers, reconciliation.shards):
        assert all(stage.do(each) for each in step(stage.view(), lone))
    (said,) = stage.view().unclean.values()
    assert (said.cause, said.leader, said.end, said.given_up) == ("reconciled", "a", 5, ("b", "c"))
    assert said.epoch == stage.record().unclean and "may have been b, c" in said.why


def test_a_folder_that_is_older_than_the_store_is_refused(stage: Stage) -> None:
    stage.files["b"] = msgspec.structs.replace(stage.files["b"], registration=0, intended=0)
    assert refused(planned(stage, {name: (log(9, 5),) for name in "abc"}), Reason.OLD_FOLDER)


def test_all_logs_of_a_shard_count_and_who_has_something_of_the_last_epoch_was_cut_to_its_leader(
    stage: Stage,
) -> None:
    deposed = (log(7, 40), log(7, 99, kind=2))
    made = planned(stage, {"a": deposed, "b": (log(9, 50), log(7, 30, kind=2)), "c": (log(9, 50),)})
    assert isinstance(made, Plan) and not made.losses and made.shards[0].copies == ("b",)
    crossed = planned(
        stage, {"a": (log(9, 50), log(9, 3, kind=2)), "b": (log(9, 49), log(9, 4, kind=2))}, ["c"]
    )
    assert isinstance(crossed, Plan) and "none surely has every log to its end" in crossed.losses[0]


BROUGHT_UP = (log(7, 100), log(9, 51, kind=1, kept=50))


@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_a_copy_that_was_being_brought_up_leads_nothing_although_one_of_its_logs_is_the_newest(
    stage: Stage, stream: str
) -> None:
    whole = (log(8, 900, kept=900), log(8, 50, kind=1, kept=50))
    made = planned(stage, {"b": whole, "c": BROUGHT_UP}, ["a"], stream=stream)
    assert isinstance(made, Plan) and not made.losses
    assert made.shards[0].copies == ("b",) and made.shards[0].after.isr == {"b": 5}


def test_where_two_copies_lack_something_of_each_other_it_says_so(stage: Stage) -> None:
    unsure = (log(8, 900, kept=100), log(8, 50, kind=1, kept=50))
    made = planned(stage, {"b": unsure, "c": BROUGHT_UP}, ["a"])
    assert isinstance(made, Plan) and "of b, c none surely has every log" in made.losses[0]
    made = planned(stage, {"a": (log(7, 5),), "b": unsure, "c": BROUGHT_UP})
    assert isinstance(made, Plan) and not made.losses, "a was heard: each of them has its own alone"
    assert made.shards[0].copies == ("b",)


def test_a_copy_that_was_begun_anew_may_have_been_in_sync_before(stage: Stage) -> None:
    whole = (log(8, 900, kept=900), log(8, 50, kind=1, kept=50))
    stage.files["c"] = msgspec.structs.replace(stage.files["c"], folder="another")
    made = planned(stage, {"b": whole, "c": BROUGHT_UP}, ["a"])
    assert isinstance(made, Plan) and "may have been a, the folder that c had before" in made.losses[0]


@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_folders_that_were_lost_since_may_have_had_what_was_committed(stage: Stage, stream: str) -> None:
    """Two are being brought up from the one that has all, and that is lost, too."""
    for name in "bc":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=f"new {name}")
    stage.place("abc", stream=stream)
    made = planned(stage, {"b": (log(9, 3),), "c": (log(9, 2),)}, ["a"], stream=stream)
    assert isinstance(made, Plan) and "may have been a, the folder that b had before" in made.losses[0]
    if stream == NAME:
        assert made.shards[0].after.unclean
    else:
        assert is_led_by_nobody(made)


@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_a_run_that_was_cut_off_forgets_no_folder_that_was_lost(stage: Stage, stream: str) -> None:
    """By then the store has the folders that took the place of those that were lost."""
    stage.place("abc", stream=stream)
    for name in "bc":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=name * 32)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (log(9, 3),), "b": (), "c": ()}
    made = planned(stage, heard, stream=stream)
    assert isinstance(made, Plan) and "the folder that b had before" in made.losses[0]
    freeze = reconciliation.freeze(stage.view(), "a", made)
    assert freeze is not None and stage.do(freeze)
    assert all(stage.do(each) for each in reconciliation.brokers(stage.view(), made))
    # Here it is killed, and run again.
    again = planned(stage, heard, stream=stream)
    assert isinstance(again, Plan) and again.losses == made.losses
    assert reconciliation.freeze(stage.view(), "a", again) is None
    assert all(stage.do(each) for each in reconciliation.shards(stage.view(), again))
    if stream == NAME:
        (said,) = stage.view().unclean.values()
        assert said.epoch == stage.record().unclean and said.given_up == ("b", "c")
    else:
        assert is_led_by_nobody(again)


def test_a_former_folder_that_is_back_counts_until_the_one_in_its_place_is_written(stage: Stage) -> None:
    stage.place("abc", stream=str(AUDIT_STREAM))
    former = dict(stage.files)
    for name in "bc":
        stage.files[name] = FolderRecord(folder=name * 32, registration=6, intended=6)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (log(9, 3),), "b": (), "c": ()}
    back: dict[str, tuple[LogTold, ...]] = {"a": (log(9, 3),), "b": (log(9, 5),), "c": (log(9, 5),)}
    made = planned(stage, heard, stream=str(AUDIT_STREAM))
    assert isinstance(made, Plan) and "has to be back before this is accepted" in made.losses[0]
    new, stage.files = stage.files, former
    again = planned(stage, back, stream=str(AUDIT_STREAM))
    assert isinstance(again, Plan) and not again.losses and again.shards[0].copies == ("b", "c")
    stage.files = new
    freeze = reconciliation.freeze(stage.view(), "a", made)
    assert freeze is not None and stage.do(freeze)
    assert all(stage.do(each) for each in reconciliation.brokers(stage.view(), made))
    stage.files = former
    assert refused(planned(stage, back, stream=str(AUDIT_STREAM)), Reason.OLD_FOLDER)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_a_folder_that_was_replaced_in_the_store_that_was_put_back_may_have_had_what_was_committed(
    stage: Stage, stream: str, frozen: bool
) -> None:
    """Before it was reconciled, or between a run that was cut off and the next one."""
    stage.place("abc", stream=stream)
    heard: dict[str, tuple[LogTold, ...]] = {"b": (), "c": (log(9, 3),)}
    if frozen:
        made = planned(stage, {"b": (log(9, 5),), "c": (log(9, 3),)}, ["a"], stream=stream)
        assert isinstance(made, Plan)
        freeze = reconciliation.freeze(stage.view(), "b", made)
        assert freeze is not None and stage.do(freeze)
    stage.files["b"] = FolderRecord(folder="b" * 32)
    stage.start("b", replace=True)
    stage.die("b")
    for _ in range(2):
        made = planned(stage, heard, ["a"], stream=stream)
        assert isinstance(made, Plan) and "a, the folder that b had before" in made.losses[0]
        freeze = reconciliation.freeze(stage.view(), "b", made)
        assert freeze is None or stage.do(freeze)
        assert all(stage.do(each) for each in reconciliation.brokers(stage.view(), made))
    assert all(stage.do(each) for each in reconciliation.shards(stage.view(), made))
    if stream == NAME:
        (said,) = stage.view().unclean.values()
        assert said.epoch == stage.record().unclean and said.given_up == ("a", "b")
    else:
        assert is_led_by_nobody(made)


def test_an_audit_log_that_lost_folders_is_led_by_nobody_however_often_it_is_reconciled(stage: Stage) -> None:
    stage.place("abc", stream=str(AUDIT_STREAM))
    for name in "bc":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=name * 32)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (log(9, 3),), "b": (), "c": ()}
    for _ in range(3):
        made = planned(stage, heard, stream=str(AUDIT_STREAM))
        assert isinstance(made, Plan) and "The audit log is led by nobody" in made.losses[0]
        if (freeze := reconciliation.freeze(stage.view(), "a", made)) is not None:
            assert stage.do(freeze)
        for step in (reconciliation.brokers, reconciliation.shards):
            assert all(stage.do(each) for each in step(stage.view(), made))
        assert stage.do(reconciliation.thaw(stage.view()))
        record = stage.record()
        assert not record.members() and not record.leader


def test_who_got_a_copy_of_the_audit_log_after_the_backup_and_lost_its_folder_may_have_had_leaves() -> None:
    """At the backup c had a copy; d has had it since. What a and d alone had in sync last, no folder has any more."""
    stage, stream = Stage("abcd"), str(AUDIT_STREAM)
    stage.place("abc", stream=stream)
    before = {name: file.folder for name, file in stage.files.items()}
    for name in "abcd":
        stage.die(name)
        stage.files[name] = msgspec.structs.replace(stage.files[name], registration=4, intended=5, pulse=9)
    for name in "ad":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=name * 32)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (), "b": (log(9, 3),), "c": (), "d": ()}
    # b was in the set before, and heard when it left it; c knows an older one.
    noted = {
        "b": (9, {each: before[each] for each in "ad"}),
        "c": (8, {each: before[each] for each in "abcd"}),
    }
    for _ in range(2):
        made = planned(stage, heard, stream=stream, noted=noted)
        assert isinstance(made, Plan)
        assert is_led_by_nobody(made) or not made.shards[0].changes
        assert "the folder that a had before, the folder that d had before" in made.losses[0]
        for step in (reconciliation.brokers, reconciliation.shards):
            assert all(stage.do(each) for each in step(stage.view(), made))


@pytest.mark.parametrize("equal", [False, True])
def test_a_broker_that_lost_its_folder_may_have_got_a_copy_after_the_backup(equal: bool) -> None:
    """Nobody knows of which streams. Where as many copies are equal as a commit leaves no other, it may have had what it likes."""
    stage = Stage("abcd")
    stage.place("abc")
    for name in "abcd":
        stage.die(name)
        stage.files[name] = msgspec.structs.replace(stage.files[name], registration=4, intended=5, pulse=9)
    for name in "ad":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=name * 32)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (), "b": (log(9, 3),), "c": (), "d": ()}
    if equal:
        heard["c"] = (log(9, 3),)
    made = planned(stage, heard)
    assert isinstance(made, Plan)
    (shard,) = made.shards
    if equal:
        assert not made.losses and set(shard.copies) == {"b", "c"} and not shard.after.unclean
    else:
        assert (
            "the folder that a had before, one that d got since, in a folder that it lost" in made.losses[0]
        )
        assert shard.after.unclean == shard.after.epoch


def test_copies_of_the_audit_log_that_are_not_needed_any_more_count_for_nothing() -> None:
    """They were in sync once, in an epoch that is not the last one."""
    stage = Stage("abcd")
    stage.place("abc", stream=str(AUDIT_STREAM))
    before = {name: file.folder for name, file in stage.files.items()}
    for name in "abcd":
        stage.die(name)
        stage.files[name] = msgspec.structs.replace(stage.files[name], registration=4, intended=5, pulse=9)
    for name in "ad":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=name * 32)
    heard: dict[str, tuple[LogTold, ...]] = {"a": (), "b": (log(9, 3),), "c": (log(9, 3),), "d": ()}
    noted = {
        "b": (9, {each: before[each] for each in "bc"}),
        "c": (8, {each: before[each] for each in "abcd"}),
    }
    made = planned(stage, heard, stream=str(AUDIT_STREAM), noted=noted)
    assert isinstance(made, Plan) and not made.losses and made.shards[0].copies == ("b", "c")
    away = planned(
        stage,
        {name: heard[name] for name in "abc"},
        stream=str(AUDIT_STREAM),
        noted=noted | {"b": (9, {"e": "e" * 32})},
        expected="d",
        without="d",
    )
    assert refused(away, Reason.NO_REPORT) and "Of e no folder was heard" in away.sentence  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_the_next_epoch_is_above_one_of_the_audit_log_in_which_nothing_was_written(
    stage: Stage, stream: str
) -> None:
    """A broker keeps which copies were in sync in the newest epoch that it saw, and takes no word of an older one."""
    seen = 2 * reconciliation.RECONCILE_GAP
    stage.place("abc", stream=stream)
    heard = {name: (log(9, 50),) for name in "abc"}
    folders = {name: stage.files[name].folder for name in "abc"}
    made = planned(stage, heard, stream=stream, noted={"b": (seen, folders)})
    assert isinstance(made, Plan) and not made.losses
    assert (made.shards[0].after.epoch > seen) == (stream == str(AUDIT_STREAM))
    carried_out(stage, made)
    again = planned(stage, heard, stream=stream, noted={"b": (seen, folders)})
    assert isinstance(again, Plan) and not again.shards[0].changes, "an earlier run's record is as good"


def begun(*epochs: tuple[int, int], end: int, kept: int = 0) -> LogTold:
    """A log by the offsets at which its epochs begin."""
    starts = tuple(EpochStart(epoch, f"{epoch:016x}", LogPoint(start)) for epoch, start in epochs)
    last = starts[-1]
    return LogTold(
        kind=0,
        epoch=last.epoch,
        election=last.election,
        end=LogPoint(end),
        kept=LogPoint(kept),
        starts=starts,
    )


@pytest.mark.parametrize("b_end", [100, 101])
@pytest.mark.parametrize("stream", [NAME, str(AUDIT_STREAM)])
def test_what_an_earlier_leader_had_and_a_later_one_committed_without_writing_is_not_lost(
    stage: Stage, stream: str, b_end: int
) -> None:
    """b wrote record 99 anew in epoch 10, alone; c, elected in 11, had the one of epoch 9 still, and a and c committed it. c is lost."""
    stage.place("abc", stream=stream)
    a, b = begun((9, 0), end=100, kept=100), begun((9, 0), (10, 99), end=b_end, kept=99)
    made = planned(stage, {"a": (a,), "b": (b,)}, ["c"], stream=stream)
    assert isinstance(made, Plan) and not made.losses and made.shards[0].copies == ("a",)
    unsaid = begun((9, 0), end=100, kept=99)
    made = planned(stage, {"a": (unsaid,), "b": (b,)}, ["c"], stream=stream)
    assert isinstance(made, Plan) and "of a, b none surely has every log" in made.losses[0]
    assert stream == NAME or is_led_by_nobody(made)


def test_what_is_otherwise_where_it_is_known_to_be_committed_was_written_in_vain(stage: Stage) -> None:
    deposed, leader = begun((7, 0), end=90, kept=30), begun((7, 0), (9, 40), end=50, kept=45)
    made = planned(stage, {"a": (deposed,), "b": (leader,)}, ["c"])
    assert isinstance(made, Plan) and not made.losses and made.shards[0].copies == ("b",)


def test_who_was_retired_since_has_nothing_that_others_lack(stage: Stage) -> None:
    heard = {name: (log(9, 90), log(9, 5, kind=1)) for name in "abc"}
    made = planned(stage, heard, ["d", "e"])
    assert isinstance(made, Plan) and "may have been d, e" in made.losses[0]
    made = planned(stage, heard, retired=["d", "e"])
    assert isinstance(made, Plan) and not made.losses and made.shards[0].copies == ("a", "b", "c")
    lone = planned(stage, {"a": heard["a"]}, ["b"], retired=["c"])
    assert isinstance(lone, Plan) and not lone.losses, "one is away, and a commit needs two"


def carried_out(stage: Stage, made: Plan | Refusal) -> None:
    assert isinstance(made, Plan) and not made.losses
    for step in (reconciliation.brokers, reconciliation.shards, reconciliation.retired):
        assert all(stage.do(each) for each in step(stage.view(), made))


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_who_was_retired_stays_retired_where_others_know_it_or_an_operator_says_it(
    stage: Stage, is_known: bool, is_heard: bool
) -> None:
    """Its folder may be on the disk still."""
    heard = {name: (log(9, 90),) for name in "ab"} | ({"c": (log(7, 50),)} if is_heard else {})
    marks = {"c": stage.files["c"].folder}
    made = planned(stage, heard, marks=marks) if is_known else planned(stage, heard, retired=["c"])
    carried_out(stage, made)
    assert isinstance(made, Plan) and made.retired == ["c"]
    assert (
        made.notes[:1]
        == [
            "Broker c was retired, as the folders of others know: it stays so, and its folder, if there is one, is left as it is."
        ]
        * is_known
    )
    view = stage.view()
    assert set(view.nodes) == set("ab") and "c" not in view.pulses and stage.record().replicas == ("a", "b")
    again = planned(stage, heard, marks=marks) if is_known else planned(stage, heard, retired=["c"])
    assert isinstance(again, Plan) and not again.retired and not again.shards[0].changes


def test_a_name_that_was_given_anew_or_that_region_yaml_has_is_no_retired_broker(stage: Stage) -> None:
    heard = {name: (log(9, 90),) for name in "ab"}
    marks = {"c": stage.files["c"].folder}
    assert refused(planned(stage, heard, marks={"c": "another folder"}), Reason.NO_REPORT)
    assert refused(planned(stage, heard, marks=marks, expected=["c"]), Reason.NO_REPORT)
    stage.files["c"] = msgspec.structs.replace(stage.files["c"], folder="f" * 32)
    anew = planned(stage, heard | {"c": (log(9, 90),)}, marks=marks)
    assert isinstance(anew, Plan) and not anew.retired and set(anew.nodes) == set("abc")


def test_a_folder_that_is_left_out_on_an_operators_word_and_has_more_needs_another_word(stage: Stage) -> None:
    made = planned(stage, {"a": (log(9, 90),), "b": (log(9, 90),), "c": (log(9, 91),)}, retired=["c"])
    assert isinstance(made, Plan) and made.retired == ["c"]
    assert made.losses == [
        f"{NAME} shard 0: the folder of c may have more of it than any other, and is left out because c is said to be retired."
    ]


def test_a_broker_that_comes_back_is_named_with_what_retires_it_again(stage: Stage) -> None:
    heard = {name: (log(9, 90),) for name in "abc"}
    made = planned(stage, heard, configured="ab")
    again = "`felix region drain c`, then `felix region retire c`."
    assert isinstance(made, Plan) and "say --retired c" in made.notes[0] and made.notes[0].endswith(again)
    # One that a shard names, which nobody else has, cannot be forgotten.
    stage.place("c", replicas=("c",), min=1)
    lone = planned(stage, {"a": (), "b": ()}, retired=["c"])
    assert isinstance(lone, Plan) and not lone.retired
    assert any(
        each.startswith(f"Broker c was retired, and is registered again, as {NAME}") and each.endswith(again)
        for each in lone.notes
    )


def test_a_stream_that_comes_back_from_one_copy_where_others_have_none_any_more_needs_a_word(
    stage: Stage,
) -> None:
    made = planned(stage, {"a": (), "b": (), "c": (log(7, 5),)})
    assert isinstance(made, Plan) and "a, b had a copy at the backup" in made.losses[0]
    assert "felix stream delete acme/payments/orders" in made.losses[0]
    assert not made.shards[0].after.unclean
    stage.files["d"] = msgspec.structs.replace(stage.files["c"], folder="of d")
    stage.boots["d"] = 1
    moved = planned(stage, {"a": (), "b": (log(7, 5),), "c": (log(7, 5),), "d": (log(7, 5),)})
    assert isinstance(moved, Plan) and not moved.losses
    for name in "ab":
        stage.files[name] = msgspec.structs.replace(stage.files[name], folder=f"new {name}")
    anew = planned(stage, {"a": (), "b": (), "c": (log(7, 5),), "d": ()})
    assert isinstance(anew, Plan) and "had a copy at the backup" not in anew.losses[0]
    assert "the folder that a had before, the folder that b had before" in anew.losses[0]


def test_one_epoch_of_two_elections_and_what_was_committed_and_is_gone_need_a_word(stage: Stage) -> None:
    twice = planned(stage, {"a": (log(9, 5),), "b": (log(9, 5, election=OTHER),), "c": (log(9, 4),)})
    assert isinstance(twice, Plan) and "two elections" in twice.losses[0] and twice.shards[0].copies == ("a",)
    gone = planned(stage, {"a": (log(9, 5),), "b": (log(9, 5),), "c": (log(8, 4, kept=6),)})
    assert isinstance(gone, Plan) and "broker c had more" in gone.losses[0]


def test_the_audit_log_is_led_by_nobody_rather_than_by_a_copy_that_may_lack_leaves(stage: Stage) -> None:
    stage.place("abc", stream=str(AUDIT_STREAM))
    made = planned(stage, {"a": (log(9, 5),)}, ["b", "c"], stream=str(AUDIT_STREAM))
    assert isinstance(made, Plan) and "second history" in made.losses[0]
    assert is_led_by_nobody(made)


def test_a_stream_of_one_copy_waits_for_its_broker_and_goes_on_from_it(stage: Stage) -> None:
    stage.place("b", replicas=("b",), min=1)
    away = planned(stage, {"a": (), "c": ()}, ["b"], replicas=1)
    assert isinstance(away, Plan) and "until b" in away.losses[0] and is_led_by_nobody(away)
    made = planned(stage, {"a": (), "b": (log(400, 5, election=""),), "c": ()}, replicas=1)
    assert isinstance(made, Plan) and not made.losses
    assert made.shards[0].after.isr == {"b": 5} and made.shards[0].after.epoch > 400


def test_streams_that_the_store_lacks_and_those_that_no_folder_has_are_told(stage: Stage) -> None:
    reports = {name: report(stage, name) for name in "abc"}
    reports["b"] = report(stage, "b", log(3, 7))
    made = reconciliation.reconcile(stage.view(), {}, (), reports, (), without=(), election=lambda: OTHER)
    assert isinstance(made, Plan) and made.shards[0].copies == ("b",), "the record of the shard is enough"
    empty = reconciliation.reconcile(
        stage.view(),
        {},
        (),
        {name: report(stage, name) for name in "abc"},
        (),
        without=(),
        election=lambda: OTHER,
    )
    assert isinstance(empty, Plan) and "no folder at any broker" in empty.notes[0] and not empty.losses
    stage.store.transact([], [reconciliation.Delete(KEYS.shard(SHARD))])
    unknown = reconciliation.reconcile(stage.view(), {}, (), reports, (), without=(), election=lambda: OTHER)
    assert isinstance(unknown, Plan) and "was created after the backup" in unknown.losses[0]
    dropped = reconciliation.reconcile(
        stage.view(), {}, {STREAM}, reports, (), without=(), election=lambda: OTHER
    )
    assert isinstance(dropped, Plan) and not dropped.losses
    placed = planned(stage, {"a": (), "b": (log(3, 7),), "c": ()})
    assert (
        isinstance(placed, Plan)
        and placed.shards[0].before is None
        and placed.shards[0].after.isr == {"b": 5}
    )


def test_a_shard_that_the_store_lacks_and_whose_one_copy_cannot_be_read_is_not_begun_anew(
    stage: Stage,
) -> None:
    stage.store.transact([], [reconciliation.Delete(KEYS.shard(SHARD))])
    config = StreamConfig(durability=Durability("fsync"))
    streams = {STREAM: Stream(name=NAME, incarnation=STREAM, created_ms=0, config=config)}

    def made(*told: ShardTold) -> Plan:
        reports = {name: report(stage, name) for name in "ab"} | {"c": report(stage, "c", shards=told)}
        plan = reconciliation.reconcile(
            stage.view(), streams, (), reports, (), without=(), election=lambda: OTHER
        )
        assert isinstance(plan, Plan)
        return plan

    damaged = made(ShardTold(stream=NAME, incarnation=STREAM, number=0, damaged="a frame is torn."))
    assert "led by nobody until c" in damaged.losses[0] and "a frame is torn" in damaged.losses[0]
    assert is_led_by_nobody(damaged) and damaged.shards[0].after.replicas == ("c",)
    assert all(stage.do(each) for each in reconciliation.brokers(stage.view(), damaged))
    assert all(stage.do(each) for each in reconciliation.shards(stage.view(), damaged))
    repaired = made(ShardTold(stream=NAME, incarnation=STREAM, number=0, logs=(log(400, 5, election=""),)))
    assert not repaired.losses and repaired.shards[0].after.isr == {"c": 5}
    assert made().losses == [] and made().shards[0].after.replicas == ("c",)


def test_there_is_always_a_next_epoch(stage: Stage) -> None:
    made = planned(stage, {name: (log(EPOCH_MAX - 4, 5),) for name in "abc"})
    assert isinstance(made, Plan) and made.shards[0].after.epoch == EPOCH_MAX - 2


def without_a_record(stage: Stage) -> None:
    stage.store.transact([], [reconciliation.Delete(KEYS.shard(SHARD))])


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_stream_without_a_record_whose_holders_may_all_be_away_is_not_begun_anew(
    stage: Stage, replicas: int
) -> None:
    without_a_record(stage)
    made = planned(stage, {"a": ()}, ["b", "c"], replicas=replicas)
    assert isinstance(made, Plan) and "is led by nobody until b, c" in made.losses[0]
    assert is_led_by_nobody(made)
    (shard,) = made.shards
    assert shard.after.replicas == ("b", "c")
    heard = planned(stage, dict.fromkeys("abc", ()), replicas=replicas)
    assert isinstance(heard, Plan) and not heard.losses and not heard.shards, "nobody has anything of it"
    if replicas == 3:
        one = planned(stage, {"a": (), "b": ()}, ["c"])
        assert isinstance(one, Plan) and not one.losses and not one.shards, "one copy commits nothing"


def test_more_copies_than_a_record_names_are_equal(stage: Stage) -> None:
    names = "abcdefghij"
    for name in names[3:]:
        stage.files[name] = msgspec.structs.replace(stage.files["a"], folder=f"{ord(name):032x}")
        stage.boots[name] = 1
    made = planned(stage, {name: (log(9, 50),) for name in names})
    assert isinstance(made, Plan) and not made.losses
    assert made.shards[0].copies == tuple("abcdefg") == made.shards[0].after.replicas
    for step in (reconciliation.brokers, reconciliation.shards):
        assert all(stage.do(each) for each in step(stage.view(), made))
    assert set(stage.record().isr) == set("abcdefg")


AUDIT = str(AUDIT_STREAM)


def audit_of(stage: Stage, told: dict[str, tuple[LogTold, ...]], *without: str, signed: int = 0) -> Plan:
    config = StreamConfig(durability=Durability("fsync"), replicas=3)
    record = Stream(name=AUDIT, incarnation=STREAM, created_ms=0, config=config)
    reports = {
        broker: report(stage, broker, *logs, audit_log=AuditTold(signed=signed))
        for broker, logs in told.items()
    }
    made = reconciliation.reconcile(
        stage.view(), {STREAM: record}, (), reports, (), without=without, election=lambda: OTHER
    )
    assert isinstance(made, Plan)
    return made


def test_an_audit_log_that_the_store_lacks_is_placed_where_the_folders_have_it_to_its_end(
    stage: Stage,
) -> None:
    without_a_record(stage)
    made = audit_of(stage, {"a": (log(9, 40),), "b": (log(9, 50),), "c": (log(9, 50),)}, signed=50)
    assert not made.losses and made.shards[0].copies == ("b", "c")
    one = audit_of(stage, {"a": (log(9, 50),), "b": (log(9, 50),)}, "c", signed=50)
    assert not one.losses and one.shards[0].copies == ("a", "b"), "one copy alone commits no leaf"


def test_an_audit_log_that_the_store_lacks_is_led_by_nobody_where_a_longer_one_may_stand_elsewhere(
    stage: Stage,
) -> None:
    without_a_record(stage)
    whole = (log(9, 50),)
    lone = audit_of(stage, {"a": whole, "b": (), "c": ()})
    assert "in folders that were not heard" in lone.losses[0] and is_led_by_nobody(lone)
    away = audit_of(stage, {"a": whole}, "b", "c")
    assert "may have been b, c" in away.losses[0] and is_led_by_nobody(away)
    nowhere = audit_of(stage, dict.fromkeys("abc", ()))
    assert "a folder with its copy" in nowhere.losses[0] and is_led_by_nobody(nowhere)
    signed = audit_of(stage, dict.fromkeys("abc", whole), signed=51)
    assert "has a checkpoint of 51 leaves" in signed.losses[0] and is_led_by_nobody(signed)
