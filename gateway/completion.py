"""One completion on its way: its choices, the text pulled from them, and the answer as JSON or as events.

Tokens are read from the sequences, where the engine commits them; text is made here, while the next round is under way.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from gateway.engine import Engine
from gateway.errors import rest_error
from gateway.peers import Model
from gateway.schemas import CompletionRequest
from gateway.sequence import Sampling, Sequence
from gateway.tokenizer import TextStream

_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice has grown by."""

    index: int
    text: str
    tokens: list[int]
    finish_reason: str | None


class Choice:
    """One sequence seen as text."""

    def __init__(self, index: int, sequence: Sequence, text: TextStream):
        self.index, self.sequence, self._text = index, sequence, text
        self.finish_reason: str | None = None
        self._seen = 0

    @property
    def tokens(self) -> int:
        """How many tokens belong to the text: none after a stop string."""
        return self._text.taken

    @property
    def accepted(self) -> int:
        return min(self.sequence.accepted, self.tokens)

    @property
    def rejected(self) -> int:
        return self.sequence.drafted - self.accepted

    def pull(self) -> Piece | None:
        """What is new since the last pull; None when nothing is to be said."""
        if self.finish_reason is not None:
            return None
        sequence, taken = self.sequence, self._text.taken
        new = sequence.output[self._seen :]
        self._seen += len(new)
        text = self._text.push(new)
        if sequence.finished and not self._text.stopped:
            text += self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        elif sequence.finished:
            self.finish_reason = sequence.finish_reason
        elif not new:
            return None
        return Piece(self.index, text, new[: self._text.taken - taken], self.finish_reason)


