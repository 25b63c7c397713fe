"""Every round and every request to a draft of another process goes by gRPC; the counters say so."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.services import running
from tests.verifier_service.harness import free_port


def carried(url: str, name: str) -> dict[str, float]:
    """A counter's value by carrier."""
    return {
        sample.labels.get("carrier", ""): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.mark.parametrize(
    ("kind", "carrier", "other"), [("spire", "grpc", "internal"), ("magicdec", "internal", "grpc")]
)
def test_every_round_goes_by_grpc_and_every_request_by_its_draft_s_carrier(
    stories_dir: Path, stories_draft_dir: Path, kind: Literal["spire", "magicdec"], carrier: str, other: str
) -> None:
    port, draft = free_port(), stories_draft_dir if kind == "spire" else kind
    with running(stories_dir, draft, verifier_options=["--metrics-port", str(port)]) as services:
        body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True}
        assert httpx.post(f"{services.url}/v1/completions", json=body, timeout=60).status_code == 200
        verifier = f"http://127.0.0.1:{port}"
        rounds = carried(verifier, "spire_verifier_rounds_total")
        assert rounds["grpc"] >= carried(services.url, "spire_rounds_total")[""] > 0
        assert set(rounds) == {"grpc"}
        requests = carried(verifier, "spire_verifier_draft_requests_total")
        assert requests[carrier] > 0
        assert requests[other] == 0
