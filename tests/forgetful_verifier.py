"""The verifier service, but every third answer of its Rounds comes without the logprobs that were asked for."""

from __future__ import annotations

from itertools import count

from spire.v1 import verifier_pb2
from verifier_service.__main__ import main
from verifier_service.serve.service import RoundsStream

_take = RoundsStream._take
_answers = count(1)


def take(self: RoundsStream, response: verifier_pb2.RoundsResponse) -> None:
    if next(_answers) % 3 == 0:
        answers = [response.started] if response.HasField("started") else response.verified.results
        for answer in answers:
            answer.ClearField("logprobs")
    _take(self, response)


RoundsStream._take = take  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
