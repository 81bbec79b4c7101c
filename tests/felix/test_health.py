"""The health page of a process that may open no more files."""

from __future__ import annotations

import os
import resource
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from felix.health import ACCEPT_AGAIN_S, HealthServer


class Nothing(Collector):
    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("nothing", "Nothing.", 0.0)


@contextmanager
def no_more_files() -> Iterator[list[int]]:
    """Every descriptor below the limit is taken. Yields some that are, to be closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    taken: list[int] = []
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield taken
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_answers_while_the_process_may_open_no_more_files_and_spins_not() -> None:
    server = HealthServer("127.0.0.1", 0, Nothing(), lambda: "too many open files")
    try:
        with no_more_files() as taken:
            # What asks is in this process, too, and needs one.
            for path in ("/livez", "/metrics", "/livez"):
                os.close(taken.pop())
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{server.address[1]}{path}", timeout=10
                ) as page:
                    assert page.status == 200
                taken.append(os.open(os.devnull, os.O_RDONLY))
        # Both have their files before: of what is free then, the server may take it first.
        with socket.socket() as first, socket.socket() as second, no_more_files():
            # The one that is kept back is gone as well: what knocks is not looked at again and again.
            for each in (first, second):
                each.settimeout(10)
                each.connect(server.address)
            time.sleep(ACCEPT_AGAIN_S)
            before = time.process_time()
            time.sleep(5 * ACCEPT_AGAIN_S)
            assert time.process_time() - before < 2.5 * ACCEPT_AGAIN_S
    finally:
        server.close()
