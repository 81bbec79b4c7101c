"""A broker's configuration: `region.yaml`, decoded into typed values (policy.documents says where a mistake is).

Every option is read by something; what is left out has the default that stands here. Paths are relative to the
file's folder.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from audit.witness_config import Witnesses
from felix.address import Address
from felix.errors import Code, RequestError
from felix.names import parse_region
from felix.quota import QuotaLimits
from felix.telemetry import TracingConfig
from felix.transport.port import EngineName
from keys.offer import Line
from policy.documents import Parsed, decode_document
from policy.quantity import Duration, Rate, Size
from region.cluster.records import BROKERS_MAX, WORD_CHARS_MAX
from region.log.offloader import FETCHED_BYTES_MAX, RATE_BYTES
from region.log.scrub import SCRUB_EVERY_MS, SCRUB_RATE_BYTES
from region.metadata.lease import LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN
from region.metadata.records import REPLICAS_MAX
from region.replication.copy_pace import COPY_RATE_BYTES

DEFAULT_PORT: Final = 7443
CONFIGS_KEPT: Final = 8
"""A process reads that of its own region, over and over."""
DAY_MS: Final = 86_400_000
LIFETIME_MS_MIN: Final = 1_000
"""Certificates count in seconds."""
PUBLISH_BUDGET_BYTES_MIN: Final = 4 << 20
"""One publishing session's smallest window, and room."""
INGEST_BUDGET_BYTES_MIN: Final = 8 << 20
"""One link shard's window."""
DELIVERY_BUDGET_BYTES_MIN: Final = 4 << 20
CATCH_UP_BUDGET_BYTES_MIN: Final = 1 << 20
"""One read."""
OFFLOAD_RATE_BYTES_MIN: Final = 64 << 10
"""A segment in an hour."""
COPY_RATE_BYTES_MIN: Final = 1 << 20
"""A gigabyte in a quarter of an hour."""
SCRUB_RATE_BYTES_MIN: Final = 64 << 10
"""Five gigabytes a day."""
SCRUB_EVERY_MS_MIN: Final = 60_000
SCRUB_EVERY_MS_MAX: Final = 365 * DAY_MS
"""What is not looked at for longer is as good as never looked at."""
CLUSTER_LEASE_MS: Final = 5_000
"""Of a broker of a cluster: long enough for pauses of Python and elections of etcd."""
LEASE_MS: Final = 15_000
"""Of a broker's registration in etcd: outages of etcd up to two thirds of it are not felt by those who write, and another broker waits
so long before it takes over from a machine that is gone."""
SWEEP_MS_MIN: Final = 10
SWEEP_MS_MAX: Final = 3_600_000
"""A sweep without work costs a look at each shard; one that never comes is a disk that fills."""
RING_BUDGET_BYTES_MIN: Final = 1 << 20
"""The smallest ring of one shard."""
EXCHANGE_BUDGET_BYTES_MIN: Final = 4 << 20
"""A few calls of the largest size."""
TRANSACTION_BYTES_MAX: Final = 16 << 20
"""Written into a journal at once, beside what waits there: half of what a log lets wait for the disk."""
VIEW_BUDGET_BYTES_MIN: Final = 1 << 20
"""One batch of the largest size: the least that a queue's window, a cache or a transaction can work with."""


Words = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Place = Annotated[str, msgspec.Meta(max_length=WORD_CHARS_MAX)]
Label = Annotated[str, Parsed(parse_region)]
Amount = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the configuration's parts: an unknown key is a mistake."""


class MetadataConfig(Part, frozen=True):
    """`embedded` (SQLite in the data folder) or `etcd`. `lease`: how long etcd may be away before the broker stops writing."""

    kind: Literal["embedded", "etcd"] = "embedded"
    endpoints: tuple[str, ...] = ()
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    lease: Duration = Duration(LEASE_MS)

    def __post_init__(self) -> None:
        if not LEASE_TTL_MS_MIN <= self.lease <= LEASE_TTL_MS_MAX:
            raise RequestError(
                f"lease is {self.lease}; {Duration(LEASE_TTL_MS_MIN)} to {Duration(LEASE_TTL_MS_MAX)} are allowed."
            )
        if self.kind == "etcd" and not self.endpoints:
            raise RequestError("kind is etcd and no endpoint is named: add endpoints: [127.0.0.1:2379].")


