"""The verifier's gRPC services for gateways and drafts, and the names of the callers."""
