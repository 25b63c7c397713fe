"""Completions whose choices were decoded before, for tests of how answers are written."""

from __future__ import annotations

import threading
from typing import Any

from gateway.api.completion import Completion
from gateway.config import GatewayConfig
from gateway.requests.schemas import CompletionRequest
from gateway.sequence import Logprob, Sequence, State
from gateway.text.tokenizer import TextCodec
from gateway.verifier_client import ServedModel
from spire.text.chat_template import ChatTemplate
from spire.v1 import verifier_pb2


class Idle:
    """Stands for the engine of sequences that were decoded before."""

    config = GatewayConfig()

    def new_id(self, request_id: str) -> str:
        return request_id

    def finish(self, sequences: list[Sequence], reason: str) -> None:
        pass


def decoded(kind: type[Completion], codec: TextCodec, prompts: list[list[int]], **fields: Any) -> Completion:
    """A completion whose choices are all there: one token each."""
    info = verifier_pb2.GetInfoResponse(model_name="x", max_context=512)
    model = ServedModel(info, codec, ChatTemplate("", {}), 0)
    request = CompletionRequest(prompt=prompts, max_tokens=1, **fields)
    completion = kind(Idle(), request, model, prompts, "x", 60)  # type: ignore[arg-type]
    for choice in completion.choices:
        sequence = choice.sequence
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = Read(len(sequence.prompt) - 1)  # type: ignore[assignment]
        sequence.output, sequence.logprobs, sequence.from_draft = [300], [Logprob(-1.0, [(300, -1.0)])], [False]
        sequence.state, sequence.finish_reason = State.FINISHED, "length"
    completion._changed.set()
    return completion


class Read:
    """A prompt's logprobs that note how often they are read, and whether on the main thread, where the loop is."""

    def __init__(self, length: int):
        self.length, self.times, self.on_the_loop = length, 0, False

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> Logprob:
        self.times += 1
        self.on_the_loop |= threading.current_thread() is threading.main_thread()
        return Logprob(-1.0, [(5, -1.0), (6, -2.0)], 1)
