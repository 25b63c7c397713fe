"""What the files of a checkpoint say reaches clients: end tokens, suggested sampling, ids that have no text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_target, save_target
from spire.model.target import Target
from tests.gateway.conftest import Api
from tests.services import running
from tests.spire.checkpoints.test_convert import greedy

PROMPT = "Once upon a time"
VOCAB, PADDED = 512, 640
SUGGESTED = {"do_sample": True, "temperature": 0.6, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def model(stories_chat_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with more ids than its tokenizer has. It says some of them, in the places of two of its tokens."""
    out = tmp_path_factory.mktemp("models") / "padded"
    shutil.copytree(stories_chat_dir, out)
    narrow, _ = load_target(stories_chat_dir)
    wide = Target(narrow.config.model_copy(update={"vocab_size": PADDED, "tie_word_embeddings": False}))
    weights = narrow.state_dict()
    replaced = load_tokenizer(out).encode("was little", add_special_tokens=False).ids[:2]
    for name in ("embed_tokens.weight", "lm_head.weight"):
        padding = 1.05 * weights[name][replaced].repeat((PADDED - VOCAB) // 2, 1)
        weights[name] = torch.cat((weights[name], padding if name.startswith("lm_head") else padding / 1.05))
    wide.load_state_dict(weights)
    save_target(out, wide, torch.float32)
    generation = SUGGESTED | {"min_p": -1, "eos_token_id": [2, end_of_sentence(out)]}
    (out / "generation_config.json").write_text(json.dumps(generation))
    return out


def end_of_sentence(model: Path) -> int:
    token: int = load_tokenizer(model).token_to_id(".")
    return token


@pytest.fixture(scope="module")
def api(model: Path) -> Iterator[Api]:
    with running(model) as system:
        yield Api(system.url)


def said_by(model: Path, prompt: list[int], count: int) -> list[int]:
    """What the target itself says, token by token."""
    return greedy(load_target(model)[0], prompt, count)[len(prompt) :]


def test_ids_without_text_stay_what_the_target_says_and_have_no_text(api: Api, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(PROMPT).ids
    says = said_by(model, prompt, 40)
    assert any(token >= VOCAB for token in says)
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (choice,) = api.complete(PROMPT, **asked, logprobs=2, echo=True)["choices"]
    assert choice["token_ids"] == says
    assert choice["text"] == PROMPT + tokenizer.decode([*prompt, *says])[len(tokenizer.decode(prompt)) :]
    shown = choice["logprobs"]["tokens"][len(prompt) :]
    assert [text == "" for text in shown] == [token >= VOCAB for token in says]


def test_a_stream_with_ids_without_text_says_the_same(api: Api, model: Path) -> None:
    asked = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = api.text(PROMPT, **asked)
    with api.http.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True, **asked}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == text


def test_ids_without_text_are_taken_as_a_prompt_and_detokenized_to_nothing(api: Api, model: Path) -> None:
    prompt = load_tokenizer(model).encode(PROMPT).ids
    said = api.http.post("/detokenize", json={"tokens": [*prompt[1:], 600, 639]})
    assert said.json() == {"prompt": PROMPT}
    answer = api.complete([*prompt, 600], max_tokens=3, temperature=0, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == said_by(model, [*prompt, 600], 3)


def test_no_grammar_allows_an_id_without_text(api: Api) -> None:
    asked = {"max_tokens": 30, "temperature": 1.5, "seed": 3, "structured_outputs": {"regex": "[a-z ]{20,25}"}}
    (choice,) = api.complete(PROMPT, **asked, return_token_ids=True)["choices"]
    assert choice["token_ids"]
    assert all(token < VOCAB for token in choice["token_ids"])


def test_a_text_ends_at_an_end_token_that_only_generation_config_names(api: Api, model: Path) -> None:
    asked = {"max_tokens": 100, "temperature": 0}
    (whole,) = api.complete(PROMPT, **asked, ignore_eos=True)["choices"]
    (choice,) = api.complete(PROMPT, **asked)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole["text"].split(".")[0]
    chat = {"messages": [{"role": "user", "content": f"{PROMPT}, there was a little girl."}], **asked}
    said = [
        api.http.post("/v1/chat/completions", json=chat | {"ignore_eos": ignored}).json() for ignored in (False, True)
    ]
    ended, endless = (answer["choices"][0]["message"]["content"] for answer in said)
    assert ended == endless.split(".")[0] != endless


def test_the_sampling_that_its_makers_suggest_is_told_and_not_applied(api: Api) -> None:
    (card,) = api.http.get("/v1/models").json()["data"]
    assert card["suggested_sampling"] == SUGGESTED
    plain = {"max_tokens": 20, "seed": 9, "ignore_eos": True}
    said = api.text(PROMPT, **plain, temperature=1, top_p=1, top_k=0, repetition_penalty=1)
    assert api.text(PROMPT, **plain) == said


def test_ids_without_text_and_dropped_suggestions_are_logged_at_startup(model: Path) -> None:
    with running(model) as system:
        lines = [json.loads(line) for line in system.verifier.log.read_text().splitlines() if line.startswith("{")]
    (left_out,) = [line for line in lines if line["event"] == "suggestions of generation_config.json are left out"]
    assert left_out["unusable"].startswith("min_p is -1: ")
    (told,) = [line for line in lines if line["event"] == "ids of the vocabulary without text"]
    assert (told["ids"], told["vocab_size"]) == (PADDED - VOCAB, PADDED)
