"""A checkpoint's tokenizer gives the ids that transformers gives, whatever the files beside tokenizer.json say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gateway.text.tokenizer import TextCodec
from spire.checkpoints.chat_template import read_chat_template
from spire.checkpoints.tokenizer import ids_without_text, load_tokenizer
from spire.errors import CheckpointError
from spire.training.corpus import train_tokenizer

TEXTS = [
    "Once upon a time 12345, a girl<|end|> named </s> Lily <s> x<extra>y",
    " leading, and  two",
    "a  b\n<s> [INST] hi [/INST]</s>x <pad>",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
END = {"content": "<|end|>", "lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
TRUNCATION = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<unk>",
}


def write(directory: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture(scope="session")
def byte_level_dir(stories_dir: Path, prose: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, as Llama 3's, in the directory of a Llama."""
    out = tmp_path_factory.mktemp("bytes")
    shutil.copy(stories_dir / "config.json", out)
    train_tokenizer([file.read_text() for file in prose], 500).save(str(out / "tokenizer.json"))
    return out


@pytest.fixture(params=["SentencePiece", "bytes"])
def directory(request: pytest.FixtureRequest, stories_dir: Path, byte_level_dir: Path, tmp_path: Path) -> Path:
    source = stories_dir if request.param == "SentencePiece" else byte_level_dir
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(source / name, tmp_path)
    return tmp_path


CASES: dict[str, dict[str, Any]] = {
    "tokenizer.json alone": {},
    "a class of its own": {"tokenizer_config.json": FAST},
    "a class that nobody knows": {"tokenizer_config.json": FAST | {"tokenizer_class": "MineTokenizer"}},
    "bos and eos asked for": {"tokenizer_config.json": FAST | {"add_bos_token": True, "add_eos_token": True}},
    "bos asked not to be": {"tokenizer_config.json": FAST | {"add_bos_token": False}},
    "a declared end token": {"tokenizer_config.json": FAST | {"eos_token": "<|end|>"}},
    "as an object": {"tokenizer_config.json": FAST | {"eos_token": END | {"__type": "AddedToken"}}},
    "as one that is added": {
        "tokenizer_config.json": FAST | {"added_tokens_decoder": {"512": END | {"special": True}}},
        "special_tokens_map.json": {"pad_token": "<pad>"},
    },
    "in the older file": {"special_tokens_map.json": {"eos_token": END, "pad_token": "<pad>"}},
    "in both": {"tokenizer_config.json": FAST, "special_tokens_map.json": {"eos_token": "<|end|>"}},
    "in the oldest file": {"tokenizer_config.json": FAST, "added_tokens.json": {"<extra>": 512, "<|end|>": 513}},
    "extra tokens": {"tokenizer_config.json": FAST | {"additional_special_tokens": ["<extra>", "<|end|>"]}},
    "extra tokens by name": {"tokenizer_config.json": FAST | {"extra_special_tokens": {"image_token": "<extra>"}}},
    "extra tokens in the older file": {
        "tokenizer_config.json": FAST,
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>"]},
    },
    "a named token of its own": {"tokenizer_config.json": FAST | {"image_token": "<extra>"}},
    "Llama's class": {"tokenizer_config.json": LLAMA},
    "Llama's fast class, older rule": {
        "tokenizer_config.json": LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}
    },
    "Llama's class, newer rule": {"tokenizer_config.json": LLAMA | {"legacy": False, "add_eos_token": True}},
    "Llama's class, nothing in front": {"tokenizer_config.json": LLAMA | {"add_prefix_space": False}},
    "Llama's class of a Mistral": {"tokenizer_config.json": LLAMA, "config.json": {"model_type": "mistral"}},
    "Llama's class of a Qwen3": {"tokenizer_config.json": LLAMA, "config.json": {"model_type": "qwen3"}},
}


@pytest.mark.parametrize("case", CASES)
def test_prompt_ids_are_those_of_transformers(case: str, directory: Path) -> None:
    write(directory, CASES[case])
    reference = AutoTokenizer.from_pretrained(directory)
    served = TextCodec(load_tokenizer(directory).to_str().encode()).tokenizer
    for text in TEXTS:
        for special in (True, False):
            ids = reference(text, add_special_tokens=special)["input_ids"]
            assert served.encode(text, add_special_tokens=special).ids == ids


def test_declared_tokens_change_ids(directory: Path) -> None:
    """A control: cases above tell a tokenizer that ignores its neighbours from one that does not."""
    alone = [load_tokenizer(directory).encode(text).ids for text in TEXTS]
    write(directory, CASES["a declared end token"])
    assert [load_tokenizer(directory).encode(text).ids for text in TEXTS] != alone


