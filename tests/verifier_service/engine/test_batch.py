"""Whatever a draft said of many blocks at once is padded to what each of them would have brought by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from spire.decoding.verification import SparseDistribution
from spire.errors import InvalidRequest
from spire.kernels import every_kernels
from spire.rpc.tensors import put
from spire.v1 import verifier_pb2 as pb
from verifier_service.engine.batch import Block, Item, Q, SharedQ, VerifyTask, pad, q_problems, read_q
from verifier_service.engine.sequence import HeldSequence

V = 16
CPU = torch.device("cpu")


def block(slot: int, tokens: list[int], q: Q | None) -> Block:
    sequence = cast(HeldSequence, SimpleNamespace(newest=slot, slot=slot))
    return Block(sequence, 7, cast(VerifyTask, None), cast(Item, None), tokens, q)


def distributions(X: int, K: int, dtype: torch.dtype) -> Tensor:
    """q [X, K, V]"""
    return torch.rand(X, K, V, generator=torch.Generator().manual_seed(K)).softmax(dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(
    k=st.integers(1, 4),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    greedy=st.integers(0, 6),
    other=st.booleans(),
)
def test_rows_of_one_tensor_are_padded_as_tensors_of_their_own(
    dtype: torch.dtype, k: int, rows: list[int], greedy: int, other: bool
) -> None:
    """Beside a block that needs no q, of any length, and perhaps one whose q is of another draft."""
    probs_XKV, others_XKV = distributions(5, k, dtype), distributions(1, 2, dtype)
    tokens = list(range(1, k + 1))

    def padded(shared: bool) -> list[Tensor]:
        def q_of(probs_XKV: Tensor, row: int) -> Q:
            return Q(probs_XKV, V, row=row) if shared else Q(probs_XKV[row], V)

        blocks = [block(slot, tokens, q_of(probs_XKV, row)) for slot, row in enumerate(rows)]
        blocks.append(block(len(blocks), [3] * greedy, None))
        if other:
            blocks.append(block(len(blocks), [1, 2], q_of(others_XKV, 0)))
        batch = pad(blocks, CPU)
        assert batch.q is not None
        assert batch.q.probs_BKM.shape[:2] == batch.draft_BK.shape
        return [batch.tokens_BT, batch.counts_B, batch.widths_B, batch.q.probs_BKM, batch.q.sum_BK, batch.q.least_BK]

    for found, expected in zip(padded(shared=True), padded(shared=False), strict=True):
        assert torch.equal(found, expected)


@given(
    k=st.integers(1, 4),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True),
    longest=st.integers(1, 4),
    greedy=st.integers(0, 4),
)
def test_candidates_of_one_tensor_are_padded_as_tensors_of_their_own(
    k: int, rows: list[int], longest: int, greedy: int
) -> None:
    """As the target's own are: of three candidates, drafted as deep as the deepest block was asked for."""
    depth, M = max(k, longest), 3
    probs_XKM = distributions(5, depth, torch.float32)[..., :M].contiguous()
    ids_XKM = torch.stack([torch.randperm(V)[:M] for _ in range(5 * depth)]).view(5, depth, M)

    def padded(shared: bool) -> list[Tensor]:
        def q_of(row: int) -> Q:
            whole = Q(probs_XKM, M, ids_XKM, row)
            return whole if shared else Q(probs_XKM[row, :k], M, ids_XKM[row, :k])

        blocks = [block(slot, list(range(1, k + 1)), q_of(row)) for slot, row in enumerate(rows)]
        blocks.append(block(len(blocks), [3] * min(greedy, depth), None))
        batch = pad(blocks, CPU)
        assert batch.q is not None
        assert batch.q.ids_BKM is not None
        there_BK = torch.zeros(batch.draft_BK.shape, dtype=torch.bool)
        there_BK[: len(rows), :k] = True
        probs_BKM = batch.q.probs_BKM.masked_fill(~there_BK[..., None], 0)
        return [
            batch.tokens_BT,
            batch.counts_B,
            probs_BKM,
            batch.q.ids_BKM[there_BK],
            batch.q.of(batch.draft_BK)[there_BK],
        ]

    for found, expected in zip(padded(shared=True), padded(shared=False), strict=True):
        assert torch.equal(found, expected)


