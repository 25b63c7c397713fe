"""Costs of serving: the performance model, its calibration, and memory."""
