"""SmolLM2-135M-Instruct with its shipped draft answers chats as it does without a draft: text, JSON, stops, logprobs.

In bfloat16 by kernels, which sum alike however many tokens they verify; in float32 thoroughly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import spire.cli.paths
from spire.kernels import kernels_for
from tests.marks import thoroughly
from tests.services import Services, running

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not kernels_for(torch.bfloat16), reason="no compiler at installation, or none for this CPU"),
]

DRAFT = spire.cli.paths.BUNDLED / "smollm2-draft"
QUESTION = "Tom has 3 boxes of 12 pencils and gives 5 pencils away. How many has he left? Explain each step."
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "count": {"type": "integer"}},
    "required": ["colour", "count"],
}


@pytest.fixture(scope="module", params=["bfloat16", thoroughly("float32")])
def services(request: pytest.FixtureRequest, smollm2_dir: Path) -> Iterator[Services]:
    with running(smollm2_dir, DRAFT, dtype=request.param) as services:
        yield services


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"temperature": 0}, id="greedy"),
        pytest.param({"temperature": 1, "seed": 7}, id="seeded"),
        pytest.param({"temperature": 0, "stop": ["pencils", "="]}, id="stop"),
        pytest.param({"temperature": 0, "logprobs": True, "top_logprobs": 3}, id="logprobs"),
        pytest.param({"temperature": 0, "presence_penalty": 0.8, "frequency_penalty": 0.4}, id="penalties"),
        pytest.param(
            {
                "temperature": 0,
                "response_format": {"type": "json_schema", "json_schema": {"name": "colours", "schema": COLOURS}},
            },
            id="schema",
        ),
    ],
)
def test_a_chat_is_answered_as_without_a_draft(services: Services, fields: dict[str, Any]) -> None:
    speculated, plain = (answer(services.url, fields | changes) for changes in ({}, {"speculation": {"draft": "off"}}))
    assert accepted(speculated) > 0
    assert accepted(plain) == 0
    (one,), (other,) = speculated["choices"], plain["choices"]
    assert one == other
    assert one["message"]["content"]


def answer(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64}
    reply = httpx.post(f"{url}/v1/chat/completions", json=chat | fields, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()


def accepted(reply: dict[str, Any]) -> int:
    return reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
