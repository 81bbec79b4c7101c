"""The health page of a process that may open no more files, and of one that somebody asks who hangs on, or asks for too much."""

from __future__ import annotations

import os
import resource
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Lock, active_count

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from felix.health import ACCEPT_AGAIN_S, COLLECTING_MAX, CONNECTIONS_MAX, HealthServer


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


def test_who_hangs_on_takes_few_threads_and_gives_way_to_who_asks(capfd: pytest.CaptureFixture[str]) -> None:
    server = HealthServer("127.0.0.1", 0, Nothing(), lambda: "")
    threads = active_count()
    try:
        with ExitStack() as hanging:
            for _ in range(4 * CONNECTIONS_MAX):
                hanging.enter_context(socket.create_connection(server.address, timeout=10)).sendall(
                    b"GET /li"
                )
            with urllib.request.urlopen(f"http://127.0.0.1:{server.address[1]}/livez", timeout=10) as page:
                assert page.status == 200
            deadline = time.monotonic() + 5
            while active_count() - threads > CONNECTIONS_MAX and time.monotonic() < deadline:
                time.sleep(0.01)
            assert active_count() - threads <= CONNECTIONS_MAX
    finally:
        server.close()
    assert capfd.readouterr().err == "", "a stranger fills no log"


def test_few_pages_of_metrics_are_made_at_once_and_all_that_are_asked_for() -> None:
    class Counting(Collector):
        now = most = 0
        lock = Lock()

        def collect(self) -> Iterator[Metric]:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            time.sleep(0.02)
            yield GaugeMetricFamily("nothing", "Nothing.", 0.0)
            with self.lock:
                self.now -= 1

    collector = Counting()
    server = HealthServer("127.0.0.1", 0, collector, lambda: "")

    def ask(_: int) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.address[1]}/metrics", timeout=30) as page:
            status: int = page.status
            return status

    try:
        with ThreadPoolExecutor(CONNECTIONS_MAX // 2) as pool:
            assert set(pool.map(ask, range(CONNECTIONS_MAX))) == {200}
    finally:
        server.close()
    assert collector.most == COLLECTING_MAX
