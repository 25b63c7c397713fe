"""From logits to a token: histories, grammars, truncation, logprobs."""
