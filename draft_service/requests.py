"""Draft requests on their way to the model thread, and the replies on their way back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import structlog

from draft_service.replies import Replies
from draft_service.worker import DraftResult, Worker
from spire.lost_device import end_if_device_lost
from spire.v1 import draft_pb2 as pb

log = structlog.get_logger("draft_service")

Reply = Callable[[pb.DraftReply], None]


class Requests:
    """Passes draft requests to the model thread, which parses them, drafts and makes the replies."""

    def __init__(self, worker: Worker):
        self._worker, self.replies = worker, Replies(worker.drafter)
        # Ids of the requests without a reply so far.
        self.unanswered: set[int] = set()

    def take(self, request: pb.DraftRequest, reply: Reply) -> None:
        """Queue a request. The model thread passes the reply to `reply`, even after an error."""

        def answer(message: pb.DraftReply) -> None:
            self.unanswered.discard(request.batch_id)
            reply(message)

        self.unanswered.add(request.batch_id)
        self._worker.do(lambda: self._begin(request, answer))

    def _begin(self, request: pb.DraftRequest, reply: Reply) -> None:
        self._worker.verifier_step_seconds = request.step_seconds
        nothing = pb.DraftReply(batch_id=request.batch_id)

        def drafted(done: Future[DraftResult]) -> None:
            message = nothing
            try:
                message = self.replies.to(parsed, None if done.exception() else done.result())
            except Exception as error:
                end_if_device_lost(error)
                log.exception("a reply could not be made")
            reply(message)

        try:
            parsed = self.replies.parsed(request)
            if parsed.task is None:
                reply(self.replies.to(parsed, None))
                return
        except Exception as error:
            end_if_device_lost(error)
            log.exception("a request could not be read")
            reply(nothing)
            return
        parsed.task.done.add_done_callback(drafted)
        self._worker.draft(parsed.task)
