"""Decoding rounds: scheduling of sequences, the choice of k, and the processing of results."""
