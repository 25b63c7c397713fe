"""Tokens that a checkpoint declares outside its tokenizer.json: named (`bos_token` ...), extra and added tokens.

As in transformers 5, the tokens are read from `added_tokens_decoder` of `tokenizer_config.json`, or else from the older
`special_tokens_map.json` and `added_tokens.json`. The text of a declared token is never split in a prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from spire.errors import CheckpointError
from spire.model.directory import read_object_if_any

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LLAMA_DEFAULTS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
# Model types for which transformers does not take Llama's class, although checkpoints name it.
_NEVER_LLAMA = ("mistral", "qwen2")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")


class DeclaredTokens(NamedTuple):
    """The tokens that a checkpoint's files declare, and the settings of `tokenizer_config.json`."""

    named: dict[str, AddedToken]
    extra: list[AddedToken]
    added: dict[int, AddedToken]
    settings: dict[str, Any]
    is_llama: bool

    def in_order(self) -> list[AddedToken]:
        """Return all declared tokens, in the order in which ids are assigned to tokens that the tokenizer lacks."""
        return [*(self.added[at] for at in sorted(self.added)), *self.named.values(), *self.extra]


def read_declared(directory: Path, tokenizer: dict[str, Any]) -> DeclaredTokens:
    """Read a checkpoint's declared tokens; `tokenizer` is its parsed tokenizer.json. Raises CheckpointError."""
    settings, config = (read_object_if_any(directory / name) for name in ("tokenizer_config.json", "config.json"))
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    # A byte-level tokenizer is not Llama 2's, whatever its class says.
    byte_level = any('"ByteLevel"' in json.dumps(tokenizer.get(part)) for part in ("pre_tokenizer", "decoder"))
    is_llama = kind in _LLAMA and config.get("model_type") not in _NEVER_LLAMA and not byte_level
    written = (_LLAMA_DEFAULTS if is_llama else {}) | settings
    try:
        if "added_tokens_decoder" in settings:
            added = {int(at): _token(value) for at, value in settings["added_tokens_decoder"].items()}
        else:
            written |= read_object_if_any(directory / "special_tokens_map.json")
            added = {int(entry["id"]): _token(entry) for entry in tokenizer.get("added_tokens") or []}
            older = read_object_if_any(directory / "added_tokens.json")
            added |= {int(at): AddedToken(text, normalized=True) for text, at in older.items()}
        known = {token.content: token for token in added.values()}
        extra: list[AddedToken] = []
        names = {name: written[name] for name in _NAMES if written.get(name) is not None}
        names |= {name: value for name, value in written.items() if name.endswith("_token") and isinstance(value, str)}
        for value in (written.get(name) for name in _EXTRA):
            if isinstance(value, dict):
                names |= value
            elif value:
                extra += [_special(one, known) for one in value]
        named = {name: _special(value, known) for name, value in names.items()}
        return DeclaredTokens(named, extra, added, settings, is_llama)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{directory}: the tokens that its tokenizer files declare cannot be read: {error!r}"
        ) from error


def _special(value: Any, known: dict[str, AddedToken]) -> AddedToken:
    token = _token(value)
    if token.content in known:
        return known[token.content]
    token.special = True
    return token


def _token(value: Any) -> AddedToken:
    """Convert a token of the tokenizer's configuration (a string, or a JSON object with `content`) to an AddedToken."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    properties = {name: value[name] for name in _PROPERTIES if isinstance(value.get(name), bool)}
    return AddedToken(value["content"], **properties)
