"""The choice of one of the verifier's drafts for all rounds, and whether that draft can be asked now."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import structlog

from gateway.circuit import Circuit
from spire.model.config import MAGICDEC
from spire.v1 import verifier_pb2

AUTO, OFF = "auto", "off"
# Seconds within which a draft that reconnects is listed again.
_RETURNS_WITHIN = 2.0

log = structlog.get_logger("gateway")


class ChosenDraft:
    """The draft that this gateway uses. `wanted`: a draft's kind, name or id, or `auto` for any draft but magicdec.

    The choice stays while the verifier lists the draft, and a moment longer, because running sequences can use no other
    draft. After a late answer the draft is not asked for a while: twice as long each time, less after answers in time.
    """

    def __init__(self, wanted: str):
        self._wanted = wanted
        # The chosen draft as the verifier last described it; kept while the draft is disconnected.
        self.info: verifier_pb2.DraftInfo | None = None
        self.circuit = Circuit()
        self._drafts: list[verifier_pb2.DraftInfo] = []
        self._available = False
        # Monotonic time since which the verifier no longer lists the chosen draft.
        self._gone_since: float | None = None
        self._left_alone_until = 0.0

    @property
    def up(self) -> bool:
        """True if the draft can be asked for tokens now: available, and not in the pause after a late answer."""
        if self._gone_since is not None:
            self._choose()
        return self._available and time.monotonic() >= self._left_alone_until

    @property
    def id(self) -> str:
        return self.info.draft_id if self.info else ""

    @property
    def in_verifier(self) -> bool:
        """True if the target is its own draft (magicdec), so that the verifier publishes no activations."""
        return self.info is not None and self.info.kind == MAGICDEC

    def told(self, drafts: Iterable[verifier_pb2.DraftInfo]) -> None:
        """Replace the list of the verifier's drafts (empty after the loss of the verifier) and choose one."""
        self._drafts = [draft for draft in drafts if self._fits(draft)]
        self._choose()

    def late(self) -> None:
        self.circuit.late()
        self._left_alone_until = time.monotonic() + self.circuit.seconds

    def _fits(self, draft: verifier_pb2.DraftInfo) -> bool:
        if self._wanted == AUTO:
            return bool(draft.kind != MAGICDEC)
        return self._wanted in (draft.kind, draft.model_name, draft.draft_id)

    def _choose(self) -> None:
        now = time.monotonic()
        known = next((draft for draft in self._drafts if draft.draft_id == self.id), None)
        gone_since = self._gone_since or now
        self._gone_since = None if known else gone_since
        if known is None and self._drafts and (not self.info or now >= gone_since + _RETURNS_WITHIN):
            # At random, so that gateways spread over the drafts; preferably one that can be asked.
            known = random.choice([draft for draft in self._drafts if draft.available] or self._drafts)
            self.circuit, self._left_alone_until, self._gone_since = Circuit(), 0.0, None
        if known:
            self.info = known
        available = known is not None and known.available
        if available != self._available and self.info:
            said = "connected" if available else "cannot be asked"
            log.info(said, peer="draft", draft=self.id, kind=self.info.kind, model=self.info.model_name)
        self._available = available
