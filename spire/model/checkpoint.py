"""Checkpoints in Hugging Face layout: `config.json`, safetensors (sharded or not), `tokenizer.json`. No pickle.

What it does not know: quantised weights and architectures other than Llama's are refused by name.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from spire.errors import CheckpointError
from spire.files import write_whole
from spire.model.config import ModelConfig, load_draft_config, load_model_config
from spire.model.draft import Draft
from spire.model.target import Target

_SAMPLED_ELEMENTS = 1024
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_target(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Target, str]:
    """The target in `directory`, in inference mode, and its fingerprint. Raises CheckpointError naming the file."""
    config = load_model_config(directory)
    tensors = {_without_prefix(name): tensor for name, tensor in load_tensors(directory).items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors.get("embed_tokens.weight", torch.empty(0))
    target = Target(config)
    fill(target, tensors, directory)
    return target.to(dtype).eval().requires_grad_(False), fingerprint(config, tensors)


def load_draft(directory: Path, dtype: torch.dtype = torch.float32) -> Draft:
    """The draft in `directory`, in inference mode. Raises CheckpointError naming the file."""
    draft = Draft(load_model_config(directory), load_draft_config(directory))
    tensors = {_without_prefix(name): tensor for name, tensor in load_tensors(directory).items()}
    if draft.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors.get("embed_tokens.weight", torch.empty(0))
    fill(draft, tensors, directory)
    return draft.to(dtype).eval().requires_grad_(False)


def save_draft(directory: Path, draft: Draft, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft: a directory like a target's whose config carries a `spire_draft` section."""
    config = draft.config.to_hugging_face() | {
        "dtype": str(dtype).removeprefix("torch."),
        "spire_draft": draft.draft.model_dump(mode="json"),
    }
    save_directory(directory, config, _stored_names(draft, draft.config), dtype)


def save_target(directory: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write `config.json` and `model.safetensors` so that this loader and `transformers` both open them."""
    config = target.config.to_hugging_face() | {"dtype": str(dtype).removeprefix("torch.")}
    save_directory(directory, config, _stored_names(target, target.config), dtype)


def _stored_names(module: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    return {
        name if name.startswith("lm_head.") else f"model.{name}": tensor
        for name, tensor in module.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }


def save_directory(directory: Path, config: dict[str, object], tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a checkpoint; each file appears whole or not at all."""
    ready = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}

    def write_weights(unfinished: Path) -> None:
        save_file(ready, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)  # safetensors leaves it readable to its owner alone

    write_whole(directory / "model.safetensors", write_weights)
    write_whole(
        directory / "config.json", lambda unfinished: unfinished.write_text(json.dumps(config, indent=2) + "\n")
    )


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as stored. Raises CheckpointError for a missing or truncated file."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(directory):
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: {_instead(file.parent)}")
        try:
            with safe_open(file, framework="pt") as shard:
                tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read ({error}): truncated or not a safetensors file") from error
    return tensors


def _instead(directory: Path) -> str:
    """What a directory without safetensors lacks."""
    pickles = sorted(file.name for file in directory.glob("*") if file.suffix in _PICKLES)
    if not pickles:
        return "the checkpoint is incomplete"
    return (
        f"{pickles[0]} is not opened, because a pickle can run any code. Save the model as safetensors, for example "
        "with save_pretrained of transformers, where you trust it"
    )


def fill(module: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
    """Copy `tensors` into `module`. Raises CheckpointError for missing, unknown or misshapen ones."""
    wanted = module.state_dict()
    known = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(wanted.keys() - known.keys()):
        raise CheckpointError(f"{directory}: {len(missing)} tensors are missing, the first is {missing[0]!r}")
    if unknown := sorted(known.keys() - wanted.keys()):
        raise CheckpointError(f"{directory}: {len(unknown)} tensors are not Llama's, the first is {unknown[0]!r}")
    for name, tensor in wanted.items():
        if tensor.shape != known[name].shape:
            raise CheckpointError(
                f"{directory}: {name} has shape {list(known[name].shape)}, config.json asks for {list(tensor.shape)}"
            )
    module.load_state_dict(known)


def fingerprint(config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    """Identity of a target: its shape and 1,024 elements of every tensor as stored, whatever the sharding."""
    digest = hashlib.sha256(config.model_dump_json(exclude={"torch_dtype"}).encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
        digest.update(f"{name}{list(tensors[name].shape)}".encode())
        digest.update(flat[::step].float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no safetensors index: {error!r}") from error
    return [directory / name for name in sorted(names)]


def _without_prefix(name: str) -> str:
    return name.removeprefix("model.")
