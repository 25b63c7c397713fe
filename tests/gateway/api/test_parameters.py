"""Every parameter of a completion does what it says, and what cannot be done is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.text.tokenizer import TextCodec
from tests.gateway.conftest import OFF, Api, stream
from tests.marks import thoroughly
from tests.services import Services, start

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = {"temperature": 0, "return_token_ids": True}


def one(api: Api, prompt: object = PROMPT, **request: Any) -> dict[str, Any]:
    """The only choice of a greedy request that shows its tokens."""
    choice: dict[str, Any] = api.complete(prompt, **GREEDY | request)["choices"][0]
    return choice


def streamed(api: Api, prompt: object = PROMPT, **request: Any) -> dict[str, Any]:
    """The same from a stream, put together."""
    pieces = [event["choices"][0] for event in stream(api, prompt, **GREEDY | request)]
    return {
        "text": "".join(piece["text"] for piece in pieces),
        "token_ids": [token for piece in pieces for token in piece["token_ids"]],
        "finish_reason": pieces[-1]["finish_reason"],
    }


# -- where a text ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 4])
def test_a_stop_token_ends_the_text_and_is_shown_only_if_so_wished(api: Api, k: int) -> None:
    full = one(api, max_tokens=40)
    at = 20
    stop = full["token_ids"][at]
    first = full["token_ids"].index(stop)
    request = {"max_tokens": 40, "stop_token_ids": [511, stop], "speculation": {"k": k}}
    hidden = one(api, **request)
    assert hidden["token_ids"] == full["token_ids"][: first + 1]
    assert hidden["finish_reason"] == "stop"
    shown = one(api, **request, include_stop_str_in_output=True)
    assert shown["text"] == hidden["text"] + one(api, max_tokens=first + 1)["text"][len(hidden["text"]) :]
    assert len(shown["text"]) > len(hidden["text"])
    assert full["text"].startswith(shown["text"])


def test_a_stop_string_is_shown_if_so_wished_and_nothing_after_it(api: Api) -> None:
    full = one(api, max_tokens=60)["text"]
    stop = full[25:29]
    end = full.index(stop) + len(stop)
    request = {"max_tokens": 60, "stop": stop, "include_stop_str_in_output": True}
    assert one(api, **request)["text"] == full[:end]
    assert streamed(api, **request)["text"] == full[:end]


def test_no_stop_string_ends_a_text_before_its_least_length(api: Api) -> None:
    full = one(api, max_tokens=60)
    stop = full["text"][4:6]
    assert len(one(api, max_tokens=60, stop=stop)["token_ids"]) < 12
    later = one(api, max_tokens=60, stop=stop, min_tokens=12)
    assert 12 <= len(later["token_ids"]) <= 60
    assert full["text"].startswith(later["text"])


def test_max_tokens_of_zero_is_the_prompts_echo(api: Api) -> None:
    answer = api.complete(PROMPT, max_tokens=0, echo=True, return_metrics=True)
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["metrics"]["mean_itl_ms"] is None
    assert api.complete([5] * 512, max_tokens=0, echo=True)["usage"]["prompt_tokens"] == 512


# -- what a prompt is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [PROMPT, "A caf\u00e9, \u96ea\u2603\nand more", "  two  spaces ", "<s>again"])
def test_an_echo_is_the_prompt_in_front_of_the_text(api: Api, prompt: str) -> None:
    request = {"max_tokens": 12, "stop": "never there"}
    alone, echoed = one(api, prompt, **request), one(api, prompt, **request, echo=True)
    assert echoed["text"] == prompt + alone["text"]
    assert echoed["token_ids"] == alone["token_ids"]
    assert streamed(api, prompt, **request, echo=True)["text"] == prompt + alone["text"]


def test_token_ids_are_echoed_as_their_text(api: Api) -> None:
    tokens = one(api, "A caf\u00e9, \u96ea", max_tokens=1)["prompt_token_ids"]
    assert api.text(tokens, max_tokens=0, echo=True) == "A caf\u00e9, \u96ea"
    assert api.text("A caf\u00e9, \u96ea", max_tokens=0, echo=True, truncate_prompt_tokens=3) == "\u96ea"


def test_each_choice_echoes_its_own_prompt(api: Api) -> None:
    prompts = ["The cat", "A dog"]
    texts = [choice["text"] for choice in api.complete(prompts, n=2, echo=True, max_tokens=3)["choices"]]
    assert [text.startswith(prompt) for text, prompt in zip(texts, [p for p in prompts for _ in "ab"], strict=True)]
    assert all(len(text) > 7 for text in texts)


def test_special_tokens_are_added_unless_they_are_not_wanted(api: Api) -> None:
    usual, bare = one(api, max_tokens=1), one(api, max_tokens=1, add_special_tokens=False)
    assert usual["prompt_token_ids"] == [1, *bare["prompt_token_ids"]]


def test_of_a_truncated_prompt_the_end_is_kept(api: Api) -> None:
    whole = one(api, max_tokens=4)["prompt_token_ids"]
    cut = one(api, max_tokens=4, truncate_prompt_tokens=3)
    assert cut["prompt_token_ids"] == whole[-3:]
    assert cut["token_ids"] == one(api, whole[-3:], max_tokens=4)["token_ids"]
    assert one(api, whole, max_tokens=4, truncate_prompt_tokens=3)["prompt_token_ids"] == whole[-3:]
    assert one(api, max_tokens=4, truncate_prompt_tokens=100)["prompt_token_ids"] == whole


@pytest.mark.parametrize("prompt", ["word " * 6000, [5] * 9000], ids=["text", "tokens"])
def test_a_prompt_longer_than_the_context_can_be_cut_to_what_has_room(api: Api, prompt: object) -> None:
    usage = api.complete(prompt, max_tokens=12, truncate_prompt_tokens=-1)["usage"]
    assert usage["prompt_tokens"] == 500
    assert usage["completion_tokens"] <= 12


# -- how a text is drawn ---------------------------------------------------------------------------------------------


def test_a_biased_token_comes_always_or_never(api: Api) -> None:
    first = one(api, max_tokens=1)["token_ids"][0]
    banned = one(api, max_tokens=30, logit_bias={str(first): -100})["token_ids"]
    assert first not in banned
    assert set(one(api, max_tokens=12, logit_bias={"300": 100})["token_ids"]) == {300}


@pytest.mark.parametrize("k", [0, 4])
def test_only_allowed_tokens_come(api: Api, k: int) -> None:
    allowed = [310, 320, 330]
    answer = api.complete(
        PROMPT, max_tokens=24, seed=1, allowed_token_ids=allowed, return_token_ids=True, speculation={"k": k}
    )
    assert set(answer["choices"][0]["token_ids"]) <= set(allowed)


@pytest.mark.parametrize("k", [0, 4])
def test_no_end_comes_before_the_least_length(api: Api, k: int) -> None:
    full = one(api, max_tokens=40)
    ends = list(set(full["token_ids"][:10]))
    assert len(one(api, max_tokens=40, stop_token_ids=ends)["token_ids"]) == 1
    later = one(api, max_tokens=40, stop_token_ids=ends, min_tokens=15, speculation={"k": k})["token_ids"]
    assert len(later) > 15
    assert not set(later[:15]) & set(ends)


def test_penalties_and_min_p_change_the_text(api: Api) -> None:
    full = one(api, max_tokens=60)["token_ids"]
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.5}):
        changed = one(api, max_tokens=60, **penalty)["token_ids"]
        assert len(set(changed)) > len(set(full))
    likeliest = api.complete(PROMPT, max_tokens=30, temperature=1.5, min_p=1, return_token_ids=True)["choices"][0]
    assert likeliest["token_ids"] == full[:30]


def test_the_best_of_several_candidates_is_the_likeliest(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "seed": 5, "logprobs": 0}
    every = api.complete(PROMPT, **request, n=6)
    means = [sum(logprobs) / len(logprobs) for c in every["choices"] if (logprobs := c["logprobs"]["token_logprobs"])]
    order = sorted(range(6), key=lambda at: -means[at])
    best = api.complete(PROMPT, **request | {"logprobs": None}, n=2, best_of=6)
    assert [choice["text"] for choice in best["choices"]] == [every["choices"][at]["text"] for at in order[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] > 24


def test_the_best_of_each_prompt_is_its_own(api: Api) -> None:
    prompts = ["The cat", "A dog", PROMPT]
    answer = api.complete(prompts, n=1, best_of=3, max_tokens=4, echo=True, stop="never there")
    texts = [choice["text"] for choice in answer["choices"]]
    assert [text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True)] == [True] * 3
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


# -- speculation -----------------------------------------------------------------------------------------------------


def test_origins_tell_the_drafts_tokens_from_the_targets(api: Api) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "return_token_origins": True, "return_metrics": True, "temperature": 0}
    answer = api.complete(PROMPT, **request)
    origins = answer["choices"][0]["token_origins"]
    assert len(origins) == 60
    assert origins[0] == "target"
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert origins.count("draft") == accepted > 0
    pieces = [event["choices"] for event in stream(api, PROMPT, **request)]
    assert [origin for choices in pieces for choice in choices for origin in choice["token_origins"]] == origins
    plain = api.complete(PROMPT, **request, speculation=OFF)["choices"][0]["token_origins"]
    assert set(plain) == {"target"}
    assert "token_origins" not in api.complete(PROMPT, max_tokens=2)["choices"][0]


@pytest.mark.parametrize("ending", [{"max_tokens": 60}, {"max_tokens": 200, "stop": [" the"]}, {"max_tokens": 1}])
def test_rounds_tell_which_of_them_gave_each_token(ending: dict[str, Any], api: Api) -> None:
    """In a stream and whole: they follow on one another, and their sums are those of the metrics."""
    request = GREEDY | ending | {"return_rounds": True, "return_token_origins": True, "return_metrics": True}
    answer = api.complete(PROMPT, **request)
    choice, figures = answer["choices"][0], answer["metrics"]["speculative_decoding"]
    rounds = choice["rounds"]
    assert [round_["begin"] for round_ in rounds] == [1, *(r["begin"] + r["tokens"] for r in rounds)][: len(rounds)]
    assert sum(round_["tokens"] for round_ in rounds) == len(choice["token_ids"]) - 1
    for round_ in rounds:
        own = choice["token_origins"][round_["begin"] :][: round_["tokens"]]
        assert own == (["draft"] * round_["accepted"] + ["target"])[: round_["tokens"]]
    if "stop" not in ending:  # what was under way when a stop string came counts, and gave no token
        assert len(rounds) == figures["num_spec_steps"]
        assert sum(round_["drafted"] for round_ in rounds) == figures["num_draft_tokens"]
        assert sum(round_["accepted"] for round_ in rounds) == figures["num_accepted_draft_tokens"]
    pieces = [event["choices"] for event in stream(api, PROMPT, **request)]
    assert [round_ for choices in pieces for choice in choices for round_ in choice["rounds"]] == rounds
    plain = api.complete(PROMPT, **request, speculation=OFF)["choices"][0]["rounds"]
    assert {(round_["drafted"], round_["accepted"], round_["tokens"]) for round_ in plain} <= {(0, 0, 1)}
    assert "rounds" not in api.complete(PROMPT, max_tokens=2)["choices"][0]


@pytest.mark.parametrize(
    ("request_body", "rule"),
    [
        ({}, "block"),
        ({"seed": 1}, "invariant"),
        ({"seed": 1, "speculation": {"rule": "block"}}, "block"),
        ({"speculation": {"rule": "invariant"}}, "invariant"),
        ({"temperature": 0, "speculation": {"rule": "block"}}, "greedy"),
    ],
)
def test_the_rule_that_was_used_is_told(api: Api, request_body: dict[str, Any], rule: str) -> None:
    metrics = api.complete(PROMPT, max_tokens=8, return_metrics=True, **request_body)["metrics"]
    assert metrics["speculative_decoding"]["rule"] == rule


@pytest.mark.parametrize("rule", [thoroughly("rejection"), "block", thoroughly("invariant")])
def test_every_rule_repeats_a_seeds_text(api: Api, rule: str) -> None:
    request: dict[str, Any] = {"max_tokens": 40, "seed": 9, "temperature": 0.7, "speculation": {"rule": rule, "k": 3}}
    first = api.complete(PROMPT, **request)
    assert first["choices"][0]["text"] == api.text(PROMPT, **request)
    assert first["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


@pytest.mark.parametrize("k", [thoroughly(1), 3, thoroughly(8)])
def test_the_text_of_a_seed_is_one_with_and_without_speculation(api: Api, k: int) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "seed": 4, "n": 3, "temperature": 0.9, "return_token_ids": True}
    plain = api.complete(PROMPT, **request, speculation=OFF)["choices"]
    assert api.complete(PROMPT, **request, speculation={"k": k})["choices"] == plain


def test_the_rules_of_a_gateway_decide_what_a_request_gets() -> None:
    usual = GatewayConfig()
    assert [usual.rule_for(None, seeded) for seeded in (False, True)] == ["block", "invariant"]
    assert GatewayConfig(rule="block").rule_for(None, seeded=True) == "block"
    assert GatewayConfig(rule="block").rule_for("rejection", seeded=True) == "rejection"
    assert GatewayConfig(rules=("block",)).rule_for(None, seeded=True) == "block"
    assert GatewayConfig(rules="rejection,block").rule_for(None, seeded=True) == "rejection"
    assert GatewayConfig(rules=("rejection",)).rule_for(None, seeded=False) == "rejection"
    with pytest.raises(ValueError, match="block"):
        GatewayConfig(rules=("block",), rule="invariant")


# -- refusals --------------------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"n": 3, "best_of": 2}, "best_of", "2"),
    ({"best_of": 17}, "best_of", "16"),
    ({"best_of": 2, "stream": True}, "best_of", "stream"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "five"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias", "\u0665"),
    ({"logit_bias": {"512": 1}}, "logit_bias", "511"),
    ({"logit_bias": {"5": 100.5}}, "logit_bias", "100.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", "number"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "-2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"min_p": 1.5}, "min_p", "1.5"),
    ({"min_p": -0.1}, "min_p", "-0.1"),
    ({"min_tokens": 17}, "min_tokens", "16"),
    ({"min_tokens": -1}, "min_tokens", "-1"),
    ({"stop_token_ids": [512]}, "stop_token_ids", "512"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids", "65"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [512]}, "allowed_token_ids", "512"),
    ({"allowed_token_ids": [5] * 4097}, "allowed_token_ids", "4096"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    ({"suffix": "end"}, "suffix", "suffix"),
    ({"cache_salt": ""}, "cache_salt", "1"),
    ({"cache_salt": "a" * 257}, "cache_salt", "256"),
    ({"cache_salt": "\ud800"}, "cache_salt", "unicode"),
    ({"max_tokens": 0}, "max_tokens", "echo"),
    ({"speculation": {"rule": "psychic"}}, "speculation.rule", "psychic"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "required"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "guided_regex"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": "[]"}, "guided_json", "list"),
    ({"guided_json": 5}, "guided_json", "5"),
    ({"guided_json": ""}, "guided_json", "JSON"),
    ({"guided_json": nested(80)}, "guided_json", "64"),
    ({"guided_json": json.dumps(nested(80))}, "guided_json", "64"),
    ({"guided_json": nested(900)}, "guided_json", "64"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(80)}}}, "response_format", "64"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_regex": "\ud800"}, "guided_regex", "Unicode"),
    ({"guided_regex": "a" * 65537}, "guided_regex", "65537"),
    ({"guided_json": {"description": "a" * 65536}}, "guided_json", "65536"),
]


@pytest.mark.parametrize(("request_body", "param", "said"), BAD, ids=[json.dumps(body)[:50] for body, _, _ in BAD])
def test_bad_parameters_are_refused_by_name_and_with_what_was_wrong(
    api: Api, request_body: dict[str, Any], param: str, said: str
) -> None:
    body = json.dumps({"prompt": "x"} | request_body).encode()
    response = api.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_limits_are_no_refusals(api: Api) -> None:
    most_ids = {"logit_bias": {str(token): 0.5 for token in range(512)}, "stop_token_ids": [5] * 64}
    furthest = {"min_tokens": 1, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2}
    for limits in (most_ids, furthest):
        assert api.complete("x", max_tokens=1, **limits)["usage"]["completion_tokens"] == 1


# -- single tokens as text -------------------------------------------------------------------------------------------


def test_tokens_show_leading_spaces_special_names_and_raw_bytes(stories_dir: Path) -> None:
    codec = TextCodec((stories_dir / "tokenizer.json").read_bytes())
    tokens = codec.tokenizer.encode(PROMPT + "\u96ea").ids
    texts = [codec.token_text(token) for token in tokens]
    assert texts[0] == "<s>"
    assert "".join(texts[1:-3]) == " " + PROMPT
    assert texts[-3:] == ["bytes:\\xe9", "bytes:\\x9b", "bytes:\\xaa"]


def test_a_gateway_that_was_told_its_rules_uses_no_other(services: Services, tmp_path: Path) -> None:
    command = ["-m", "gateway", "--verifier", services.verifier.address, "--port", "0", "--rules", "block,rejection"]
    gateway = start(command, tmp_path)
    try:
        api = Api(f"http://{gateway.address}")
        assert api.http.get("/v1/models").json()["data"][0]["rules"] == ["greedy", "block", "rejection"]
        error = api.post(prompt=PROMPT, speculation={"rule": "invariant"}).json()["error"]
        assert error["param"] == "speculation.rule"
        assert "block, rejection" in error["message"]
        metrics = api.complete(PROMPT, max_tokens=2, seed=1, return_metrics=True)["metrics"]
        assert metrics["speculative_decoding"]["rule"] == "block"
    finally:
        gateway.stop()
