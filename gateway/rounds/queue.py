"""The queue of sequences that wait for a place: first come, first served, within fair shares. A pure data structure.

API keys share the places at the verifier evenly, and so do the requests within a key. The next place goes to the key
that holds the fewest, and within the key to the request that holds the fewest; ties go to the earliest arrival.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from heapq import merge
from operator import attrgetter

from gateway.sequence import Sequence

_by_arrival = attrgetter("arrival")


class Held:
    """The number of places that each API key and each request holds."""

    def __init__(self, sequences: Iterable[Sequence] = ()):
        self._sequences = list(sequences)
        self.of_key = Counter(one.key for one in self._sequences)
        self.of_request = Counter(one.request for one in self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        self.of_key[sequence.key] += 1
        self.of_request[sequence.request] += 1

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self.of_key[sequence.key] -= 1
        self.of_request[sequence.request] -= 1

    def before(self, one: Sequence, other: Sequence) -> bool:
        """Return True if the waiting sequence `one` gets a place before `other`."""
        if one.key == other.key:
            return (self.of_request[one.request], one.arrival) < (self.of_request[other.request], other.arrival)
        return (self.of_key[one.key], one.arrival) < (self.of_key[other.key], other.arrival)

    def beyond_share(self, waiting: Sequence) -> Sequence | None:
        """Return the sequence to preempt in favour of `waiting`, or None if the shares are as equal as possible.

        The victim is the latest arrival of the API key with the most places or, if keys are even, of the request with
        the most within the key of `waiting`. Sequences put back before are exempt until they have LEAST_RUN new tokens.
        """
        key = max(self.of_key, key=self.of_key.__getitem__, default=waiting.key)
        theirs = [one for one in self._sequences if one.key == key]
        if self.of_key[key] < self.of_key[waiting.key] + 2:
            ours = Counter(one.request for one in self._sequences if one.key == waiting.key)
            request = max(ours, key=ours.__getitem__, default=waiting.request)
            if ours[request] < ours[waiting.request] + 2:
                return None
            theirs = [one for one in self._sequences if one.request == request]
        return max((one for one in theirs if one.may_give_way), key=_by_arrival, default=None)


class Queue:
    """Waiting sequences in the order of arrival. A sequence that is queued again keeps its original arrival."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        # Sequences by key and request, sorted by arrival. Requests are numbered in the order of arrival.
        self._waiting: dict[str, dict[int, list[Sequence]]] = {}
        self._count = 0
        for sequence in sequences:
            self.add(sequence)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        requests = [request for of_key in self._waiting.values() for request in of_key.values()]
        return merge(*requests, key=_by_arrival)

    @property
    def keys(self) -> Set[str]:
        """The API keys of which sequences wait."""
        return self._waiting.keys()

    def of_key(self, key: str) -> int:
        """Return the number of waiting sequences of an API key."""
        return sum(map(len, self._waiting.get(key, {}).values()))

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue by its order of arrival."""
        of_key = self._waiting.setdefault(sequence.key, {})
        late = bool(of_key) and sequence.request < next(reversed(of_key))
        insort(of_key.setdefault(sequence.request, []), sequence, key=_by_arrival)
        if late:
            self._waiting[sequence.key] = dict(sorted(of_key.items()))
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        of_key = self._waiting[sequence.key]
        of_key[sequence.request].remove(sequence)
        if not of_key[sequence.request]:
            del of_key[sequence.request]
        if not of_key:
            del self._waiting[sequence.key]
        self._count -= 1

    def next(self, held: Held) -> Sequence | None:
        """Return the waiting sequence to start next, given the places `held`, without removing it from the queue."""
        firsts = [_first(of_key, held) for of_key in self._waiting.values()]
        return min(firsts, key=lambda one: (held.of_key[one.key], one.arrival), default=None)


def _first(requests: dict[int, list[Sequence]], held: Held) -> Sequence:
    """Return the sequence to start next of a key's waiting requests, which are in the order of arrival."""
    without_place = next((waiting for request, waiting in requests.items() if not held.of_request[request]), None)
    waiting = without_place or requests[min(requests, key=held.of_request.__getitem__)]
    return waiting[0]