# --- q of a draft with a vocabulary of its own ----------------------------------------------------------------------


def message_of(probs_KM: Tensor, ids_M: list[int]) -> pb.DraftDistribution:
    message = pb.DraftDistribution()
    put(message.probabilities, probs_KM)
    put(message.ids, torch.tensor(ids_M, dtype=torch.int32))
    return message


@given(depths=st.lists(st.integers(0, 16), min_size=1, max_size=64))
def test_blocks_in_order_of_depth_are_computed_without_padding(depths: list[int]) -> None:
    blocks = [block(slot, list(range(1, k + 1)), None) for slot, k in enumerate(sorted(depths))]
    batch = pad(blocks, CPU)
    slots = [slot for slots, _ in batch.rectangles() for slot in slots]
    rows = [row for _, tokens_BT in batch.rectangles() for row in tokens_BT.tolist()]
    assert [*zip(slots, rows, strict=True)] == [
        (one.sequence.slot, [one.sequence.newest, *one.tokens]) for one in blocks
    ]
    assert batch.positions == sum(depths) + len(depths)


def test_q_over_a_drafts_own_vocabulary_is_zero_elsewhere() -> None:
    probs_KM = torch.rand(3, 4).softmax(dim=-1)
    q = read_q(message_of(probs_KM, [1, 5, 6, 15]), 3, V, None)
    assert q is not None
    assert q.ids is None
    assert q.vocabulary is not None
    spread_KV = SparseDistribution(None, q.probs[None], vocabulary_M=q.vocabulary).spread(V).probs_BKM[0]
    assert torch.equal(spread_KV[:, [1, 5, 6, 15]], probs_KM)
    assert not spread_KV[:, [0, 2, 3, 4, *range(7, 15)]].any()


def test_blocks_that_all_stopped_early_leave_their_q_to_the_kernel() -> None:
    """The rows behind the tokens that were drafted are left out."""
    message = message_of(torch.rand(2, 3, 16).softmax(dim=-1).bfloat16().flatten(0, 1), [*range(16)])
    message.probabilities.shape[:] = [2, 3, 16]
    shared = SharedQ(message, (2, 3), 2)
    batch = pad([block(row, [1, 2], shared.of(row, 2, 32, None)) for row in range(2)], CPU)
    assert batch.q is not None
    assert batch.q.collected == bool(every_kernels())
    assert batch.q.probs_BKM.shape == (2, 2, 16)


def test_blocks_of_drafts_with_different_vocabularies_are_one_batch() -> None:
    probs_KM = torch.rand(2, 4).softmax(dim=-1)
    of_some, of_others = (read_q(message_of(probs_KM, ids), 2, V, None) for ids in ([1, 5, 6, 15], [0, 5, 7, 8]))
    batch = pad([block(0, [5, 6], of_some), block(1, [7, 8], of_others)], CPU)
    assert batch.q is not None
    expected_BK = torch.stack([probs_KM[range(2), [1, 2]], probs_KM[range(2), [2, 3]]])
    torch.testing.assert_close(batch.q.of(batch.draft_BK), expected_BK)
    assert q_problems(batch, V) == ["", ""]


@pytest.mark.parametrize(
    ("shape", "ids_M", "says"),
    [
        ((3, 4), [1, 5, 15], r"q over 3 tokens has shape \[3, 4\], expected \[3, 3\]"),
        ((2, 3), [1, 5, 15], r"q over 3 tokens has shape \[2, 3\], expected \[3, 3\]"),
        ((3, 3), [5, 1, 15], "must ascend and lie below 16"),
        ((3, 3), [1, 1, 15], "must ascend and lie below 16"),
        ((3, 3), [1, 5, 16], "must ascend and lie below 16"),
        ((3, 3), [-1, 5, 15], "must ascend and lie below 16"),
        ((3, 0), [], "must ascend and lie below 16"),
    ],
)
def test_a_vocabulary_of_q_that_is_none_is_refused(shape: tuple[int, int], ids_M: list[int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_q(message_of(torch.rand(shape), ids_M), 3, V, None)
