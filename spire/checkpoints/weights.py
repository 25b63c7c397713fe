"""Load and save weights in Hugging Face layout: `config.json` and safetensors (sharded or not), never pickle.

Does not know: quantised weights and families that `spire.model.families` does not list, which are refused with an error
that names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spire.checkpoints.random_weights import draw_weights, has_random_weights
from spire.errors import CheckpointError
from spire.files import write_json, write_whole
from spire.model.config import ModelConfig, load_draft_config, load_model_config
from spire.model.directory import read_object, refuse_stand_in
from spire.model.draft import Draft
from spire.model.target import Target

Module = TypeVar("Module", Target, Draft)

_SAMPLED_ELEMENTS = 1024
# Tensors of other dtypes are quantised.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_target(
    directory: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Target, str]:
    """Load a target for inference and return it with its fingerprint. Raises CheckpointError naming the file."""
    config = load_model_config(directory)
    target, tensors = _loaded(directory, config, lambda: Target(config), dtype, device)
    return target, fingerprint(config, tensors)


def load_draft(directory: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Draft:
    """Load a draft for inference. Raises CheckpointError naming the file."""
    config, kind = load_model_config(directory), load_draft_config(directory)
    if (taps := len(kind.tapped_layers)) not in (0, config.num_hidden_layers):
        raise CheckpointError(
            f"{directory / 'config.json'}: spire_draft taps {taps} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}: each layer of a draft remembers one, or none does"
        )
    return _loaded(directory, config, lambda: Draft(config, kind), dtype, device)[0]


def _loaded(
    directory: Path, config: ModelConfig, build: Callable[[], Module], dtype: torch.dtype, device: torch.device | str
) -> tuple[Module, dict[str, Tensor]]:
    """Load a module for inference and return it with its stored tensors by name, none for random weights."""
    if has_random_weights(directory):
        return draw_weights(build, dtype, device), {}
    # All tensors by the parameter names of our modules, including `lm_head.weight` of a tied checkpoint.
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_tensors(directory).items()}
    if config.tie_word_embeddings and (embedding := tensors.get("embed_tokens.weight")) is not None:
        own = tensors.setdefault("lm_head.weight", embedding)
        if own is not embedding and not torch.equal(own, embedding):
            raise CheckpointError(
                f"{directory}: config.json says tie_word_embeddings, and lm_head.weight differs from "
                "embed_tokens.weight: set tie_word_embeddings to false if the output matrix is its own"
            )
    with torch.device("meta"):
        module = build()
    wanted = module.state_dict()
    _check(wanted, tensors, directory, config.model_type)
    # The loaded tensors become the parameters, without a copy.
    module.load_state_dict({name: tensors[name] for name in wanted}, assign=True)
    if config.tie_word_embeddings:
        module.lm_head.weight = module.embed_tokens.weight
    return module.to(dtype).to(device).eval().requires_grad_(False), tensors


def save_draft(directory: Path, draft: Draft, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft's checkpoint, which is like a target's plus a `spire_draft` section in `config.json`."""
    _save(directory, draft, dtype, {"spire_draft": draft.draft.model_dump(mode="json")})


def save_target(directory: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a target's `config.json` and `model.safetensors`, which `load_target` and transformers can both load."""
    _save(directory, target, dtype, {})


def _save(directory: Path, module: Target | Draft, dtype: torch.dtype, further: dict[str, Any]) -> None:
    """Write `config.json`, including the `further` keys, and `model.safetensors`, each atomically."""
    tied = {"lm_head.weight"} if module.config.tie_word_embeddings else set()
    tensors = {
        stored_name(name): tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in tied
    }
    write_tensors(directory / "model.safetensors", tensors)
    config = module.config.to_hugging_face() | {"dtype": str(dtype).removeprefix("torch.")} | further
    write_json(directory / "config.json", config)


def stored_name(name: str) -> str:
    """Return Hugging Face's name for a parameter of our modules."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write one safetensors file atomically."""

    def write(unfinished: Path) -> None:
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.chmod(0o644)  # safetensors makes the file readable by its owner only

    write_whole(file, write)


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Load all tensors of a checkpoint by stored name. Raises CheckpointError for a missing or truncated file."""
    index, files = directory / "model.safetensors.index.json", [directory / "model.safetensors"]
    if index.is_file():
        places = read_object(index).get("weight_map")
        names = set(places.values()) if isinstance(places, dict) else set()
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError(f"{index} is no safetensors index: its weight_map names no files of this directory")
        files = [directory / name for name in sorted(names)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist: {_instead(file.parent)}")
        refuse_stand_in(file)
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} cannot be read ({error}): truncated or not a safetensors file") from error
    return tensors


def _instead(directory: Path) -> str:
    """Return the text that explains a missing safetensors file, with advice if there are pickles."""
    pickles = sorted(file.name for file in directory.glob("*") if file.suffix in _PICKLES)
    if not pickles:
        return "the checkpoint is incomplete"
    return (
        f"{pickles[0]} is not opened, because a pickle can run any code. Save the model as safetensors, for example "
        "with save_pretrained of transformers, where you trust it"
    )


def _check(wanted: dict[str, Tensor], tensors: dict[str, Tensor], directory: Path, model_type: str) -> None:
    """Raise CheckpointError for missing, unknown, misshapen or quantised tensors."""
    known = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    advice = f"model_type is {model_type!r}; take the config.json that belongs to these weights"
    if missing := sorted(wanted.keys() - known.keys()):
        raise CheckpointError(f"{directory}: {len(missing)} tensors are missing, the first is {missing[0]!r}: {advice}")
    if unknown := sorted(known.keys() - wanted.keys()):
        raise CheckpointError(
            f"{directory}: {len(unknown)} tensors are not this model's, the first is {unknown[0]!r}: {advice}"
        )
    for name, parameter in wanted.items():
        shape, asked, dtype = known[name].shape, parameter.shape, known[name].dtype
        if shape != asked:
            raise CheckpointError(f"{directory}: {name} has shape {list(shape)}, config.json asks for {list(asked)}")
        if dtype not in _FLOATS:
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{directory}: {name} is {kind}: quantised weights are not served")


def fingerprint(config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    """Return a hash, independent of sharding, of a target's config and about 1,024 elements of each stored tensor."""
    digest = hashlib.sha256(config.identity.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
        digest.update(f"{name}{list(tensors[name].shape)}".encode())
        digest.update(flat[::step].float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
