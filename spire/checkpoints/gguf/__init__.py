"""`spire convert gguf`: convert a GGUF file, quantised or not, to a directory in Hugging Face layout.

    spire convert gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2

Does not know: architectures other than Llama's, split files, big-endian files, and pre-tokenizers that cannot be
rebuilt exactly. Each is refused by name.
"""
