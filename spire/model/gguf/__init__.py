"""`spire convert gguf`: a GGUF file, quantised or not, as a directory in Hugging Face layout.

    spire convert gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2

What it does not know: architectures other than Llama's, files in parts, big-endian files, pre-tokenizers that it cannot
rebuild exactly. Each is refused by name.
"""