class ClusterBroker(Part, frozen=True):
    """One of a region's brokers. `address`: where clients reach it, where that is not where it listens. `host`: the machine that it runs on, else
    the host name; no two copies of a shard are on one, where there are enough. `zone`: what fails together; copies are spread over zones."""

    id: Label
    listen: Address
    address: Address | None = None
    health: Address | None = None
    host: Place = ""
    zone: Place = ""

    def __post_init__(self) -> None:
        if not self.client_address.port:
            raise RequestError(
                f"{self.id} is reached at port 0: brokers of a cluster tell each other's addresses, so name a port."
            )

    @property
    def client_address(self) -> Address:
        """Where clients reach it."""
        return self.address or self.listen


class ClusterConfig(Part, frozen=True):
    """The brokers of a region that has several. The first of them has the audit log on its disk.

    `lease`: how long a broker may be silent before it stops answering and another may take its place. `replicas`: copies of a new stream
    that does not say how many; 0: as `Clustered.default_replicas` has it.
    """

    brokers: Annotated[tuple[ClusterBroker, ...], msgspec.Meta(min_length=1, max_length=BROKERS_MAX)]
    lease: Duration = Duration(CLUSTER_LEASE_MS)
    replicas: Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)] = 0

    def __post_init__(self) -> None:
        if not LEASE_TTL_MS_MIN <= self.lease <= LEASE_TTL_MS_MAX:
            raise RequestError(
                f"lease is {self.lease}; {Duration(LEASE_TTL_MS_MIN)} to {Duration(LEASE_TTL_MS_MAX)} are allowed."
            )
        if self.replicas > len(self.brokers):
            raise RequestError(
                f"replicas is {self.replicas}, and there are {len(self.brokers)} brokers: each copy is on a broker of its own."
            )
        for what, values in (
            ("id", [str(each.id) for each in self.brokers]),
            ("address", [str(each.client_address) for each in self.brokers]),
        ):
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise RequestError(f"Two brokers have the {what} {twice[0]}.")


class AuditConfig(Part, frozen=True):
    """How often the audit log signs a checkpoint while leaves come in, and who is asked to cosign it besides the regions
    that bridges lead to (docs/witnesses.md)."""

    checkpoint_every: Duration = Duration(1_000)
    witnesses: Witnesses = ()


class LimitsConfig(Part, frozen=True):
    """Bounds of one broker; docs/operations.md says where each is enforced."""

    sessions: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 4096
    relays: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 256
    publish_budget: Size = Size(256 << 20)
    ingest_budget: Size = Size(256 << 20)
    delivery_budget: Size = Size(256 << 20)
    catch_up_budget: Size = Size(64 << 20)
    ring_budget: Size = Size(1 << 30)
    exchange_budget: Size = Size(64 << 20)
    cache_budget: Size = Size(512 << 20)
    queue_budget: Size = Size(128 << 20)
    transactions_budget: Size = Size(64 << 20)
    transaction_bytes: Size = Size(8 << 20)
    transaction_timeout: Duration = Duration(60_000)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes of each of the broker's budgets, by its name (region.limits.budget)."""
        return {
            name.removesuffix("_budget"): int(getattr(self, name))
            for name in self.__struct_fields__
            if name.endswith("_budget")
        }

    def __post_init__(self) -> None:
        for name, least in (
            ("publish_budget", PUBLISH_BUDGET_BYTES_MIN),
            ("ingest_budget", INGEST_BUDGET_BYTES_MIN),
            ("delivery_budget", DELIVERY_BUDGET_BYTES_MIN),
            ("catch_up_budget", CATCH_UP_BUDGET_BYTES_MIN),
            ("ring_budget", RING_BUDGET_BYTES_MIN),
            ("exchange_budget", EXCHANGE_BUDGET_BYTES_MIN),
            ("cache_budget", VIEW_BUDGET_BYTES_MIN),
            ("queue_budget", VIEW_BUDGET_BYTES_MIN),
            ("transactions_budget", VIEW_BUDGET_BYTES_MIN),
        ):
            if getattr(self, name) < least:
                raise RequestError(
                    f"{name} is {Size(getattr(self, name))}; with less than {Size(least)} nothing could be served."
                )
        if not VIEW_BUDGET_BYTES_MIN <= self.transaction_bytes <= TRANSACTION_BYTES_MAX:
            raise RequestError(
                f"transaction_bytes is {self.transaction_bytes}; {Size(VIEW_BUDGET_BYTES_MIN)} to "
                f"{Size(TRANSACTION_BYTES_MAX)} are allowed."
            )


