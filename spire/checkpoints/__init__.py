"""Checkpoint directories: weights, tokenizers, and conversion from other formats."""
