"""The process of `spire bench --peers transformers`, which times `transformers` generating from Spire's checkpoint.

    python -m spire.bench.peers.transformers_peer < task.json

`spire.bench.peers.servers` writes the task; the results of each mode are a line of JSON on standard output. A mode with
several ways to run (kind of cache, attention implementation, number of draft tokens) first tries each way briefly and
is then measured in the fastest. Tokens are drawn at the requested temperature from the whole vocabulary.

Does not know: batches of assisted generation, which transformers does not support.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from spire.bench.system import peak_of
from spire.model.placement import choose_device, choose_dtype

_PROBE_TOKENS = 16
_ATTENTIONS = ("sdpa", "eager")

Way = dict[str, Any]


class _Clock(StoppingCriteria):
    """Records the time and the sequence length of each step, and never stops the generation."""

    def __init__(self) -> None:
        self.stamps: list[tuple[float, int]] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self.stamps.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Peer:
    """A checkpoint loaded by transformers, with methods to find the fastest way to generate and to run it."""

    def __init__(self, model: str, assistant: str | None, dtype: str, temperature: float):
        self.device = choose_device("auto")
        self._options = {"dtype": choose_dtype(dtype, self.device)}
        self.model = self._open(model)
        self.assistant = self._open(assistant) if assistant else None
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._drawing = drawing if temperature else {"do_sample": False}

    def _open(self, directory: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, **self._options)
        # Generate as many tokens as requested: no token ends the text.
        model.generation_config.eos_token_id = None
        return model.to(self.device).eval()

    def modes(self, k: int) -> dict[str, list[Way]]:
        """Return the ways to try for each mode: generate, prompt lookup and, with an assistant model, assisted."""
        plain = [{"attention": a, "cache_implementation": c} for a in _ATTENTIONS for c in ("dynamic", "static")]
        modes: dict[str, list[Way]] = {"generate": plain}
        modes["prompt lookup"] = [{"attention": _ATTENTIONS[0], "prompt_lookup_num_tokens": n} for n in (k, 10)]
        if self.assistant:
            # k draft tokens as in Spire, or transformers' default: up to 20 while the assistant is confident.
            depths = ({"assistant_tokens": k, "confidence": 0.0}, {"assistant_tokens": 20, "confidence": 0.4})
            modes["assisted"] = [{"attention": a} | depth for a in _ATTENTIONS for depth in depths]
        return modes

    def quickest(self, ways: Sequence[Way], prompts: list[list[int]]) -> Way:
        """Return the fastest way. Each way runs twice, briefly; only the second run counts."""

        def seconds(way: Way) -> float:
            self.run(way, prompts, _PROBE_TOKENS)
            stamps = self.run(way, prompts, _PROBE_TOKENS)
            taken: float = (stamps[-1][0] - stamps[0][0]) / max(1, stamps[-1][1] - stamps[0][1])
            return taken

        return min(ways, key=seconds)

    def run(self, way: Way, prompts: list[list[int]], tokens: int) -> list[tuple[float, int]]:
        """Generate `tokens` tokens once. Return (seconds since the start, tokens so far) of each step."""
        way = dict(way)
        self.model.set_attn_implementation(way.pop("attention"))
        if self.assistant and "assistant_tokens" in way:
            # transformers reads these values from the assistant, and changes the confidence as it generates.
            self.assistant.generation_config.num_assistant_tokens = way.pop("assistant_tokens")
            self.assistant.generation_config.assistant_confidence_threshold = way.pop("confidence")
            way["assistant_model"] = self.assistant
        ids = torch.tensor(prompts, device=self.device)
        clock, length = _Clock(), ids.shape[1]
        began = time.perf_counter()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([clock]),
            **self._drawing,
            **way,
        )
        return [(moment - began, reached - length) for moment, reached in clock.stamps]


def main() -> None:
    task = json.load(sys.stdin)
    peer = Peer(task["model"], task["assistant"], task["dtype"], task["temperature"])
    for load in task["loads"]:
        for mode, ways in peer.modes(task["k"]).items():
            if mode == "generate" or load["batch"] == 1:
                way = peer.quickest(ways, load["prompts"][0])
                runs = [peer.run(way, prompts, load["generate"]) for prompts in load["prompts"]]
                answer = {"mode": mode, "way": way, "batch": load["batch"], "context": load["context"], "runs": runs}
                print(json.dumps(answer | {"peak_memory_bytes": peak_of([os.getpid()])}), flush=True)


if __name__ == "__main__":
    main()
