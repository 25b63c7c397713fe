"""Backends of the model: kernels for CPUs and GPUs."""
