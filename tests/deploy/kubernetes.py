"""What kustomize makes of deploy/kubernetes, and the rules that it must keep, one function each.

No cluster is asked: what admission, a scheduler or a network plugin does with it is not tested here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from tests.deploy.compose import DEPLOY, OPTIONS

NAMES = ("gateway", "verifier", "draft")

Manifest = dict[str, Any]
Rule = Callable[[list[Manifest]], Iterator[str]]


def kustomize() -> list[str]:
    """The command. Skips the test where there is none."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    pytest.skip("needs kustomize: the package kustomize or kubernetes-client of Debian 13, or kubectl")


def built(directory: Path, secrets: Path, *components: str) -> list[Manifest]:
    """All manifests, with these secrets and components, from a copy in a directory that is not there yet."""
    shutil.copytree(DEPLOY / "kubernetes", directory, ignore=shutil.ignore_patterns("secrets"))
    shutil.copytree(secrets, directory / "secrets")
    if components:
        file = directory / "kustomization.yaml"
        written = file.read_text()
        assert "# components: [gpu]" in written
        file.write_text(written.replace("# components: [gpu]", f"components: [{', '.join(components)}]"))
    done = subprocess.run([*kustomize(), directory], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # such as a field that is deprecated
    return list(yaml.safe_load_all(done.stdout))


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pod's specification of each deployment."""
    return {name: found["spec"]["template"]["spec"] for name, found in of_kind(manifests, "Deployment").items()}


def container(pod: Manifest) -> Manifest:
    (only,) = pod["containers"]
    return dict(only)


def environment(pod: Manifest) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(pod)["env"]}


def _port(pod: Manifest, name: str) -> int | None:
    return next((port["containerPort"] for port in container(pod)["ports"] if port["name"] == name), None)


def pods_keep_the_restricted_standard(manifests: list[Manifest]) -> Iterator[str]:
    """Of Kubernetes' Pod Security Standards, and a read-only root beside it."""
    for name, pod in pods(manifests).items():
        whole, own = pod.get("securityContext", {}), container(pod).get("securityContext", {})
        wanted = {
            "may run as root": whole.get("runAsNonRoot") is True and whole.get("runAsUser", 0) > 0,
            "has no seccomp profile": whole.get("seccompProfile") == {"type": "RuntimeDefault"},
            "may gain privileges": own.get("allowPrivilegeEscalation") is False,
            "has a root that can be written": own.get("readOnlyRootFilesystem") is True,
            "keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "has a token of the cluster": pod.get("automountServiceAccountToken") is False,
            "mounts the host": not any("hostPath" in volume for volume in pod["volumes"]),
        }
        yield from (f"{name} {what}" for what, well in wanted.items() if not well)


def no_service_sets_an_option(manifests: list[Manifest]) -> Iterator[str]:
    """A Service named spire-gateway would be SPIRE_GATEWAY_PORT in every pod of its namespace."""
    for name, pod in pods(manifests).items():
        if pod.get("enableServiceLinks") is not False:
            yield f"{name} is told of every Service by its environment"


def everything_is_probed(manifests: list[Manifest]) -> Iterator[str]:
    for name, pod in pods(manifests).items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asks = container(pod).get(probe, {})
            said = " ".join(asks.get("exec", {}).get("command", []))
            path, port = asks.get("httpGet", {}).get("path"), _port(pod, "grpc")
            if path != "/health" and f"spire.service.health 127.0.0.1:{port} --tls" not in said:
                yield f"{name} has no {probe} that it answers"


def services_lead_to_pods_at_the_ports_that_are_called(manifests: list[Manifest]) -> Iterator[str]:
    services, running = of_kind(manifests, "Service"), pods(manifests)
    for name, pod in running.items():
        for variable, value in environment(pod).items():
            other, _, port = value.partition(":")
            if other not in NAMES:
                continue
            service = services.get(other, {"spec": {"ports": []}})["spec"]
            if int(port) not in [open_port["port"] for open_port in service["ports"]]:
                yield f"{name}: nothing is at {variable}={value}"
                continue
            if service["selector"].items() > _labels(manifests, other).items():
                yield f"the service {other} leads to no pod"
        listens = environment(pod).get(f"SPIRE_{name.upper()}_PORT")
        if listens != str(_port(pod, "http" if name == "gateway" else "grpc")):
            yield f"{name} listens at {listens}, where no port is open"


