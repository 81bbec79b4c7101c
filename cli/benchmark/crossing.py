"""The measurement of a bridge: two founded regions, one agent, and how fast records cross with everything in force.

Per round, all with the same records: single records at an even pace; a burst while the agent runs; then, with the
agent stopped, the same burst into the source alone, that backlog read by a subscriber of the source's own region, and
the backlog crossing once the agent has begun again. So a round holds its own yardsticks: the durable rate of the source
and the local rate of a subscriber, which have no border, no transform, no audit.

After the last round everything is stopped in order, and both audit logs are read from their files, verified and
settled (cli.benchmark.settlement) before any figure is given away.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from audit.leaf import Leaf, decode_leaf
from audit.note import parse_note
from audit.tile import CHECKPOINT_PATH, read_entries
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from bridge.config import BridgeConfig, DestinationConfig
from cli.benchmark.crossing_roles import (
    Arrived,
    Begin,
    Burst,
    End,
    Expect,
    Finish,
    Links,
    Lone,
    Prepare,
    ReadBack,
    Sent,
    arrive,
    carry,
    depart,
    serve_region,
)
from cli.benchmark.departures import DROPPED, PSEUDONYMIZED, Arrivals
from cli.benchmark.disk import measure_sync
from cli.benchmark.figures import Latency, LatencySpread, Spread
from cli.benchmark.measurement import WHOLE_TIMEOUT_S, Machine, machine
from cli.benchmark.processes import HOST, Processes
from cli.benchmark.settlement import LogBooks, Settlement, settle
from felix.address import Address
from felix.errors import UnavailableError
from felix.names import SpiffeId
from felix.runtime.real import now_ms
from keys.bundle import decode_bundle
from keys.key_file import load_signing_key
from policy.access import Verb
from policy.grant import sign_export, sign_import
from policy.residency import ResidencyPolicy, parse_policy, sign_policy
from policy.terms import Basis, GrantTerms
from policy.transform import build_spec
from region.bootstrap import OPERATOR, found_region, issue_identity, trust_region
from region.config import load_config
from region.folder import RegionFolder

SOURCE: Final = "bench-east"
DESTINATION: Final = "bench-west"
MESH: Final = "bench"
BRIDGE: Final = "east-to-west"
STREAM: Final = "bench/ops/departures"
DAY_MS: Final = 86_400_000
LONE_PER_SECOND: Final = 50.0
"""A record has landed, and its acknowledgement is in the log, well before the next one is made."""
FINDINGS_MAX: Final = 5
"""Of one log, in a settlement's problems."""
ENGINES: Final = ("qh3",)
"""Measured where none is named."""

_POLICY: Final = f"""
version: 1
name: {{region}}
revision: 1
region: {{region}}
regions:
  {SOURCE}: {{{{country: US, jurisdiction: US}}}}
  {DESTINATION}: {{{{country: IE, jurisdiction: EU}}}}
classes:
  operational: {{{{description: Flights., streams: [bench/ops/*]}}}}
{{rules}}
"""
_EXPORTS: Final = """exports:
  - name: to-west
    classes: [operational]
    to: {jurisdictions: [EU]}
    bases: [scc]
    keys: [pseudonymize, drop]
    lifetime: 90d
    approvals: 0
"""
_IMPORTS: Final = f"""imports:
  - name: from-east
    classes: [operational]
    from: {{regions: [{SOURCE}]}}
    bases: [scc]
    lifetime: 90d
    approvals: 0
"""


class CrossingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. `records`: of each burst, two per round."""

    engines: Sequence[str] = ENGINES
    records: int = 50_000
    batch_records: int = 250
    lone_records: int = 200
    shards: int = 1
    repeats: int = 3
    budget_s: float = 240.0


class CrossingResult(msgspec.Struct, frozen=True, kw_only=True):
    """One engine over its rounds; rates in records/s, ratios of the same round.

    `crossing`: a burst from its first record's making to the last one's arrival, while the publisher competes;
    `catch_up`: a backlog; `publish`: the source alone, acknowledged with fsync; `local`: a subscriber in the source's own
    region; `lone`, `lone_publish`: a single record to the subscriber at the destination, and to its acknowledgement.
    """

    engine: str
    repeats: int
    crossing: Spread
    catch_up: Spread
    publish: Spread
    local: Spread
    of_publish: Spread
    of_local: Spread
    lone: LatencySpread | None
    lone_publish: LatencySpread | None
    settlement: Settlement


class CrossingReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `felix bench bridge --json` prints."""

    kind: str
    machine: Machine
    plan: CrossingPlan
    seconds: float
    sync: LatencySpread
    results: list[CrossingResult]

    @property
    def is_reconciled(self) -> bool:
        return all(result.settlement.is_reconciled for result in self.results)


class _Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round's figures; 0 where nothing arrived."""

    crossing: float
    catch_up: float
    publish: float
    local: float
    lone: Latency | None
    lone_publish: Latency | None


def measure_crossing(
    plan: CrossingPlan, folder: Path | None = None, said: Callable[[str], None] = lambda _: None
) -> CrossingReport:
    """Measure, with all state in a folder below `folder` that is removed at the end. Blocks for a while.

    `said` is called with what is being measured. Raises UnavailableError where a process fails or does not finish.
    """
    begun = time.monotonic()
    syncs: list[Latency] = []
    results = []
    with tempfile.TemporaryDirectory(prefix="felix-bench-", dir=folder) as home:
        for number, engine in enumerate(plan.engines):
            root = Path(home) / engine
            root.mkdir()
            with Processes(begun + WHOLE_TIMEOUT_S, what=f"The measurement over {engine}") as processes:
                said(f"{engine}: two regions and a bridge")
                border = Border(plan, processes, root, engine)
                border.open()
                rounds: list[_Round] = []
                until = begun + plan.budget_s * (number + 1) / len(plan.engines)
                while len(rounds) < plan.repeats and (not rounds or time.monotonic() < until):
                    syncs.append(measure_sync(root))
                    about = f"{engine}, round {len(rounds) + 1} of {plan.repeats}: "
                    rounds.append(border.round(partial(_say, said, about)))
                    if not border.arrivals.is_clean:
                        break
                said(f"{engine}: verifying both audit logs")
                settlement = border.close()
            results.append(_result(engine, rounds, settlement))
    sync = LatencySpread.of(syncs)
    assert sync is not None
    return CrossingReport(
        kind="bridge",
        machine=machine(),
        plan=plan,
        seconds=time.monotonic() - begun,
        sync=sync,
        results=results,
    )


def _result(engine: str, rounds: Sequence[_Round], settlement: Settlement) -> CrossingResult:
    return CrossingResult(
        engine=engine,
        repeats=len(rounds),
        crossing=Spread.of([each.crossing for each in rounds]),
        catch_up=Spread.of([each.catch_up for each in rounds]),
        publish=Spread.of([each.publish for each in rounds]),
        local=Spread.of([each.local for each in rounds]),
        of_publish=Spread.of([_ratio(each.crossing, each.publish) for each in rounds]),
        of_local=Spread.of([_ratio(each.catch_up, each.local) for each in rounds]),
        lone=LatencySpread.of([each.lone for each in rounds]),
        lone_publish=LatencySpread.of([each.lone_publish for each in rounds]),
        settlement=settlement,
    )


def _say(said: Callable[[str], None], about: str, what: str) -> None:
    said(about + what)


def _ratio(value: float, to: float) -> float:
    return value / to if to else 0.0


