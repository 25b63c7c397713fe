"""Convert a GGUF file's vocabulary to `tokenizer.json` and `tokenizer_config.json` with the same token ids.

Byte-level BPE (`gpt2`) splits text by the pre-tokenizer that the file names. SentencePiece BPE (`llama`) prepends a
space to every text between special tokens, as llama.cpp does, because GGUF files contain no finer setting.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from spire.checkpoints.gguf.file import GgufFile
from spire.checkpoints.sentencepiece import Vocabulary, without_special_tokens

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_LLAMA_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


class Division(NamedTuple):
    """A pre-tokenizer: splits text by `pattern` (empty: GPT-2's) and, if `single_digits`, numbers into digits."""

    pattern: str = ""
    single_digits: bool = False
    composes: bool = False  # normalise to NFC first
    whole_words: bool = False  # a word that is a token is not split by merges
    starts: bool = False  # prepend the start token if the file does not say


_LLAMA3 = Division(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words=True, starts=True
)
_DIVISIONS = {
    "gpt-2": Division(),
    "smollm": Division(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Division(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}", composes=True),
    "tekken": Division(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        whole_words=True,
        starts=True,
    ),
}


class GgufTokenizer(NamedTuple):
    """A GGUF file's tokenizer, its start and end tokens, and further settings for `tokenizer_config.json`."""

    tokenizer: Tokenizer
    start: int | None
    ends: tuple[int, ...]
    config: dict[str, Any]


def read_tokenizer(file: GgufFile, vocab_size: int) -> GgufTokenizer:
    """Build a GGUF file's tokenizer. Raises CheckpointError, naming the key, if it cannot be rebuilt exactly."""
    pieces, kinds = _vocabulary(file, vocab_size)
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        (tokenizer, starts), ids = _byte_level(file, pieces), dict[str, int]()
    elif model == "llama":
        tokenizer, starts, ids = _sentencepiece(file, pieces, kinds), True, _LLAMA_IDS
    else:
        raise file.error(f"tokenizer.ggml.model is {model!r}; only 'gpt2' and 'llama' are read")
    # Control tokens are special tokens; user-defined tokens are text that is never split.
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    defined = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in defined])
    roles = {role: _id(file, key, ids.get(role), len(pieces)) for role, key in _ROLES.items()}
    added = {
        "bos_token": file.flag("tokenizer.ggml.add_bos_token", starts),
        "eos_token": file.flag("tokenizer.ggml.add_eos_token", False),
    }
    tokenizer.post_processor = _frame(file, roles, pieces, added)
    ends = [roles["eos_token"], *(_id(file, key, None, len(pieces)) for key in ("eot_token_id", "eom_token_id"))]
    return GgufTokenizer(
        tokenizer,
        roles["bos_token"],
        tuple(dict.fromkeys(end for end in ends if end is not None)),
        {role: pieces[number] for role, number in roles.items() if number is not None}
        | {f"add_{role}": adds for role, adds in added.items()}
        | _chat_templates(file),
    )


def _vocabulary(file: GgufFile, vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and type of every token, without the padding tokens at the end of the vocabulary."""
    pieces = file.list("tokenizer.ggml.tokens", str)
    kinds = file.list("tokenizer.ggml.token_type", int, [_NORMAL] * len(pieces))
    if len(kinds) != len(pieces):
        raise file.error(f"there are {len(pieces)} tokens and {len(kinds)} token types")
    if len(pieces) > vocab_size:
        raise file.error(f"there are {len(pieces)} tokens, and embeddings for {vocab_size}")
    while pieces and kinds[-1] == _UNUSED and pieces[-1] == f"[PAD{len(pieces) - 1}]":
        pieces, kinds = pieces[:-1], kinds[:-1]
    if twice := [piece for piece, count in Counter(pieces).items() if count > 1]:
        raise file.error(f"two tokens have the text {twice[0]!r}")
    return pieces, kinds


def _byte_level(file: GgufFile, pieces: list[str]) -> tuple[Tokenizer, bool]:
    """Return the byte-level BPE tokenizer, and whether the start token is prepended by default."""
    name = file.text("tokenizer.ggml.pre", "")
    if name not in _DIVISIONS:
        found = f"is {name!r}" if name else "is missing"
        raise file.error(f"tokenizer.ggml.pre {found}: how text is divided is known of {', '.join(sorted(_DIVISIONS))}")
    division = _DIVISIONS[name]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge.split(" ")) for merge in file.list("tokenizer.ggml.merges", str)]
    try:
        bpe = models.BPE(ids, merges, fuse_unk=False, byte_fallback=False, ignore_merges=division.whole_words)
    except Exception as error:  # tokenizers raises bare Exception
        raise file.error(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = Tokenizer(bpe)
    if division.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if division.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if division.pattern:
        steps.append(pre_tokenizers.Split(Regex(division.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not division.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, division.starts


def _sentencepiece(file: GgufFile, pieces: list[str], kinds: list[int]) -> Tokenizer:
    scores = file.list("tokenizer.ggml.scores", float)[: len(pieces)]
    mergeable = [kind == _NORMAL for kind in kinds]
    if len(scores) != len(pieces):
        raise file.error(f"there are {len(pieces)} tokens and {len(scores)} scores")
    if len({score for score, merges in zip(scores, mergeable, strict=True) if merges}) < 2:
        raise file.error("all tokens have one score: the order in which pieces are merged is lost")
    vocabulary = Vocabulary(
        pieces,
        scores,
        mergeable,
        keeps_extra_spaces=not file.flag("tokenizer.ggml.remove_extra_whitespaces", False),
        puts_space_in_front=file.flag("tokenizer.ggml.add_space_prefix", True),
    )
    unknown = _id(file, _ROLES["unk_token"], _LLAMA_IDS["unk_token"], len(pieces))
    return without_special_tokens(vocabulary, unknown or 0)


def _frame(
    file: GgufFile, roles: dict[str, int | None], pieces: list[str], added: dict[str, bool]
) -> processors.PostProcessor:
    """Return the post-processor that adds start and end tokens, which its template names by role, not by text."""
    tokens = []
    for role in (role for role, adds in added.items() if adds):
        number = roles[role]
        if number is None:
            raise file.error(f"tokenizer.ggml.add_{role} is true, and there is no {_ROLES[role]}")
        tokens.append({"id": role, "ids": [number], "tokens": [pieces[number]]})
    front, behind = (role if added[role] else "" for role in ("bos_token", "eos_token"))
    return processors.TemplateProcessing(single=f"{front} $A {behind}".strip(), special_tokens=tokens)


def _id(file: GgufFile, key: str, default: int | None, count: int) -> int | None:
    number = file.whole(f"tokenizer.ggml.{key}", default)
    if number is not None and not 0 <= number < count:
        raise file.error(f"tokenizer.ggml.{key} is {number}, and there are {count} tokens")
    return number


def _chat_templates(file: GgufFile) -> dict[str, Any]:
    default = file.text("tokenizer.chat_template", "")
    names = file.list("tokenizer.chat_templates", str, [])
    if not names:
        return {"chat_template": default} if default else {}
    named = {"default": default} if default else {}
    named |= {name: file.text(f"tokenizer.chat_template.{name}") for name in names}
    return {"chat_template": [{"name": name, "template": template} for name, template in named.items()]}
