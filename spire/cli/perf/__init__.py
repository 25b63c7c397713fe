"""`spire perf-model`, `spire eval` and `spire doctor --calibrate`."""
