"""Load a checkpoint's tokenizer, which encodes text to the same ids as in transformers 5.

The tokenizer is read from `tokenizer.json` and the tokens declared in other files (`special_tokens`). Settings of
`tokenizer.json` for truncation and padding are never applied. `add_bos_token` and `add_eos_token` of
`tokenizer_config.json` are ignored: transformers uses the post-processor of `tokenizer.json`.

Does not know: tokenizers without a `tokenizer.json`, and tokenizers built by a checkpoint's own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from spire.checkpoints.special_tokens import read_declared
from spire.errors import CheckpointError
from spire.model.directory import read_object


def load_tokenizer(directory: Path, vocab_size: int | None = None) -> Tokenizer:
    """Load a checkpoint's tokenizer. Raises CheckpointError if it is invalid or has ids beyond `vocab_size`."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        advice = "AutoTokenizer of transformers opens it, and its save_pretrained writes the other"
        other = (directory / "tokenizer.model").is_file()
        instead = f"tokenizer.model is not read. {advice}" if other else "a model is served with its own tokenizer"
        raise CheckpointError(f"{file} does not exist: {instead}")
    raw = read_object(file)
    if not isinstance(raw.get("model"), dict):
        raise CheckpointError(f"{file} holds no model of a tokenizer: its key 'model' is {raw.get('model')!r}")
    declared = read_declared(directory, raw)
    if declared.settings.get("split_special_tokens"):
        raise CheckpointError(f"{directory / 'tokenizer_config.json'}: split_special_tokens is not supported")
    try:
        is_llama = declared.is_llama and raw["model"].get("type", "BPE") == "BPE"
        tokenizer = _unbounded(_as_llama(raw, declared.settings) if is_llama else Tokenizer.from_file(str(file)))
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        lacking = {token.content: token for token in declared.in_order() if token.content not in known}
        tokenizer.add_tokens(list(lacking.values()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and panics that are no Exception
        raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if vocab_size is not None and largest >= vocab_size:
        raise CheckpointError(
            f"{file}: the tokenizer has {largest + 1} tokens, the model's vocab_size is {vocab_size}: it could not be "
            f"given the last ones, such as {token!r}. Take the tokenizer that belongs to these weights"
        )
    return tokenizer


def tokenizer_of(tokenizer_json: bytes) -> Tokenizer:
    """Parse a `tokenizer.json` and disable truncation and padding. Raises Exception if the content is invalid."""
    return _unbounded(Tokenizer.from_buffer(tokenizer_json))


def ids_without_text(tokenizer: Tokenizer, vocab_size: int) -> int:
    """Return the number of ids below the model's `vocab_size` that have no token in the tokenizer."""
    return vocab_size - len({token for token in tokenizer.get_vocab().values() if token < vocab_size})


def _unbounded(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _as_llama(raw: dict[str, Any], settings: dict[str, Any]) -> Tokenizer:
    """Build transformers' LlamaTokenizer from a parsed `tokenizer.json` and the settings of `tokenizer_config.json`."""
    model = raw["model"] | {"unk_token": None, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer.from_str(json.dumps(raw | {"model": model, "normalizer": None, "added_tokens": []}))
    in_front = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if in_front else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if in_front else steps)
    return tokenizer
