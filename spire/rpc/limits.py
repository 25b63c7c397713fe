"""Limits of the protocol: the gateway reports them to clients, and the verifier enforces them itself."""

from __future__ import annotations

from spire.errors import InvalidRequest

# Most probable alternatives reported with a token.
MAX_LOGPROBS = 20

# In characters. The ids of our gateway are shorter: gateway id, number, request id, life.
MAX_SEQUENCE_ID = 256

MAX_GRAMMAR_BYTES = 64 << 10

# Adjustments per request. MAX_END_TOKENS includes the model's own end tokens.
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_STOP_TOKENS = 64
MAX_END_TOKENS = 2 * MAX_STOP_TOKENS

# Sequences that one message may name, and that a verifier holds at most.
MAX_NAMED = 4096

# Drafts that may follow a verifier at once. The verifier keeps activations of every slot for each draft.
MAX_FOLLOWERS = 16

# Sink plus window of a draft that taps layers: positions per sequence whose activations the verifier keeps.
MAX_TAPPED_POSITIONS = 1024


def check_named(what: str, count: int) -> None:
    """Raise InvalidRequest if the message `what` names more than MAX_NAMED sequences."""
    if count > MAX_NAMED:
        raise InvalidRequest(f"{what} names {count} sequences, at most {MAX_NAMED} are taken at once")
