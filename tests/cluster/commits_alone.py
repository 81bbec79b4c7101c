"""`felix` with R1 switched off: a leader commits what it has on its own disk, whoever else has it. For tests that have to miss the rule."""

from __future__ import annotations

from cli.main import main
from region.log.point import LogPoint
from region.replication.leader import LeaderCore
from region.replication.replica import Log


def committed_alone(self: LeaderCore, log: Log) -> LogPoint:
    return max(log.commit, log.durable)


if __name__ == "__main__":
    LeaderCore._committed = committed_alone  # type: ignore[method-assign]
    main()
