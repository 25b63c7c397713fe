"""Limits of the protocol that the gateway tells its clients and the verifier holds by itself."""

from __future__ import annotations

from spire.errors import InvalidRequest

# Alternatives that are reported beside a token.
MAX_LOGPROBS = 20

# A gateway's names are shorter: its own id, a number, the request's id, a life.
MAX_SEQUENCE_ID = 256

MAX_GRAMMAR_BYTES = 64 << 10

# Of one request's adjustments. The model's own end tokens come on top of those that a request names.
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_STOP_TOKENS = 64
MAX_END_TOKENS = 2 * MAX_STOP_TOKENS

# Sequences that one message names: a verifier holds no more of them.
MAX_NAMED = 4096

# Drafts that follow a verifier at once. It keeps activations of every slot for each.
MAX_FOLLOWERS = 16


# Sink and window of a draft that taps layers. The verifier keeps activations of so many positions of every sequence.
MAX_TAPPED_POSITIONS = 1024


def check_named(what: str, count: int) -> None:
    """Raises InvalidRequest when a message names too many sequences."""
    if count > MAX_NAMED:
        raise InvalidRequest(f"{what} names {count} sequences, at most {MAX_NAMED} are taken at once")