class Border:
    """Both regions and what runs between them: `open`, rounds, `close`."""

    def __init__(self, plan: CrossingPlan, processes: Processes, home: Path, engine: str) -> None:
        self._plan = plan
        self._processes = processes
        self._home = home
        self._engine = engine
        self._source = RegionFolder.of(SOURCE, home)
        self._destination = RegionFolder.of(DESTINATION, home)
        self._published: dict[int, int] = {}
        self._brokers: list[Any] = []
        self._agent: Any = None
        self._departing: Any = None
        self._arriving: Any = None
        self._stopped_at = ""
        self.arrivals = Arrivals()

    # -- setting up ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Found, trust, start, grant; one batch crosses, so that the link is up and the destination has the stream.

        Raises UnavailableError where it does not.
        """
        processes, home, engine = self._processes, self._home, self._engine
        self._found()
        addresses = []
        for region in (SOURCE, DESTINATION):
            self._brokers.append(broker := processes.start(serve_region, home, region, engine))
            addresses.append(processes.answer(broker))
        self._departing = processes.start(depart, home, SOURCE, engine)
        self._arriving = processes.start(arrive, home, DESTINATION, engine)
        config = BridgeConfig(
            name=BRIDGE,
            source=SOURCE,
            mesh=MESH,
            source_addresses=(addresses[0],),
            destinations=(DestinationConfig(region=DESTINATION, addresses=(addresses[1],)),),
            engine="aioquic" if engine == "aioquic" else "qh3",
        )
        self._agent = processes.start(carry, config, self._source.root)
        for pipe in (self._departing, self._arriving, self._agent):
            processes.answer(pipe)
        self._prepare()
        self._ask(self._agent, Begin())
        first = self._cross(self._burst(self._plan.batch_records * self._plan.shards))
        if not first.records:
            raise UnavailableError(
                f"Nothing crosses: {self._stopped_at}",
                hint="The messages above are the regions' and the agent's.",
            )

    def _found(self) -> None:
        for folder, region, country, jurisdiction in (
            (self._source, SOURCE, "US", "US"),
            (self._destination, DESTINATION, "IE", "EU"),
        ):
            found_region(
                folder,
                region=region,
                mesh=MESH,
                country=country,
                jurisdiction=jurisdiction,
                entity=f"benchmark {country}",
                listen=Address(HOST, 0),
                health=None,
                now_ms=now_ms(),
            )
        source, destination = self._source, self._destination
        issue_identity(source, load_config(source.config), "bridge", BRIDGE, now_ms())
        trust_region(source, decode_bundle(destination.bundle.read_bytes()), now_ms())
        trust_region(destination, decode_bundle(source.bundle.read_bytes()), now_ms())

    def _prepare(self) -> None:
        source, destination = self._source, self._destination
        exports, imports = _policy(SOURCE, _EXPORTS), _policy(DESTINATION, _IMPORTS)
        source_key = load_signing_key(source.policy_key).private_key
        destination_key = load_signing_key(destination.policy_key).private_key
        now = now_ms()
        bridge = str(SpiffeId(SOURCE, MESH, "bridge", BRIDGE))
        terms = GrantTerms(
            stream=STREAM,
            from_region=SOURCE,
            to_region=DESTINATION,
            bridge=bridge,
            purpose="a measurement",
            basis=Basis.SCC,
            reference="SCC-2026-001",
            exporter="benchmark US",
            importer="benchmark IE",
            owner="operator",
            drawn_up_by=str(SpiffeId(SOURCE, MESH, "operator", OPERATOR)),
            not_before=now - DAY_MS,
            expires=now + DAY_MS,
            transform=build_spec(pseudonymize=[PSEUDONYMIZED], drop=list(DROPPED)),
        )
        export = sign_export(terms, exports, source_key, now)
        trusted = {
            region: decode_bundle(folder.bundle.read_bytes()).bundle.policy_keys
            for region, folder in ((SOURCE, source), (DESTINATION, destination))
        }
        accepted = sign_import(
            export,
            imports,
            destination_key,
            trusted,
            str(SpiffeId(DESTINATION, MESH, "operator", OPERATOR)),
            now,
        )
        self._ask(
            self._departing,
            Prepare(
                [
                    ("policy", sign_policy(exports, source_key).encode_file()),
                    ("export", export.encode_file()),
                ],
                STREAM,
                self._plan.shards,
                {bridge: [f"{Verb.BRIDGE_READ} {STREAM}"]},
            ),
        )
        self._ask(
            self._arriving,
            Prepare(
                [
                    ("policy", sign_policy(imports, destination_key).encode_file()),
                    ("export", export.encode_file()),
                    ("import", accepted.encode_file()),
                ],
                STREAM,
                0,
                {},
            ),
        )

    # -- rounds ----------------------------------------------------------------------------------------

    def _ask(self, pipe: Any, command: object) -> Any:
        pipe.send(command)
        return self._processes.answer(pipe)

    def _burst(self, records: int) -> Sent:
        sent: Sent = self._ask(self._departing, Burst(records, self._plan.batch_records))
        self._published = sent.counts
        return sent

    def _cross(self, sent: Sent) -> Arrived:
        arrived: Arrived = self._ask(self._arriving, Expect(sent.made))
        self.arrivals = arrived.arrivals
        if arrived.arrivals.lost:
            self._stopped_at = self._ask(self._departing, Links()) or "no link has reported"
        return arrived

    def round(self, said: Callable[[str], None]) -> _Round:
        """Single records, a burst, a backlog."""
        plan = self._plan
        said("single records")
        alone: Sent = self._ask(self._departing, Lone(plan.lone_records, LONE_PER_SECOND))
        self._published = alone.counts
        lone = self._cross(alone)
        said("publishing and crossing")
        together = self._cross(self._burst(plan.records))
        self._ask(self._agent, End())
        said("publishing without the bridge")
        offsets = dict(self._published)
        backlog = self._burst(plan.records)
        said("a local subscriber")
        local: float = self._ask(self._departing, ReadBack(offsets))
        said("a backlog crosses")
        self._ask(self._agent, Begin())
        caught_up = self._cross(backlog)
        return _Round(
            crossing=together.records / together.span_s if together.span_s > 0 else 0.0,
            catch_up=caught_up.rate,
            publish=backlog.rate,
            local=local,
            lone=lone.latency,
            lone_publish=alone.latency,
        )

    # -- settling --------------------------------------------------------------------------------------

    def close(self) -> Settlement:
        """Stop everything in order, verify both logs from their files, and settle."""
        for pipe in (self._departing, self._arriving, self._agent, *self._brokers):
            self._ask(pipe, Finish())
        bundles = [
            decode_bundle(folder.bundle.read_bytes()).bundle for folder in (self._source, self._destination)
        ]
        trust = Trust.of(bundles)
        egress = read_log(self._source.bridge(BRIDGE) / "egress", trust)
        data = load_config(self._destination.config).data
        ingress = read_log(self._destination.root / data / "audit", trust)
        found = settle(self._published, self.arrivals, egress, ingress)
        if self._stopped_at:
            found.problems.append(f"the agent's links, when nothing came any more: {self._stopped_at}")
        return found


def _policy(region: str, rules: str) -> ResidencyPolicy:
    return parse_policy(_POLICY.format(region=region, rules=rules), f"{region}.yaml")


def read_log(path: Path, trust: Trust) -> LogBooks:
    """A log's books, straight from its files, and what verification finds in it. Blocks."""
    books = LogBooks()
    report = verify_log(Folder(path), trust)
    books.verdict = [finding.sentence for finding in report.findings[:FINDINGS_MAX]]
    books.cosigned = report.cosigned_size
    books.take(_leaves(path), STREAM)
    return books


def _leaves(path: Path) -> list[Leaf]:
    files = Folder(path)
    data = files.read(CHECKPOINT_PATH)
    size = int(parse_note(data).text.split("\n")[1]) if data else 0
    return [decode_leaf(entry) for _, entry in read_entries(files, 0, size, size)]