class Completion:
    """Submits a request's sequences and turns them into the answer. `close` frees whatever is still running."""

    def __init__(self, engine: Engine, request: CompletionRequest, model: Model, prompts: list[list[int]]):
        self.engine, self.request, self.model, self.prompts = engine, request, model, prompts
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._changed = asyncio.Event()
        self.choices = [
            self._choice(at * request.n + choice, sequence)
            for at, prompt in enumerate(prompts)
            for choice, sequence in enumerate(sequences_of(engine, request, model, prompt))
        ]

    def _choice(self, index: int, sequence: Sequence) -> Choice:
        sequence.listener = self._changed.set
        sequence.hears_rounds = self.request.stream or bool(self.request.stops)
        return Choice(index, sequence, TextStream(self.model.codec, sequence.prompt, self.request.stops))

    def submit(self) -> None:
        """Raises OutOfCapacity or NoVerifier."""
        self.engine.submit([choice.sequence for choice in self.choices])

    def close(self) -> None:
        self.engine.finish([choice.sequence for choice in self.choices], "abort")

    async def whole(self) -> dict[str, Any]:
        """The answer as one object. Raises what ended any of its choices early."""
        texts = ["" for _ in self.choices]
        async for piece in self._pieces():
            if piece is not None:
                texts[piece.index] += piece.text
        answer = self._head()
        answer["choices"] = [self._choice_object(choice, texts[choice.index]) for choice in self.choices]
        answer["usage"] = self._usage()
        if self.request.return_metrics:
            answer["metrics"] = self._metrics()
        return answer

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. An error in mid-stream is an event too."""
        try:
            async for piece in self._pieces(ping=self.engine.config.idle_ping):
                if piece is None:
                    yield _PING
                elif piece.text or piece.finish_reason or (piece.tokens and self.request.return_token_ids):
                    yield _event(self._chunk(piece))
            if self.request.include_usage or self.request.return_metrics:
                yield _event(self._last_chunk())
        except Exception as error:
            yield _event(rest_error(error)[1])
        yield _DONE

    async def _pieces(self, ping: float | None = None) -> AsyncIterator[Piece | None]:
        """What the choices grow by, as it comes; None when nothing came for `ping` seconds."""
        unfinished = self.choices
        while unfinished:
            try:
                async with asyncio.timeout(ping):
                    await self._changed.wait()
            except TimeoutError:
                yield None
                continue
            self._changed.clear()
            for choice in unfinished:
                if choice.sequence.error is not None:
                    raise choice.sequence.error
                if (piece := choice.pull()) is not None:
                    if piece.finish_reason is not None:
                        self.engine.finish([choice.sequence], piece.finish_reason)
                    yield piece
            unfinished = [choice for choice in unfinished if choice.finish_reason is None]

    # -- objects of the answer ---------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"spire-{self.model.info.target_fingerprint[:16]}",
        }

    def _choice_object(self, choice: Choice, text: str) -> dict[str, Any]:
        answer = {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = choice.sequence.prompt
            answer["token_ids"] = choice.sequence.output[: choice.tokens]
        return answer

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish_reason}
        if self.request.return_token_ids:
            choice["token_ids"] = piece.tokens
        chunk = self._head() | {"choices": [choice]}
        if self.request.include_usage:
            chunk["usage"] = self._usage() if self.request.continuous_usage else None
        return chunk

    def _last_chunk(self) -> dict[str, Any]:
        chunk = self._head() | {"choices": []}
        if self.request.include_usage:
            chunk["usage"] = self._usage()
        if self.request.return_metrics:
            chunk["metrics"] = self._metrics()
        return chunk

    def _cached_tokens(self) -> int:
        """Of each prompt once: its first choice is the one that may have computed the rest."""
        first_choices = self.choices[:: len(self.choices) // len(self.prompts)]
        return sum(choice.sequence.cached_tokens for choice in first_choices)

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.accepted for choice in self.choices),
                "rejected_prediction_tokens": sum(choice.rejected for choice in self.choices),
            },
        }

    def _metrics(self) -> dict[str, Any]:
        sequences = [choice.sequence for choice in self.choices]
        arrived = sequences[0].moments.arrived
        first = min(sequence.moments.first_token for sequence in sequences)
        last = max(sequence.moments.last_token for sequence in sequences)
        gaps = sum(sequence.moments.last_token - sequence.moments.first_token for sequence in sequences)
        later_tokens = sum(len(sequence.output) - 1 for sequence in sequences)
        tokens = sum(choice.tokens for choice in self.choices)
        return {
            "time_to_first_token_ms": 1000 * (first - arrived),
            "mean_itl_ms": 1000 * gaps / later_tokens if later_tokens else None,
            "tokens_per_second": tokens / (last - arrived),
            "speculative_decoding": speculation_figures(sequences),
        }


def speculation_figures(sequences: list[Sequence]) -> dict[str, Any]:
    """What speculation did for these sequences; every round counts, whether it had draft tokens or not."""
    rounds = sum(sequence.rounds for sequence in sequences)
    drafted = sum(sequence.drafted for sequence in sequences)
    histogram = _sum([sequence.accepted_histogram for sequence in sequences])
    accepted = sum(number * times for number, times in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "full_depth_histogram": _sum([sequence.full_depth_histogram for sequence in sequences]),
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def _sum(histograms: list[list[int]]) -> list[int]:
    return [sum(times) for times in zip_longest(*histograms, fillvalue=0)]


def sequences_of(engine: Engine, request: CompletionRequest, model: Model, prompt: list[int]) -> list[Sequence]:
    """The n choices of one prompt, as sequences."""
    speculation, seed = request.speculation, request.chosen_seed()
    k = 0 if speculation.draft == "off" else engine.config.k if speculation.k is None else speculation.k
    end_tokens = frozenset() if request.ignore_eos else frozenset(model.info.end_tokens)
    return [
        Sequence(
            id=engine.new_id(),
            prompt=prompt,
            sampling=Sampling(request.temperature, max(0, request.top_k), request.top_p, seed, choice),
            max_tokens=request.max_tokens,
            k=k or 0,
            automatic=k is None,
            end_tokens=end_tokens,
        )
        for choice in range(request.n)
    ]


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
