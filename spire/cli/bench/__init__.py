"""`spire bench` and `spire capacity`."""
