"""Load and save weights in Hugging Face layout: `config.json` and safetensors (sharded or not), never pickle.

Does not know: quantised weights and families that `spire.model.families` does not list, which are refused with an error
that names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from spire.checkpoints.random_weights import draw_weights, has_random_weights
from spire.errors import CheckpointError
from spire.files import write_json, write_whole
from spire.model.config import DraftConfig, ModelConfig, load_draft_config, load_model_config, read_config
from spire.model.directory import read_object, refuse_stand_in
from spire.model.draft import Draft
from spire.model.target import Target

Module = TypeVar("Module", Target, Draft)

_SAMPLED_ELEMENTS = 1024
# Tensors of other dtypes are quantised.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# The file of a draft's stop head, and what the names of its tensors begin with among those of the draft.
STOP_HEAD, _STOP_HEAD = "stop_head.safetensors", "stop_head."
_EMBEDDING, _HEAD, _VOCABULARY = "embed_tokens.weight", "lm_head.weight", "vocabulary"


def load_target(
    directory: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Target, str]:
    """Load a target for inference and return it with its fingerprint. Raises CheckpointError naming the file."""
    config = load_model_config(directory)
    tensors = _stored(directory)
    target = _loaded(directory, config, lambda: Target(config), tensors, dtype, device)
    return target, fingerprint(config, tensors)


def load_draft(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    target: Path | None = None,
) -> Draft:
    """Load a draft for inference. `target`: the directory of its target, for a draft without embeddings of its own.

    Raises CheckpointError naming the file.
    """
    config, kind = load_model_config(directory), load_draft_config(directory)
    if (taps := len(kind.tapped_layers)) not in (0, config.num_hidden_layers):
        raise CheckpointError(
            f"{directory / 'config.json'}: spire_draft taps {taps} layers, and num_hidden_layers is "
            f"{config.num_hidden_layers}: each layer of a draft remembers one, or none does"
        )
    if (kind.vocabulary or 0) > config.vocab_size:
        raise CheckpointError(
            f"{directory / 'config.json'}: spire_draft proposes {kind.vocabulary} tokens of {config.vocab_size}"
        )
    tensors = _stored(directory)
    if (vocabulary_W := tensors.get(_VOCABULARY)) is not None:
        _check_vocabulary(directory, vocabulary_W, config.vocab_size)
    if kind.stop_head:
        with _readable(directory / STOP_HEAD):
            tensors |= {f"{_STOP_HEAD}{name}": tensor for name, tensor in load_file(directory / STOP_HEAD).items()}
    if kind.embeddings:
        tensors |= _shared_embeddings(directory, kind, vocabulary_W, target, dtype)
    return _loaded(directory, config, lambda: Draft(config, kind), tensors, dtype, device)


def _check_vocabulary(directory: Path, vocabulary_W: Tensor, vocab_size: int) -> None:
    below, beyond = (vocabulary_W.new_full((1,), end) for end in (-1, vocab_size))
    steps = vocabulary_W.diff(prepend=below, append=beyond)
    if vocabulary_W.dtype != torch.int64 or not bool((steps > 0).all()):
        raise CheckpointError(
            f"{directory}: {_VOCABULARY!r} does not list tokens below {vocab_size} in ascending order"
        )


def _shared_embeddings(
    directory: Path, kind: DraftConfig, vocabulary_W: Tensor | None, target: Path | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the embedding and unembedding of a draft that uses its target's, under the names of our modules."""
    assert kind.embeddings is not None
    if target is None:
        raise CheckpointError(
            f"{directory} has no embeddings of its own, because it uses its target's: give the target's directory, too "
            "(--target DIR)"
        )
    matrices = load_embeddings(target)
    if sampled_hash(matrices) != kind.embeddings.fingerprint:
        raise CheckpointError(
            f"{target} is not the target that {directory} was trained for: its embeddings are others. Serve the draft "
            "with its own target, or train one for this target with `spire train draft`"
        )
    head = matrices[_HEAD]
    return {
        _EMBEDDING: matrices[_EMBEDDING].to(dtype) * kind.embeddings.scale,
        _HEAD: head if vocabulary_W is None else head[vocabulary_W],
    }


def load_embeddings(directory: Path) -> dict[str, Tensor]:
    """Load only a target's embedding and unembedding, by the names of our modules; one tensor if they are tied."""
    stored = {name: stored_name(name) for name in (_EMBEDDING, _HEAD)}
    found = read_tensors(directory, set(stored.values()))
    embedding = found.get(stored[_EMBEDDING])
    if embedding is None:
        raise CheckpointError(f"{directory} has no tensor {stored[_EMBEDDING]!r}: it is no target in this layout")
    return {_EMBEDDING: embedding, _HEAD: found.get(stored[_HEAD], embedding)}


