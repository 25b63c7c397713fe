"""Checkpoint directories: every spelling of `config.json` that exists, and a clear no to what cannot be served."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from spire.bench.synthetic import write_pair
from spire.checkpoints.weights import load_draft, load_target
from spire.cli.paths import BUNDLED
from spire.errors import CheckpointError
from spire.model.config import ModelConfig, load_draft_config, load_model_config
from spire.model.families import FAMILIES
from spire.perf.shapes import SEQAX_67M
from tests.spire.model.test_target import LLAMA3, reference_model
from verifier_service.config import VerifierConfig
from verifier_service.serve.server import load

SHAPE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def config_of(directory: Path, **values: Any) -> ModelConfig:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPE | values))
    return load_model_config(directory)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    reference_model().save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    new = config_of(tmp_path / "new", rope_parameters=LLAMA3)
    old = config_of(tmp_path / "old", rope_theta=10000.0, rope_scaling=scaling)
    assert new.rope == old.rope
    assert new.rope.rope_type == "llama3"
    assert new.rope.factor == 8.0


def test_the_oldest_spelling_of_the_rope_type_is_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=5000.0)
    assert (config.rope.rope_type, config.rope.factor, config.rope.rope_theta) == ("linear", 2.0, 5000.0)


def test_what_config_json_leaves_out_has_llamas_defaults(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_scaling=None)
    assert config.num_key_value_heads == 4
    assert config.head_dim == 12
    assert (config.rope.rope_type, config.rope.rope_theta) == ("default", 10000.0)


@pytest.mark.parametrize(("written", "read"), [(2, (2,)), ([2, 7, 9], (2, 7, 9)), (None, ())])
def test_one_several_or_no_end_tokens_are_read(written: object, read: tuple[int, ...], tmp_path: Path) -> None:
    assert config_of(tmp_path, eos_token_id=written).eos_token_ids == read


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type"),
        ({"model_type": "gemma"}, "'gemma'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(values: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named) as refusal:
        config_of(tmp_path, **values)
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_a_missing_directory_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent/config\.json does not exist"):
        load_model_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} does not exist"):
        load_target(checkpoint)


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_truncated_shard_is_named(kept: int, checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{shard.name} cannot be read"):
        load_target(checkpoint)


def test_a_broken_index_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text('{"metadata": {}}')
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        load_target(checkpoint)


def test_weights_that_do_not_fit_config_json_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 81}))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight has shape"):
        load_target(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(CheckpointError, match=r"tensors are missing, the first is 'layers\.3\."):
        load_target(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match=r"tensors are not this model's, the first is 'layers\.2\."):
        load_target(checkpoint)


def test_weights_of_another_family_are_told_by_their_tensors(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    for kind, count, first in (("qwen2", 9, "self_attn.k_proj.bias"), ("qwen3", 6, "self_attn.k_norm.weight")):
        other = {"model_type": kind, "architectures": list(FAMILIES[kind].architectures)}
        (checkpoint / "config.json").write_text(json.dumps(config | other))
        with pytest.raises(CheckpointError) as refused:
            load_target(checkpoint)
        missing = f"{count} tensors are missing, the first is 'layers.0.{first}': model_type is '{kind}'"
        assert missing in str(refused.value)
    reference_model("qwen2").save_pretrained(tmp_path / "qwen2")
    config = json.loads((tmp_path / "qwen2" / "config.json").read_text())
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "qwen2" / "config.json").write_text(json.dumps(config | llama))
    with pytest.raises(CheckpointError, match=r"9 tensors are not this model's, the first is .*k_proj\.bias'"):
        load_target(tmp_path / "qwen2")


def test_the_bundled_draft_still_knows_its_target() -> None:
    """A fingerprint must not change with the code: every draft names its target by one."""
    assert load_target(BUNDLED / "target")[1] == load_draft_config(BUNDLED / "draft").target_fingerprint


def test_a_target_is_no_draft(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="this directory is no draft"):
        load_draft_config(checkpoint)


# -- what stands in for a file -----------------------------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 269060552\n"


@pytest.mark.parametrize(
    ("content", "says"), [(POINTER, "Git LFS pointer"), ("<!DOCTYPE html>\n<html>", "web page"), ("", "is empty")]
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00002-of-00009.safetensors"])
def test_what_stands_in_for_a_file_is_told_from_it(name: str, content: str, says: str, checkpoint: Path) -> None:
    assert (checkpoint / name).is_file()
    (checkpoint / name).write_text(content)
    with pytest.raises(CheckpointError, match=says) as refused:
        load_target(checkpoint)
    assert str(checkpoint / name) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "index", [{"weight_map": None}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "../b"}}, {"model": None}]
)
def test_an_index_of_no_files_is_named(index: dict[str, Any], checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is no safetensors index"):
        load_target(checkpoint)


# In a process of its own: what earlier tests have taken hides what this one takes. Prints the KiB by which the peak of
# its memory grows, and the refusal.
LOADING = """
import sys
from pathlib import Path
from spire.errors import CheckpointError
from spire.checkpoints.weights import load_target

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

