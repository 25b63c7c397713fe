MOST_QUERIES: int
MOST_WIDTH: int

def available() -> bool: ...
def attend(*work: int) -> None:
    """Addresses of queries, keys, values, what is found, slots and lengths; B, G, R, T, K, positions of a slot; strides
    of a slot and a head in elements; threads."""
