"""Communication between services: channels, trust, tensors on the wire, shared memory, error codes."""
