"""deploy/docker-compose.yml is valid in every profile and keeps the rules of tests/deploy/compose.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from tests.deploy import compose as rules
from tests.deploy.compose import DEPLOY, PROFILES, RULES, Config, Rule, compose, composed

USUAL = (("cpu", "observability"), ("gpu", "observability"))


@pytest.mark.parametrize("profiles", [chosen for n in (1, 2) for chosen in combinations(PROFILES, n)], ids=" ".join)
def test_every_profile_is_valid(profiles: tuple[str, ...]) -> None:
    assert composed(*profiles)["services"]


def test_a_profile_runs_what_its_name_says() -> None:
    names = {profile: set(composed(profile)["services"]) for profile in PROFILES}
    assert names == {
        "cpu": {"proxy", "gateway", "verifier", "draft"},
        "gpu": {"proxy", "gateway", "verifier-gpu", "draft-gpu"},
        "observability": {"prometheus", "grafana"},
        "setup": {"secrets"},
    }


@pytest.mark.parametrize("profiles", USUAL, ids=" ".join)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds(rule: Rule, profiles: tuple[str, ...]) -> None:
    config = composed(*profiles)
    assert len(config["services"]) == 6
    assert not list(rule(config))


Break = Callable[[Config], object]

BREAKS: list[tuple[Rule, str, Break]] = [
    (
        rules.only_what_people_use_is_published,
        "a port on every address",
        lambda c: c["services"]["proxy"]["ports"][0].update(host_ip="0.0.0.0"),
    ),
    (
        rules.only_what_people_use_is_published,
        "a verifier's port",
        lambda c: c["services"]["verifier"].update(ports=[{"published": "50051", "host_ip": "127.0.0.1"}]),
    ),
    (rules.nothing_may_more_than_it_needs, "a root", lambda c: c["services"]["gateway"].update(user="0:0")),
    (rules.nothing_may_more_than_it_needs, "no user", lambda c: c["services"]["grafana"].pop("user")),
    (rules.nothing_may_more_than_it_needs, "a capability", lambda c: c["services"]["draft"].update(cap_add=["CHOWN"])),
    (rules.nothing_may_more_than_it_needs, "writing", lambda c: c["services"]["proxy"].update(read_only=False)),
    (rules.nothing_may_more_than_it_needs, "setuid", lambda c: c["services"]["proxy"].pop("security_opt")),
    (rules.images_are_pinned, "latest", lambda c: c["services"]["grafana"].update(image="grafana/grafana:latest")),
    (rules.images_are_pinned, "no tag", lambda c: c["services"]["grafana"].update(image="host:5000/grafana")),
    (
        rules.everything_has_a_health_check_without_curl,
        "none",
        lambda c: c["services"]["draft"].pop("healthcheck"),
    ),
    (
        rules.everything_has_a_health_check_without_curl,
        "curl",
        lambda c: c["services"]["proxy"]["healthcheck"].update(test=["CMD", "curl", "http://127.0.0.1"]),
    ),
    (
        rules.who_needs_another_waits_until_it_is_healthy,
        "started is enough",
        lambda c: c["services"]["gateway"]["depends_on"]["verifier"].update(condition="service_started"),
    ),
    (
        rules.who_needs_another_waits_until_it_is_healthy,
        "no waiting",
        lambda c: c["services"]["draft"].pop("depends_on"),
    ),
    (
        rules.who_drains_is_given_the_time,
        "the usual 10 s",
        lambda c: c["services"]["gateway"].pop("stop_grace_period"),
    ),
    (
        rules.who_drains_is_given_the_time,
        "a longer drain",
        lambda c: c["services"]["verifier"]["environment"].update(SPIRE_VERIFIER_DRAIN_SECONDS="55"),
    ),
    (
        rules.every_option_is_one_of_its_service,
        "a misspelt one",
        lambda c: c["services"]["gateway"]["environment"].update(SPIRE_GATEWAY_KEY="x"),
    ),
    (
        rules.secrets_are_files_that_cannot_be_written,
        "a password for all to see",
        lambda c: c["services"]["grafana"]["environment"].update(GF_SECURITY_ADMIN_PASSWORD="x"),
    ),
    (
        rules.secrets_are_files_that_cannot_be_written,
        "a mount to write",
        lambda c: [volume.pop("read_only", None) for volume in c["services"]["gateway"]["volumes"]],
    ),
    (
        rules.services_know_one_another_by_certificate,
        "no certificate",
        lambda c: c["services"]["verifier"]["environment"].pop("SPIRE_VERIFIER_TLS"),
    ),
    (
        rules.the_gateway_asks_for_keys,
        "no keys",
        lambda c: c["services"]["gateway"]["environment"].pop("SPIRE_GATEWAY_KEYS"),
    ),
    (
        rules.only_what_is_published_has_a_way_out,
        "a way out",
        lambda c: c["services"]["gateway"]["networks"].update(edge=None),
    ),
    (
        rules.activations_travel_through_memory,
        "a directory of its own",
        lambda c: c["services"]["draft"]["environment"].update(SPIRE_DRAFT_SHARED_MEMORY="/dev/shm"),
    ),
    (rules.activations_travel_through_memory, "a disk", lambda c: c["volumes"]["activations"].pop("driver_opts")),
    (rules.activations_travel_through_memory, "two users", lambda c: c["services"]["draft"].update(user="10002:10002")),
    (
        rules.a_gpu_is_reserved_where_one_is_used,
        "no device",
        lambda c: c["services"]["verifier"]["environment"].update(SPIRE_VERIFIER_DEVICE="cuda"),
    ),
    (
        rules.models_cannot_be_written,
        "no models",
        lambda c: c["services"]["verifier"].update(volumes=[]),
    ),
]


@pytest.mark.parametrize(
    ("rule", "break_it"), [(rule, break_it) for rule, _, break_it in BREAKS], ids=[what for _, what, _ in BREAKS]
)
def test_the_rule_sees_what_breaks_it(rule: Rule, break_it: Break) -> None:
    config = composed(*USUAL[0])
    break_it(config)
    assert list(rule(config))


def test_every_rule_has_a_control() -> None:
    assert {rule for rule, _, _ in BREAKS} == set(RULES)


def test_publishing_elsewhere_is_one_option_and_the_check_sees_it() -> None:
    opened = composed("cpu", environment={"SPIRE_BIND": "0.0.0.0"})
    assert list(rules.only_what_people_use_is_published(opened)) == ["proxy is published on 0.0.0.0"]


def test_the_target_may_draft_for_itself() -> None:
    config = composed("cpu", environment={"SPIRE_DRAFTS": "0", "SPIRE_GATEWAY_DRAFT": "magicdec"})
    assert config["services"]["draft"]["scale"] == 0
    assert config["services"]["gateway"]["environment"]["SPIRE_GATEWAY_DRAFT"] == "magicdec"


def test_speculation_may_be_off() -> None:
    config = composed("cpu", environment={"SPIRE_DRAFTS": "0", "SPIRE_GATEWAY_DRAFT": "off"})
    assert config["services"]["gateway"]["environment"]["SPIRE_GATEWAY_DRAFT"] == "off"


@pytest.mark.parametrize(
    ("service", "option", "value"),
    [
        ("gateway", "SPIRE_GATEWAY_PRICE", "2.5"),
        ("verifier", "SPIRE_VERIFIER_MAX_CONTEXT", "4096"),
        ("verifier", "SPIRE_VERIFIER_CACHE_GB", "20"),
        ("draft", "SPIRE_DRAFT_THREADS", "2"),
    ],
)
def test_an_option_set_in_the_environment_file_reaches_its_service(service: str, option: str, value: str) -> None:
    assert composed("cpu")["services"][service]["environment"][option] is None
    assert composed("cpu", environment={option: value})["services"][service]["environment"][option] == value


# What compose decides by its own layout: files, addresses, ways in (certificates and keys). And what is for benchmarks.
NOT_FOR_CONTAINERS = {
    "ready_file",
    "lossy_synthetic_acceptance",
    "https",
    "without_keys",
    "draft_id",
    "secret_file",
    "allow_host",
}


@pytest.mark.parametrize("service", sorted(rules.OPTIONS))
def test_every_option_of_a_service_is_set_or_passed_on(service: str) -> None:
    prefix = str(rules.OPTIONS[service].model_config["env_prefix"])
    options = {prefix + name.upper() for name in rules.OPTIONS[service].model_fields if name not in NOT_FOR_CONTAINERS}
    told = set(re.findall(rf"^ +({prefix}\w+):", (DEPLOY / "docker-compose.yml").read_text(), re.MULTILINE))
    assert told == options


def test_a_file_of_overrides_is_read_by_make(tmp_path: Path) -> None:
    copy = tmp_path / "deploy"
    shutil.copytree(DEPLOY, copy, ignore=shutil.ignore_patterns("secrets", ".env"))
    shutil.copy(DEPLOY / ".env.example", copy / ".env")
    (copy / "docker-compose.override.yml").write_text("services: {gateway: {environment: {SPIRE_GATEWAY_K: '3'}}}")
    makefile = (DEPLOY.parent / "Makefile").read_text()
    (command,) = re.findall(r"^COMPOSE := (.*)$", makefile, re.MULTILINE)
    shown = f"{command.replace('docker compose', ' '.join(compose()))} config --format json"
    done = subprocess.run(["bash", "-c", shown], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["services"]["gateway"]["environment"]["SPIRE_GATEWAY_K"] == "3"


def test_the_calibration_is_mounted_read_only_where_the_gateway_reads_it(tmp_path: Path) -> None:
    assert composed("cpu")["services"]["gateway"]["environment"]["SPIRE_GATEWAY_CALIBRATION"] is None
    file = tmp_path / "calibration.json"
    told = {"SPIRE_CALIBRATION_FILE": str(file), "SPIRE_GATEWAY_CALIBRATION": "/run/calibration.json"}
    gateway = composed("cpu", environment=told)["services"]["gateway"]
    (mounted,) = [volume for volume in gateway["volumes"] if volume["source"] == str(file)]
    assert mounted["target"] == gateway["environment"]["SPIRE_GATEWAY_CALIBRATION"]
    assert mounted["read_only"]


def test_the_example_tells_what_compose_asks_for_and_its_defaults() -> None:
    file, example = (DEPLOY / "docker-compose.yml").read_text(), (DEPLOY / ".env.example").read_text()
    used = dict(re.findall(r"\$\{(SPIRE_\w+):?-([^}]*)\}", file))
    told = dict(re.findall(r"^#?(\w+)=(.*)$", example, re.MULTILINE))
    assert told.pop("COMPOSE_PROFILES") == "cpu,observability"
    passed_on = set(re.findall(r"^ +(SPIRE_\w+):$", file, re.MULTILINE))
    assert used.keys() <= told.keys()
    assert told.keys() - used.keys() <= passed_on
    # Two have another default in each profile.
    assert {name for name in used if used[name] != told[name]} <= {"SPIRE_MODEL_IMAGE", "SPIRE_TORCH_INDEX"}


def test_the_example_tells_no_default_of_what_is_refused_once_it_is_set() -> None:
    """64 sequences are cut to what fits a GPU if nobody asks for them, and refused if somebody does."""
    told = dict(re.findall(r"^#?(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), re.MULTILINE))
    sizes = ("cache_gb", "max_context", "max_sequences")
    options = rules.OPTIONS["verifier"]
    example = {name: told["SPIRE_VERIFIER_" + name.upper()] for name in sizes}
    assert not [name for name in sizes if float(example[name]) == options.model_fields[name].default]
    options.model_validate({"model": "target", **example})


def test_prometheus_finds_the_services_and_its_key() -> None:
    config = composed("cpu", "observability")
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    ports = {name: config["services"][name]["environment"] for name in ("gateway", "verifier", "draft")}
    assert targets == {
        "gateway": [f"gateway:{ports['gateway']['SPIRE_GATEWAY_PORT']}"],
        "verifier": [f"verifier:{ports['verifier']['SPIRE_VERIFIER_METRICS_PORT']}"],
        "draft": [f"draft:{ports['draft']['SPIRE_DRAFT_METRICS_PORT']}"],
    }
    mounted = {volume["target"] for volume in config["services"]["prometheus"]["volumes"]}
    assert str(Path(jobs[0]["authorization"]["credentials_file"]).parent) in mounted


def test_what_is_mounted_from_the_repository_is_there() -> None:
    files = {
        Path(volume["source"])
        for profile in PROFILES
        for service in composed(profile)["services"].values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
        and DEPLOY / "secrets" not in (*Path(volume["source"]).parents, Path(volume["source"]))
    }
    assert {file.name for file in files} >= {"nginx.conf", "make-secrets", "models", "prometheus"}
    assert not [file for file in files if not file.exists()]