def _labels(manifests: list[Manifest], name: str) -> dict[str, str]:
    labels: dict[str, str] = of_kind(manifests, "Deployment")[name]["spec"]["template"]["metadata"]["labels"]
    return labels


def a_rollout_starts_the_next_before_it_ends_the_last(manifests: list[Manifest]) -> Iterator[str]:
    for name, deployment in of_kind(manifests, "Deployment").items():
        rolling = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
        if (rolling.get("maxSurge"), rolling.get("maxUnavailable")) != (1, 0):
            yield f"{name} is ended before the next one serves"
        if not container(deployment["spec"]["template"]["spec"]).get("lifecycle", {}).get("preStop"):
            yield f"{name} ends before others have heard of it"


def who_drains_is_given_the_time(manifests: list[Manifest]) -> Iterator[str]:
    """What comes before SIGTERM counts, and HTTP or gRPC takes up to 5 s to end."""
    for name, pod in pods(manifests).items():
        default = OPTIONS[name].model_fields.get("drain_seconds")
        told = environment(pod).get(f"SPIRE_{name.upper()}_DRAIN_SECONDS", default.default if default else 0)
        before = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        if pod.get("terminationGracePeriodSeconds", 30) < float(told) + float(before[1]) + 10:
            yield f"{name} is killed while it drains"


def gateways_and_verifiers_are_not_all_evicted(manifests: list[Manifest]) -> Iterator[str]:
    """A draft may be: that costs speed alone."""
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for name in ("gateway", "verifier"):
        spec = budgets.get(name, {}).get("spec", {})
        selects = spec.get("selector", {}).get("matchLabels", {})
        if not selects or not selects.items() <= _labels(manifests, name).items() or spec.get("minAvailable", 0) < 1:
            yield f"all of {name} may be evicted at once"


def there_are_two_gateways_and_one_verifier(manifests: list[Manifest]) -> Iterator[str]:
    replicas = {name: found["spec"]["replicas"] for name, found in of_kind(manifests, "Deployment").items()}
    if replicas["gateway"] < 2:
        yield "a single gateway"
    if replicas["verifier"] != 1 or replicas["draft"] != 1:
        yield f"gateways and the draft of a cell may be at different verifiers: {replicas}"


def every_option_is_one_of_its_service(manifests: list[Manifest]) -> Iterator[str]:
    for name, pod in pods(manifests).items():
        options: type[BaseSettings] = OPTIONS[name]
        for variable in environment(pod):
            if variable.removeprefix(str(options.model_config["env_prefix"])).lower() not in options.model_fields:
                yield f"{name} knows no {variable}"
        names = [variable["name"] for variable in container(pod)["env"]]
        yield from (f"{name} is told {variable} twice" for variable in set(names) if names.count(variable) > 1)


def secrets_come_from_generators_and_are_where_services_look(manifests: list[Manifest]) -> Iterator[str]:
    made = of_kind(manifests, "Secret")
    for name, pod in pods(manifests).items():
        mounts = {mount["name"]: mount for mount in container(pod)["volumeMounts"]}
        holds = {}
        for volume in pod["volumes"]:
            if "secret" not in volume:
                continue
            secret = made.get(volume["secret"]["secretName"])
            if secret is None:
                yield f"{name} mounts {volume['secret']['secretName']}, which nothing makes"
                continue
            if mounts[volume["name"]].get("readOnly") is not True or volume["secret"]["defaultMode"] & 0o007:
                yield f"{name}: {volume['name']} is open to others"
            holds[mounts[volume["name"]]["mountPath"]] = set(secret["data"])
        told = environment(pod)
        if holds.get(told.get(f"SPIRE_{name.upper()}_TLS", "")) != {"tls.crt", "tls.key", "ca.crt"}:
            yield f"{name} has no certificate"
        keys = Path(told.get("SPIRE_GATEWAY_KEYS", "none"))
        if name == "gateway" and keys.name not in holds.get(str(keys.parent), set()):
            yield "the gateway has no keys"


