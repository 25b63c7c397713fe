"""The drafts that sequences may name: how each describes itself, and whether it can be asked now.

Any thread may call. Does not know: what drafts are asked for.
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
    """Raises InvalidRequest if this draft id is the reserved name of the target itself."""
    if draft_id == MAGICDEC:
        raise InvalidRequest(f"{MAGICDEC!r} is the target itself: no draft that follows it can have that id")


class Drafts:
    """The drafts that follow the target, and the target itself, which can always be asked."""

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
        # Held while gateways are told, so that no gateway gets an older state after a newer one.
        self._lock = threading.RLock()

    @property
    def message(self) -> pb.RoundsResponse:
        """The message that tells gateways of all drafts."""
        response = pb.RoundsResponse()
        with self._lock:
            for draft_id, info in self._following.items():
                response.drafts.drafts.add().CopyFrom(info)
                response.drafts.drafts[-1].available = draft_id in self._askable
        return response

    def check(self, info: pb.DraftInfo) -> None:
        """Raises MismatchError, naming both values, if tokenizer or vocabulary differ; InvalidRequest for MAGICDEC."""
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
        """Tell gateways of this draft inside the `with` block, or until a newer subscription takes over its id."""
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
        """Set whether this draft can be asked: it is connected and owes no reply."""
        if askable != (draft_id in self._askable):
            self._change(lambda: (self._askable.add if askable else self._askable.discard)(draft_id))

    @contextmanager
    def telling(self, tell: Tell) -> Iterator[None]:
        """Call `tell`, which must not block, with the current state and with every change inside the `with` block."""
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