def embedding_rows(directory: Path, most_bytes: int) -> Iterator[tuple[bool, Tensor]]:
    """Yield a target's embedding and then, if stored apart, its unembedding (True), a few rows at a time.

    Raises the errors of `load_tensors`.
    """
    for name in (_EMBEDDING, _HEAD):
        for file in _files(directory):
            with _readable(file), safe_open(file, framework="pt") as stored:
                if stored_name(name) not in stored.keys():  # noqa: SIM118
                    continue
                matrix = stored.get_slice(stored_name(name))
                rows, width = matrix.get_shape()
                step = max(1, most_bytes // (4 * width))
                for first in range(0, rows, step):
                    yield name == _HEAD, matrix[first : first + step]


def save_embeddings(directory: Path, embedding: Tensor, unembedding: Tensor | None) -> str:
    """Write a target's embeddings, in a directory that `load_draft` takes for the target's; return their fingerprint.

    `unembedding`: None if it is the embedding.
    """
    head = embedding if unembedding is None else unembedding
    tensors = {_EMBEDDING: embedding} | ({} if unembedding is None else {_HEAD: unembedding})
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", {stored_name(name): tensor for name, tensor in tensors.items()})
    return sampled_hash({_EMBEDDING: embedding, _HEAD: head})


def _loaded(
    directory: Path,
    config: ModelConfig,
    build: Callable[[], Module],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Module:
    """Return a module for inference with the given tensors, or with random ones if the directory says so."""
    if has_random_weights(directory):
        return draw_weights(build, dtype, device)
    if config.tie_word_embeddings and (embedding := tensors.get(_EMBEDDING)) is not None:
        own = tensors.setdefault(_HEAD, embedding)
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
    return module.to(dtype).to(device).eval().requires_grad_(False)


def _stored(directory: Path) -> dict[str, Tensor]:
    """Load all tensors of a checkpoint by the names of our modules; none if its weights are random."""
    stored = {} if has_random_weights(directory) else load_tensors(directory)
    return {name.removeprefix("model."): tensor for name, tensor in stored.items()}


def save_draft(directory: Path, draft: Draft, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a draft's checkpoint, which is like a target's plus a `spire_draft` section in `config.json`.

    Embeddings that are the target's are left out. A stop head is written by `save_stop_head`.
    """
    section = draft.draft.model_dump(mode="json", exclude_none=True)
    of_head = {name for name in draft.state_dict() if name.startswith(_STOP_HEAD)}
    of_target = {_EMBEDDING, _HEAD} if draft.draft.embeddings else set()
    _save(directory, draft, dtype, {"spire_draft": section}, of_target | of_head)
    if of_head:
        save_stop_head(directory, draft)


def save_stop_head(directory: Path, draft: Draft) -> None:
    """Write a draft's stop head, in float32, beside its weights in `directory`, which stay as they are."""
    assert draft.stop_head is not None
    assert draft.draft.stop_head is not None
    tensors = {name: tensor.detach().cpu().float() for name, tensor in draft.stop_head.state_dict().items()}
    write_tensors(directory / STOP_HEAD, tensors)
    config = read_config(directory)
    config["spire_draft"]["stop_head"] = draft.draft.stop_head.model_dump()
    write_json(directory / "config.json", config)


def save_target(directory: Path, target: Target, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a target's `config.json` and `model.safetensors`, which `load_target` and transformers can both load."""
    _save(directory, target, dtype, {}, {_HEAD} if target.config.tie_word_embeddings else set())


def _save(
    directory: Path, module: Target | Draft, dtype: torch.dtype, further: dict[str, Any], left_out: set[str]
) -> None:
    """Write `config.json`, including the `further` keys, and `model.safetensors`, each atomically."""
    tensors = {
        stored_name(name): tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in left_out
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
    tensors: dict[str, Tensor] = {}
    for file in _files(directory):
        with _readable(file):
            tensors |= load_file(file)
    return tensors


def read_tensors(directory: Path, names: set[str]) -> dict[str, Tensor]:
    """Load those tensors of a checkpoint that have one of these stored names. Raises the errors of `load_tensors`."""
    tensors: dict[str, Tensor] = {}
    for file in _files(directory):
        with _readable(file), safe_open(file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in names & set(stored.keys())}
    return tensors


def stores_bfloat16(directory: Path) -> bool:
    """True if a target's checkpoint stores its weights as bfloat16. Raises the errors of `load_tensors`."""
    if has_random_weights(directory):
        return False
    for file in _files(directory):
        with _readable(file), safe_open(file, framework="pt") as stored:
            if stored_name(_EMBEDDING) in stored.keys():  # noqa: SIM118
                return bool(stored.get_slice(stored_name(_EMBEDDING)).get_dtype() == "BF16")
    return False


def _files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises CheckpointError if its index is invalid."""
    index, files = directory / "model.safetensors.index.json", [directory / "model.safetensors"]
    if index.is_file():
        places = read_object(index).get("weight_map")
        names = set(places.values()) if isinstance(places, dict) else set()
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError(f"{index} is no safetensors index: its weight_map names no files of this directory")
        files = [directory / name for name in sorted(names)]
    return files


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise CheckpointError if this safetensors file does not exist, or cannot be read inside the `with` block."""
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: {_instead(file.parent)}")
    refuse_stand_in(file)
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read ({error}): truncated or not a safetensors file") from error


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
        if dtype not in _FLOATS and name != _VOCABULARY:
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{directory}: {name} is {kind}: quantised weights are not served")


def fingerprint(config: ModelConfig, tensors: dict[str, Tensor]) -> str:
    """Return a hash, independent of sharding, of a target's config and about 1,024 elements of each stored tensor."""
    return sampled_hash(tensors, config.identity)


def sampled_hash(tensors: dict[str, Tensor], further: str = "") -> str:
    """Return a hash of about 1,024 elements of each tensor, of the tensors' names and shapes, and of `further`."""
    digest = hashlib.sha256(further.encode())
    for name in sorted(tensors):
        flat = tensors[name].reshape(-1)
        step = max(1, flat.numel() // _SAMPLED_ELEMENTS)
        digest.update(f"{name}{list(tensors[name].shape)}".encode())
        digest.update(flat[::step].float().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
