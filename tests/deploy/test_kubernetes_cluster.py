"""The manifests of deploy/kubernetes/cluster: held to each other, to region.yaml beside them and to the command line. No cluster is asked.

The init container's script is run as it stands, and a broker is started as a process with the arguments that the pod gives it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.processes import process_of
from deploy_words import DEPLOY, check_words
from doc_commands import write_felix
from etcd_process import EtcdProcess, etcd_of_each_test
from ports import claim_port
from region_home import make_region
from region_peer import until

from region.cluster.records import ClusterKeys, decode_node
from region.config import load_config
from region.folder import RegionFolder
from region.metadata.etcd import EtcdConfig, EtcdStore

__all__ = ["etcd_of_each_test"]  # the fixture

CLUSTER = DEPLOY / "kubernetes" / "cluster"
KUSTOMIZATION = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((CLUSTER / name).read_text())
]
NAMESPACE = KUSTOMIZATION["namespace"]
FIELDS = {
    "metadata.name": "us-east-1",
    "spec.nodeName": "node-7",
    "metadata.labels['topology.kubernetes.io/zone']": "zone-b",
}
"""What the kubelet would say of a pod."""


def of(kind: str, name: str = "us-east") -> dict[str, Any]:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


SET = of("StatefulSet")["spec"]
POD = SET["template"]["spec"]
(INIT,), (BROKER,) = POD["initContainers"], POD["containers"]


def words(container: dict[str, Any], **fields: str) -> list[str]:
    """A container's arguments, with its variables in their places, as the kubelet puts them there."""
    values = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in container["args"]]


