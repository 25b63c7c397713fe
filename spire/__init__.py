"""Spire: lossless speculative decoding with a draft whose memory does not grow with context."""

__version__ = "0.1.0"
