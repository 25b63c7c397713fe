"""The drafts that sequences can use: the description of each draft, and whether it can take requests now.

Any thread may call all methods. Does not know: the content of draft requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spire.decoding.drafting import MAX_SPECULATION_DEPTH
from spire.errors import InvalidRequest, MismatchError
from spire.model.config import MAGICDEC
from spire.v1 import verifier_pb2 as pb

Tell = Callable[[pb.RoundsResponse], None]


def check_draft_id(draft_id: str) -> None:
    """Raise InvalidRequest if this draft id is MAGICDEC, which is reserved for the target itself."""
    if draft_id == MAGICDEC:
        raise InvalidRequest(f"{MAGICDEC!r} is the target itself: no draft that follows it can have that id")


class Drafts:
    """The drafts subscribed to the verifier, and the target as its own draft, which is always available."""

    def __init__(self, target: pb.GetInfoResponse, self_window: int, self_sink: int):
        self._target = target
        own = pb.DraftInfo(
            draft_id=MAGICDEC,
            kind=MAGICDEC,
            model_name=target.model_name,
            tokenizer_hash=target.tokenizer_hash,
            vocab_size=target.vocab_size,
            max_speculation_depth=min(MAX_SPECULATION_DEPTH, target.max_speculation_depth),
            max_sequences=target.max_sequences,
            shape=target.shape,
            window=self_window,
            sink=self_sink,
            available=True,
        )
        # By draft id.
        self._following = {MAGICDEC: own}
        self._askable = {MAGICDEC}
        self._told: list[Tell] = []
        # Held while gateways are notified, so that no gateway gets an older state after a newer one.
        self._lock = threading.RLock()

    @property
    def message(self) -> pb.RoundsResponse:
        """The message to gateways that lists all drafts and whether each is available."""
        response = pb.RoundsResponse()
        with self._lock:
            for draft_id, info in self._following.items():
                response.drafts.drafts.add().CopyFrom(info)
                response.drafts.drafts[-1].available = draft_id in self._askable
        return response

    def check(self, info: pb.DraftInfo) -> None:
        """Raise MismatchError if the draft's tokenizer or vocabulary differs, InvalidRequest for kind MAGICDEC."""
        if info.kind == MAGICDEC:
            raise InvalidRequest(f"{MAGICDEC!r} is the target itself: no draft that follows it is of that kind")
        tokenizer = info.tokenizer_hash or self._target.tokenizer_hash
        for what, theirs, ours in (
            ("tokenizer", tokenizer, self._target.tokenizer_hash),
            ("vocabulary", info.vocab_size, self._target.vocab_size),
        ):
            if theirs != ours:
                raise MismatchError(f"{what} differs: the draft has {theirs!r}, the target {ours!r}")

    @contextmanager
    def followed_by(self, draft_id: str, info: pb.DraftInfo) -> Iterator[None]:
        """Announce this draft to gateways inside the `with` block, or until a newer subscription with the same id."""
        known = pb.DraftInfo()
        known.CopyFrom(info)
        known.draft_id = draft_id
        self._change(lambda: self._following.update({draft_id: known}))
        try:
            yield
        finally:
            if self._following.get(draft_id) is known:
                self._change(lambda: self._following.pop(draft_id))

    def may_be_asked(self, draft_id: str, askable: bool) -> None:
        """Record if a draft can take requests (is connected and owes no late reply). Notify gateways of a change."""
        if askable != (draft_id in self._askable):
            self._change(lambda: (self._askable.add if askable else self._askable.discard)(draft_id))

    @contextmanager
    def telling(self, tell: Tell) -> Iterator[None]:
        """Call `tell`, which must not block, with all drafts now and after each change inside the `with` block."""
        with self._lock:
            self._told.append(tell)
            tell(self.message)
        try:
            yield
        finally:
            with self._lock:
                self._told.remove(tell)

    def _change(self, change: Callable[[], object]) -> None:
        with self._lock:
            change()
            message = self.message
            for tell in self._told:
                tell(message)
