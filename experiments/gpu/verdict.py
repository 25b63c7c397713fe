"""Part 4: unembedding and verdict of a step's blocks for an 8B shape's vocabulary, by kind of sampling."""

from __future__ import annotations

import torch

from experiments.gpu.expectation import PRODUCTS
from experiments.gpu.findings import Finding, Findings
from experiments.gpu.launches import in_words, launches
from experiments.gpu.machine_rates import copy_rate
from experiments.gpu.part import Setting
from experiments.gpu.shapes import shape_of
from spire.bench.synthetic import config_of
from spire.checkpoints.random_weights import draw_weights
from spire.decoding.verification import SparseDistribution, verify
from spire.model.backends.placed import backend_for
from spire.model.backends.reference import BlockBatch
from spire.model.target import Target
from spire.perf.microbenchmarks import Bench
from spire.perf.shapes import Shape
from spire.rpc.sampling import from_protos
from spire.v1.tensor_pb2 import RULE_BLOCK, Sampling

_BATCH, _TINY_BATCH, _DEPTH, _CANDIDATES = 32, 2, 4, 4096
_SAMPLINGS = {
    "greedy": Sampling(temperature=0, top_p=1),
    "sampled": Sampling(temperature=1, top_p=1, seed=1, rule=RULE_BLOCK),
    "sampled, top_p = 0.9": Sampling(temperature=1, top_p=0.9, seed=1, rule=RULE_BLOCK),
}
# How often the logits are read or written: softmax, sums and the residual.
_PASSES = 10


@torch.inference_mode()
def measure(setting: Setting, findings: Findings) -> None:
    rate, shape = copy_rate(setting), shape_of(setting)
    batch = _TINY_BATCH if setting.tiny else _BATCH
    backend, config = backend_for(setting.device), config_of(shape, 16).model_copy(update={"num_hidden_layers": 1})
    target = backend.pack(draw_weights(lambda: Target(config), torch.bfloat16, setting.device))
    for name, sampling in _SAMPLINGS.items():
        for k in (0, _DEPTH):
            what = f"verdict, {batch} sequences, {f'k = {k}' if k else 'plain'}, {name}"
            with findings.attempt(what):
                hidden_BTD = torch.randn(batch, k + 1, shape.hidden_size, device=setting.device).bfloat16()
                blocks = _blocks(batch, k, sampling, shape, setting.device)

                def judge(hidden_BTD: torch.Tensor = hidden_BTD, blocks: BlockBatch = blocks) -> object:
                    return backend.verdict(target, hidden_BTD, blocks, verify)

                milliseconds = 1000 * Bench(setting.device, torch.bfloat16, setting.least_seconds).seconds(judge)
                counted = launches(judge, setting.device)
                expected = 1000 * _expected(shape, batch * (k + 1), rate)
                findings.add(Finding(what, milliseconds, "ms", expected, in_words(counted), counted))


def _blocks(batch: int, k: int, sampling: Sampling, shape: Shape, device: torch.device) -> BlockBatch:
    """Blocks with random draft tokens, each the most probable of its candidates."""
    ids_BKM = torch.rand(batch, k, shape.vocab_size, device=device).topk(min(_CANDIDATES, shape.vocab_size)).indices
    probs_BKM = torch.linspace(8, 0, ids_BKM.shape[-1], device=device).softmax(-1).expand(ids_BKM.shape).contiguous()
    q = SparseDistribution(ids_BKM, probs_BKM) if k and sampling.temperature else None
    counts_B = torch.full((batch,), k, device=device)
    rows = from_protos([sampling] * batch, device)
    return BlockBatch(ids_BKM[..., 0].contiguous(), counts_B, q, rows, torch.full((batch,), 9, device=device))


def _expected(shape: Shape, positions: int, rate: float) -> float:
    """Seconds to read the matrix of the unembedding once, and logits in fp32 `_PASSES` times."""
    return (PRODUCTS * 2 * shape.vocab_size * shape.hidden_size + _PASSES * 4 * positions * shape.vocab_size) / rate
