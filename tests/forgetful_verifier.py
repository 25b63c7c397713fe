"""The verifier service, but every third answer of its Rounds comes without the logprobs that were asked for."""

from __future__ import annotations

from itertools import count

from spire.rpc.line import Line
from spire.v1 import verifier_pb2
from verifier_service.__main__ import main
from verifier_service.service import RoundsStream

_take, _reply_by = RoundsStream._take, RoundsStream._reply_by
_answers = count(1)


def forget_logprobs(response: verifier_pb2.RoundsResponse) -> None:
    if next(_answers) % 3 == 0:
        answers = [response.started] if response.HasField("started") else response.verified.results
        for answer in answers:
            answer.ClearField("logprobs")


def take(self: RoundsStream, response: verifier_pb2.RoundsResponse) -> None:
    forget_logprobs(response)
    _take(self, response)


def reply_by(self: RoundsStream, line: Line, response: verifier_pb2.RoundsResponse) -> None:
    forget_logprobs(response)
    _reply_by(self, line, response)


RoundsStream._take = take  # type: ignore[method-assign]
RoundsStream._reply_by = reply_by  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