model, before, refusal = Path(sys.argv[1]), peak(), None
try:
    LOAD
except CheckpointError as error:
    refusal = error
print(peak() - before, refusal)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux tells the peak of one program")
def test_no_memory_is_taken_for_a_shape_that_the_weights_do_not_have(checkpoint: Path) -> None:
    """2 GB here, the whole machine elsewhere."""
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 1_000_000, "head_dim": 99_998}))
    program = [sys.executable, "-c", LOADING.replace("LOAD", "load_target(model)"), str(checkpoint)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    grown, _, refused = done.stdout.partition(" ")
    assert "has shape" in refused
    assert int(grown) < 500_000


def test_loading_does_not_import_torch_s_compiler(checkpoint: Path) -> None:
    """It takes each service seconds and 120 MB, and nobody uses it."""
    program = """
import sys
from pathlib import Path
from spire.checkpoints.weights import load_target

load_target(Path(sys.argv[1]))
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program, str(checkpoint)], timeout=120).returncode == 0


def test_quantised_weights_are_refused_by_name(checkpoint: Path) -> None:
    shard = min(checkpoint.glob("model-*.safetensors"))
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.int8)}, shard)
    with pytest.raises(CheckpointError, match=f"{name.removeprefix('model.')} is int8"):
        load_target(checkpoint)


def test_a_tied_model_with_an_output_matrix_of_its_own_is_refused(tmp_path: Path) -> None:
    model = reference_model()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings, and lm_head\.weight differs"):
        load_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert load_target(tmp_path)[0].config.tie_word_embeddings


def test_a_shape_without_weights_is_drawn_at_load_and_always_the_same(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path, replace(SEQAX_67M, layers=4, hidden_size=64, vocab_size=512), 128)
    assert not list(tmp_path.rglob("*.safetensors"))
    one, identity = load_target(target, torch.bfloat16)
    other, _ = load_target(target, torch.bfloat16)
    assert one.lm_head.weight.dtype == torch.bfloat16
    assert 0.01 < one.lm_head.weight.float().std() < 0.03
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert load_draft(draft).draft.target_fingerprint == identity


def test_a_shape_without_weights_is_served_to_measurements_alone(tmp_path: Path) -> None:
    target, _ = write_pair(tmp_path, replace(SEQAX_67M, layers=4, hidden_size=64, vocab_size=512), 128)
    with pytest.raises(CheckpointError, match="holds a shape and no weights"):
        load(VerifierConfig(model=target, device="cpu"))


def test_weights_are_read_without_a_second_copy_in_another_type(checkpoint: Path) -> None:
    """They were made in float32 first, and thrown away: twice the memory of a checkpoint in bfloat16."""
    made: list[torch.device] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.Tensor.uniform_ or function is torch.Tensor.normal_:
                made.append(args[0].device)
            return function(*args, **(kwargs or {}))

    with Watch():
        load_target(checkpoint)
    assert {device.type for device in made} <= {"meta"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_stands_in_for_a_draft_s_file_is_told_from_it(name: str, stories_draft_dir: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(stories_draft_dir, tmp_path / "draft")
    (draft / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer"):
        load_draft(draft)


def test_a_draft_that_taps_more_layers_than_it_has_is_refused(stories_draft_dir: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(stories_draft_dir, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    config["spire_draft"]["tapped_layers"] = [2, 3, 4]
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="taps 3 layers, and num_hidden_layers is 2"):
        load_draft(draft)
