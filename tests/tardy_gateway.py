"""The gateway on a busy machine: now and then it reads an answer 8 ms late, and then finds the next one there."""

from __future__ import annotations

import random
import time

from gateway.__main__ import main
from gateway.verifier_client import VerifierClient
from spire.v1 import verifier_pb2

_random = random.Random(0)
_receive = VerifierClient._receive


def receive_late(self: VerifierClient, message: verifier_pb2.RoundsResponse) -> None:
    if _random.random() < 0.3:
        time.sleep(0.008)  # nobody else runs meanwhile: as if it waited for a core
    _receive(self, message)


VerifierClient._receive = receive_late  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