def test_truncation_and_padding_that_training_left_are_not_applied(directory: Path) -> None:
    plain = load_tokenizer(directory).encode(100 * TEXTS[0]).ids
    raw = json.loads((directory / "tokenizer.json").read_text())
    write(directory, {"tokenizer.json": raw | {"truncation": TRUNCATION, "padding": PADDING}})
    assert len(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(100 * TEXTS[0]).ids) == 64
    assert load_tokenizer(directory).encode(100 * TEXTS[0]).ids == plain
    assert TextCodec((directory / "tokenizer.json").read_bytes()).tokenizer.encode(100 * TEXTS[0]).ids == plain
    assert AutoTokenizer.from_pretrained(directory)(100 * TEXTS[0])["input_ids"] == plain


def test_ids_of_a_chat_are_those_of_transformers_with_one_start_token(directory: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    write(directory, {"tokenizer_config.json": FAST | {"eos_token": "<|end|>", "chat_template": template}})
    source = read_chat_template(directory)
    from spire.text.chat_template import ChatTemplate

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    text = ChatTemplate(source.template, source.special_tokens).render(messages, 10_000, add_generation_prompt=False)
    ids = load_tokenizer(directory).encode(text, add_special_tokens=False).ids
    reference = AutoTokenizer.from_pretrained(directory)
    assert ids == reference.apply_chat_template(messages, return_dict=False)
    assert ids.count(reference.bos_token_id) == 1


# -- what cannot be served -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"model": null}', "holds no model of a tokenizer"),
        ("{}", "holds no model of a tokenizer"),
        ("[]", "holds no JSON object"),
        ('{"model": {"type": "BPE"', "is not valid JSON"),
        ('{"model": {"type": "BPE", "vocab": 5, "merges": []}}', "cannot be read as a tokenizer"),
        ("", "is empty"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1", "Git LFS pointer"),
        ("<!DOCTYPE html>", "web page"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_tokenizer_that_is_none_is_named_in_one_line(content: str, says: str, directory: Path) -> None:
    write(directory, {"tokenizer.json": content})
    with pytest.raises(CheckpointError, match=says) as refused:
        load_tokenizer(directory)
    assert str(directory / "tokenizer.json") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", {"added_tokens_decoder": None}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": "text", "x": "text"}}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("special_tokens_map.json", {"eos_token": {"text": "x"}}),
        ("added_tokens.json", {"<extra>": "five"}),
    ],
)
def test_a_file_that_declares_no_tokens_is_named_in_one_line(name: str, content: Any, directory: Path) -> None:
    write(directory, {name: content})
    with pytest.raises(CheckpointError) as refused:
        load_tokenizer(directory)
    assert str(directory) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_directory_with_an_older_tokenizer_is_told_how_to_convert_it(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist: tokenizer\.model is not read\."):
        load_tokenizer(directory)


def test_a_tokenizer_beyond_the_vocabulary_is_refused_with_both_numbers(stories_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(stories_dir, tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(tmp_path, 512).get_vocab_size() == 512
    with pytest.raises(CheckpointError, match=r"has 512 tokens, the model's vocab_size is 511"):
        load_tokenizer(tmp_path, 511)
    write(tmp_path, {"tokenizer_config.json": FAST | {"pad_token": "<pad>"}})
    with pytest.raises(CheckpointError, match=r"has 513 tokens, the model's vocab_size is 512.*'<pad>'"):
        load_tokenizer(tmp_path, 512)


def test_ids_without_text_decode_to_nothing(stories_dir: Path) -> None:
    tokenizer = load_tokenizer(stories_dir)
    assert ids_without_text(tokenizer, 512) == 0
    assert ids_without_text(tokenizer, 640) == 128
    codec = TextCodec(tokenizer.to_str().encode())
    girl = tokenizer.encode("a girl", add_special_tokens=False).ids
    assert codec.decode([600, *girl[:1], 511 + 1, *girl[1:], 639]) == codec.decode(girl)
    assert (codec.token_text(600), codec.token_bytes(600)) == ("", b"")


def test_the_real_tokenizer_gives_the_ids_of_transformers(smollm2_dir: Path) -> None:
    reference, ours = AutoTokenizer.from_pretrained(smollm2_dir), load_tokenizer(smollm2_dir)
    for text in [*TEXTS, "<|im_start|>user\nHi \u96ea\u2603<|im_end|>\n"]:
        assert ours.encode(text).ids == reference(text)["input_ids"]