class StorageConfig(Part, frozen=True):
    """How often retention is applied: a record goes at the latest an eighth of its stream's age and this after its time.

    Offload: the URLs, or beginnings of them, that closed segments may be copied to (none: nowhere), bytes moved per second,
    and bytes of segments that were fetched back for reading.

    Copies: bytes per second that this broker sends of copies that are not in sync, beyond what is written to their streams meanwhile.

    Scrub: bytes per second of the closed segments of streams with copies that are looked at for damage, and how often all of them are.
    """

    sweep_every: Duration = Duration(1_000)
    offload_allow: tuple[Words, ...] = ()
    offload_rate: Size = Size(RATE_BYTES)
    offload_cache: Size = Size(FETCHED_BYTES_MAX)
    copy_rate: Size = Size(COPY_RATE_BYTES)
    scrub_rate: Size = Size(SCRUB_RATE_BYTES)
    scrub_every: Duration = Duration(SCRUB_EVERY_MS)

    def __post_init__(self) -> None:
        if self.copy_rate < COPY_RATE_BYTES_MIN:
            raise RequestError(
                f"copy_rate is {Size(self.copy_rate)}; at least {Size(COPY_RATE_BYTES_MIN)} a second are needed."
            )
        if self.scrub_rate < SCRUB_RATE_BYTES_MIN:
            raise RequestError(
                f"scrub_rate is {Size(self.scrub_rate)}; at least {Size(SCRUB_RATE_BYTES_MIN)} a second are needed."
            )
        if not SCRUB_EVERY_MS_MIN <= self.scrub_every <= SCRUB_EVERY_MS_MAX:
            raise RequestError(
                f"scrub_every is {Duration(self.scrub_every)}; {Duration(SCRUB_EVERY_MS_MIN)} to {Duration(SCRUB_EVERY_MS_MAX)} are allowed."
            )
        if self.offload_rate < OFFLOAD_RATE_BYTES_MIN:
            raise RequestError(
                f"offload_rate is {Size(self.offload_rate)}; at least {Size(OFFLOAD_RATE_BYTES_MIN)} a second are needed."
            )
        if not SWEEP_MS_MIN <= self.sweep_every <= SWEEP_MS_MAX:
            raise RequestError(
                f"sweep_every is {Duration(self.sweep_every)}; {Duration(SWEEP_MS_MIN)} to {Duration(SWEEP_MS_MAX)} are allowed."
            )


class SharedQuota(Part, frozen=True):
    """Limits of tenants and identities without their own quota; null is unlimited (felix.quota)."""

    publish_bytes: Rate | None = None
    publish_records: Amount | None = None
    delivery_bytes: Rate | None = None
    delivery_records: Amount | None = None
    requests: Amount | None = None
    sessions: Amount | None = None
    subscriptions: Amount | None = None
    leases: Amount | None = None

    @property
    def limits(self) -> QuotaLimits:
        """The same, as requests and the catalog write it."""
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        return QuotaLimits(**{name: int(value) for name, value in named.items() if value is not None})


class IdentityQuota(SharedQuota, frozen=True):
    """Of each identity, with what only identities have."""

    transactions: Amount | None = None


class TenantQuota(SharedQuota, frozen=True):
    """Of each tenant, with what only tenants have."""

    streams: Amount | None = None
    stored_bytes: Size | None = None


class QuotasConfig(Part, frozen=True):
    """Quotas of those who have none of their own (`felix quota set`)."""

    tenant: TenantQuota = TenantQuota()
    identity: IdentityQuota = IdentityQuota()


class SubscriptionsConfig(Part, frozen=True):
    """How often durable subscriptions are looked at that had no consumer for their `inactive_ttl`."""

    sweep_every: Duration = Duration(60_000)

    def __post_init__(self) -> None:
        if not SWEEP_MS_MIN <= self.sweep_every <= SWEEP_MS_MAX:
            raise RequestError(
                f"sweep_every is {Duration(self.sweep_every)}; {Duration(SWEEP_MS_MIN)} to "
                f"{Duration(SWEEP_MS_MAX)} are allowed."
            )


class KindConfig(Part, frozen=True):
    """Identities of one kind: how long a certificate holds at most, and how long after it was issued by hand an identity may renew
    itself; 0s: not at all."""

    lifetime: Duration = Duration(30 * DAY_MS)
    renewable_for: Duration = Duration(365 * DAY_MS)

    def __post_init__(self) -> None:
        if self.lifetime < LIFETIME_MS_MIN:
            raise RequestError(
                f"lifetime is {self.lifetime}; at least {Duration(LIFETIME_MS_MIN)} are needed."
            )


