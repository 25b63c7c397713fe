"""What `docker compose config` makes of deploy/docker-compose.yml, and the rules that it must keep, a function each.

A rule yields what is wrong; what is well yields nothing. No engine runs, so what one does with it is not tested here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from ipaddress import ip_address
from typing import Any

import pytest
from pydantic_settings import BaseSettings

from draft_service.config import DraftServiceConfig
from gateway.config import GatewayConfig
from tests.paths import ROOT
from verifier_service.config import VerifierConfig

DEPLOY = ROOT / "deploy"
PROFILES = ("cpu", "gpu", "observability", "setup")
PUBLISHED = {"proxy", "prometheus", "grafana"}

# pydantic-settings classes of the services, by the part of a service's name before the device.
OPTIONS: dict[str, type[BaseSettings]] = {
    "gateway": GatewayConfig,
    "verifier": VerifierConfig,
    "draft": DraftServiceConfig,
}

Config = dict[str, Any]
Rule = Callable[[Config], Iterator[str]]


def compose() -> list[str]:
    """The command, of version 2. Skips the test where there is none."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            asked = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
            if asked.returncode == 0 and asked.stdout.lstrip("v").startswith(("2.", "5.")):
                return command
    pytest.skip("needs docker compose 2: the package docker-compose of Debian 13, docker-compose-v2 of Ubuntu")


def composed(*profiles: str, environment: dict[str, str] | None = None) -> Config:
    """All that these profiles run, with the options of .env.example and then these. Skips without docker compose."""
    config: Config = json.loads(_composed(profiles, tuple((environment or {}).items())))
    return config


