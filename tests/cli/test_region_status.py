"""What `felix region status` and `down` say of several brokers of this machine, and how a broker ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from e2e.command_mesh import felix_command
from region_home import make_region

from cli import operate, region
from cli.process import FAILURE, failure
from cli.several import log_file
from felix.errors import Code, FelixError, RequestError, UnavailableError
from felix.messages import BrokerState, ShardMoves

REFUSED = f"{FAILURE}Broker b2 had another data folder.\n       Put it back.\n       CONFLICT (409)\n"


def test_why_a_process_failed_is_read_at_the_end_of_its_log_alone(tmp_path: Path) -> None:
    said = tmp_path / "b2.log"
    said.write_text("it serves\n" + REFUSED)
    words = failure(said)
    assert words is not None and (words.sentence, words.hint) == (
        "Broker b2 had another data folder.",
        "Put it back.",
    )
    said.write_text(REFUSED + "it serves again\n" * 20)
    assert failure(said) is None


def test_a_broker_that_was_refused_on_this_machine_has_its_reason_in_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    for name in ("b1", "b2"):
        log_file(folder, name).parent.mkdir(exist_ok=True)
        log_file(folder, name).write_text(REFUSED)
    states = [BrokerState("b1", "127.0.0.1:7443"), BrokerState("b2"), BrokerState("b3")]
    (told,) = region._ends_here("us-east", states)
    assert told.startswith("Broker b2 ended here: Broker b2 had another data folder. Put it back. See ")
    # One that region.yaml names, and no broker knows.
    log_file(folder, "b4").write_text(REFUSED.replace("\n       Put it back.", ""))
    told = region._ends_here("us-east", states, ["b1", "b2", "b3", "b4"])[1]
    assert told.startswith("Broker b4 ended here: Broker b2 had another data folder. See ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "us-east", "--region", "eu-west"), "are two regions"),
        (("down", "us-east", "--region", "eu-west"), "are two regions"),
        (("ready", "us-east", "--region", "eu-west"), "are two regions"),
        (("drain", "b1", "us-east", "--region", "eu-west"), "are two regions"),
        (("undrain", "b1", "us-east", "--region", "eu-west"), "are two regions"),
        (("rebalance", "us-east", "--region", "eu-west"), "are two regions"),
        (("scale", "2", "us-east", "--region", "eu-west"), "are two regions"),
        (("down", "--region", "us-east"), "us-east does not run"),
        (("ready", "--region", "us-east"), "us-east does not run"),
        (("scale", "2", "us-east"), "us-east has one broker"),
        (("scale", "2", "--region", "us-east"), "us-east has one broker"),
    ],
)
def test_the_region_is_named_as_an_argument_or_an_option_and_once(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    make_region(tmp_path, "us-east")
    found = felix_command(tmp_path, "region", *words, code=(1, 2, 3, 4))
    assert said in found.err, found.err


def test_problems_stand_first_one_a_line_then_remarks(capsys: pytest.CaptureFixture[str]) -> None:
    problems = [f"the {number}. thing" for number in range(12)]
    region._print_problems({"problems": problems, "remarks": ["b3 is drained"]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["problem: the 0. thing", "problem: the 1. thing"]
    assert lines[10:] == ["and 2 more: --json shows all", "remark: b3 is drained"]


def test_brokers_that_end_by_themselves_while_they_are_stopped_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[str] = []

    def stop(path: Path, what: str) -> int:
        if path.name.startswith("b3"):
            raise RequestError(f"{what} does not run.", code=Code.NOT_FOUND)
        stopped.append(path.name)
        return 7

    pids: list[Any] = [(tmp_path / f"b{number}.pid", f"Broker b{number} of us-east") for number in (1, 2, 3)]
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    make_region(tmp_path, "us-east")
    monkeypatch.setattr(region, "_pid_files", lambda folder, config: pids)
    monkeypatch.setattr(region, "read_state", lambda path: {"pid": 7} if path in dict(pids) else None)
    monkeypatch.setattr(region, "stop", stop)
    region.down("us-east")
    assert stopped == ["b1.pid", "b2.pid"]
    assert capsys.readouterr().out.splitlines()[-1] == "Broker b3 of us-east has stopped"


async def test_a_broker_that_may_go_on_no_more_ends_its_process_with_the_reason() -> None:
    async def ended() -> FelixError:
        return RequestError("Its keys were given up.", code=Code.CONFIG_INVALID)

    node: Any = SimpleNamespace(ended=ended)
    with pytest.raises(RequestError, match="given up"):
        await region._stopped(node, asyncio.Event())


def test_a_rebalance_says_how_many_shards_moved_and_how_many_nobody_can_lead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = ShardMoves([], 3, revision=7)

    async def moved(*asked: object) -> tuple[ShardMoves, ShardMoves]:
        return began, ShardMoves([], 0, moved=2, unled=1, revision=9)

    monkeypatch.setattr(operate, "_rebalance", moved)
    with pytest.raises(UnavailableError, match="1 shard stays where it is, as nobody can lead it"):
        operate.rebalance()
    assert "2 shards moved" in capsys.readouterr().out


class Asked:
    """A client of a region whose rebalancing somebody ends after the first look."""

    def __init__(self) -> None:
        self.looks = 0

    async def rebalance(self, *, dry_run: bool = False, since: int = 0) -> ShardMoves:
        if not dry_run:
            return ShardMoves([], 3, revision=7)
        self.looks += 1
        assert since == 7
        return ShardMoves([], 2, moved=1, revision=9, is_asked=self.looks < 2)


def test_a_rebalance_that_somebody_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(operate, "LOOK_S", 0.0)
    monkeypatch.setattr(operate, "connect", lambda region, identity: contextlib.nullcontext(asked))
    with pytest.raises(
        RequestError, match="1 shard moved, 0 on the way, 2 that would have moved stay"
    ) as refused:
        operate.rebalance()
    assert refused.value.code is Code.CONFLICT and asked.looks == 1 + operate.LOOKS


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (ShardMoves([], 5, under_way=2), "The rebalancing is ended: 2 shards on the way arrive, and nothing more begins to move for it. Drains go on"),
        (ShardMoves([], 5), "The rebalancing is ended: nothing is on the way, and nothing more begins to move for it. Drains go on"),
        (ShardMoves([], 0, is_asked=False), "No rebalancing is under way"),
        (ShardMoves([], 0, under_way=1, is_asked=False), "No rebalancing is under way; 1 shard still on the way arrives"),
    ],
)  # fmt: skip
def test_a_rebalance_that_is_ended_says_what_becomes_of_what_moves(ended: ShardMoves, said: str) -> None:
    assert operate._ended_text(ended) == said
