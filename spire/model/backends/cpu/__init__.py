"""The CPU backend: C kernels (`spire/kernels`)."""
