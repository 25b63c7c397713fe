"""Convert a SentencePiece BPE vocabulary to a `tokenizers` tokenizer with the same ids, without sentencepiece itself.

Two formats are read: SentencePiece's `.model`, and llama2.c's `.bin` of the same vocabulary, which contains pieces and
scores but no normalisation (spaces are then kept unchanged, as in llama2.c's own encoder). A control piece such as
`<s>` in a text is encoded as the control token, as in every Hugging Face tokenizer; SentencePiece encodes it as text.

Does not know: Unigram vocabularies, which are refused.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from spire.errors import CheckpointError
from spire.model.directory import refuse_stand_in

UNKNOWN, START, END = 0, 1, 2  # ids in every llama2.c and Llama vocabulary
_SPACE = "▁"
_NORMAL, _BPE = 1, 2
_LLAMA2C_MARKS = {"\n<s>\n": "<s>", "\n</s>\n": "</s>"}


class Vocabulary(NamedTuple):
    """A BPE vocabulary: pieces in order of ids, their scores (higher scores merge first), and text normalisation."""

    pieces: list[str]
    scores: list[float]
    mergeable: list[bool]
    keeps_extra_spaces: bool = True
    puts_space_in_front: bool = True
    charsmap: bytes = b""


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a BPE vocabulary: a SentencePiece `.model` or llama2.c `.bin`. Raises CheckpointError for other files."""
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: --tokenizer takes a SentencePiece .model or llama2.c .bin file")
    refuse_stand_in(file)
    raw = file.read_bytes()
    try:
        vocabulary = _read_llama2c(raw) if file.suffix == ".bin" else _read_model(raw)
    except (DecodeError, struct.error, IndexError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file} is no SentencePiece vocabulary ({error!r}): truncated or another format"
        ) from error
    if vocabulary is None:
        raise CheckpointError(f"{file} holds no BPE vocabulary: only SentencePiece BPE can be converted")
    return vocabulary


def to_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Build a tokenizer that has the ids of a SentencePiece vocabulary and prepends `<s>` to every prompt."""
    names = [vocabulary.pieces[number] for number in (UNKNOWN, START, END)]
    tokenizer = without_special_tokens(vocabulary, UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names[START]} $A", special_tokens=[(names[START], START)]
    )
    return tokenizer


def without_special_tokens(vocabulary: Vocabulary, unknown: int) -> Tokenizer:
    """Build a tokenizer with a vocabulary's ids and no special tokens. `unknown` is the id of the unknown token."""
    ids = {piece: number for number, piece in enumerate(vocabulary.pieces)}
    unknown_piece = vocabulary.pieces[unknown]
    bpe = models.BPE(ids, _merges(vocabulary, ids), unk_token=unknown_piece, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = _normalizer(vocabulary)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.puts_space_in_front:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all BPE merges, pairs of pieces that form a piece, highest score first as SentencePiece merges them."""
    ranked = []
    for piece, score, mergeable in zip(vocabulary.pieces, vocabulary.scores, vocabulary.mergeable, strict=True):
        for cut in range(1, len(piece)) if mergeable else ():
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _normalizer(vocabulary: Vocabulary) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if not vocabulary.keeps_extra_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if vocabulary.puts_space_in_front:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _read_llama2c(raw: bytes) -> Vocabulary:
    """Parse llama2.c's format: int32 maximum length; then for each piece float32 score, int32 length, bytes."""
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8
        if not 0 <= length <= len(raw) - at:
            raise IndexError(f"piece {len(pieces)} would be {length} bytes long")
        text = raw[at : at + length].decode()
        pieces.append(_LLAMA2C_MARKS.get(text, text.replace(" ", _SPACE)))
        scores.append(score)
        at += length
    mergeable = [number > END and not re.fullmatch("<0x..>", piece, re.DOTALL) for number, piece in enumerate(pieces)]
    return Vocabulary(pieces, scores, mergeable)


def _read_model(raw: bytes) -> Vocabulary | None:
    """Parse a ModelProto: fields 1 (pieces of text, score, type), 2 (trainer) and 3 (normalizer). None if not BPE."""
    parts = _fields(raw)
    pieces = [dict(_fields(value)) for number, value in parts if number == 1]
    trainer, normalizer = (dict(_fields(dict(parts).get(number, b""))) for number in (2, 3))
    if not pieces or trainer.get(3) != _BPE:
        return None
    return Vocabulary(
        [_bytes(piece[1]).decode() for piece in pieces],
        [struct.unpack("<f", struct.pack("<I", piece.get(2, 0)))[0] for piece in pieces],
        [piece.get(3, _NORMAL) == _NORMAL for piece in pieces],
        keeps_extra_spaces=not normalizer.get(4, 1),
        puts_space_in_front=bool(normalizer.get(3, 1)),
        charsmap=_bytes(normalizer.get(2, b"")),
    )


def _fields(raw: int | bytes) -> list[tuple[int, int | bytes]]:
    """Return a protobuf message's (field number, value) pairs: bytes for strings and messages, otherwise integers."""
    return [(field.field_number, field.data) for field in UnknownFieldSet(Empty.FromString(_bytes(raw)))]


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where text was expected")
    return value
