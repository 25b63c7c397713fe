"""`spire convert llama2c` on real weights: the same tokens as transformers, the same ids as SentencePiece."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from spire.checkpoints.convert import convert_llama2c
from spire.checkpoints.weights import load_target
from spire.errors import CheckpointError
from spire.model.target import Target, WholeSequence
from tests.conftest import FIXTURES
from tests.spire.checkpoints.conftest import SAMPLES

SOURCE = FIXTURES / "stories260K"


def greedy(target: Target, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        so_far = torch.tensor([tokens])
        hidden = target(so_far, WholeSequence(so_far)).hidden_BTD
        tokens = [*tokens, int(target.unembed(hidden[0, -1]).argmax())]
    return tokens


def test_200_greedy_tokens_match_transformers_and_read_like_a_story(stories_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    prompt = tokenizer.encode("Once upon a time").ids
    ours = greedy(load_target(stories_dir)[0], prompt, 200)
    reference = LlamaForCausalLM.from_pretrained(stories_dir, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None
    theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0].tolist()
    assert len(ours) == len(prompt) + 200
    assert ours == theirs
    story = tokenizer.decode(ours)
    assert story.startswith("Once upon a time, there was a little girl named Lily. She loved to play outside")


@pytest.mark.parametrize("text", SAMPLES)
def test_the_converted_tokenizer_gives_the_ids_of_sentencepiece(stories_dir: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    reference = SentencePieceProcessor(model_file=str(SOURCE / "tok512.model"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == reference.encode(text)
    assert tokenizer.encode(text).ids == [reference.bos_id(), *ids]
    assert tokenizer.decode(ids) == reference.decode(ids)


def test_the_converted_tokenizer_gives_the_ids_of_sentencepiece_on_prose(stories_dir: Path, prose: list[Path]) -> None:
    tokenizer = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    reference = SentencePieceProcessor(model_file=str(SOURCE / "tok512.model"))
    paragraphs = [paragraph for file in prose for paragraph in file.read_text().split("\n\n")]
    ours = [encoding.ids for encoding in tokenizer.encode_batch(paragraphs, add_special_tokens=False)]
    assert ours == reference.encode(paragraphs)


def test_both_vocabulary_formats_give_the_same_ids(stories_dir: Path, tmp_path: Path) -> None:
    convert_llama2c(SOURCE / "stories260K.bin", SOURCE / "tok512.bin", tmp_path)
    from_bin = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    from_model = Tokenizer.from_file(str(stories_dir / "tokenizer.json"))
    for text in SAMPLES[:5]:
        assert from_bin.encode(text).ids == from_model.encode(text).ids


@pytest.mark.parametrize("kept", [10, 28, 5000])
def test_truncated_weights_are_refused_by_name(tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.bin"
    cut.write_bytes((SOURCE / "stories260K.bin").read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"cut\.bin has"):
        convert_llama2c(cut, SOURCE / "tok512.model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tok512.model", "tok512.bin"])
def test_a_truncated_vocabulary_is_refused_by_name(tmp_path: Path, name: str) -> None:
    cut = tmp_path / name
    cut.write_bytes((SOURCE / name).read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=name):
        convert_llama2c(SOURCE / "stories260K.bin", cut, tmp_path / "out")


def test_files_in_each_others_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"stories260K\.bin is no SentencePiece vocabulary"):
        convert_llama2c(SOURCE / "stories260K.bin", SOURCE / "stories260K.bin", tmp_path)
    with pytest.raises(CheckpointError, match=r"tok512\.model is not in llama2\.c's format|tok512\.model has"):
        convert_llama2c(SOURCE / "tok512.model", SOURCE / "tok512.model", tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.bin does not exist"):
        convert_llama2c(tmp_path / "absent.bin", SOURCE / "tok512.model", tmp_path)
    with pytest.raises(CheckpointError, match=r"absent\.model does not exist"):
        convert_llama2c(SOURCE / "stories260K.bin", tmp_path / "absent.model", tmp_path)


@torch.no_grad()
def test_a_classifier_of_its_own_is_read(stories_dir: Path, tmp_path: Path) -> None:
    """A negative vocabulary announces one, at the end of the file. Here: twice the embedding, so twice the logits."""
    header, body = (SOURCE / "stories260K.bin").read_bytes()[:28], (SOURCE / "stories260K.bin").read_bytes()[28:]
    fields = list(struct.unpack("<7i", header))
    fields[5] = -fields[5]
    doubled = 2 * torch.frombuffer(bytearray(body), dtype=torch.float32)[: 512 * 64]
    (tmp_path / "own.bin").write_bytes(struct.pack("<7i", *fields) + body + doubled.numpy().tobytes())
    convert_llama2c(tmp_path / "own.bin", SOURCE / "tok512.model", tmp_path / "own")
    tokens = torch.tensor([[1, 403, 407, 261, 378]])
    shared, own = (load_target(directory)[0] for directory in (stories_dir, tmp_path / "own"))
    logits = [target.unembed(target(tokens, WholeSequence(tokens)).hidden_BTD) for target in (shared, own)]
    assert not own.config.tie_word_embeddings
    assert torch.equal(2 * logits[0], logits[1])


@pytest.mark.parametrize("name", ["stories260K.bin", "tok512.model"])
def test_a_pointer_of_git_lfs_is_told_from_what_it_points_to(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1056540\n")
    sources = {other: SOURCE / other for other in ("stories260K.bin", "tok512.model")} | {name: tmp_path / name}
    with pytest.raises(CheckpointError, match=f"{name} is a Git LFS pointer"):
        convert_llama2c(sources["stories260K.bin"], sources["tok512.model"], tmp_path / "out")
