"""The exceptions of Spire, all of one base class, which REST and gRPC each map to status codes by one table."""


class SpireError(Exception):
    """Base class of all errors that Spire raises deliberately. The message is meant for people."""


class CheckpointError(SpireError):
    """Error for a model directory that cannot be served. The message names the file."""


class DataError(SpireError):
    """Error for data or files that a command cannot use."""


class MismatchError(SpireError):
    """Error for two peers with different protocols, models or data. The message names both values."""


class RequestError(SpireError):
    """Error for a request that cannot be carried out."""


class InvalidRequest(RequestError):
    """Error for a request that is invalid in itself: wrong shapes, values out of range, unknown values.

    `param` names the wrong field, or is empty if no single field is wrong.
    """

    def __init__(self, message: str, param: str = ""):
        super().__init__(message)
        self.param = param


class UnknownSequence(RequestError):
    """Error for a sequence that the verifier or draft does not have: the caller must start or replay the sequence."""


class NotAllowed(RequestError):
    """Error for a caller that uses the name of a gateway or draft while another process uses that name."""


class StaleBlock(RequestError):
    """Error for a block whose base position or round is not the current one, or whose stream a newer one replaced."""


class NotFinite(RequestError):
    """Error for non-finite logits of a sequence."""


class OutOfCapacity(RequestError):
    """Error for a request without a free slot or queue place: try again later."""
