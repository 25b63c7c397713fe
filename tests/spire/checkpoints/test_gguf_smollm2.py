"""A real GGUF file, SmolLM2-135M-Instruct in Q4_1: the same weights, ids and text as transformers makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer

from spire.checkpoints.gguf.convert import convert_gguf
from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_tensors
from spire.model.config import load_model_config
from tests.gateway.conftest import Api
from tests.marks import thoroughly
from tests.services import running
from tests.spire.checkpoints.conftest import SAMPLES

# Of 135 M parameters, on whatever machine.
pytestmark = pytest.mark.timeout(1800)

TEXTS = [
    *SAMPLES,
    "Compute 12 + 345 = 357.\n\n\tThen 6*7?",
    "<|im_start|>user\nHi 2 you<|im_end|>\n",
    "日本語 e\u0301",
]
QUESTION = [{"role": "user", "content": "Why is the sky blue? Name 3 reasons."}]
TOKENS = 200


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """The model as transformers loads it from the file: dequantised, float32."""
    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_tokenizer(smollm2_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module", params=[torch.bfloat16, thoroughly(torch.float32)], ids=["bfloat16", "float32"])
def converted(request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "SmolLM2"
    convert_gguf(smollm2_gguf, out, request.param)
    return out


@pytest.mark.thorough
def test_weights_and_shape_are_those_that_transformers_reads(converted: Path, reference: Any) -> None:
    """Bit for bit, in float32; in bfloat16 rounded."""
    found = load_tensors(converted)
    theirs = {name: values for name, values in reference.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name].to(values.dtype)) for name, values in found.items())
    ours, config = load_model_config(converted), reference.config
    assert ours.tie_word_embeddings is config.tie_word_embeddings is True
    assert (ours.rms_norm_eps, ours.max_position_embeddings) == (config.rms_norm_eps, config.max_position_embeddings)
    assert ours.rope.rope_theta == config.rope_parameters["rope_theta"]
    assert (ours.bos_token_id, *ours.eos_token_ids) == (config.bos_token_id, config.eos_token_id)


@pytest.mark.thorough
def test_ids_are_those_of_transformers(converted: Path, reference_tokenizer: Any) -> None:
    ours = load_tokenizer(converted)
    again = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == reference_tokenizer(text)["input_ids"] == again(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text
    prompts = [
        tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
        for tokenizer in (again, reference_tokenizer)
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("  12", ["ĠĠ", "1", "2"]),
        ("1\n\n2", ["1", "ĊĊ", "2"]),
        (" ½", ["Ġ", "Â½"]),
    ],
)
def test_digits_stand_apart_from_white_space_as_the_file_says(converted: Path, text: str, tokens: list[str]) -> None:
    """`smollm` takes digits apart first; llama.cpp gives these ids. transformers passes that over, and its differ."""
    assert load_tokenizer(converted).encode(text).tokens == tokens


@pytest.mark.thorough
def test_200_greedy_tokens_of_a_chat_are_those_of_transformers(
    converted: Path, reference: Any, reference_tokenizer: Any
) -> None:
    """Served in float32 from the weights as they are stored, the model drafting for itself. They are transformers' own
    if each of them is what it finds likeliest after those before it: one forward instead of 200."""
    body = {"messages": QUESTION, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with running(converted, "magicdec") as system:
        answer = Api(system.url).http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == TOKENS
    prompt = reference_tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert choice["prompt_token_ids"] == prompt
    dtype = next(iter(load_tensors(converted).values())).dtype
    stored = {name: values.to(dtype).float() for name, values in reference.named_parameters()}
    with torch.inference_mode():
        logits = functional_call(reference, stored, torch.tensor([prompt + tokens])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens
    assert choice["message"]["content"] == reference_tokenizer.decode(tokens, skip_special_tokens=True)
