"""What is measured when a GPU is at hand, by parts: `make gpu`, or `python -m experiments.gpu --help`."""
