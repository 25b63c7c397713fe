"""The GPU backend: Triton kernels and CUDA graphs."""
