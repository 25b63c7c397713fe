"""`spire perf-model` and `spire eval`."""