def test_every_file_is_a_resource_or_a_file_of_the_configuration() -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    named = [*KUSTOMIZATION["resources"], *(each.partition("=")[2] for each in generated["files"])]
    there = {str(path.relative_to(CLUSTER)) for path in CLUSTER.rglob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(named) == sorted(there)
    base = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text())
    (image,) = KUSTOMIZATION["images"]
    assert image in base["images"]
    assert {each["image"] for each in (INIT, BROKER)} == {image["name"]}
    assert (
        of("Namespace", NAMESPACE)["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    )
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generated["name"]
    claims = {each["metadata"]["name"] for each in SET["volumeClaimTemplates"]}
    for each in (INIT, BROKER):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes.keys() | claims
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in each["resources"]["limits"] and each["resources"]["requests"]
    assert POD["securityContext"]["runAsNonRoot"] and POD["automountServiceAccountToken"] is False


def test_region_yaml_names_the_pods_at_their_addresses() -> None:
    config = load_config(CLUSTER / "region" / "region.yaml")
    assert config.cluster is not None
    headless = of("Service", SET["serviceName"])
    assert headless["spec"]["clusterIP"] == "None" and headless["spec"]["publishNotReadyAddresses"]
    ports = {each["name"]: each["containerPort"] for each in BROKER["ports"]}
    assert len(config.cluster.brokers) == SET["replicas"] == 3
    for number, each in enumerate(config.cluster.brokers):
        assert each.id == f"us-east-{number}"
        assert str(each.address) == f"{each.id}.{SET['serviceName']}.{NAMESPACE}.svc:{ports['quic']}"
        assert str(each.listen) == f"0.0.0.0:{ports['quic']}"
        assert str(each.health) == f"0.0.0.0:{ports['health']}"
    mounts = {each["name"]: each["mountPath"] for each in BROKER["volumeMounts"]}
    metadata = config.metadata
    assert {str(Path(path).parent) for path in (metadata.ca, metadata.cert, metadata.key)} == {mounts["etcd"]}
    allowed = [
        (next(iter(to["namespaceSelector"]["matchLabels"].values())), port["port"])
        for rule in of("NetworkPolicy", "broker")["spec"]["egress"]
        for to in rule["to"]
        for port in rule["ports"]
        if "namespaceSelector" in to
    ]
    for endpoint in metadata.endpoints:
        host, _, port = endpoint.rpartition(":")
        assert (host.split(".")[2], int(port)) in allowed


def test_an_update_and_a_drain_take_one_broker_at_a_time_once_copies_are_in_sync() -> None:
    labels = SET["template"]["metadata"]["labels"]
    assert SET["selector"]["matchLabels"] == labels
    assert BROKER["readinessProbe"]["httpGet"]["path"] == "/syncz"
    assert BROKER["livenessProbe"]["httpGet"]["path"] == "/livez", "never for what others lack"
    assert SET["updateStrategy"] == {"type": "RollingUpdate"} and SET["podManagementPolicy"] == "Parallel"
    budget = of("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1 and budget["selector"]["matchLabels"] == labels
    spread = {each["topologyKey"]: each for each in POD["topologySpreadConstraints"]}
    assert spread["kubernetes.io/hostname"]["whenUnsatisfiable"] == "DoNotSchedule"
    assert "topology.kubernetes.io/zone" in spread
    assert all(each["labelSelector"]["matchLabels"] == labels for each in spread.values())
    for name in ("us-east", SET["serviceName"]):
        assert of("Service", name)["spec"]["selector"] == labels
    policies = [each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in policies
    assert not any(
        "ipBlock" in to for each in policies for rule in each.get("egress", ()) for to in rule["to"]
    )
    (peers,) = [
        rule for rule in of("NetworkPolicy", "broker")["spec"]["ingress"]
        if {"podSelector": {"matchLabels": labels}} in rule["from"]
    ]  # fmt: skip
    assert peers["ports"] == [{"protocol": "UDP", "port": 7443}]


@pytest.mark.parametrize("zone", ["zone-b", ""])
def test_the_pods_arguments_are_those_of_a_command(zone: str) -> None:
    check_words(words(BROKER, **FIELDS | {"metadata.labels['topology.kubernetes.io/zone']": zone}))


@pytest.mark.etcd
async def test_a_broker_starts_with_what_its_pod_gives_it(tmp_path: Path, etcd: EtcdProcess) -> None:
    founded = make_region(tmp_path / "safe", "us-east")
    secret, home = tmp_path / "secret", tmp_path / "volume" / "home"
    secret.mkdir()
    home.parent.mkdir()
    with tarfile.open(secret / "us-east.tar", "w") as tar:
        tar.add(founded.root, "us-east")
    paths = {"FELIX_HOME": home, "CONFIG": CLUSTER / "region", "SECRET": secret}
    assert {each["name"] for each in INIT["env"]} == paths.keys(), "every variable that it reads"
    write_felix(tmp_path / "bin")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
    environment |= {name: str(path) for name, path in paths.items()}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"

    async def files() -> None:
        done = await asyncio.to_thread(
            subprocess.run,
            ["/bin/sh", "-ec", INIT["args"][0]],
            env=environment,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    await files()
    folder = RegionFolder(home / "us-east")
    (folder.secrets / "own").write_text("kept")
    (secret / "us-east.tar").unlink()
    await files()
    assert (folder.secrets / "own").exists() and folder.audit_key.stat().st_mode & 0o077 == 0
    assert folder.config.read_text() == (CLUSTER / "region" / "region.yaml").read_text()
    # This machine in the place of pods.
    text = folder.config.read_text().replace("0.0.0.0:7443", f"127.0.0.1:{claim_port()}")
    text = re.sub(r"(us-east-\d)\.us-east-brokers\S*?:7443", lambda found: f"localhost:{claim_port()}", text)
    text = re.sub(r"0\.0\.0\.0:8080", lambda found: f"127.0.0.1:{claim_port()}", text)
    text = re.sub(r"endpoints: .*", f'endpoints: ["{etcd.endpoint.removeprefix("http://")}"]', text)
    folder.config.write_text(re.sub(r"  (ca|cert|key): .*\n", "", text))
    process = await asyncio.create_subprocess_exec(
        str(tmp_path / "bin" / "felix"),
        *words(BROKER, **FIELDS),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        await until(lambda: process_of(folder, "us-east-1") != 0 or process.returncode is not None, 60)
        assert process.returncode is None, await process.stderr.read()
        store = await EtcdStore.open(EtcdConfig(endpoints=(etcd.endpoint.removeprefix("http://"),)))
        key = ClusterKeys("us-east").node("us-east-1")
        entry = await store.get(key)
        await store.close()
        assert entry is not None
        node = decode_node(entry.value, key)
        assert (node.host, node.zone) == ("node-7", "zone-b")
        ready = await asyncio.to_thread(
            subprocess.run,
            [str(tmp_path / "bin" / "felix"), "region", "ready", "us-east"],
            env=environment,
            timeout=60,
        )
        assert ready.returncode == 0
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert process.returncode == 0
