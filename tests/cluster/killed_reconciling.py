"""`felix region reconcile` of us-east, killed with SIGKILL before one of its transactions, or after it and before its answer.

    python -m cluster.killed_reconciling KILL [OPTION …]

`KILL`: before which of these moments, counted from 1 on; 0: before none. With what follows the command is called.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from cli.main import main
from region.metadata.etcd import EtcdStore


def begin(kill: int) -> None:
    transact, count = EtcdStore.transact, 0

    def moment() -> None:
        nonlocal count
        count += 1
        if count == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    async def counted(self: EtcdStore, *arguments: Any, **named: Any) -> Any:
        moment()
        answer = await transact(self, *arguments, **named)
        moment()
        return answer

    EtcdStore.transact = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    begin(int(sys.argv[1]))
    sys.argv = ["felix", "region", "reconcile", "us-east", *sys.argv[2:]]
    main()
