"""Attention by kernels: this project's C kernels over contiguous slots, and Triton kernels over pages."""
