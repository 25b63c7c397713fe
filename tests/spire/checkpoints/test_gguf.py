"""`spire convert gguf`: weights and shape are what the file holds, and what cannot be served is named."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from spire.checkpoints.gguf import weights
from spire.checkpoints.gguf.convert import convert_gguf
from spire.checkpoints.weights import load_target, load_tensors
from spire.cli import app
from spire.errors import CheckpointError
from spire.model.config import ModelConfig, RopeConfig, load_model_config
from spire.model.layers import Rope
from spire.model.target import Target
from tests.gguf_files import (
    as_stored,
    gguf_name,
    gguf_tensors,
    sentencepiece_metadata,
    shape_metadata,
    write_gguf,
)
from tests.spire.checkpoints.conftest import Changes, Writer

KINDS = [GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_1")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_weight_is_exactly_what_the_file_holds(
    stories_dir: Path, stories_gguf: Writer, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    convert_gguf(stories_gguf(kind=kind), tmp_path / "out", torch.float32)
    found = load_tensors(tmp_path / "out")
    written = load_tensors(stories_dir)
    assert found.keys() == written.keys()
    for name, values in written.items():
        assert torch.equal(found[name], torch.from_numpy(as_stored(values.numpy(), kind)).reshape(values.shape)), name


def test_weights_are_bfloat16_unless_another_type_is_asked_for(
    stories_dir: Path, stories_gguf: Writer, tmp_path: Path
) -> None:
    convert_gguf(stories_gguf(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    found = load_tensors(tmp_path / "out")
    assert all(torch.equal(found[name], values.bfloat16()) for name, values in load_tensors(stories_dir).items())


def test_the_shape_is_the_original_one_and_transformers_opens_it(
    stories_dir: Path, stories_gguf: Writer, tmp_path: Path
) -> None:
    convert_gguf(stories_gguf(), tmp_path / "out", torch.float32)
    ours, original = load_model_config(tmp_path / "out"), load_model_config(stories_dir)
    assert ours.rms_norm_eps == np.float32(original.rms_norm_eps)
    same = {"rms_norm_eps": original.rms_norm_eps, "eos_token_ids": original.eos_token_ids}
    assert ours.model_copy(update=same) == original
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    written = load_tensors(stories_dir)
    assert all(torch.equal(values, written[name]) for name, values in reference.state_dict().items() if name in written)


def test_large_models_become_shards_that_both_loaders_open(
    stories_dir: Path, stories_gguf: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SHARD", 200_000)
    monkeypatch.setattr(weights, "_AT_ONCE", 1000)
    convert_gguf(stories_gguf(), tmp_path / "out", torch.float32)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 210_000 for shard in shards)
    found, written = load_tensors(tmp_path / "out"), load_tensors(stories_dir)
    assert all(torch.equal(found[name], values) for name, values in written.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_output_of_its_own_and_biases_are_read(stories_dir: Path, stories_gguf: Writer, tmp_path: Path) -> None:
    """llama.cpp keeps biases for some projections of a layer; Hugging Face's layout for all: the others are zero."""
    config = load_model_config(stories_dir)
    generator = torch.Generator().manual_seed(0)
    more = {"lm_head.weight": torch.randn(config.vocab_size, config.hidden_size, generator=generator)}
    for layer in range(config.num_hidden_layers):
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            more[name] = torch.randn(heads * config.head_dim, generator=generator)
    convert_gguf(stories_gguf(tensors_too=gguf_tensors(more, config)), tmp_path / "out", torch.float32)
    read = load_model_config(tmp_path / "out")
    assert (read.tie_word_embeddings, read.attention_bias, read.mlp_bias) == (False, True, False)
    found = load_tensors(tmp_path / "out")
    assert all(torch.equal(found[name], values) for name, values in more.items())
    assert not found["model.layers.0.self_attn.o_proj.bias"].any()
    load_target(tmp_path / "out")


def test_a_sliding_window_is_served_as_a_mistral_s(stories_dir: Path, stories_gguf: Writer, tmp_path: Path) -> None:
    convert_gguf(stories_gguf({"llama.attention.sliding_window": 100}), tmp_path / "out", torch.float32)
    config = load_model_config(tmp_path / "out")
    assert (config.model_type, config.sliding_window, config.longest) == ("mistral", 100, 100)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (reference.config.model_type, reference.config.sliding_window) == ("mistral", 100)
    written = load_tensors(stories_dir)
    assert all(torch.equal(values, written[name]) for name, values in reference.state_dict().items() if name in written)


