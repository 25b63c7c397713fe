"""Byte-level vocabularies of GGUF files: text is divided as the pre-tokenizer that a file names divides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import TokenType
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2Tokenizer

from spire.checkpoints.gguf.convert import convert_gguf
from spire.checkpoints.gguf.file import GgufFile
from spire.checkpoints.gguf.tokenizer import read_tokenizer
from spire.checkpoints.tokenizer import load_tokenizer
from spire.errors import CheckpointError
from tests.gguf_files import byte_level_metadata, write_gguf
from tests.spire.checkpoints.conftest import SAMPLES

TEXTS = [
    *SAMPLES,
    "It's  I'LL\r\n\r\n  12 and 34567\t\n x=1;\n\n\n",
    "e\u0301 ½ Ⅷ ٣٤ ͏ \u00a0\u2028",
    "HTTPServer fooBar x/y\n/",
]


@pytest.fixture(scope="module")
def trained(prose: list[Path]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of 2,000 tokens with merges over digits, white space and line ends, so that divisions show."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False, max_token_length=8)
    numbers = " ".join(str(number) for number in range(0, 40000, 7))
    spaced = "\n\n".join(f"  {number}\t {number}\r\n" for number in range(300))
    paragraphs = [text for file in prose for text in file.read_text().split("\n\n")]
    tokenizer.train_from_iterator([numbers, spaced, *TEXTS * 5, *paragraphs[:300]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def bpe_gguf(path: Path, trained: tuple[dict[str, int], list[tuple[str, str]]], pre: str | None, **more: Any) -> Path:
    described = byte_level_metadata(*trained, pre) | {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.block_count": 1,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    described |= {f"tokenizer.{key}": value for key, value in more.items()}
    rows = len(described["tokenizer.ggml.tokens"])
    square = dict.fromkeys(["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"], (32, 32))
    shapes = {f"blk.0.{part}.weight": shape for part, shape in square.items()}
    shapes |= {f"{name}.weight": (32,) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
    shapes["token_embd.weight"] = (rows, 32)
    return write_gguf(path, described, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})


START = {"ggml.bos_token_id": 5}


def converted(path: Path) -> Tokenizer:
    convert_gguf(path, path.parent / "out")
    return load_tokenizer(path.parent / "out")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "tekken"])
def test_ids_are_those_of_transformers_reading_the_same_file(trained: Any, tmp_path: Path, pre: str) -> None:
    ours = converted(bpe_gguf(tmp_path / "bpe.gguf", trained, pre, **{"ggml.add_bos_token": False}))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="bpe.gguf")
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"] == again(text)["input_ids"], text
        assert ours.decode(ids) == text


def test_ids_of_a_qwen2_vocabulary_are_those_of_transformers_own_tokenizer(trained: Any, tmp_path: Path) -> None:
    """Not of transformers reading the file: then it does not compose characters, which the model's tokenizer does."""
    ours = converted(bpe_gguf(tmp_path / "bpe.gguf", trained, "qwen2"))
    vocabulary, merges = trained
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    assert all(ours.encode(text).ids == theirs(text)["input_ids"] for text in TEXTS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a 12", ["a", " ", "1", "2"]),
        ("a  12", ["a", "  ", "1", "2"]),
        ("\n\n3", ["\n\n", "3"]),
        ("it's ½  x²", ["it", "'s", " ", "½", " ", " x", "²"]),
    ],
)
def test_the_smollm_division_takes_digits_apart_before_all_else(
    trained: Any, tmp_path: Path, text: str, parts: list[str]
) -> None:
    """llama.cpp's patterns for it: `\\p{N}`, then GPT-2's. transformers, reading such a file, passes the first over."""
    ours = converted(bpe_gguf(tmp_path / "bpe.gguf", trained, "smollm"))
    divided = [text[begin:end] for _, (begin, end) in ours.pre_tokenizer.pre_tokenize_str(text)]
    assert divided == parts


def test_a_llama_3_word_that_is_a_token_is_taken_whole(trained: Any, tmp_path: Path) -> None:
    """Even where no merges lead to it."""
    vocabulary, merges = trained
    extended = {**vocabulary, "Ġzyzzyva": len(vocabulary)}
    whole = converted(bpe_gguf(tmp_path / "bpe.gguf", (extended, merges), "llama-bpe", **START))
    assert whole.encode(" zyzzyva", add_special_tokens=False).tokens == ["Ġzyzzyva"]
    (tmp_path / "other").mkdir()
    merged = converted(bpe_gguf(tmp_path / "other" / "bpe.gguf", (extended, merges), "gpt-2"))
    assert len(merged.encode(" zyzzyva").tokens) > 1


def test_a_llama_3_text_gets_the_start_token_if_the_file_does_not_say(trained: Any, tmp_path: Path) -> None:
    ours = converted(bpe_gguf(tmp_path / "bpe.gguf", trained, "llama-bpe", **START))
    assert ours.encode("Hello").ids[0] == 5
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["add_bos_token"] is True


def test_control_tokens_are_special_and_user_defined_ones_are_unsplit_text(trained: Any, tmp_path: Path) -> None:
    vocabulary, merges = trained
    size = len(vocabulary)
    extended = {**vocabulary, "<｜end｜>": size, "<think>": size + 1, "[PAD2002]": size + 2}
    kinds = [*[1] * size, int(TokenType.CONTROL), int(TokenType.USER_DEFINED), int(TokenType.UNUSED)]
    more = {"ggml.token_type": kinds, "ggml.eos_token_id": size}
    ours = converted(bpe_gguf(tmp_path / "bpe.gguf", (extended, merges), "gpt-2", **more))
    ids = ours.encode("a<think>b<｜end｜>").ids
    assert ids == [vocabulary["a"], size + 1, vocabulary["b"], size]
    assert ours.decode(ids) == "a<think>b"
    assert ours.decode(ids, skip_special_tokens=False) == "a<think>b<｜end｜>"
    assert ours.id_to_token(size + 2) is None


@pytest.mark.parametrize(
    ("pre", "more", "message"),
    [
        ("default", {}, "tokenizer.ggml.pre is 'default': how text is divided is known of gpt-2, llama-bpe"),
        (None, {}, "tokenizer.ggml.pre is missing"),
        ("gpt-2", {"ggml.merges": ["zz qq"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ("gpt-2", {"ggml.merges": ["a b c"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ("gpt-2", {"ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ("llama-bpe", {}, "add_bos_token is true, and there is no bos_token_id"),
        ("gpt-2", {"ggml.tokens": ["a", "b", "a"], "ggml.token_type": [1] * 3}, "two tokens have the text 'a'"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused_by_name(
    trained: Any, tmp_path: Path, pre: str | None, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert_gguf(bpe_gguf(tmp_path / "bpe.gguf", trained, pre, **more), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Counted(str):
    """A token that counts how often tokens are looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return super().__hash__()


def test_a_duplicate_at_the_end_of_a_large_vocabulary_is_found_in_one_pass(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = GgufFile(bpe_gguf(tmp_path / "bpe.gguf", trained, "gpt-2"))
    pieces = [Counted(f"token {number}") for number in range(3000)]
    pieces[-1] = Counted("token 2998")
    monkeypatch.setattr(file, "list", lambda key, kind, default=None: pieces if key.endswith("tokens") else default)
    with pytest.raises(CheckpointError, match="two tokens have the text 'token 2998'"):
        read_tokenizer(file, len(pieces))
    assert Counted.looked_up <= 4 * len(pieces)
