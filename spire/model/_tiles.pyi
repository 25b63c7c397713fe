MOST_QUERIES: int
MOST_WIDTH: int

def available() -> bool: ...
def attend(*work: int) -> None:
    """Of queries, new keys and new values the address and strides by row, head and position; addresses of keys, values,
    what is found, slots and lengths; B, T, H, G, K, positions of a slot; strides of a slot and a head; threads."""

def project_normed(*work: float) -> None:
    """Addresses of x, norm, weight, cosines, sines, what is normed and what is projected; eps; R, D, E, heads to
    rotate, K; threads."""

def behind_attention(*work: float) -> None:
    """Addresses of x, what was attended, the weights of output, norm, gates with ups and down, the hidden state
    between, what is normed, what is inside and the result; eps; R, D, width of what was attended, F; threads."""

def project(*work: int) -> None:
    """Addresses of x, weight and the result in fp32; R, D, E; threads."""

def draft_pass(*work: float) -> None:
    """Addresses of layers, embedding, norm, unembedding, feedback's weights, tokens, cosines, sines, places that are
    seen, scratch and logits; eps; B, N, D, H, G, K, F, V, S, place; threads."""
