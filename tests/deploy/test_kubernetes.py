"""The manifests of deploy/kubernetes, held to each other, to the command line and to the process's own pages. No cluster is asked.

The scripts of init containers are run as they stand, with this tree's `felix`. Where kubectl is at hand, it renders the whole.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_words import DEPLOY, check_words
from doc_commands import write_felix

from bridge.config import load_config, paths_of
from keys.bundle import decode_bundle
from region.config import load_config as load_region

BASE = DEPLOY / "kubernetes" / "base"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((BASE / name).read_text())
]
FELIX = "/opt/felix/bin/felix"


def of(kind: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind, or of that kind and name."""
    (found,) = [each for each in OBJECTS if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Labels of what makes pods, as text, and the pod's specification with those labels at hand."""
    for each in OBJECTS:
        template = each.get("spec", {}).get("jobTemplate", each).get("spec", {}).get("template")
        if template is not None:
            yield each["metadata"]["name"], {"labels": template["metadata"]["labels"], **template["spec"]}


def pod(name: str) -> dict[str, Any]:
    return dict(pods())[name]


def containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def test_every_file_is_a_resource_or_a_file_of_the_configuration() -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    named = [*KUSTOMIZATION["resources"], *(each.partition("=")[2] for each in generated["files"])]
    there = {str(path.relative_to(BASE)) for path in BASE.rglob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(named) == sorted(there)
    assert {each["name"] for each in KUSTOMIZATION["images"]} == {
        each["image"] for _, spec in pods() for each in containers(spec)
    }
    tags = {each["newTag"] for each in KUSTOMIZATION["images"]}
    compose = (DEPLOY / "container" / "compose.yaml").read_text()
    assert len(tags) == 1 and f"image: felix:{tags.pop()}" in compose


@pytest.mark.parametrize("name", [name for name, _ in pods()])
def test_no_process_may_do_more_than_it_needs(name: str) -> None:
    spec = pod(name)
    assert spec["automountServiceAccountToken"] is False
    assert (
        spec["securityContext"]["runAsNonRoot"]
        and spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    )
    volumes = {each["name"] for each in spec["volumes"]} | {
        each["metadata"]["name"]
        for each in of("StatefulSet")["spec"]["volumeClaimTemplates"]
        if name == "us-east"
    }
    for each in containers(spec):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert "memory" in each["resources"]["limits"] and each["resources"]["requests"]
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        ports = {port["name"] for port in each.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in each:
                get = each[probe]["httpGet"]
                assert get["path"] in ("/readyz", "/syncz", "/livez") and get["port"] in ports


def test_every_command_is_one_of_felix() -> None:
    called = []
    for _, spec in pods():
        for each in containers(spec):
            if "command" not in each:
                called.append(each["args"])
                continue
            assert each["command"][0] == "/bin/sh"
            text = (
                each["args"][0]
                .replace("\\\n", " ")
                .replace("'Acme Inc.'", "Acme")
                .replace("$(date -u +%F)", "today")
            )
            called += [line.partition(FELIX)[2].split() for line in text.splitlines() if FELIX in line]
    for words in called:
        check_words(words)
    assert [words[:2] for words in called] == [
        ["region", "init"], ["region", "up"], ["bridge", "up"], ["audit", "report"],
    ]  # fmt: skip


def test_selectors_fit_their_pods() -> None:
    broker = pod("us-east")["labels"]
    assert of("Service")["spec"]["selector"] == broker
    assert of("StatefulSet")["spec"]["selector"]["matchLabels"] == broker
    assert of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == broker
    assert of("StatefulSet")["spec"]["serviceName"] == of("Service")["metadata"]["name"]
    assert of("Deployment")["spec"]["selector"]["matchLabels"] == pod("us-to-eu")["labels"]
    assert of("Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert of("StatefulSet")["spec"]["replicas"] == of("Deployment")["spec"]["replicas"] == 1
    claims = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "PersistentVolumeClaim"}
    claims.add("state-us-east-0")  # as the stateful set calls it
    for _, spec in pods():
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
    near = pod("report")["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert near["labelSelector"]["matchLabels"] == broker


def test_the_bridge_alone_reaches_out() -> None:
    everything = of("NetworkPolicy", "deny-all")["spec"]
    assert everything == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    policies = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "NetworkPolicy"}
    assert policies["broker"]["podSelector"]["matchLabels"] == pod("us-east")["labels"]
    assert policies["bridge"]["podSelector"]["matchLabels"] == pod("us-to-eu")["labels"]
    assert all("Egress" in each["policyTypes"] for each in policies.values())
    assert [name for name, each in policies.items() if each.get("egress")] == ["bridge"]
    outside = [
        (peer["ipBlock"]["cidr"], port)
        for rule in policies["bridge"]["egress"] for peer in rule["to"] if "ipBlock" in peer for port in rule["ports"]
    ]  # fmt: skip
    config = load_config(BASE / "agent" / "bridge.yaml")
    (destination,) = config.destinations
    assert outside == [
        (f"{destination.addresses[0].rpartition(':')[0]}/32", {"protocol": "UDP", "port": 7443})
    ]
    assert config.source_addresses == (f"{of('Service')['metadata']['name']}:7443",)
    (health,) = [port["containerPort"] for port in pod("us-to-eu")["containers"][0]["ports"]]
    assert config.health is not None and config.health.port == health
    assert policies["bridge"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": health}]


def script(name: str, **paths: Path) -> str:
    """An init container's script, with folders of the test in the place of mounts."""
    (init,) = pod(name)["initContainers"]
    text = init["args"][0].replace(FELIX, "felix")
    known = {each["name"] for each in init["env"]}
    assert set(paths) == known, "every variable that it reads"
    return "".join(f"export {key}='{value}'\n" for key, value in paths.items()) + text


def run(text: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
    done = subprocess.run(
        ["/bin/sh", "-ec", text],
        env={**environment, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_init_containers_found_a_region_once_and_give_the_agent_its_files_once(tmp_path: Path) -> None:
    write_felix(tmp_path / "bin")
    home = tmp_path / "volume" / "home"
    home.parent.mkdir()
    run(script("us-east", FELIX_HOME=home), tmp_path)
    config = load_region(home / "us-east" / "region.yaml")
    ports = {port["name"]: port["containerPort"] for port in pod("us-east")["containers"][0]["ports"]}
    assert config.health is not None
    assert {"quic": config.listen.port, "health": config.health.port} == ports
    assert config.listen.host == config.health.host == "0.0.0.0"
    root = (home / "us-east" / "bundle.json").read_bytes()
    run(script("us-east", FELIX_HOME=home), tmp_path)
    assert (home / "us-east" / "bundle.json").read_bytes() == root, "a region that is there stays"
    # The secret as docs/kubernetes.md makes it, mounted read-only with a mode that an agent refuses.
    run(f"FELIX_HOME='{home}' felix identity issue us-to-eu --kind bridge --region us-east", tmp_path)
    secret, agent = tmp_path / "secret", tmp_path / "agent"
    secret.mkdir()
    for file in (home / "us-east" / "identities").glob("us-to-eu.*"):
        shutil.copy(file, secret)
    for name in ("bundle.json", "eu-west.json"):
        shutil.copy(home / "us-east" / "bundle.json", secret / name)
    for file in secret.iterdir():
        file.chmod(0o440)
    files = script("us-to-eu", AGENT=agent, CONFIG=BASE / "agent", SECRET=secret)
    run(files, tmp_path)
    paths = paths_of(load_config(agent / "bridge.yaml"), agent)
    for path in (paths.identity, paths.egress_key, paths.egress_ml_dsa_key, paths.handoff_key):
        assert path.stat().st_mode & 0o777 == 0o600
    assert decode_bundle(paths.bundle.read_bytes()).bundle.region == "us-east"
    assert paths.trusted["eu-west"].is_file()
    assert (
        Path("/var/lib/felix")
        in paths_of(
            load_config(BASE / "agent" / "bridge.yaml"), Path("/var/lib/felix/us-to-eu")
        ).egress.parents
    )
    paths.identity.write_text("renewed")
    run(files, tmp_path)
    assert paths.identity.read_text() == "renewed", "an identity that the agent has renewed stays"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not at hand")
def test_kubectl_renders_it() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == len(OBJECTS) + 1, "and the agent's configuration"
    assert {each["metadata"].get("namespace") for each in made if each["kind"] != "Namespace"} == {
        KUSTOMIZATION["namespace"]
    }
    (config,) = [each["metadata"]["name"] for each in made if each["kind"] == "ConfigMap"]
    assert done.stdout.count(f"name: {config}\n") == 2, (
        "it is mounted by its name, which changes with what is in it"
    )
