"""A checkpoint's tokenizer: the one that transformers 5 makes of the same directory, with the same ids.

`tokenizer.json` decides, with what the files beside it declare (`special_tokens`). Truncation and padding that training
left in it are never applied. `add_bos_token` and `add_eos_token` of `tokenizer_config.json` decide nothing:
transformers goes by the post-processor of `tokenizer.json`.

What it does not know: tokenizers without a `tokenizer.json`, and those that are made by code of a checkpoint's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from spire.errors import CheckpointError
from spire.model.directory import read_object
from spire.model.special_tokens import Declared, read_declared


def load_tokenizer(directory: Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer in `directory`. Raises CheckpointError, also where it has ids beyond the model's vocabulary."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: {_instead(directory)}")
    raw = read_object(file)
    if not isinstance(raw.get("model"), dict):
        raise CheckpointError(f"{file} holds no model of a tokenizer: its key 'model' is {raw.get('model')!r}")
    declared = read_declared(directory, raw)
    if declared.settings.get("split_special_tokens"):
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: split_special_tokens is not supported")
    try:
        tokenizer = _built(file, raw, declared)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics that are none
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    if vocab_size is not None:
        _check_fits(tokenizer, vocab_size, file)
    return tokenizer


def tokenizer_of(tokenizer_json: bytes) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, without truncation and padding. Raises the library's bare Exception."""
    return _unbounded(Tokenizer.from_buffer(tokenizer_json))


def ids_without_text(tokenizer: Tokenizer, vocab_size: int) -> int:
    """How many ids of a model's vocabulary its tokenizer does not know."""
    return vocab_size - len({token for token in tokenizer.get_vocab().values() if token < vocab_size})


def _instead(directory: Path) -> str:
    """Advice for a directory without `tokenizer.json`."""
    if not (directory / "tokenizer.model").is_file():
        return "a model is served with its own tokenizer"
    return (
        "tokenizer.model is not read. AutoTokenizer of transformers opens it, and its save_pretrained writes the other"
    )


def _built(file: Path, raw: dict[str, Any], declared: Declared) -> Tokenizer:
    is_llama = declared.is_llama and raw["model"].get("type", "BPE") == "BPE"
    tokenizer = _unbounded(_as_llama(raw, declared.settings) if is_llama else Tokenizer.from_file(str(file)))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    lacking = {token.content: token for token in declared.in_order() if token.content not in known}
    tokenizer.add_tokens(list(lacking.values()))
    return tokenizer


def _unbounded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_llama(raw: dict[str, Any], settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer of class LlamaTokenizer that transformers builds from these vocabulary and merges."""
    model = raw["model"] | {"unk_token": None, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer.from_str(json.dumps(raw | {"model": model, "normalizer": None, "added_tokens": []}))
    in_front = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if in_front else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if in_front else steps)
    return tokenizer


def _check_fits(tokenizer: Tokenizer, vocab_size: int, file: Path) -> None:
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocab_size:
        raise CheckpointError(
            f"{file}: the tokenizer has {largest + 1} tokens, the model's vocab_size is {vocab_size}: it could not be "
            f"given the last ones, such as {token!r}. Take the tokenizer that belongs to these weights"
        )
