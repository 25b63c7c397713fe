"""The usage and metrics of a completion: token counts, times, and statistics of speculation."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from gateway.api.choice import Choice
from gateway.sequence import GREEDY, Sequence
from spire.v1.tensor_pb2 import Rule


def usage(prompts: list[list[int]], choices: list[Choice], candidates: int) -> dict[str, Any]:
    """Return OpenAI's usage object. `choices` contains `candidates` choices for each prompt, in order."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(choice.tokens for choice in choices)
    # Of each prompt's first choice only: the others may copy the prefix that it computed.
    cached_tokens = sum(choice.sequence.cached_tokens for choice in choices[::candidates])
    accepted = sum(min(choice.sequence.accepted, choice.tokens) for choice in choices)
    drafted = sum(choice.sequence.drafted for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def metrics(choices: list[Choice]) -> dict[str, Any]:
    """Return the latency and speculation metrics of choices. Every choice must have tokens."""
    sequences = [choice.sequence for choice in choices]
    sampling = sequences[0].sampling
    rule = Rule.Name(sampling.rule).removeprefix("RULE_").lower() if sampling.temperature else GREEDY
    arrived = sequences[0].arrived_at
    first = min(sequence.first_token_at for sequence in sequences)
    last = max(sequence.last_token_at for sequence in sequences)
    gaps = sum(sequence.last_token_at - sequence.first_token_at for sequence in sequences)
    later_tokens = sum(max(0, len(sequence.output) - 1) for sequence in sequences)
    return {
        "time_to_first_token_ms": 1000 * (first - arrived),
        "mean_itl_ms": 1000 * gaps / later_tokens if later_tokens else None,
        "tokens_per_second": sum(choice.tokens for choice in choices) / (last - arrived),
        "speculative_decoding": {"rule": rule, **speculation_figures(sequences)},
    }


def speculation_figures(sequences: list[Sequence]) -> dict[str, Any]:
    """Return the speculation metrics of these sequences. Rounds without draft tokens count, with none accepted."""
    rounds = sum(len(sequence.rounds) for sequence in sequences)
    drafted = sum(sequence.drafted for sequence in sequences)
    histogram = _sum([sequence.accepted_histogram for sequence in sequences])
    accepted = sum(number * times for number, times in enumerate(histogram))
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "drafted_histogram": _sum([sequence.drafted_histogram for sequence in sequences]),
        "full_depth_histogram": _sum([sequence.full_depth_histogram for sequence in sequences]),
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def _sum(histograms: list[list[int]]) -> list[int]:
    return [sum(times) for times in zip_longest(*histograms, fillvalue=0)]
