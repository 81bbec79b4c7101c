"""Alert rules and dashboard name metrics that a broker or an agent shows, and leave none of them out; their syntax is promtool's to judge."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from deploy_words import DEPLOY
from docs.test_links import anchors
from prometheus_client import CollectorRegistry, generate_latest
from region_home import make_region, running
from region_peer import client

from audit.submission import SubmissionStatus
from audit.trail import TrailStatus
from bridge.health import AgentCollector
from bridge.link_context import LinkStats
from felix.address import Address
from felix.settings import Deduplication, Views
from region.cluster import condition
from region.cluster.records import ClusterKeys
from region.cluster.view import ClusterView
from region.metrics import BrokerMetrics

RULES = yaml.safe_load((DEPLOY / "prometheus" / "felix.rules.yaml").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DEPLOY / "grafana" / "felix.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAME = re.compile(r"\bfelix_[a-z_]+\b")
WITNESS = SubmissionStatus("witness.example/w1", "https://witness.example", 1, 0, 0, "")

promtool = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(promtool is None, reason="no promtool on this machine")


def names_in(expressions: Iterable[str]) -> set[str]:
    return {name for expression in expressions for name in NAME.findall(expression)}


def families(page: str) -> set[str]:
    """Metrics of a page as expressions name them: those of counters end with `_total`."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.M)
    return {name for name, kind in found if not name.endswith("_created") and kind in ("gauge", "counter")}


async def broker_families(home: Path) -> set[str]:
    """What the health page of a broker shows with a stream of every kind, and a witness that it waits for."""
    folder = make_region(home, "us-east")
    async with running(folder, health=Address("127.0.0.1", 0)) as node, client(folder) as region:
        node.services.governance.witnessing._submissions = type(
            "One", (), {"status": lambda self: [WITNESS]}
        )()  # type: ignore[assignment]
        await region.create_stream(
            "acme/ops/crew", views=Views(deduplication=Deduplication(window_ms=60_000))
        )
        await region.create_queue("acme/ops/jobs")
        await region.queue("acme/ops/jobs").put(b"job")
        await region.queue("acme/ops/jobs").lease(1, wait=20)
        gates = await region.create_cache("acme/ops/gates")
        await gates.put(b"B22", b"open")
        assert node.health is not None
        host, port = node.health.address

        def read() -> str:
            with urlopen(f"http://{host}:{port}/metrics", timeout=30) as page:
                text: str = page.read().decode()
                return text

        return families(await asyncio.to_thread(read))


def agent_families() -> set[str]:
    status = TrailStatus(*[0] * len(TrailStatus._fields))  # type: ignore[arg-type]
    links: Sequence[tuple[Any, LinkStats]] = ()
    registry = CollectorRegistry()
    registry.register(
        AgentCollector(
            lambda: links,
            lambda: status,
            lambda: False,
            dict,
            lambda: [WITNESS],
            lambda: {"eu-west": 0},
            lambda: 0,
            lambda: 0.0,
        )
    )
    return families(generate_latest(registry).decode())


def cluster_families() -> set[str]:
    """What the health page of one of several brokers shows beside."""
    counted = condition.counts(ClusterView(ClusterKeys("us-east")), "b1", "")
    copies = (
        "copies",
        "copies_alarmed",
        "copies_cut_records",
        "copies_opened_again",
        "copies_damaged_segments",
        "copies_damaged_found",
    )
    scrub = "copies_repaired_segments", "scrub_checked_bytes", "scrub_rounds", "scrub_round_percent"
    return {f"felix_{name}" for name in (*counted, *copies, *scrub)}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return (
        asyncio.run(broker_families(tmp_path_factory.mktemp("home"))) | agent_families() | cluster_families()
    )


@cache
def everything_named() -> frozenset[str]:
    return frozenset(names_in(EXPRESSIONS) | names_in(alert["expr"] for alert in ALERTS))


def test_every_metric_that_is_named_is_shown_by_a_process(shown: set[str]) -> None:
    assert everything_named() - shown == set()


def test_every_metric_is_on_the_dashboard(shown: set[str]) -> None:
    assert shown - names_in(EXPRESSIONS) == set()
    assert len(shown) > 100  # the pages were read, and were those of a broker and an agent


def test_a_refusal_that_an_alert_counts_is_shown_before_it_happens() -> None:
    """Prometheus sees no increase in a series that begins with its first event."""
    asked = {
        code
        for alert in ALERTS
        for codes in re.findall(r'felix_refusals_total{code=~?"([a-z_|]+)"}', alert["expr"])
        for code in codes.split("|")
    }
    shown = BrokerMetrics().refusals
    assert asked and {code: shown.get(code) for code in asked} == dict.fromkeys(asked, 0)


def test_an_alert_says_what_is_wrong_and_where_to_read_on() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert alert.keys() <= {"alert", "expr", "for", "labels", "annotations"}, alert
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["annotations"].keys() == {"summary", "description", "runbook"}
        page, _, heading = alert["annotations"]["runbook"].partition("#")
        path = DEPLOY.parent / "docs" / page
        assert path.is_file() and (not heading or heading in anchors(path)), alert["alert"]


def test_every_panel_has_a_place_of_its_own_and_asks_the_chosen_source() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"])
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"], panel["title"]
        used = set(re.findall(r"\$(?!__)\{?([a-z]+)", json.dumps(panel)))
        assert used <= variables, panel["title"]


@needs_promtool
def test_promtool_takes_the_rules_and_they_fire_as_they_should() -> None:
    assert promtool is not None
    for words in (
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "felix.test.yaml", "felix.days.test.yaml"),
    ):
        done = subprocess.run(
            [promtool, *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    assert promtool is not None
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
