"""deploy/kubernetes builds, on CPUs and on GPUs, and keeps the rules of tests/deploy/kubernetes.py."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy import kubernetes as rules
from tests.deploy.compose import DEPLOY
from tests.deploy.kubernetes import RULES, Manifest, Rule, built, container, kustomize, of_kind, pods


@pytest.fixture(scope="module")
def on_cpus(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return built(tmp_path_factory.mktemp("kubernetes") / "cpu", secrets)


@pytest.fixture(scope="module")
def on_gpus(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return built(tmp_path_factory.mktemp("kubernetes") / "gpu", secrets, "gpu")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_on_cpus(rule: Rule, on_cpus: list[Manifest]) -> None:
    assert set(pods(on_cpus)) == set(rules.NAMES)
    assert not list(rule(on_cpus))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds_on_gpus(rule: Rule, on_gpus: list[Manifest]) -> None:
    assert container(pods(on_gpus)["verifier"])["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert not list(rule(on_gpus))


def without_secrets(directory: Path) -> str:
    copied = subprocess.run(["cp", "-r", DEPLOY / "kubernetes", directory])
    assert copied.returncode == 0
    subprocess.run(["rm", "-rf", directory / "secrets"], check=True)
    return subprocess.run([*kustomize(), directory], capture_output=True, text=True).stderr


def test_without_secrets_it_does_not_build(tmp_path: Path) -> None:
    assert "secrets/keys/api_keys" in without_secrets(tmp_path / "copy")


def variables(manifests: list[Manifest], name: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = pods(manifests)[name]["containers"][0]["env"]
    return found


def change(manifests: list[Manifest], name: str, variable: str, value: str) -> None:
    (found,) = [each for each in variables(manifests, name) if each["name"] == variable]
    found["value"] = value


def own(manifests: list[Manifest], name: str) -> Manifest:
    found: Manifest = pods(manifests)[name]["containers"][0]
    return found


def drop(manifests: list[Manifest], kind: str, name: str) -> None:
    manifests.remove(of_kind(manifests, kind)[name])


def deployment(manifests: list[Manifest], name: str) -> Manifest:
    found: Manifest = of_kind(manifests, "Deployment")[name]["spec"]
    return found


def dns(manifests: list[Manifest], name: str) -> dict[str, str]:
    """The labels by which it knows the cluster's DNS."""
    egress = of_kind(manifests, "NetworkPolicy")[name]["spec"]["egress"]
    found: dict[str, str] = egress[-1]["to"][0]["podSelector"]["matchLabels"]
    return found


Break = Callable[[list[Manifest]], object]

BREAKS: list[tuple[Rule, str, Break]] = [
    (
        rules.pods_keep_the_restricted_standard,
        "a capability",
        lambda m: own(m, "draft")["securityContext"].update(capabilities={"add": ["SYS_PTRACE"]}),
    ),
    (
        rules.pods_keep_the_restricted_standard,
        "a root",
        lambda m: pods(m)["gateway"]["securityContext"].update(runAsUser=0),
    ),
    (rules.no_service_sets_an_option, "service links", lambda m: pods(m)["gateway"].pop("enableServiceLinks")),
    (rules.everything_is_probed, "no probe", lambda m: own(m, "draft").pop("livenessProbe")),
    (
        rules.everything_is_probed,
        "a probe that needs a key",
        lambda m: own(m, "gateway")["readinessProbe"]["httpGet"].update(path="/ready"),
    ),
    (
        rules.services_lead_to_pods_at_the_ports_that_are_called,
        "another port",
        lambda m: change(m, "gateway", "SPIRE_GATEWAY_VERIFIER", "verifier:50052"),
    ),
    (
        rules.services_lead_to_pods_at_the_ports_that_are_called,
        "no service",
        lambda m: drop(m, "Service", "verifier"),
    ),
    (
        rules.a_rollout_starts_the_next_before_it_ends_the_last,
        "recreate",
        lambda m: deployment(m, "verifier").update(strategy={"type": "Recreate"}),
    ),
    (
        rules.a_rollout_starts_the_next_before_it_ends_the_last,
        "no notice",
        lambda m: own(m, "gateway").pop("lifecycle"),
    ),
    (
        rules.who_drains_is_given_the_time,
        "the usual 30 s",
        lambda m: pods(m)["gateway"].pop("terminationGracePeriodSeconds"),
    ),
    (
        rules.gateways_and_verifiers_are_not_all_evicted,
        "no budget",
        lambda m: drop(m, "PodDisruptionBudget", "gateway"),
    ),
    (
        rules.gateways_and_verifiers_are_not_all_evicted,
        "a budget of others",
        lambda m: of_kind(m, "PodDisruptionBudget")["verifier"]["spec"]["selector"].update(matchLabels={"app": "x"}),
    ),
    (
        rules.there_are_two_gateways_and_one_verifier,
        "two verifiers",
        lambda m: deployment(m, "verifier").update(replicas=2),
    ),
    (
        rules.every_option_is_one_of_its_service,
        "a misspelt one",
        lambda m: variables(m, "verifier").append({"name": "SPIRE_VERIFIER_MODELS", "value": "x"}),
    ),
    (
        rules.secrets_come_from_generators_and_are_where_services_look,
        "a secret that is not made",
        lambda m: [m.remove(secret) for secret in of_kind(m, "Secret").values()],
    ),
    (
        rules.secrets_come_from_generators_and_are_where_services_look,
        "another place",
        lambda m: change(m, "gateway", "SPIRE_GATEWAY_KEYS", "/run/secrets/spire/api_keys"),
    ),
    (rules.only_who_needs_to_can_talk, "all open", lambda m: drop(m, "NetworkPolicy", "deny-all")),
    (
        rules.only_who_needs_to_can_talk,
        "a verifier for all",
        lambda m: of_kind(m, "NetworkPolicy")["verifier"]["spec"]["ingress"][0].pop("from"),
    ),
    (
        rules.names_are_asked_of_the_cluster,
        "a label of ours on the cluster's DNS",
        lambda m: dns(m, "draft").update({"app.kubernetes.io/part-of": "spire"}),
    ),
    (
        rules.names_are_asked_of_the_cluster,
        "no DNS",
        lambda m: of_kind(m, "NetworkPolicy")["gateway"]["spec"]["egress"].pop(),
    ),
    (
        rules.every_selector_matches_pods,
        "a label that no pod has",
        lambda m: of_kind(m, "Service")["verifier"]["spec"]["selector"].update(tier="verifier"),
    ),
    (
        rules.every_selector_matches_pods,
        "a peer that is no pod",
        lambda m: of_kind(m, "NetworkPolicy")["gateway"]["spec"]["egress"][0].update(
            to=[{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "verifiers"}}}]
        ),
    ),
    (rules.images_are_pinned, "latest", lambda m: own(m, "gateway").update(image="spire-gateway:latest")),
    (
        rules.a_gpu_is_asked_for_where_one_is_used,
        "none asked for",
        lambda m: change(m, "verifier", "SPIRE_VERIFIER_DEVICE", "cuda"),
    ),
]


@pytest.mark.parametrize(
    ("rule", "break_it"), [(rule, break_it) for rule, _, break_it in BREAKS], ids=[what for _, what, _ in BREAKS]
)
def test_the_rule_sees_what_breaks_it(rule: Rule, break_it: Break, on_cpus: list[Manifest]) -> None:
    manifests = copy.deepcopy(on_cpus)
    break_it(manifests)
    assert list(rule(manifests))


def test_every_rule_has_a_control() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)
