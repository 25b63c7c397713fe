"""Under the invariant rule the text of a seed is the target's own: with or without speculation, whatever the draft, k,
the other requests of the batch, and whatever dies meanwhile. Promised in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from tests.gateway.conftest import Api, eventually
from tests.marks import thoroughly
from tests.services import running, start

# Thousands of tokens, on whatever machine.
pytestmark = pytest.mark.timeout(1200)

PROMPTS = ["Once upon a time", "The little dog", "One day, Lily and Tom"]
VOCABULARY = 512


@pytest.fixture(scope="module")
def api(stories_dir: Path, stories_draft_dir: Path) -> Iterator[Api]:
    with running(stories_dir, stories_draft_dir) as services:
        yield Api(services.url)


def texts(api: Api, requests: list[dict[str, Any]], **speculation: Any) -> list[list[Any]]:
    """All at once: (token ids, text) of each choice."""
    more = {"speculation": speculation, "return_token_ids": True}
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda body: api.complete(**body, **more), requests))
    return [[(choice["token_ids"], choice["text"]) for choice in answer["choices"]] for answer in answers]


def seeded(n: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": PROMPTS[seed % 3] + " there" * seed, "seed": seed, "max_tokens": 60, "ignore_eos": True} | more
        for seed in range(n)
    ]


tokens = st.integers(0, VOCABULARY - 1)
parameters = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "seed": st.integers(0, 2**32), "temperature": st.floats(0, 1.8)},
    optional={
        "top_k": st.integers(1, 60),
        "top_p": st.floats(0.3, 1),
        "min_p": st.floats(0, 0.3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.8, 1.5),
        "logit_bias": st.dictionaries(tokens.map(str), st.floats(-10, 10), max_size=5),
        "allowed_token_ids": st.lists(tokens, min_size=30, max_size=60, unique=True),
        "min_tokens": st.integers(0, 10),
        "stop_token_ids": st.lists(tokens, max_size=3),
        "n": st.integers(1, 2),
    },
)


# What a system of processes does is no function of an example alone, so there is nothing to shrink or to replay.
drawn = partial(settings, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("examples", [6, thoroughly(200)])
def test_whatever_is_asked_speculation_changes_no_token(api: Api, examples: int) -> None:
    @drawn(max_examples=examples)
    @given(body=parameters, k=st.integers(1, 8))
    def check(body: dict[str, Any], k: int) -> None:
        body |= {"max_tokens": 20}
        assert texts(api, [body], k=k) == texts(api, [body], draft="off")

    check()


GRAMMARS: list[dict[str, Any]] = [
    {"guided_regex": "[a-z]{3,8}( [a-z]{1,5}){2,4}\\."},
    {"guided_regex": "(yes|no|maybe)"},
    {"guided_grammar": 'start: "The " ("cat" | "dog") " is " /[a-z ]{4,20}/ "."'},
    {
        "guided_json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
]
plain_parameters = st.fixed_dictionaries(
    {"prompt": st.sampled_from(PROMPTS), "seed": st.integers(0, 2**32), "temperature": st.floats(0, 1.5)},
    optional={"min_p": st.floats(0, 0.2), "frequency_penalty": st.floats(-1, 1), "ignore_eos": st.booleans()},
)


@pytest.mark.parametrize("examples", [5, thoroughly(50)])
def test_under_a_grammar_speculation_changes_no_token(api: Api, examples: int) -> None:
    @drawn(max_examples=examples)
    @given(body=plain_parameters, grammar=st.sampled_from(GRAMMARS), k=st.integers(1, 8))
    def check(body: dict[str, Any], grammar: dict[str, Any], k: int) -> None:
        body |= grammar | {"max_tokens": 40}
        drafted = texts(api, [body], k=k)
        assert drafted == texts(api, [body], draft="off")
        ((_, text),) = drafted[0]
        if pattern := grammar.get("guided_regex"):
            assert re.fullmatch(pattern, text) or len(drafted[0][0][0]) == 40, text

    check()


@pytest.mark.parametrize("depths", [(1, 5), thoroughly(range(9))])
def test_neither_k_nor_the_batch_changes_a_token(api: Api, depths: Sequence[int]) -> None:
    together = texts(api, seeded(6), draft="off")
    assert len({str(text) for text in together}) == 6
    for k in depths:
        assert texts(api, seeded(6), k=k) == together
    assert [texts(api, [body])[0] for body in seeded(6)] == together


def test_the_texts_of_a_rule_that_is_not_invariant_do_differ(api: Api) -> None:
    """The comparison sees a difference where there is one."""
    alone, drafted = (texts(api, seeded(6), rule="rejection", **more) for more in ({"draft": "off"}, {"k": 4}))
    assert alone != drafted


def test_another_draft_changes_no_token(api: Api, stories_dir: Path) -> None:
    expected = texts(api, seeded(4), draft="off")
    with running(stories_dir, "magicdec") as services:
        other = Api(services.url)
        assert texts(other, seeded(4), k=5) == expected
        assert other.metric("spire_accepted_tokens_total") > 0


@pytest.mark.thorough
def test_a_death_in_the_midst_of_a_text_changes_no_token(stories_dir: Path, stories_draft_dir: Path) -> None:
    with running(stories_dir, stories_draft_dir) as services:
        api = Api(services.url)
        bodies = seeded(4, max_tokens=400, frequency_penalty=0.3)
        expected = texts(api, bodies, draft="off")
        with ThreadPoolExecutor(1) as pool:
            disturbed = pool.submit(texts, api, bodies)
            eventually(lambda: api.metric("vllm:num_requests_running") == len(bodies))
            assert services.draft is not None
            services.draft.kill()
            services.verifier.kill()
            command = services.verifier.command.copy()
            command[command.index("--port") + 1] = services.verifier.address.rsplit(":", 1)[1]
            revived = start(command, services.directory)
            try:
                assert disturbed.result() == expected
                assert api.metric("spire_replays_total") >= 4
            finally:
                revived.process.terminate()
