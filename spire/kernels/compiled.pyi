MOST_WIDTH: int

def available() -> list[tuple[int, str, bool, int, int, int]]:
    """Of the kernels that this processor can run, the fastest first: index, name, whether they are for bfloat16,
    outputs of a weight that lie together, what heads' width is a multiple of, most queries of a key (0 is any)."""

def uniforms(*work: int) -> None:
    """Addresses of seeds, choices, whether there is a salt, bases and numbers; B, T and the purpose."""

# What follows takes the index of the kernels first. A weight is two addresses, of its values and of its scales (0
# unless it is fp8), and 1 if its values are bfloat16 and the model's numbers are floats. `sampling`: addresses of
# temperatures, top_k, top_p, min_p, rules, seeds, choices and bases; ids of the target's vocabulary.

def attend(kernels: int, *work: int) -> None:
    """Of queries, new keys and new values the address and strides by row, head and position; addresses of keys, values,
    what is found, slots and lengths; B, T, H, G, K, positions of a slot; strides of a slot and a head; threads."""

def before_attention(kernels: int, *work: float) -> None:
    """Addresses of x, norm, weight, cosines, sines, what is normed and what is projected; eps; R, D, E, heads to
    rotate, K; threads."""

def behind_attention(kernels: int, *work: float) -> None:
    """Addresses of x, what was attended, the norm, the weights of output, gates with ups and down, the hidden state
    between, what is normed, what is inside and the result; eps; R, D, width of what was attended, F; threads."""

def norm(kernels: int, *work: float) -> None:
    """Addresses of x, weight and the result; eps; R, D; threads."""

def project(kernels: int, *work: int) -> None:
    """Addresses of x, weight and the result in fp32; R, D, E; threads."""

def absorb(kernels: int, *work: float) -> None:
    """Addresses of layers, taps, positions, ends, slots, cosines, sines, places and scratch; eps; R, N, D, H, G, K, S,
    window, sink; threads."""

def forward(kernels: int, *work: float) -> None:
    """Addresses of layers, stretches, tapped layers, tokens, embedding, the last norm, cosines and sines by position,
    scratch, taps and what is made of it all; eps; how many stretches and taps; R, N, D, H, G, K, F, V, positions that
    there are rotations of, positions of a slot; strides of a slot and of a head; threads.

    Raises IndexError for a token or a position that is not there."""

def draft_pass(kernels: int, round: tuple[float, ...], number: int, tokens: int, threads: int) -> None:
    """Of the round addresses of layers, embedding, norm, unembedding, feedback's weights, positions, slots, bases,
    cosines and sines by position, its own keys and values, scratch, logits and the tokens that it can propose (0 for
    all); eps; B, k, N, D, H, G, K, F, V, S, window, sink, and whether a position attends itself. Then which pass it is,
    the address of its tokens, and threads."""

def draft_round(
    kernels: int,
    round: tuple[float, ...],
    newest: int,
    sampling: tuple[int, ...],
    uniforms: int,
    tokens: int,
    q: int,
    stop: tuple[int, ...],
    threads: int,
) -> None:
    """Of the round as for `draft_pass`. Addresses of its first tokens, uniform numbers [B, k], tokens [k, B] and q. Of
    a stop head, if any, the addresses of `Stop` in `kernels.h`, its depth and width."""

def draw(kernels: int, logits: int, sampling: tuple[int, ...], step: int, *work: int) -> None:
    """Address of logits, which are overwritten; the token's place in the round; addresses of uniform numbers, tokens
    and q; the stride of q's rows; B, V; threads."""

def judge(kernels: int, logits: int, sampling: tuple[int, ...], *work: int) -> None:
    """Addresses of logits, which are used up; of drafted tokens, counts, the tokens that q is of (0 for all), q, its
    sums, how many were accepted, tokens and whether all was finite; B, T, V, tokens that q is of; whether the logits
    contain padding; threads."""

def collect(kernels: int, *work: int) -> None:
    """Addresses of addresses of rows, of how many there are, of all rows together, of sums and of least numbers;
    B, K, V; threads."""