def only_who_needs_to_can_talk(manifests: list[Manifest]) -> Iterator[str]:
    policies = of_kind(manifests, "NetworkPolicy")
    everything = [
        policy["spec"] for policy in policies.values() if not policy["spec"]["podSelector"].get("matchExpressions")
    ]
    if not any(_denies_all(spec) for spec in everything):
        yield "what no policy names is open"
    callers = {"gateway": set(), "verifier": {"gateway", "draft"}, "draft": {"gateway"}}
    for name, wanted in callers.items():
        rules = policies.get(name, {}).get("spec", {}).get("ingress", [])
        for rule in rules:
            if {port["port"] for port in rule.get("ports", [])} == {"grpc"}:
                allowed = {_selected(peer) for peer in rule.get("from", [{}])}
                if allowed != wanted:
                    yield f"{name} can be called by {allowed}, it needs {wanted}"
            elif not rule.get("ports"):
                yield f"all ports of {name} are open"
        if wanted and not rules:
            yield f"nobody can call {name}"


def _denies_all(spec: Manifest) -> bool:
    selects = {key for key in spec["podSelector"].get("matchLabels", {}) if key != "app.kubernetes.io/part-of"}
    return not selects and not spec.get("ingress") and not spec.get("egress") and len(spec["policyTypes"]) == 2


def _selected(peer: Manifest) -> str:
    return str(peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name", "anybody"))


def names_are_asked_of_the_cluster(manifests: list[Manifest]) -> Iterator[str]:
    """Its DNS has one label of its own and none of Spire's."""
    policies = of_kind(manifests, "NetworkPolicy")
    for name in ("gateway", "draft"):
        egress = policies.get(name, {}).get("spec", {}).get("egress", [])
        asks = [rule for rule in egress if 53 in [port["port"] for port in rule.get("ports", [])]]
        selected = [peer["podSelector"]["matchLabels"] for rule in asks for peer in rule["to"]]
        if selected != [{"k8s-app": "kube-dns"}]:
            yield f"{name} asks {selected} for addresses"


def every_selector_matches_pods(manifests: list[Manifest]) -> Iterator[str]:
    """But for those of other namespaces, whose pods are not known here."""
    labels = [_labels(manifests, name) for name in of_kind(manifests, "Deployment")]
    for manifest in manifests:
        for wanted in _selectors(manifest):
            if not any(wanted.items() <= of_pod.items() for of_pod in labels):
                yield f"{manifest['kind']} {manifest['metadata']['name']} selects {wanted}, which no pod is"


def _selectors(part: Any) -> Iterator[dict[str, str]]:
    if isinstance(part, list):
        for each in part:
            yield from _selectors(each)
    elif isinstance(part, dict) and "namespaceSelector" not in part:
        for key, value in part.items():
            if key in ("selector", "podSelector", "labelSelector"):
                yield value.get("matchLabels", value)
            else:
                yield from _selectors(value)


def images_are_pinned(manifests: list[Manifest]) -> Iterator[str]:
    for name, pod in pods(manifests).items():
        if not re.search(r":\d+\.\d+\.\d+", container(pod)["image"]):
            yield f"{name}: {container(pod)['image']} names no version"


def a_gpu_is_asked_for_where_one_is_used(manifests: list[Manifest]) -> Iterator[str]:
    for name, pod in pods(manifests).items():
        asked = int(container(pod)["resources"]["limits"].get("nvidia.com/gpu", 0))
        used = environment(pod).get(f"SPIRE_{name.upper()}_DEVICE") == "cuda"
        if bool(asked) != used or (name != "gateway" and container(pod)["image"].endswith("-cuda") != used):
            yield f"{name} uses {'a GPU' if used else 'none'}, asks for {asked} and is {container(pod)['image']}"


RULES: tuple[Rule, ...] = (
    pods_keep_the_restricted_standard,
    no_service_sets_an_option,
    everything_is_probed,
    services_lead_to_pods_at_the_ports_that_are_called,
    a_rollout_starts_the_next_before_it_ends_the_last,
    who_drains_is_given_the_time,
    gateways_and_verifiers_are_not_all_evicted,
    there_are_two_gateways_and_one_verifier,
    every_option_is_one_of_its_service,
    secrets_come_from_generators_and_are_where_services_look,
    only_who_needs_to_can_talk,
    names_are_asked_of_the_cluster,
    every_selector_matches_pods,
    images_are_pinned,
    a_gpu_is_asked_for_where_one_is_used,
)
