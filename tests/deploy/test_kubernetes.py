"""The manifests of deploy/kubernetes, held to each other, to the command line and to the process's own pages. No cluster is asked.

The scripts of init containers are run as they stand, with this tree's `felix`. Where kubectl is at hand, it renders the whole.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import textwrap
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


def test_the_report_runs_beside_the_broker_whose_volume_it_reads() -> None:
    """Of several brokers, too: each has a volume of its own, on a node of its own."""
    (near,) = pod("report")["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (claim,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod("report")["volumes"]
        if volume.get("persistentVolumeClaim", {}).get("readOnly")
    ]
    (template,) = of("StatefulSet")["spec"]["volumeClaimTemplates"]
    name = claim.removeprefix(f"{template['metadata']['name']}-")
    assert near["labelSelector"]["matchLabels"] == {"statefulset.kubernetes.io/pod-name": name}
    assert name == f"{of('StatefulSet')['metadata']['name']}-0"


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


def run(text: str, tmp_path: Path, *, code: int = 0) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FELIX_")}
    done = subprocess.run(
        ["/bin/sh", "-ec", text],
        env={**environment, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr


def test_init_containers_found_a_region_once_and_give_the_agent_its_files(tmp_path: Path) -> None:
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
    run(f"FELIX_HOME='{home}' felix identity issue us-to-eu --kind bridge --region us-east", tmp_path)
    (home / "us-east" / "trusted").mkdir(exist_ok=True)
    shutil.copy(home / "us-east" / "bundle.json", home / "us-east" / "trusted" / "eu-west.json")
    secret, agent, mounted = tmp_path / "secret", tmp_path / "agent", tmp_path / "mounted"
    shutil.copytree(BASE / "agent", mounted)
    (mounted / "witnesses.policy").write_text("quorum none\n")
    files = script("us-to-eu", AGENT=agent, CONFIG=mounted, SECRET=secret)
    secret.mkdir()
    run(files, tmp_path, code=1)  # the secret is optional, and not there yet
    make_secret(home, secret)
    run(files, tmp_path)
    paths = paths_of(load_config(agent / "bridge.yaml"), agent)
    for path in (paths.identity, paths.egress_key, paths.egress_ml_dsa_key, paths.handoff_key):
        assert path.is_file()
    # A second start is by the same user, who may write where it wrote: not so where a copy had the secret's mode, 0440.
    for path in agent.rglob("*"):
        assert path.is_dir() or path.stat().st_mode & 0o777 == 0o600, path
    assert decode_bundle(paths.bundle.read_bytes()).bundle.region == "us-east"
    assert paths.trusted["eu-west"].is_file()
    assert (agent / "witnesses.policy").is_file(), "what bridge.yaml names beside itself"
    assert (
        Path("/var/lib/felix")
        in paths_of(
            load_config(BASE / "agent" / "bridge.yaml"), Path("/var/lib/felix/us-to-eu")
        ).egress.parents
    )
    paths.identity.write_text("renewed")
    run(files, tmp_path)
    assert paths.identity.read_text() == "renewed", "an identity that the agent has renewed stays"
    # The secret is deleted after the first start; a later one has new bundles alone.
    (volume,) = [each["secret"] for each in pod("us-to-eu")["volumes"] if "secret" in each]
    assert volume["optional"], "else no pod starts again once it is gone"
    for file in secret.iterdir():
        file.unlink()
    run(files, tmp_path)
    (secret / "eu-west.json").write_text("newer")
    run(files, tmp_path)
    assert paths.trusted["eu-west"].read_text() == "newer"
    assert paths.bundle.read_bytes() == root_of(home), "what the secret has no more stays"


def root_of(home: Path) -> bytes:
    return (home / "us-east" / "bundle.json").read_bytes()


def make_secret(home: Path, secret: Path) -> None:
    """The secret as docs/kubernetes.md makes it, mounted with a mode that an agent refuses."""
    (command,) = [line for line in page_commands() if "create secret generic us-to-eu " in line]
    named = [word.partition("=")[2] for word in command.split() if word.startswith("--from-file=")]
    (fetched,) = [
        line.partition("-cf - ")[2].partition(" >")[0] for line in page_commands() if "-- tar " in line
    ]
    assert len(named) == 6 and sorted(named) == sorted(fetched.split())
    for name in named:
        copied = shutil.copy(home / name, secret)
        Path(copied).chmod(0o440)


def page_commands() -> list[str]:
    """What stands in blocks of docs/kubernetes.md, a command a line."""
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text().replace("\\\n", " ")
    return [line for block in text.split("```")[1::2] for line in block.splitlines()[1:]]


def test_what_the_page_adds_fits_the_pods_and_keeps_to_what_it_is_for() -> None:
    text = (DEPLOY.parent / "docs" / "kubernetes.md").read_text()
    blocks = [
        textwrap.dedent(block.partition("\n")[2])
        for block in text.split("```")[1::2]
        if block.startswith("yaml")
    ]
    made = {each["metadata"]["name"]: each["spec"] for block in blocks for each in yaml.safe_load_all(block)}
    broker, agent = pod("us-east"), pod("us-to-eu")
    assert made.keys() == {"us-east-border", "border", "witness"}
    assert made["us-east-border"]["selector"] == broker["labels"]
    assert made["us-east-border"]["ports"] == of("Service")["spec"]["ports"]
    assert made["border"]["podSelector"]["matchLabels"] == broker["labels"]
    assert made["witness"]["podSelector"]["matchLabels"] == agent["labels"]
    for name, way, direction in (("border", "from", "ingress"), ("witness", "to", "egress")):
        (rule,) = made[name][direction]
        assert [each["ipBlock"]["cidr"].endswith("/32") for each in rule[way]] == [True]
        assert made[name]["policyTypes"] == [direction.capitalize()]


def test_every_felix_command_of_the_page_is_one() -> None:
    called = [
        words[at + 1 :]
        for words in (shlex.split(line, comments=True) for line in page_commands())
        for at, word in enumerate(words)
        if word in ("felix", FELIX)
    ]
    assert len(called) >= 4
    for words in called:
        check_words(words)


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
