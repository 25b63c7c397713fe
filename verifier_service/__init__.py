"""The verifier service: owns the target and its cache, verifies batches of draft tokens, publishes activations."""
