"""Measurements through the REST endpoint: acceptance (τ), throughput, and where a round's time goes."""
