"""The target's KV cache: slots of sequences, and the memory that holds their keys and values."""