class IdentitiesConfig(Part, frozen=True):
    """Lives of the region's identities, by kind. Who approves grants does so in person, and is issued in person."""

    client: KindConfig = KindConfig()
    operator: KindConfig = KindConfig()
    bridge: KindConfig = KindConfig(lifetime=Duration(7 * DAY_MS))
    approver: KindConfig = KindConfig(renewable_for=Duration(0))

    def of(self, kind: str) -> KindConfig | None:
        """None for brokers: theirs are issued at each start, by themselves."""
        return getattr(self, kind) if kind in self.__struct_fields__ else None


class RegionConfig(Part, frozen=True):
    """One broker of one region. `entity` is the legal entity that runs it, `contact` whom to ask; `operators` have every right."""

    region: Label
    mesh: Label
    country: Annotated[str, msgspec.Meta(pattern=r"\A[A-Z]{2}\Z")]
    entity: str = ""
    contact: Line = ""
    broker: Label = "b1"
    listen: Address = Address("127.0.0.1", DEFAULT_PORT)
    health: Address | None = Address("127.0.0.1", 8080)
    engine: EngineName = ""
    data: Words = "data"
    operators: tuple[str, ...] = ("operator",)
    metadata: MetadataConfig = MetadataConfig()
    cluster: ClusterConfig | None = None
    audit: AuditConfig = AuditConfig()
    tracing: TracingConfig = TracingConfig()
    storage: StorageConfig = StorageConfig()
    subscriptions: SubscriptionsConfig = SubscriptionsConfig()
    limits: LimitsConfig = LimitsConfig()
    quotas: QuotasConfig = QuotasConfig()
    identities: IdentitiesConfig = IdentitiesConfig()

    def __post_init__(self) -> None:
        if self.cluster is None:
            return
        if self.metadata.kind != "etcd":
            raise RequestError(
                "cluster names several brokers, and they share their metadata in etcd: set metadata.kind: etcd with its endpoints."
            )
        if all(each.id != self.broker for each in self.cluster.brokers):
            raise RequestError(f"broker is {self.broker}, and cluster.brokers has no such id.")

    def of_broker(self, broker: str) -> RegionConfig:
        """The configuration of one of the cluster's brokers: where it listens, and a data folder of its own, below `data`.

        Raises RequestError(NOT_FOUND) for one that is not named, or where there is no cluster.
        """
        named = [] if self.cluster is None else [each for each in self.cluster.brokers if each.id == broker]
        if not named:
            known = "none" if self.cluster is None else ", ".join(each.id for each in self.cluster.brokers)
            raise RequestError(
                f"{self.region} has no broker {broker}.",
                code=Code.NOT_FOUND,
                hint=f"Those that cluster.brokers names: {known}.",
            )
        return msgspec.structs.replace(
            self, broker=broker, listen=named[0].listen, health=named[0].health, data=f"{self.data}/{broker}"
        )

    def placed(self, host: str, zone: str) -> RegionConfig:
        """The configuration of one of the cluster's brokers, on this machine and in this zone where they are not empty. Raises RequestError of words that
        are too long."""
        if (cluster := self.cluster) is None or not (host or zone):
            return self
        if max(len(host), len(zone)) > WORD_CHARS_MAX:
            raise RequestError(f"A host's or a zone's name has {WORD_CHARS_MAX} characters at most.")
        brokers = tuple(
            msgspec.structs.replace(each, host=host or each.host, zone=zone or each.zone)
            if each.id == self.broker
            else each
            for each in cluster.brokers
        )
        return msgspec.structs.replace(self, cluster=msgspec.structs.replace(cluster, brokers=brokers))

    @property
    def data_folders(self) -> tuple[str, ...]:
        """The data folders of all brokers, relative to the file's folder, of a configuration as it was read."""
        if self.cluster is None:
            return (self.data,)
        return tuple(f"{self.data}/{each.id}" for each in self.cluster.brokers)

    @property
    def own_place(self) -> ClusterBroker | None:
        """This broker among those of the cluster; None where there is no cluster."""
        brokers = () if self.cluster is None else self.cluster.brokers
        return next((each for each in brokers if each.id == self.broker), None)


def load_config(path: Path) -> RegionConfig:
    """Read and check a region's configuration. Raises RequestError(CONFIG_INVALID) with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RequestError(
            f"There is no configuration at {path}.",
            code=Code.CONFIG_INVALID,
            hint="Make the region first: felix region init NAME --mesh MESH.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}.", code=Code.CONFIG_INVALID) from error
    try:
        return _read_once(text)
    except RequestError:
        return decode_document(text, RegionConfig, str(path))


@lru_cache(maxsize=CONFIGS_KEPT)
def _read_once(text: str) -> RegionConfig:
    return decode_document(text, RegionConfig, "")
