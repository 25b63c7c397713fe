"""Part 8: `transformers` with paged continuous batching, at the shape and batch of part 6's plain decoding.

Its model has random weights too. What counts is the time in which all requests decode.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from experiments.gpu.findings import Finding, Findings
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.bench.synthetic import config_of


@dataclass(frozen=True)
class Cell:
    """`batch` requests of `context` random tokens, each answered by `generate`."""

    batch: int
    context: int
    generate: int

    @property
    def name(self) -> str:
        return f"transformers, generate_batch, {self.batch} × {self.context:,}, plain"


_CELLS, _TINY_CELLS = (Cell(32, 1024, 128), Cell(32, 8000, 128)), (Cell(2, 24, 8),)


def measure(setting: Setting, findings: Findings) -> None:
    if importlib.util.find_spec("transformers") is None:
        findings.add(Finding("transformers", None, note="not installed"))
        return
    cells = _TINY_CELLS if setting.tiny else _CELLS
    model = _model(setting, max(cell.context + cell.generate for cell in cells))
    for cell in cells:
        with findings.attempt(cell.name):
            findings.add(Finding(cell.name, _tokens_per_second(model, cell), "tokens/s"))


def _model(setting: Setting, context: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**config_of(shape_of(setting), context).to_hugging_face())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with setting.device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation("sdpa")
    return model.eval()


def _tokens_per_second(model: Any, cell: Cell) -> float:
    """Tokens a second of all requests from the last one's first token to the first one's last."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generator = torch.Generator().manual_seed(0)
    shape = cell.batch, cell.context
    prompts = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    asked = GenerationConfig(max_new_tokens=cell.generate, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # By default it takes most of the memory of the device, on a CPU of the machine.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if cell in _TINY_CELLS else None
    batched = {"generation_config": asked, "continuous_batching_config": small, "record_timestamps": True}
    answers = model.generate_batch(prompts, **batched).values()
    if len(answers) != cell.batch or any(answer.error for answer in answers):
        raise RuntimeError(f"{len(answers)} of {cell.batch} answers, {[a.error for a in answers if a.error][:1]}")
    stamps = [answer.timestamps for answer in answers]
    began, ended = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    if ended <= began:
        raise RuntimeError("the first request ended before the last one began: there is no time in which all decode")
    counted = sum(began < stamp <= ended for each in stamps for stamp in each)
    return counted / (ended - began)
