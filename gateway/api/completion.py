"""One completion in progress: its choices, and the answer built from them as JSON or as events."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from itertools import chain
from math import inf
from typing import Any

import structlog

from gateway.api.choice import Choice, Echo, Piece
from gateway.api.logprobs import arrays, of_prompt
from gateway.api.usage import metrics, usage
from gateway.aside import Stretch, aside
from gateway.errors import BadParameter, DeadlinePassed, rest_error
from gateway.requests.adjustments import adjustments_of, field_of
from gateway.requests.schemas import CompletionRequest
from gateway.rounds.admission import Charge
from gateway.rounds.engine import Engine
from gateway.sequence import Sequence
from gateway.text.json_pieces import Joined, Large, Shared, Shown, pieces_of
from gateway.text.tokenizer import TextStream
from gateway.verifier_client import ServedModel
from spire.errors import InvalidRequest, SpireError
from spire.v1.tensor_pb2 import Sampling
from spire.v1.verifier_pb2 import Adjustments

log = structlog.get_logger("gateway")

_PING = b": ping\n\n"
_DONE = b"data: [DONE]\n\n"
# Most sequences of a request that the log names.
_MOST_LOGGED = 4


class Completion:
    """Submits the sequences of a completion request and builds the answer. `close` ends sequences that still run."""

    id_prefix = "cmpl"
    object = "text_completion"
    # True: each choice contains the logprobs of its prompt. False: the answer itself contains those of its only prompt.
    scores_in_choices = True

    def __init__(
        self,
        engine: Engine,
        request: CompletionRequest,
        model: ServedModel,
        prompts: list[list[int]],
        request_id: str,
        seconds: float,
    ):
        self.engine, self.request, self.model, self.prompts = engine, request, model, prompts
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        # When a ping is due unless something else is written before; never for an answer that is no stream.
        self._ping_at = inf
        # The name of the client's API key: capacity is shared between keys.
        self.key = ""
        # The tokens charged to the API key; settled when the completion ends.
        self.charge = Charge(None, 0)
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._changed = asyncio.Event()
        adjustments = adjustments_of(request, model.info.end_tokens)
        sequences = [one for prompt in prompts for one in self._sequences(prompt, adjustments, request_id)]
        first = [sequence.id for sequence in sequences[:_MOST_LOGGED]]
        log.debug("completion begins", id=self.id, choices=len(sequences), sequences=first)
        self.choices = [self._choice(index, sequence) for index, sequence in enumerate(sequences)]

    def _choice(self, index: int, sequence: Sequence) -> Choice:
        request = self.request
        sequence.listener = self._changed.set
        sequence.hears_rounds = request.stream or bool(request.stops)
        text = TextStream(
            self.model.codec,
            sequence.prompt,
            request.stops,
            keep_stop=request.include_stop_str_in_output,
            min_tokens=request.min_tokens,
            silent=frozenset() if request.include_stop_str_in_output else sequence.end_tokens,
            skip_special_tokens=request.skip_special_tokens,
        )
        return Choice(index, sequence, text)

    def _sequences(self, prompt: list[int], adjustments: Adjustments | None, request_id: str) -> list[Sequence]:
        """Return a prompt's candidates as sequences. Only the first one requests the prompt's logprobs, for all."""
        request, speculation, config = self.request, self.request.speculation, self.engine.config
        seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
        k = 0 if speculation.draft == "off" else config.k if speculation.k is None else speculation.k
        rule = config.rule_for(speculation.rule, request.seed is not None)
        stop = speculation.stop or config.stop or ("cost" if k is None else "off")
        end_tokens = {*request.stop_token_ids}
        if request.shape is not None or not request.ignore_eos:
            end_tokens.update(self.model.info.end_tokens)
        return [
            Sequence(
                id=self.engine.new_id(request_id),
                prompt=prompt,
                sampling=Sampling(
                    temperature=request.temperature,
                    top_k=max(0, request.top_k),
                    top_p=max(request.top_p, 1e-30),  # must not become 0 as a float32
                    seed=seed,
                    choice=choice,
                    min_p=request.min_p,
                    rule=f"RULE_{rule.upper()}",
                ),
                max_tokens=request.max_tokens,
                k=k or 0,
                automatic=k is None,
                stop=stop,
                end_tokens=frozenset(end_tokens),
                adjustments=adjustments,
                top_logprobs=request.most_logprobs,
                wants_prompt_logprobs=request.scores_prompt and choice == 0,
                cache_salt=request.cache_salt or "",
            )
            for choice in range(request.candidates)
        ]

    def submit(self) -> None:
        """Queue the sequences of all choices, or none. Raises QueueFull, InvalidRequest, NoVerifier or ShuttingDown."""
        try:
            self.engine.submit([choice.sequence for choice in self.choices], self.key)
        except SpireError:
            self.charge.settle(0)
            raise

    def close(self) -> None:
        sequences = [choice.sequence for choice in self.choices]
        self.engine.finish(sequences, "abort")
        # The tokens used: all output, and the prompts whose first choice was admitted.
        prompts = sum(len(first.prompt) for first in sequences[:: self.request.candidates] if first.admitted_at)
        self.charge.settle(prompts + sum(len(sequence.output) for sequence in sequences))

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request may use: its prompts, and `max_tokens` for each choice."""
        return sum(map(len, self.prompts)) + sum(choice.sequence.max_tokens for choice in self.choices)

    async def begun(self) -> None:
        """Wait for the first token of any choice, at most `idle_ping` s. Raises a choice's error, or DeadlinePassed."""
        await self._hear(asyncio.get_running_loop().time() + self.engine.config.idle_ping)
        for choice in self.choices:
            self._check(choice)

    async def whole(self) -> dict[str, Any]:
        """Return the answer as one object once all choices have ended. Raises a choice's error, or DeadlinePassed."""
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        async for piece in self._pieces():
            if piece is not None:
                pieces[piece.index].append(piece)
        return self._answer(pieces)

    def _chosen(self) -> list[Choice]:
        """Return each prompt's n candidates of best mean logprob, best first; all in order if there are only n."""
        n, candidates = self.request.n, self.request.candidates
        if n == candidates:
            return self.choices
        groups = [self.choices[at : at + candidates] for at in range(0, len(self.choices), candidates)]
        best = [sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[:n] for group in groups]
        return [*chain.from_iterable(best)]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An error during the stream becomes an event too."""
        loop, ping = asyncio.get_running_loop(), self.engine.config.idle_ping
        self._ping_at = loop.time() + ping
        try:
            async for piece in self._pieces():
                if piece is not None and self._says_something(piece):
                    # On another thread if the piece echoes a prompt, which may be long.
                    yield self._event_of(piece) if piece.echo is None else await aside(self._event_of, piece)
                elif loop.time() >= self._ping_at:
                    yield _PING
                else:
                    continue
                self._ping_at = loop.time() + ping
            if self.request.include_usage or self.request.return_metrics:
                yield self._event_of(None)
        except Exception as error:
            yield _event(rest_error(error)[1])
        yield _DONE

    def _says_something(self, piece: Piece) -> bool:
        request = self.request
        tells_tokens = request.return_token_ids or request.return_token_origins or request.return_rounds
        said = piece.echo or piece.text or piece.entries or piece.finish_reason
        return bool(said or (piece.tokens and tells_tokens))

    async def _pieces(self) -> AsyncIterator[Piece | None]:
        """Yield pieces of the choices' output as they arrive, and None if none has arrived by `_ping_at`."""
        if self.request.echo:
            await aside(self._echo_prompts)
        unfinished, stretch = self.choices, Stretch()
        while unfinished:
            if not await self._hear(self._ping_at):
                yield None
                continue
            self._changed.clear()
            for choice in unfinished:
                self._check(choice)
                while (piece := choice.pull()) is not None:
                    if piece.finish_reason is not None:
                        self.engine.finish([choice.sequence], piece.finish_reason)
                    yield piece
                    await stretch.breathe()
            unfinished = [choice for choice in unfinished if choice.finish_reason is None]

    async def _hear(self, until: float) -> bool:
        """Return True once a choice progresses, False if none has by the time `until`. Raises DeadlinePassed."""
        until = min(until, self._deadline)
        try:
            async with asyncio.timeout_at(until):
                await self._changed.wait()
        except TimeoutError:
            if until == self._deadline:
                raise DeadlinePassed(f"the request was not done within {self._seconds:g} s") from None
            return False
        return True

    def _check(self, choice: Choice) -> None:
        """Raise the choice's error, if any. A field that the verifier refused is named as in the client's request."""
        error = choice.sequence.error
        if isinstance(error, InvalidRequest) and (field := field_of(self.request, error.param)):
            raise BadParameter(field, str(error)) from error
        if error is not None:
            raise error

    def _echo_prompts(self) -> None:
        request, codec = self.request, self.model.codec
        given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        for at, tokens in enumerate(self.prompts):
            if isinstance(given[at], str) and request.truncate_prompt_tokens is None:
                echo = Echo(given[at], codec.offsets(given[at], request.add_special_tokens))
            else:
                stream = TextStream(codec, [], [], skip_special_tokens=request.skip_special_tokens)
                echo = Echo(stream.push(tokens) + stream.flush(), stream.offsets)
            choices = self.choices[at * request.candidates :][: request.candidates]
            echo.scored = choices[0].sequence if request.scores_prompt and request.logprobs is not None else None
            for choice in choices:
                choice.begin_with(echo)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"spire-{self.model.info.target_fingerprint[:16]}",
        }

    def _answer(self, pieces: list[list[Piece]]) -> dict[str, Any]:
        """Return the whole answer from the pieces of each choice. A choice's object is built only when encoded."""
        answer, scores, chosen = self._head(), self._prompt_logprobs(), enumerate(self._chosen())
        answer["choices"] = Large(self._choice_object(at, one, pieces[one.index], scores) for at, one in chosen)
        if scores and not self.scores_in_choices:
            answer["prompt_logprobs"] = scores[0]
        answer["usage"] = self._usage()
        if self.request.return_metrics:
            answer["metrics"] = metrics(self.choices)
        return answer

    def _choice_object(self, index: int, choice: Choice, pieces: list[Piece], scores: list[Shared]) -> dict[str, Any]:
        whole = Piece(
            index,
            next((piece.echo for piece in pieces), None),
            "".join(piece.text for piece in pieces),
            [*chain.from_iterable(piece.tokens for piece in pieces)],
            [*chain.from_iterable(piece.origins for piece in pieces)],
            [*chain.from_iterable(piece.rounds for piece in pieces)],
            [*chain.from_iterable(piece.entries for piece in pieces)],
            choice.finish_reason,
        )
        answer = self._piece_object(whole)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = choice.sequence.prompt
        if scores and self.scores_in_choices:
            answer["prompt_logprobs"] = scores[choice.index // self.request.candidates]
        return answer

    def _prompt_logprobs(self) -> list[Shared]:
        """Return the logprobs of each prompt in the format of the API; empty if not requested."""
        if (top := self.request.prompt_logprobs) is None:
            return []
        scored = [choice.sequence for choice in self.choices[:: self.request.candidates]]
        return [Shared(of_prompt(each.prompt, each.prompt_logprobs or [], self.model.codec, top)) for each in scored]

    def _piece_object(self, piece: Piece) -> dict[str, Any]:
        request = self.request
        logprobs = None if request.logprobs is None else self._logprobs(piece, request.logprobs)
        answer = {"index": piece.index, **self._said(piece), "logprobs": logprobs, "finish_reason": piece.finish_reason}
        if request.return_token_ids:
            answer["token_ids"] = piece.tokens
        if request.return_token_origins:
            answer["token_origins"] = piece.origins
        if request.return_rounds:
            answer["rounds"] = Shown(piece.rounds, asdict)
        return answer

    def _said(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece.echo.text + piece.text if piece.echo else piece.text}

    def _logprobs(self, piece: Piece, top: int) -> dict[str, Any]:
        codec = self.model.codec
        of_echo = piece.echo.arrays(codec, top) if piece.echo else {}
        own = arrays(piece.entries, codec, top)
        return {name: Joined([of_echo[name], shown] if of_echo else [shown]) for name, shown in own.items()}

    def _event_of(self, piece: Piece | None) -> bytes:
        """Return the event for a piece, or the last event for None, with usage and metrics if requested."""
        chunk = self._head() | {"choices": Large([self._piece_object(piece)] if piece else [])}
        if self.request.include_usage:
            chunk["usage"] = self._usage() if piece is None or self.request.continuous_usage else None
        if piece is None and self.request.return_metrics:
            chunk["metrics"] = metrics(self.choices)
        return _event(chunk)

    def _usage(self) -> dict[str, Any]:
        return usage(self.prompts, self.choices, self.request.candidates)


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + b"".join(pieces_of(message)) + b"\n\n"