@cache
def _composed(profiles: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> str:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SPIRE_", "COMPOSE_"))}
    ours |= {"COMPOSE_PROFILES": ",".join(profiles)} | dict(environment)
    files = ["--file", str(DEPLOY / "docker-compose.yml"), "--env-file", str(DEPLOY / ".env.example")]
    command = [*compose(), *files, "config", "--format", "json"]
    done = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # such as a variable that is not set
    return done.stdout


def serving(config: Config) -> dict[str, Config]:
    """The services that stay, by name."""
    return {name: service for name, service in config["services"].items() if name != "secrets"}


def kind(name: str) -> str:
    return name.removesuffix("-gpu")


def only_what_people_use_is_published(config: Config) -> Iterator[str]:
    for name, service in config["services"].items():
        for port in service.get("ports", []):
            if name not in PUBLISHED:
                yield f"{name} publishes {port['published']}"
            if not port.get("host_ip") or not ip_address(port["host_ip"]).is_loopback:
                yield f"{name} is published on {port.get('host_ip', 'every address')}"
        if service.get("network_mode") == "host":
            yield f"{name} has the network of the host"


def nothing_may_more_than_it_needs(config: Config) -> Iterator[str]:
    for name, service in config["services"].items():
        user = re.split(":", str(service.get("user", "")))[0]
        wanted = {
            "runs as root": user.isdigit() and int(user) > 0,
            "has a root that can be written": service.get("read_only") is True,
            "keeps capabilities": service.get("cap_drop") == ["ALL"] and not service.get("cap_add"),
            "may gain privileges": "no-new-privileges:true" in service.get("security_opt", []),
            "is privileged": not service.get("privileged"),
            "may make any number of processes": service.get("pids_limit", 0) > 0,
        }
        yield from (f"{name} {what}" for what, well in wanted.items() if not well)


def images_are_pinned(config: Config) -> Iterator[str]:
    for name, service in config["services"].items():
        tag = service["image"].partition("@")[0].rpartition("/")[2].partition(":")[2]
        if not re.search(r"\d+\.\d+", tag):
            yield f"{name}: {service['image']} names no version"


def everything_has_a_health_check_without_curl(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        test = service.get("healthcheck", {}).get("test", ["NONE"])
        if test[0] != "CMD":
            yield f"{name} has no health check that runs without a shell"
        if any("curl" in word for word in test):
            yield f"{name} needs curl"


def who_needs_another_waits_until_it_is_healthy(config: Config) -> Iterator[str]:
    needs = {"proxy": {"gateway"}, "gateway": {"verifier", "draft"}, "draft": {"verifier"}, "grafana": {"prometheus"}}
    for name, service in serving(config).items():
        waits = service.get("depends_on", {})
        yield from (f"{name} waits for {other} only to start" for other in waits if not _healthy(waits[other]))
        there = {kind(other) for other in waits if other in config["services"]}
        yield from (f"{name} does not wait for {other}" for other in needs.get(kind(name), set()) - there)


def _healthy(dependency: dict[str, Any]) -> bool:
    return bool(dependency["condition"] == "service_healthy")


def who_drains_is_given_the_time(config: Config) -> Iterator[str]:
    """Beside the drain, HTTP or gRPC takes up to 5 s to end."""
    for name, service in serving(config).items():
        options = OPTIONS.get(kind(name))
        if options is None or "drain_seconds" not in options.model_fields:
            continue
        default = options.model_fields["drain_seconds"].default
        drain = float(service["environment"].get(f"{options.model_config['env_prefix']}DRAIN_SECONDS", default))
        if _seconds(service.get("stop_grace_period", "10s")) < drain + 10:
            yield f"{name} drains for {drain:g} s and is killed after {service.get('stop_grace_period', '10s')}"


def _seconds(duration: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


def every_option_is_one_of_its_service(config: Config) -> Iterator[str]:
    """A misspelt one would be ignored."""
    for name, service in serving(config).items():
        options = OPTIONS.get(kind(name))
        for variable in service.get("environment", {}) if options else ():
            prefix = str(options.model_config["env_prefix"])  # type: ignore[union-attr]
            if variable.removeprefix(prefix).lower() not in options.model_fields:  # type: ignore[union-attr]
                yield f"{name} knows no {variable}"


def secrets_are_files_that_cannot_be_written(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        for volume in service.get("volumes", []):
            if "secrets" in volume["target"] and not (volume["type"] == "bind" and volume.get("read_only")):
                yield f"{name} can write {volume['target']}"
        for variable, value in service.get("environment", {}).items():
            is_file = str(value).startswith("/run/secrets/")
            if re.search(r"PASSWORD|KEYS?$|TLS|TOKEN$", variable) and not is_file:
                yield f"{name} has {variable} in its environment"


def services_know_one_another_by_certificate(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        if kind(name) in OPTIONS and f"SPIRE_{kind(name).upper()}_TLS" not in service["environment"]:
            yield f"{name} talks to whoever reaches it"


def the_gateway_asks_for_keys(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        if kind(name) == "gateway" and "SPIRE_GATEWAY_KEYS" not in service["environment"]:
            yield f"{name} serves whoever reaches it"


def only_what_is_published_has_a_way_out(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        outside = [network for network in service["networks"] if not config["networks"][network].get("internal")]
        if outside and name not in PUBLISHED:
            yield f"{name} is on {', '.join(outside)}"


def activations_travel_through_memory(config: Config) -> Iterator[str]:
    """One volume in memory, at the place that either service is told, of one user."""
    shares = set()
    for name, service in serving(config).items():
        if kind(name) not in ("verifier", "draft"):
            continue
        told = service["environment"].get(f"SPIRE_{kind(name).upper()}_SHARED_MEMORY")
        mounted = [volume for volume in service["volumes"] if volume["target"] == told]
        if not mounted or mounted[0].get("read_only"):
            yield f"{name} cannot use {told}"
            continue
        volume = mounted[0]["source"]
        options = config["volumes"].get(volume, {}).get("driver_opts", {})
        if options.get("type") != "tmpfs" or f"uid={str(service['user']).split(':')[0]}," not in options.get("o", ""):
            yield f"{volume} is not in memory, or not {name}'s"
        shares.add((volume, service["user"]))
    if len(shares) > 1:
        yield f"verifier and draft have nothing in common: {sorted(shares)}"


def a_gpu_is_reserved_where_one_is_used(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        if kind(name) not in ("verifier", "draft"):
            continue
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        reserved = [device for device in devices if "gpu" in device["capabilities"] and device["driver"] == "nvidia"]
        told = service["environment"][f"SPIRE_{kind(name).upper()}_DEVICE"]
        if bool(reserved) != (told == "cuda"):
            yield f"{name} computes on {told} and reserves {devices}"


def models_cannot_be_written(config: Config) -> Iterator[str]:
    for name, service in serving(config).items():
        if kind(name) in ("verifier", "draft"):
            models = [volume for volume in service["volumes"] if volume["target"] == "/models"]
            if not models or not models[0].get("read_only"):
                yield f"{name} has no models, or can write them"


RULES: tuple[Rule, ...] = (
    only_what_people_use_is_published,
    nothing_may_more_than_it_needs,
    images_are_pinned,
    everything_has_a_health_check_without_curl,
    who_needs_another_waits_until_it_is_healthy,
    who_drains_is_given_the_time,
    every_option_is_one_of_its_service,
    secrets_are_files_that_cannot_be_written,
    services_know_one_another_by_certificate,
    the_gateway_asks_for_keys,
    only_what_is_published_has_a_way_out,
    activations_travel_through_memory,
    a_gpu_is_reserved_where_one_is_used,
    models_cannot_be_written,
)
