"""Limits of the protocol that the gateway tells its clients and the verifier holds by itself."""

from __future__ import annotations

# Alternatives that are reported beside a token.
MAX_LOGPROBS = 20

# A gateway's names are shorter: its own id, a number, the request's id, a life.
MAX_SEQUENCE_ID = 256

MAX_GRAMMAR_BYTES = 64 << 10
