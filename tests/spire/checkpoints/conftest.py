"""stories260K as a GGUF file, and texts on which tokenizers differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Changes = dict[str, Any]
Writer = Callable[..., Path]

SAMPLES = [
    "Once upon a time, there was a little girl named Lily.",
    'He said: "It costs $3.50, doesn\'t it?"\nShe nodded.\n\n\tThen they left.',
    "naïve café, Gödel, Ångström; 你好, мир! 🙂",
    "aaaaaaaaaaaaaaa lllllll ........ ------- 1234567890",
    "\x00\x01 control \x7f",
    "  leading, doubled  and trailing spaces  ",
    " ",
    "",
]


@pytest.fixture
def stories_gguf(stories_dir: Path, tmp_path: Path) -> Writer:
    """Writes stories260K as a GGUF file, with other metadata, tensors or types where a test says so."""
    from gguf import GGMLQuantizationType

    from spire.checkpoints.weights import load_tensors
    from spire.model.config import load_model_config
    from tests.gguf_files import gguf_tensors, sentencepiece_metadata, shape_metadata, write_gguf

    config, tensors = load_model_config(stories_dir), load_tensors(stories_dir)

    def write(
        metadata: Changes | None = None,
        tensors_too: Changes | None = None,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    ) -> Path:
        held = gguf_tensors(tensors, config) | (tensors_too or {})
        held = {name: values for name, values in held.items() if values is not None}
        described = shape_metadata(config) | sentencepiece_metadata() | (metadata or {})
        return write_gguf(tmp_path / "stories.gguf", described, held, kind)

    return write
