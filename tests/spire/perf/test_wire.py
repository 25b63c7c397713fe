"""What travels between the services in a round, in bytes and by carrier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spire.perf.hardware import gpu
from spire.perf.perf_model import round_cost
from spire.perf.shapes import LLAMA_3_8B, LLAMA_3_70B, paper_draft, trained_draft
from spire.perf.wire import guess_bytes, wire_bytes, wire_of


def test_q_over_a_draft_s_own_vocabulary_travels_whole() -> None:
    target, whole = replace(LLAMA_3_8B, vocab_size=49_152), trained_draft("spire", LLAMA_3_8B)
    own = replace(whole, shape=replace(whole.shape, vocab_size=8_192))
    assert guess_bytes(target, own, 16, 4) == 16 * 4 * (4 + 2 * 8_192)


def test_drafts_that_need_no_activations_are_sent_none() -> None:
    spire, vanilla = (
        wire_bytes(LLAMA_3_70B, paper_draft(kind, LLAMA_3_70B), 1, 4, 3, 2) for kind in ("spire", "vanilla")
    )
    assert spire - vanilla == 3 * 20 * 8192 * 2


def test_what_magicdec_guesses_does_not_travel() -> None:
    itself, vanilla = (paper_draft(kind, LLAMA_3_8B) for kind in ("magicdec", "vanilla"))
    answers, all_ = (wire_bytes(LLAMA_3_8B, draft, 64, 4, 3.0, 2) for draft in (itself, vanilla))
    assert answers == 64 * 3 * 4
    assert all_ - answers == 64 * 4 * (4 + 4096 * 8)
    cost = round_cost(LLAMA_3_8B, itself, 64, 512, 4, 3.0, gpu("h100"))
    wire = wire_of(gpu("h100").carrier, gpu("h100"))
    assert cost.wire == pytest.approx(wire.round_trip + answers * wire.guesses)


def test_rows_travel_as_fast_as_their_carrier() -> None:
    """On one GPU a byte of activations is read and written once; a ring was measured, and so was a stream."""
    on_gpu, ring, stream = (wire_of(carrier, gpu("h100")) for carrier in ("cuda_ipc", "shared_memory", "grpc"))
    assert on_gpu.activations == 2 / 3.35e12 < ring.activations < stream.activations == 1 / 1.7e9
    assert on_gpu.guesses == on_gpu.activations < ring.guesses < stream.guesses
    assert on_gpu.round_trip == ring.round_trip == stream.round_trip > 0
