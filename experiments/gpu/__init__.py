"""Measurements for a machine with a GPU, by parts: `make gpu`, or `python -m experiments.gpu --help`."""
