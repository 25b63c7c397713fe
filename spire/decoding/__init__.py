"""The rules of speculative decoding: sampling, drafting, verification, randomness."""
