"""lm_eval, unmodified, scores and generates through `local-completions`: token-id prompts, echo, logprobs, seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.clients.conftest import run_tool

DOCUMENTS = [
    ("Once upon a time, there was a little", " girl named Lily."),
    ("The dog was very", " happy."),
    ("Tom went to the", " park with his mom."),
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
target_delimiter: ""
output_type: {kind}
"""
SCORED = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
WRITTEN = """generation_kwargs: {until: ["."], max_gen_toks: 24, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def samples(url: str, stories_chat_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What lm_eval got for each document, by task."""
    directory = tmp_path_factory.mktemp("lm_eval")
    data = directory / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": text, "target": target}) + "\n" for text, target in DOCUMENTS))
    for name, kind, rest in (("scored", "loglikelihood", SCORED), ("written", "generate_until", WRITTEN)):
        (directory / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind) + rest)
    served = f"model={stories_chat_dir.name},base_url={url}/v1/completions"
    arguments = f"{served},tokenizer={stories_chat_dir},tokenizer_backend=huggingface,num_concurrent=2"
    tasks = ["--include_path", str(directory), "--tasks", "scored,written"]
    out = ["--output_path", str(directory / "out"), "--log_samples", "--batch_size", "2"]
    run_tool(["lm_eval", "--model", "local-completions", "--model_args", arguments, *tasks, *out], directory)
    return {name: _sorted_samples(directory / "out", name) for name in ("scored", "written")}


def _sorted_samples(out: Path, task: str) -> list[Any]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line["filtered_resps"][0] for line in sorted(lines, key=lambda line: line["doc_id"])]


def test_its_loglikelihoods_are_those_of_the_target_s_own_forward(
    samples: dict[str, list[Any]], stories_chat_dir: Path
) -> None:
    # lm_eval puts no start token in front unless it is told to.
    tokenizer = Tokenizer.from_file(str(stories_chat_dir / "tokenizer.json"))
    for (text, target), (told, greedy) in zip(DOCUMENTS, samples["scored"], strict=True):
        before, whole = (tokenizer.encode(string, add_special_tokens=False).ids for string in (text, text + target))
        assert whole[: len(before)] == before
        logprobs, best = _scored(stories_chat_dir, whole, len(before))
        assert math.isclose(float(told), logprobs, abs_tol=2e-3)
        assert (str(greedy) == "True") == best


def _scored(model: Path, tokens: list[int], begin: int) -> tuple[float, bool]:
    """The log probability of the tokens from `begin`, and whether each is the most probable one."""
    import torch

    from spire.checkpoints.weights import load_target
    from spire.model.target import WholeSequence

    target, _ = load_target(model)
    tokens_1T = torch.tensor([tokens])
    logits_TV = target.unembed(target(tokens_1T, WholeSequence(tokens_1T)).hidden_BTD)[0].float()
    logprobs_TV = logits_TV.log_softmax(-1)[begin - 1 : -1]
    wanted_T = tokens_1T[0, begin:]
    chosen_T = logprobs_TV.gather(1, wanted_T[:, None])
    return float(chosen_T.sum()), bool((logprobs_TV.argmax(-1) == wanted_T).all())


def test_what_it_has_written_ends_before_its_stop(samples: dict[str, list[Any]]) -> None:
    assert all(text and "." not in text for text in samples["written"])