def test_a_window_of_all_positions_is_none(stories_gguf: Writer, tmp_path: Path) -> None:
    for number, window in enumerate((0, 512, 4096)):
        out = tmp_path / f"out{number}"
        convert_gguf(stories_gguf({"llama.attention.sliding_window": window}), out, torch.float32)
        config = load_model_config(out)
        assert (config.model_type, config.sliding_window, config.longest) == ("llama", None, 512)


def test_a_sliding_window_with_biases_is_refused(stories_dir: Path, stories_gguf: Writer, tmp_path: Path) -> None:
    config = load_model_config(stories_dir)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(config.num_attention_heads * config.head_dim)}
    file = stories_gguf({"llama.attention.sliding_window": 100}, gguf_tensors(bias, config))
    refused(file, tmp_path / "out", "attention sees 100 of 512 positions: with biases, sliding windows are not served")


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 4.0}, {"factor": 4.0}])
def test_linear_stretching_is_read(stories_gguf: Writer, tmp_path: Path, scaling: Changes) -> None:
    convert_gguf(stories_gguf({f"llama.rope.scaling.{key}": value for key, value in scaling.items()}), tmp_path / "out")
    assert load_model_config(tmp_path / "out").rope == RopeConfig(rope_type="linear", rope_theta=10000.0, factor=4.0)


def tiny(head_dim: int, rope: RopeConfig) -> Target:
    torch.manual_seed(0)
    return Target(
        ModelConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            rope=rope,
        )
    )


