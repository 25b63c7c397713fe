"""A GGUF file's vocabulary: text becomes the ids that the file means, and ends, begins and is sampled as it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

from spire.checkpoints.gguf.convert import convert_gguf
from spire.checkpoints.tokenizer import load_tokenizer
from spire.checkpoints.weights import load_tensors
from spire.model.config import load_model_config
from tests.conftest import FIXTURES
from tests.gguf_files import sentencepiece_metadata
from tests.spire.checkpoints.conftest import SAMPLES, Writer


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_of_a_sentencepiece_vocabulary_are_the_originals(stories_gguf: Writer, tmp_path: Path, text: str) -> None:
    convert_gguf(stories_gguf(), tmp_path / "out")
    reference = SentencePieceProcessor(model_file=str(FIXTURES / "stories260K" / "tok512.model"))
    ids = reference.encode(text)
    ours = load_tokenizer(tmp_path / "out")
    assert ours.encode(text).ids == [reference.bos_id(), *ids]
    assert ours.encode(text, add_special_tokens=False).ids == ids
    assert ours.decode(ids) == reference.decode(ids)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == [reference.bos_id(), *ids]


@pytest.mark.parametrize(("starts", "ends"), [(True, True), (False, True), (False, False)])
def test_start_and_end_tokens_are_added_where_the_file_says_so(
    stories_gguf: Writer, tmp_path: Path, starts: bool, ends: bool
) -> None:
    added = {"tokenizer.ggml.add_bos_token": starts, "tokenizer.ggml.add_eos_token": ends}
    convert_gguf(stories_gguf(added), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    plain = tokenizer.encode("Once upon", add_special_tokens=False).ids
    assert tokenizer.encode("Once upon").ids == [1] * starts + plain + [2] * ends
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")("Once upon")["input_ids"] == [1] * starts + plain + [2] * ends
    )
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (described["add_bos_token"], described["add_eos_token"]) == (starts, ends)


def test_no_space_goes_in_front_where_the_file_says_so(stories_gguf: Writer, tmp_path: Path) -> None:
    as_it_is = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.remove_extra_whitespaces": False}
    convert_gguf(stories_gguf(as_it_is), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert not tokenizer.encode("Once").tokens[1].startswith("▁")
    assert tokenizer.decode(tokenizer.encode(" Once").ids) == " Once"


def test_every_end_of_a_turn_ends_a_text(stories_gguf: Writer, tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    convert_gguf(stories_gguf(ends), tmp_path / "out")
    assert load_model_config(tmp_path / "out").eos_token_ids == (2, 7)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 7]}


def test_chat_templates_and_sampling_are_carried_over(stories_gguf: Writer, tmp_path: Path) -> None:
    described = {
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
    }
    convert_gguf(stories_gguf(described), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 40,
    }


def test_tokens_that_only_fill_the_vocabulary_up_have_no_text(
    stories_dir: Path, stories_gguf: Writer, tmp_path: Path
) -> None:
    vocabulary = sentencepiece_metadata()
    padded = {
        "tokenizer.ggml.tokens": [*vocabulary["tokenizer.ggml.tokens"], "[PAD512]", "[PAD513]"],
        "tokenizer.ggml.scores": [*vocabulary["tokenizer.ggml.scores"], -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [*vocabulary["tokenizer.ggml.token_type"], 5, 5],
    }
    embedding = load_tensors(stories_dir)["model.embed_tokens.weight"].numpy()
    rows = {"token_embd.weight": np.concatenate([embedding, embedding[:2]])}
    convert_gguf(stories_gguf(padded, rows), tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert load_model_config(tmp_path / "out").vocab_size == 514
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.decode([512, 513]) == ""
