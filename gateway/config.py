"""The options of `python -m gateway`, each also an environment variable SPIRE_GATEWAY_<NAME>.

Does not know: model, context length, vocabulary and tokenizer, which the verifier sends at the handshake.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, HttpUrl, field_validator, model_validator
from pydantic_settings import CliImplicitFlag, NoDecode, SettingsConfigDict

from gateway.draft import AUTO, OFF
from gateway.sequence import Rule, Stop
from spire.address import Host, Peer
from spire.service.process import ServiceConfig


class GatewayConfig(ServiceConfig):
    """The REST front of Spire: batches requests and drives the verifier and the draft in rounds."""

    model_config = SettingsConfigDict(
        env_prefix="SPIRE_GATEWAY_",
        frozen=True,
        cli_prog_name="python -m gateway",
        cli_kebab_case=True,
        pyproject_toml_table_header=("gateway",),
    )

    verifier: Peer = Field("127.0.0.1:50051", description="HOST:PORT of the verifier service")
    draft: str = Field(
        AUTO,
        description="kind, name or id of the draft to use among those that the verifier tells of: magicdec lets the "
        "target draft for itself; auto takes one that follows the verifier, off decodes plainly",
    )
    host: Host = Field("127.0.0.1", description="address to serve HTTP on")
    port: int = Field(8000, ge=0, le=65535, description="port to serve HTTP on; 0 chooses a free one")
    ready_file: Path | None = Field(None, description="where to write HOST:PORT once HTTP is served")

    keys: Path | None = Field(
        None,
        description="file of API keys, as `spire key create` makes it: every path but /health and the page at / asks "
        "for one. It is read again when it changes",
    )
    https: Path | None = Field(None, description="directory with tls.crt and tls.key: clients then speak HTTPS")
    without_keys: CliImplicitFlag[bool] = Field(
        False, description="serve whoever reaches the port, also where other machines do"
    )

    k: int | None = Field(
        None,
        ge=0,
        description="draft tokens a round, unless a request says otherwise; without it every round's are chosen from "
        "what was measured, down to 0 where speculation loses",
    )
    rule: Rule | None = Field(
        None,
        description="which draft tokens stand, unless a request says otherwise; without it, invariant for a request "
        "with a seed and block for one without",
    )
    stop: Stop | None = Field(
        None,
        description="where a draft with a stop head stops before k tokens, unless a request says otherwise: cost "
        "(where one more is worth less than it costs, for a request that is served alone), threshold (for each of a "
        "batch) or off; without it, cost where the gateway chooses k",
    )
    stop_threshold: float = Field(
        0.7, ge=0, le=1, description="for stop threshold: the probability of a rejected token at which drafting stops"
    )
    rules: Annotated[tuple[Rule, ...], NoDecode] = Field(
        ("rejection", "block", "invariant"), min_length=1, description="the rules that may be used, comma-separated"
    )
    max_batch: int = Field(64, ge=1, description="most sequences decoded together")
    max_waiting: int = Field(
        1024, ge=1, description="most sequences queued, shared by the API keys that wait; beyond that requests get 429"
    )
    max_queue_seconds: float | None = Field(
        None,
        gt=0,
        description="refuse with 429 who would wait longer for a first token, by the rate at which others got theirs",
    )
    requests_per_minute: int | None = Field(None, ge=1, description="requests that each API key may make a minute")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="tokens that each API key may have a minute, of prompts and generated"
    )
    request_deadline: float = Field(
        3600.0, gt=0, description="most seconds a request may take; X-Request-Timeout asks for fewer"
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="most connections of clients, or fewer where the "
        "process may not open as many files; beyond that the longest idle is closed",
    )
    max_choices: int = Field(256, ge=1, description="most choices (prompts x n or best_of) of one request")
    max_body_bytes: int = Field(2 * 1024 * 1024, ge=1024, description="largest request body; beyond that 413")

    cors_origins: list[str] = Field(
        default_factory=list,
        description="origins whose pages may call this gateway from a browser, '*' for all; without any, none may",
    )
    allow_host: list[str] = Field(
        default_factory=list,
        description="a name beside those of loopback that requests may be for, where this gateway listens on loopback "
        "without keys; any other Host gets 403, since a page's site may have its name resolve to this machine",
    )

    draft_deadline: float = Field(
        0.25, gt=0, description="seconds a draft of its own may take before a round goes on without"
    )
    verify_deadline: float = Field(
        60.0,
        gt=0,
        description="seconds a round may take before the stream is reset, or eight of the verifier's longest steps",
    )
    start_deadline: float = Field(
        120.0, gt=0, description="seconds without any progress of prompts before a reset, or eight steps as well"
    )
    verifier_patience: float = Field(
        60.0, ge=0, description="seconds running requests outlast a lost verifier, beside twice what it took to load"
    )
    startup_patience: float = Field(5.0, ge=0, description="seconds to wait for the peers' handshake before serving")
    head_deadline: float = Field(10.0, gt=0, description="seconds a client may take to say what it wants")
    idle_seconds: int = Field(
        120,
        ge=1,
        description="seconds a connection stays open between two requests: longer than the clients' pools keep theirs, "
        "or one is closed just when it is used again",
    )
    reading_deadline: float = Field(
        30.0, gt=0, description="seconds a client may leave unread what it is sent before the connection is cut"
    )
    body_deadline: float = Field(30.0, gt=0, description="seconds a client may take to send its request body")
    drain_seconds: float = Field(
        10.0, ge=0, description="after SIGTERM, how long running requests may take to end; a second one ends at once"
    )
    idle_ping: float = Field(15.0, gt=0, description="seconds of silence before a comment is sent on an event stream")

    plain_share: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="share of the rounds to be drafted that are decoded plainly instead, so that /metrics can compare: "
        "it costs share x (multiplier - 1) / tau of the tokens a second, 0.3 % for 0.01 where speculation doubles them",
    )
    calibration: Path | None = Field(
        None,
        description="what `spire doctor --calibrate` measured on the model services' machine: /metrics then tells the "
        "modelled multiplier too",
    )
    price: float | None = Field(
        None, gt=0, description="price of an hour of the verifier's devices: what a million tokens cost follows"
    )
    draft_price: float = Field(0.0, ge=0, description="the same of the draft's devices, where it has any of its own")
    boards: HttpUrl | None = Field(
        None, description="where people find the boards, http://HOST:3000 for Grafana: the page links to it"
    )
    vllm_metrics: bool = Field(True, description="also export the vllm:* names that existing dashboards read")

    @field_validator("draft")
    @classmethod
    def _no_address(cls, value: str) -> str:
        if re.search(r":\d+$", value):
            raise ValueError(
                f"{value!r} is an address: the verifier knows its drafts, so say auto, off, magicdec, or a draft's name"
            )
        return value or OFF

    @field_validator("rules", mode="before")
    @classmethod
    def _separate(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        if self.rule is not None and self.rule not in self.rules:
            raise ValueError(f"rule {self.rule!r} is none of the rules that may be used: {', '.join(self.rules)}")
        if self.keys and self.without_keys:
            raise ValueError(
                f"keys are in {self.keys}, and without_keys says that none are asked for: drop one of them"
            )
        return self

    def rule_for(self, wanted: Rule | None, seeded: bool) -> Rule:
        """Return `wanted` or the configured rule, else invariant if `seeded`, else block; rules[0] if not allowed."""
        usual: Rule = "invariant" if seeded else "block"
        return wanted or self.rule or (usual if usual in self.rules else self.rules[0])