def llama3_factors(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """As llama.cpp's converter computes them from Hugging Face's parameters."""
    low = rope.original_max_position_embeddings / rope.low_freq_factor
    high = rope.original_max_position_embeddings / rope.high_freq_factor
    factors = []
    for pair in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.rope_theta ** (pair / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope.factor)
        else:
            smooth = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return np.array(factors, dtype=np.float32)


def convert_with_factors(directory: Path, target: Target, factors: np.ndarray) -> ModelConfig:
    described = shape_metadata(target.config) | {"llama.attention.key_length": target.config.head_dim}
    described |= {"llama.attention.value_length": target.config.head_dim, **sentencepiece_metadata()}
    stored = {
        ("" if name.startswith("lm_head") else "model.") + name: value for name, value in target.state_dict().items()
    }
    tensors = gguf_tensors(stored, target.config) | {"rope_freqs.weight": factors}
    return convert_gguf(write_gguf(directory / "tiny.gguf", described, tensors), directory / "out")


@settings(max_examples=30)
@given(
    head_dim=st.sampled_from([64, 80, 128]),
    factor=st.floats(2.0, 64.0).map(lambda value: float(np.float32(value))),
    original=st.integers(1024, 32768),
    theta=st.sampled_from([10000.0, 500000.0]),
)
def test_llama_3_stretching_is_found_again_from_its_factors(
    tmp_path_factory: pytest.TempPathFactory, head_dim: int, factor: float, original: int, theta: float
) -> None:
    rope = RopeConfig(rope_type="llama3", rope_theta=theta, factor=factor, original_max_position_embeddings=original)
    target = tiny(head_dim, rope)
    found = convert_with_factors(tmp_path_factory.mktemp("tiny"), target, llama3_factors(head_dim, rope))
    assert found.rope == rope
    assert torch.equal(Rope(head_dim, found.rope).inverse_frequencies, target.rope.inverse_frequencies)


def test_factors_of_another_stretching_are_refused(tmp_path: Path) -> None:
    rope = RopeConfig(rope_type="llama3", rope_theta=10000.0, factor=8.0)
    factors = llama3_factors(64, rope)
    for wrong in (factors * np.float32(1.001), np.full(32, 8.0), np.ones(32), factors[:-1], np.linspace(1, 8, 32)):
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's stretching"):
            convert_with_factors(tmp_path, tiny(64, rope), wrong.astype(np.float32))


REFUSED: dict[str, tuple[Changes, str]] = {
    "architecture": (
        {"general.architecture": "qwen2"},
        r"the architecture is 'qwen2'; only 'llama' is converted: take",
    ),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter'"),
    "part": ({"split.count": 3}, "part of a model in 3 files"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8; only 0"),
    "unknown key": ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0, which is not understood"),
    "partial rotation": ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is 4; only 8"),
    "values": ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4; only 8"),
    "layers": ({"llama.block_count": 10**9}, "llama.block_count is 1000000000, and the file holds 5 layers"),
    "uneven layers": ({"llama.attention.head_count_kv": [4, 4, 2, 4, 4]}, "head_count_kv differs from layer to layer"),
    "no context": ({"llama.context_length": None}, "llama.context_length is missing"),
    "zero heads": ({"llama.attention.head_count": 0, "llama.rope.dimension_count": None}, "num_attention_heads is 0"),
    "text for a number": ({"llama.embedding_length": "64"}, "llama.embedding_length is '64', not a whole number"),
    "negative epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        "rms_norm_eps is -1.0: Input",
    ),
    "infinite theta": ({"llama.rope.freq_base": math.inf}, "rope_theta is inf"),
    "wrong width": ({"llama.feed_forward_length": 128}, "metadata asks for"),
    "unigram": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; only 'gpt2' and 'llama'"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "end token": ({"tokenizer.ggml.eos_token_id": 512}, "eos_token_id is 512, and there are 512 tokens"),
    "scores": ({"tokenizer.ggml.scores": [0.0] * 512}, "the order in which pieces are merged is lost"),
    "types": ({"tokenizer.ggml.token_type": [1] * 5}, "there are 512 tokens and 5 token types"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_served_is_refused_by_name(
    stories_gguf: Writer, tmp_path: Path, changes: Changes, message: str
) -> None:
    refused(stories_gguf(changes), tmp_path / "out", message)


def test_tensors_that_are_missing_unknown_or_misshapen_are_named(stories_gguf: Writer, tmp_path: Path) -> None:
    query = gguf_name("model.layers.2.self_attn.q_proj.weight")
    for changes, message in (
        ({query: None}, f"tensor {query} is missing"),
        ({query: np.zeros((8, 8), np.float32)}, rf"tensor {query} has shape \[8, 8\]"),
        ({"blk.2.ffn_gate_inp.weight": np.zeros((8, 8), np.float32)}, "blk.2.ffn_gate_inp.weight"),
        ({"token_embd.weight": None}, "token_embd.weight is missing"),
        ({"token_embd.weight": np.zeros((500, 64), np.float32)}, "there are 512 tokens, and embeddings for 500"),
    ):
        refused(stories_gguf(tensors_too=changes), tmp_path / "out", message)


def test_a_file_without_weights_is_refused(stories_dir: Path, tmp_path: Path) -> None:
    described = shape_metadata(load_model_config(stories_dir)) | sentencepiece_metadata()
    refused(write_gguf(tmp_path / "vocabulary.gguf", described, {}), tmp_path / "out", "no weights")


def test_a_truncated_file_is_refused_wherever_it_ends(stories_gguf: Writer, tmp_path: Path) -> None:
    whole = stories_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for kept in [3, 4, 8, 23, 24, 100, *range(1000, len(whole), len(whole) // 25), len(whole) - 1]:
        cut.write_bytes(whole[:kept])
        refused(cut, tmp_path / "out", r"cut\.gguf is no")


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    pointer = tmp_path / "pointer.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 98362432\n")
    refused(pointer, tmp_path / "out", "Git LFS pointer")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    refused(empty, tmp_path / "out", "it is empty")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" * 10)
    refused(other, tmp_path / "out", "no GGUF file")
    refused(tmp_path / "absent.gguf", tmp_path / "out", r"absent\.gguf is no file")
    refused(tmp_path, tmp_path / "out", "is no file")
    big = tmp_path / "big.gguf"
    writer = GGUFWriter(big, "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(big, tmp_path / "out", "big-endian")


def test_what_is_to_be_installed_is_named_where_the_library_is_missing(
    stories_gguf: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = stories_gguf()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'spire-serve\[gguf\]'"):
        convert_gguf(file, tmp_path / "out")


def test_nothing_is_written_over(stories_gguf: Writer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not an empty directory"):
        convert_gguf(stories_gguf(), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["notes.txt"]


def test_the_command_says_what_it_made_and_how_to_serve_it(stories_gguf: Writer, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["convert", "gguf", str(stories_gguf()), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert "5 layers of width 64, vocabulary 512, context 512" in done.output
    assert f"spire up --model {tmp_path / 'out'}" in done.output
    load_target(tmp_path / "out")


def test_a_gguf_file_given_as_a_model_names_the_conversion_command(stories_gguf: Writer) -> None:
    file = stories_gguf()
    for model in (file, file.parent):
        with pytest.raises(CheckpointError, match=f"once it is converted: spire convert gguf {file} --out DIR"):
            load_model_config(model)


def refused(file: Path, out: Path, message: str) -> None:
    """One line that names the file and what is wrong with it, and nothing written."""
    with pytest.raises(CheckpointError, match=message) as raised:
        convert_gguf(file, out)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)
    assert not out.exists()
