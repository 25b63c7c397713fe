"""Text: tokenizer and detokenizer, a JSON reader, and a JSON writer in pieces."""
